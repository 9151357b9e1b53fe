"""The clouds whose machines are set up over SSH: what is declared, chosen and refused."""

from __future__ import annotations

import re
from typing import Any

import pytest
from cloud_modules.cases import CASES, PUBLIC_KEY
from cloud_modules.cases import CLOUDS as CASES_OF
from cloud_modules.cases import access as needed

import skyinfra as sky
from skyinfra import providers
from skyinfra.bootstrap import user_data
from skyinfra.compiler import compile_pool
from skyinfra.errors import InvalidField, NotOffered, NotSupported
from skyinfra.providers.over_ssh import MachineCloud
from skyinfra.terraform.cloud_errors import refusals

CLOUDS = [each for each in vars(providers).values() if isinstance(each, type) and issubclass(each, MachineCloud)]
ACCESS = needed("digitalocean")


def access(cloud: type[MachineCloud], **fields: Any) -> MachineCloud:
    """The cloud with what it must be given."""
    return cloud(**{**needed(cloud.kind), **fields})


def selected(provider: providers.Provider, **fields: Any) -> providers.Selection:
    return compile_pool(sky.ComputePool(name="train", provider=provider, **fields), "s").selection


def test_all_of_them_are_cases_of_the_contract() -> None:
    assert {each.kind for each in CLOUDS} == {each.name for each in CASES if each.over_ssh}


@pytest.mark.parametrize("cloud", CLOUDS, ids=lambda each: each.kind)
def test_who_sets_machines_up_needs_a_key_and_a_way(cloud: type[MachineCloud]) -> None:
    with pytest.raises(InvalidField, match="ssh_public_key") as caught:
        access(cloud, ssh_public_key=None)
    assert "ssh-keygen -t ed25519" in str(caught.value)
    if providers.read(cloud.kind).takes("allow_cidrs"):
        with pytest.raises(InvalidField, match="allow_cidrs: is needed"):
            access(cloud, allow_cidrs=[])
    else:
        with pytest.raises(NotSupported, match="no firewall that a deploy can set"):
            access(cloud, allow_cidrs=["203.0.113.7/32"])


@pytest.mark.parametrize("cloud", CLOUDS, ids=lambda each: each.kind)
def test_the_user_data_are_a_script_of_any_size(cloud: type[MachineCloud]) -> None:
    fields = {**CASES_OF[cloud.kind]["pool"], "image": sky.Image(pip=["six"])}
    pool = sky.ComputePool(name="train", nodes=2, provider=access(cloud), **fields)
    deployment = compile_pool(pool, "s")
    data = user_data(deployment)
    assert data.head.startswith("#!/bin/sh\n") and "\nput 0644 /etc/skyinfra/node.json " in data.head
    inputs = deployment.selection.inputs
    assert inputs["ssh_public_key"] == PUBLIC_KEY and inputs["wait_seconds"] == 1800 and "layout" not in inputs
    assert inputs["region"] == access(cloud).region  # type: ignore[attr-defined]
    names = [each.name for each in pool.provider.terraform()]
    assert ("tls" in names) == (providers.read(cloud.kind).traits.host_keys == "given")


@pytest.mark.parametrize(
    "cloud", [each for each in CLOUDS if each.kind in sky.offers.providers()], ids=lambda each: each.kind
)
def test_a_second_machine_type_would_never_be_tried(cloud: type[MachineCloud]) -> None:
    types = [o.machine_type for o in sky.offers.load() if o.provider == cloud.kind][:2]
    with pytest.raises(NotSupported, match="no machine groups"):
        selected(access(cloud, instance_types=types), accelerator="H100")


def test_the_provider_of_host_keys_is_found_again_in_a_state() -> None:
    address = 'module.train.provider["registry.terraform.io/hashicorp/tls"].this'
    assert providers.provider_of(address) in sky.DigitalOcean(**ACCESS).terraform()


@pytest.mark.parametrize("cloud", CLOUDS, ids=lambda each: each.kind)
def test_its_machines_are_found_again_in_a_state(cloud: type[MachineCloud]) -> None:
    [(resource, _)] = providers.read(cloud.kind).terraform["machines"].items()
    found = providers.machines_of(resource, {})
    assert found and (found.provider, found.count) == (cloud.kind, 1)


def test_what_stands_in_a_state_is_read() -> None:
    droplet = providers.machines_of("digitalocean_droplet", {"size": "gpu-h100x1-80gb", "region": "tor1"})
    assert droplet == providers.Machines("digitalocean", "gpu-h100x1-80gb", "tor1")
    assert droplet.price and not droplet.elsewhere
    verda = providers.machines_of(
        "verda_instance", {"instance_type": "1H100.80S.32V", "location": "FIN-02", "is_spot": True}
    )
    assert verda and verda.spot and verda.price and verda.price.usd_per_hour == 0.8015


# DigitalOcean


@pytest.mark.parametrize(
    ("accelerator", "size", "image"),
    [
        ("H100", "gpu-h100x1-80gb", "gpu-h100x1-base"),
        ("H100:8", "gpu-h100x8-640gb", "gpu-h100x8-base"),
        ("H200", "gpu-h200x1-141gb", "gpu-h100x1-base"),
        ("MI300X", "gpu-mi300x1-192gb", "gpu-amd-base"),
        ("MI300X:8", "gpu-mi300x8-1536gb", "gpu-amd-base"),
        ("", "g-2vcpu-8gb", "ubuntu-24-04-x64"),
    ],
)
def test_droplets_and_their_images(accelerator: str, size: str, image: str) -> None:
    region = "atl1" if "MI300X" in accelerator else "nyc2"
    pool = {"accelerator": accelerator} if accelerator else {}
    found = selected(sky.DigitalOcean(region=region, **ACCESS), **pool)
    assert (found.machine_types, found.image) == ((size,), image)
    assert found.hourly_cost


def test_amd_is_partitioned_when_the_droplet_is_made() -> None:
    parted = sky.accelerators.MI300X(count=8, partition="DPX", memory_mode="NPS2")
    place = sky.DigitalOcean(region="atl1", **ACCESS)
    inputs = selected(place, accelerator=parted).inputs
    assert inputs["gpu_partition_mode"] == "PARTITION_MODE_DPX_NPS2"
    with pytest.raises(NotSupported, match="does not partition GPUs so") as caught:
        selected(place, accelerator=sky.accelerators.MI300X(partition="CPX"))
    assert 'partition="DPX", memory_mode="NPS2"' in str(caught.value)
    assert "gpu_partition_mode" not in selected(place, accelerator="MI300X").inputs
    with pytest.raises(NotOffered, match="gpu-mi300x1-192gb is offered in atl1"):
        selected(sky.DigitalOcean(**ACCESS), accelerator="MI300X")


def test_a_key_that_the_account_has_is_named_by_its_fingerprint() -> None:
    inputs = selected(sky.DigitalOcean(registered_key=True, **ACCESS)).inputs
    # ssh-keygen -l -E md5
    assert inputs["ssh_key_id"] == "3c:f8:63:74:c4:9f:7b:dc:31:54:23:40:80:02:22:b5"


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"spot": True}, "no spot machines"),
        ({"disk_gb": 500}, "comes with its type"),
        ({"labels": {"a b": "c"}}, "KEY:VALUE"),
        ({"accelerator": "A100"}, "accelerator"),
        ({"vcpus": 400}, "vcpus"),
    ],
)
def test_what_droplets_are_not_is_refused(fields: dict[str, Any], words: str) -> None:
    with pytest.raises(sky.SkyinfraError, match=words):
        selected(sky.DigitalOcean(**ACCESS), **fields)


@pytest.mark.parametrize(
    ("said", "cause"),
    [
        (
            'Error creating droplet: POST https://api/v2/droplets: 422 (request "1") creating this/these '
            "droplet(s) will exceed your droplet limit",
            "QuotaExceeded",
        ),
        (
            'POST https://api/v2/account/keys: 422 (request "1") SSH Key is already in use on your account',
            "CloudRefused",
        ),
        (
            'GET https://api/v2/account: 401 (request "1") Unable to authenticate you',
            "CloudCredentialsRefused",
        ),
        (
            'POST https://api/v2/droplets: 422 (request "1") Size is not available in this region.',
            "CapacityUnavailable",
        ),
        ('GET https://api/v2/droplets/1: 429 (request "1") Too many requests', "CloudThrottled"),
        ('DELETE https://api/v2/vpcs/1: 403 (request "1") Can not delete default VPCs', "CloudRefused"),
        ('DELETE https://api/v2/vpcs/1: 409 (request "1") Can not delete VPC with members', "CloudRefused"),
        ('DELETE https://api/v2/vpcs/1: 403 (request "1") Can not delete VPC with members', "CloudRefused"),
        (
            'POST https://api/v2/vpcs: 403 (request "1") You are not authorized to perform this operation',
            "CloudPermissionDenied",
        ),
    ],
)
def test_what_digitalocean_refuses_is_explained(said: str, cause: str) -> None:
    [found] = refusals([("module.train.digitalocean_droplet.node[0]", said)])
    assert found.cause == cause


# Verda and Lambda


def test_instances_of_verda() -> None:
    found = selected(access(sky.Verda), accelerator="H100", spot=True)
    assert (found.machine_types, found.image) == (("1H100.80S.32V",), "ubuntu-24.04-cuda-13.0-open-docker")
    assert found.hourly_cost == pytest.approx(0.8015)
    with pytest.raises(InvalidField, match="at least 50"):
        selected(access(sky.Verda), accelerator="H100", disk_gb=20)
    # The provider takes an older image on these alone.
    assert selected(access(sky.Verda, region="FIN-01"), accelerator="V100").image == "ubuntu-24.04-cuda-12.6-docker"
    assert selected(access(sky.Verda, region="FIN-03"), accelerator="B300").image.endswith("cuda-13.0-open-docker")


def test_machines_of_lambda() -> None:
    found = selected(access(sky.Lambda), accelerator="GH200")
    assert (found.machine_types, found.image) == (("gpu_1x_gh200",), "lambda-stack")
    assert found.project_paths == {"known_hosts": ".skyinfra/known_hosts"}
    with pytest.raises(NotSupported, match="Lambda Stack alone"):
        access(sky.Lambda, image="ubuntu")
    with pytest.raises(NotSupported, match="no machines without accelerators"):
        selected(access(sky.Lambda))
    with pytest.raises(NotSupported, match="no spot machines"):
        selected(access(sky.Lambda), accelerator="H100", spot=True)


def test_machines_of_nebius() -> None:
    found = selected(access(sky.Nebius), accelerator="H100:8", spot=True)
    assert (found.machine_types, found.image) == (("gpu-h100-sxm/8gpu-128vcpu-1600gb",), "ubuntu24.04-cuda13.0")
    [provider, _] = access(sky.Nebius).terraform()
    assert provider.configuration()["service_account"]["account_id_env"] == "NB_SA_ID"
    assert selected(access(sky.Nebius), vcpus=3).machine_types == ("cpu-e2/4vcpu-16gb",)
    attributes = {"resources": {"platform": "gpu-h100-sxm", "preset": "1gpu-16vcpu-200gb"}, "preemptible": None}
    machine = providers.machines_of("nebius_compute_v1_instance", attributes)
    assert machine and machine.machine_type == "gpu-h100-sxm/1gpu-16vcpu-200gb" and not machine.spot
    with pytest.raises(InvalidField, match="project_id"):
        access(sky.Nebius, project_id="mine")


@pytest.mark.parametrize(
    ("address", "said", "cause"),
    [
        ("nebius_compute_v1_instance.node", "rpc error: code = ResourceExhausted", "CapacityUnavailable"),
        ("nebius_compute_v1_instance.node", "rpc error: code = Unauthenticated", "CloudCredentialsRefused"),
        # A throttle may have that code too, and moves no pool.
        (
            "nebius_compute_v1_instance.node",
            "rpc error: code = ResourceExhausted desc = x, service error TooManyRequests",
            "CloudThrottled",
        ),
        ("verda_instance.node", "Unable to create instance, got error: service_unavailable", "CapacityUnavailable"),
        ("verda_instance.node", "Unable to create instance, got error: insufficient_funds", "QuotaExceeded"),
        ("lambdalabs_instance.node", "instance-operations/launch/insufficient-capacity", "CapacityUnavailable"),
        (
            "lambdalabs_instance.node",
            "Could not create instance, unexpected error: Unauthorized",
            "CloudCredentialsRefused",
        ),
        ("lambdalabs_instance.node", "global/quota-exceeded", "QuotaExceeded"),
        # As the providers say it: the message of Lambda without its code, of Verda with the status alone.
        ("lambdalabs_instance.node", "unexpected error: Your account is inactive.", "CloudPermissionDenied"),
        (
            "lambdalabs_instance.node",
            "Could not create instance, unexpected error: API key was invalid, expired, or deleted.",
            "CloudCredentialsRefused",
        ),
        ("lambdalabs_instance.node", "Could not find Lambdalabs SSH Key ID 0920582c: x", "CloudRefused"),
        ("verda_instance.node", "Unable to create instance, got error: API error 402: x", "QuotaExceeded"),
        ("verda_instance.node", "Unable to create instance, got error: API error 503: x", "CapacityUnavailable"),
        ("verda_instance.node", "Unable to read instance, got error: API error 404: not found", "CloudRefused"),
    ],
)
def test_what_they_refuse_is_explained(address: str, said: str, cause: str) -> None:
    [found] = refusals([(f"module.train.{address}[0]", said)])
    assert found.cause == cause


def test_machines_of_oracle_cloud() -> None:
    found = selected(access(sky.OCI), accelerator="H100:8")
    assert (found.machine_types, found.image) == (("BM.GPU.H100.8",), "ocid1.image.oc1.phx.aaaa")
    assert selected(access(sky.OCI), vcpus=3).machine_types == ("VM.Standard.E5.Flex/2/16",)
    with pytest.raises(NotSupported, match="no preemptible bare machines"):
        selected(access(sky.OCI), accelerator="H100:8", spot=True)
    assert selected(access(sky.OCI), accelerator="A10", spot=True).machine_types == ("VM.GPU.A10.1",)
    with pytest.raises(InvalidField, match="another OCID in each region"):
        selected(access(sky.OCI, image=None))
    said = {
        "Error: 500-InternalError, Out of host capacity.": "CapacityUnavailable",
        "Error: 404-NotAuthorizedOrNotFound, shape VM.GPU.A10.1 not found": "CapacityUnavailable",
        "Error: 404-NotAuthorizedOrNotFound, Authorization failed or requested resource not found.": (
            "CloudPermissionDenied"
        ),
    }
    for words, cause in said.items():
        [known] = refusals([("module.train.oci_core_instance.node", words)])
        assert known.cause == cause


@pytest.mark.parametrize("region", ["us-gov-ashburn-1", "uk-gov-london-1", "ap-dcc-canberra-1", "us-langley-1"])
def test_regions_of_oracle_clouds_other_realms_are_taken(region: str) -> None:
    assert access(sky.OCI, region=region).region == region  # type: ignore[attr-defined]


@pytest.mark.parametrize("region", ["us-gov-ashburn", "phoenix-1", "us--phoenix-1"])
def test_what_is_no_region_of_oracle_cloud_is_refused(region: str) -> None:
    with pytest.raises(InvalidField, match=r"OCI\.region"):
        access(sky.OCI, region=region)


def test_machines_of_azure() -> None:
    found = selected(access(sky.Azure), accelerator="A100", spot=True)
    assert (found.machine_types, found.image) == (
        ("Standard_NC24ads_A100_v4",),
        "microsoft-dsvm:ubuntu-hpc:2204:latest",
    )
    for disk in (32, 5000):
        with pytest.raises(InvalidField, match="64 to 4095"):
            selected(access(sky.Azure), disk_gb=disk)
    [provider, _] = access(sky.Azure).terraform()
    features = {"persist_id_on_create_before_polling_for_completion": True}
    assert provider.configuration() == {"alias": "this", "features": features}
    reserved = [{name: "x"} for name in ("skyinfra-pool", "azure-a", "Microsoft", "WINDOWS.b")]
    for labels in (*reserved, {"a/b": "c"}, {"a": "x" * 257}):
        with pytest.raises(InvalidField, match="labels"):
            selected(access(sky.Azure), labels=labels)
    with pytest.raises(InvalidField, match=r"labels: .* at most 48"):
        selected(access(sky.Azure), labels={f"l{n}": "" for n in range(49)})
    with pytest.raises(InvalidField, match=r"Azure\.image"):
        access(sky.Azure, image="ubuntu")
    machine = providers.machines_of(
        "azurerm_linux_virtual_machine", {"size": "a", "location": "b", "priority": "Regular"}
    )
    assert machine and not machine.spot
    said = {
        "polling failed: the Azure API returned AllocationFailed: Allocation failed.": "CapacityUnavailable",
        "creating: OperationNotAllowed: Operation could not be completed as it results in exceeding approved Total "
        "Regional Cores quota.": "QuotaExceeded",
        "OperationNotAllowed: The server rejected the request because too many requests have been received for this "
        "subscription.": "CloudThrottled",
        "OperationNotAllowed: Boot diagnostics is not enabled for this VM.": "CloudRefused",
        "to be managed via Terraform this resource needs to be imported into the State.": "CloudRefused",
        "unexpected status 403 (403 Forbidden) with error: RequestDisallowedByPolicy: Resource 'train-1a2b' was "
        "disallowed by policy.": "CloudRefused",
        "unexpected status 403 (403 Forbidden) with error: AuthorizationFailed: The client 'x' does not have "
        "authorization to perform action 'Microsoft.Network/virtualNetworks/write' over scope 'y'": (
            "CloudPermissionDenied"
        ),
        "unexpected status 400 (400 Bad Request) with error: PublicIPCountLimitReached: Cannot create more than 20 "
        "public IP addresses for this subscription in this region.": "QuotaExceeded",
    }
    for words, cause in said.items():
        [known] = refusals([("module.train.azurerm_linux_virtual_machine.node", words)])
        assert known.cause == cause


@pytest.mark.parametrize(
    "size",
    [
        "Standard_D4ps_v6",
        "Standard_B2pts_v2",
        "Standard_E16-8pds_v6",
        "Standard_D4pls_v5",
        "Standard_ND128isr_GB200_v6",
        "Standard_ND128isr_NDR_GB300_v6",
    ],
)
def test_sizes_of_azure_with_arm_are_known_by_their_names(size: str) -> None:
    assert providers.read("azure").architecture(size) == "arm64"


@pytest.mark.parametrize(
    "size", ["Standard_NC24ads_A100_v4", "Standard_NP10s", "Standard_PB6s", "Standard_D2s_v5", "Standard_D2_v2_Promo"]
)
def test_sizes_of_azure_without_arm_are_known_by_their_names(size: str) -> None:
    assert providers.read("azure").architecture(size) == "x86_64"


def test_sizes_of_azure_with_arm_get_the_image_for_it() -> None:
    found = selected(access(sky.Azure, instance_types=["Standard_D4ps_v6"]))
    assert found.image == "Canonical:ubuntu-24_04-lts:server-arm64:latest"
    assert selected(access(sky.Azure)).image == "Canonical:ubuntu-24_04-lts:server:latest"


def test_who_may_not_register_services_of_azure_reads_what_to_do_without() -> None:
    said = (
        "Terraform does not have the necessary permissions to register Resource Providers.\nauthorization failed: "
        'registering resource provider "Microsoft.MixedReality": unexpected status 403 (403 Forbidden) with error: '
        "AuthorizationFailed: The client 'x' with object id 'y' does not have authorization to perform action "
        "'Microsoft.MixedReality/register/action' over scope '/subscriptions/z' or the scope is invalid."
    )
    [known] = refusals([('provider["registry.terraform.io/hashicorp/azurerm"].this', said)])
    assert known.cause == "CloudPermissionDenied"
    assert "ARM_RESOURCE_PROVIDER_REGISTRATIONS=none" in known.hint


def test_nodes_of_azure_watch_for_scheduled_events_and_are_no_group() -> None:
    pool = sky.ComputePool(name="train", provider=access(sky.Azure), accelerator="A100", spot=True, nodes=3)
    deployment = compile_pool(pool, "s")
    assert (deployment.selection.machine_types, deployment.selection.separate_head) == (
        ("Standard_NC24ads_A100_v4",),
        False,
    )
    data = user_data(deployment)
    for text in (data.head, data.worker):
        (units,) = re.findall(r'"units":\[(.*?)\]', text)
        assert "skyinfra-interrupt.service" in units and "skyinfra-watch" not in units


def test_infiniband_of_azure() -> None:
    place = access(sky.Azure, infiniband=True)
    found = selected(place, accelerator="H100:8", nodes=2)
    assert (found.machine_types, found.inputs["infiniband"]) == (("Standard_ND96isr_H100_v5",), True)
    assert "infiniband" not in selected(access(sky.Azure), accelerator="H100:8").inputs
    with pytest.raises(NotSupported, match="Standard_NC24ads_A100_v4 has no InfiniBand"):
        selected(place, accelerator="A100")
    with pytest.raises(InvalidField, match="spot: nodes with InfiniBand stand in an availability set"):
        selected(place, accelerator="H100:8", spot=True)
    with pytest.raises(InvalidField, match=r"provider\.zone: nodes with InfiniBand"):
        selected(access(sky.Azure, infiniband=True, zone="1"), accelerator="H100:8")


def test_instances_of_vultr() -> None:
    found = selected(access(sky.Vultr), accelerator="L40S")
    assert (found.machine_types, found.image) == (("vcg-l40s-16c-180g-48vram",), "1743")
    with pytest.raises(NotSupported, match="no Cloud GPU plan"):
        selected(access(sky.Vultr), accelerator="L40S:8")
    with pytest.raises(NotSupported, match="nobody may partition"):
        selected(access(sky.Vultr), accelerator="A100/3g.40gb")
    [known] = refusals(
        [("module.train.vultr_instance.node", 'error creating server: {"error":"Invalid API token.","status":401}')]
    )
    assert known.cause == "CloudCredentialsRefused"


def test_instances_of_scaleway() -> None:
    found = selected(access(sky.Scaleway), accelerator="H100-PCIe")
    assert (found.machine_types, found.image) == (("H100-1-80G",), "ubuntu_jammy_gpu_os_12")
    assert selected(access(sky.Scaleway)).price_note == "on-demand price not known"
    # Its provider's recorded answers list the image for it.
    assert selected(access(sky.Scaleway), accelerator="B300:8").image == "ubuntu_jammy_gpu_os_12"
    said = "scaleway-sdk-go: resource instance_server is out of stock"
    [known] = refusals([("module.train.scaleway_instance_server.node", said)])
    assert known.cause == "CapacityUnavailable"


def test_machines_of_crusoe() -> None:
    found = selected(access(sky.Crusoe), accelerator="H100:8/3g.40gb")
    assert (found.machine_types, found.image) == (("h100-80gb-sxm-ib.8x",), "ubuntu24.04-nvidia-sxm-docker")
    cards = selected(access(sky.Crusoe), accelerator="L40S")
    assert (cards.machine_types, cards.image) == (("l40s-48gb.1x",), "ubuntu22.04-nvidia-pcie-docker:latest")
    assert selected(access(sky.Crusoe, image="mine:1"), accelerator="L40S").image == "mine:1"
    assert selected(access(sky.Crusoe), accelerator="MI300X:8").image == "ubuntu-rocm:latest"
    place = access(sky.Crusoe, region="eu-iceland1-a")
    assert selected(place, accelerator="B300:8").image == "ubuntu24.04-nvidia-sxm-docker-b300"
    assert selected(place, accelerator="GB200:4").image == "ubuntu24.04-nvidia-nvl-arm64-gb200"
    with pytest.raises(NotSupported, match="comes with its type"):
        selected(access(sky.Crusoe), accelerator="L40S", disk_gb=500)
    [known] = refusals([("module.train.crusoe_compute_instance.node", "out_of_stock: the VM type is out of stock")])
    assert known.cause == "CapacityUnavailable"
    # The provider prints the message alone.
    [known] = refusals([("module.train.crusoe_compute_instance.node", "Failed to create: the VM type is out of stock")])
    assert known.cause == "CapacityUnavailable"
