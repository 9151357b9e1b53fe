"""Google Cloud: from a declaration to machine types, image, module inputs and price; and what is refused."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest

import skyinfra as sky
from skyinfra import offers, providers
from skyinfra.bootstrap import user_data
from skyinfra.bootstrap.files import written
from skyinfra.compiler import Deployment, compile_pool
from skyinfra.providers import Selection, read
from skyinfra.stack import describe
from skyinfra.terraform.cloud_errors import refusals


def compiled(accelerator: Any = None, *, gcp: dict[str, Any] | None = None, **fields: Any) -> Deployment:
    return compile_pool(
        sky.ComputePool(name="p", provider=sky.GCP(**(gcp or {})), accelerator=accelerator, **fields), "s"
    )


def select(accelerator: Any = None, **fields: Any) -> Selection:
    return compiled(accelerator, **fields).selection


def refused(error: type[sky.SkyinfraError], accelerator: Any = None, **fields: Any) -> sky.SkyinfraError:
    with pytest.raises(error) as caught:
        select(accelerator, **fields)
    return caught.value


@pytest.mark.parametrize(
    ("accelerator", "machine_type", "count"),
    [
        ("H100:8", "a3-highgpu-8g", 8),
        ("A100-40GB:4", "a2-highgpu-4g", 4),
        ("L4", "g2-standard-4", 1),
        ("L4:8", "g2-standard-96", 8),
        ("H200:8/3g.71gb", "a3-ultragpu-8g", 8),
        ("B200:8", "a4-highgpu-8g", 8),
    ],
)
def test_the_cheapest_machine_that_carries_it(accelerator: str, machine_type: str, count: int) -> None:
    selected = select(accelerator, gcp={"reservation": "mine"})
    assert (selected.machine_types[0], selected.count, selected.separate_head) == (machine_type, count, False)


def test_machines_without_accelerators() -> None:
    selected = select(vcpus=40)
    assert (selected.machine_types, selected.hourly_cost) == (("n2-standard-48",), 2.33083)
    assert "ubuntu-2404-lts-amd64" in selected.image
    assert select(gcp={"region": "europe-west4"}).hourly_cost is None


def test_zones_for_accelerators_alone_have_longer_names() -> None:
    assert select("L4", gcp={"zones": ["us-central1-ai1a"]}).inputs["zones"] == ["us-central1-ai1a"]


def test_zones_without_the_gpu_that_is_added_are_left_out() -> None:
    """Google says of each zone that it has the N1 machine, which is there without a GPU too."""
    place = {"region": "us-west3"}
    assert select("T4", gcp=place).inputs["gpu_zones"] == ["us-west3-b"]
    own = {"region": "europe-west1", "image": "projects/p/global/images/pascal"}
    assert select("P100", gcp=own).inputs["gpu_zones"] == ["europe-west1-b", "europe-west1-d"]
    # One's own are taken as they are, and so is a region of which nothing is known.
    named = select("T4", gcp={**place, "zones": ["us-west3-a"]}).inputs
    assert named["zones"] == ["us-west3-a"] and "gpu_zones" not in named
    unknown = {"region": "europe-north1", "instance_types": ["n1-standard-8+nvidia-tesla-t4:1"]}
    for inputs in (select("L4").inputs, select().inputs, select("T4", gcp=unknown).inputs):
        assert "gpu_zones" not in inputs


def test_n1_takes_gpus_of_its_own() -> None:
    selected = select("T4:2", gcp={"instance_types": ["n1-standard-16+nvidia-tesla-t4:2"]})
    assert (selected.machine_types, selected.count) == (("n1-standard-16+nvidia-tesla-t4:2",), 2)
    assert refused(sky.NotSupported, "V100", gcp={"instance_types": ["n1-standard-8+nvidia-tesla-v100:1"]}).field


def test_spot_falls_back_in_a_group() -> None:
    selected = select("L4", spot=True, nodes=3)
    assert selected.machine_types[:2] == ("g2-standard-4", "g2-standard-8")
    assert (selected.head_machine, selected.head_price.usd_per_hour) == ("e2-standard-2", 0.06701)  # type: ignore[union-attr]
    assert "ubuntu-os-cloud" in str(selected.inputs["head_image"])
    one = select("A100-40GB", spot=True, gcp={"group": True})
    assert one.separate_head and one.inputs["group"] is True


def test_some_machines_are_sold_by_spot_or_flex_start_alone() -> None:
    error = refused(sky.NotSupported, "H100:2")
    assert "a3-highgpu-2g is sold as a spot machine or by a flex start" in str(error)
    assert select("H100:2", spot=True).machine_types == ("a3-highgpu-2g",)
    flex = select("H100:2", gcp={"flex_start_hours": 2.5})
    assert (flex.machine_types, flex.inputs["flex_start_seconds"]) == (("a3-highgpu-2g",), 9000)


def test_the_layout_travels_in_an_attribute_and_a_changed_one_replaces_nothing() -> None:
    before, after = (compiled(f"A100-40GB:2/{layout}") for layout in ("3g.20gb", "2g.10gb+1g.5gb"))
    assert (before.selection.inputs["layout"], after.selection.inputs["layout"]) == ("3g.20gb", "2g.10gb+1g.5gb")
    assert user_data(before).revision == user_data(after).revision
    assert "layout" not in select("L4").inputs


def test_user_data_fetch_from_the_own_metadata_and_watch_it() -> None:
    deployment = compiled("A100-40GB:2/3g.20gb", nodes=2)
    data = user_data(deployment)
    assert "first_boot/gce.py" in data.head and "google-local-nvme-ssd" in data.worker
    assert "google-skyinfra-head" in data.head and "google-skyinfra-head" not in data.worker
    head, worker = (re.findall(r'\\"units\\":\[(.*?)\]', text)[0] for text in (data.head, data.worker))
    assert "skyinfra-watch.service" in head and "skyinfra-interrupt.service" in head
    assert "skyinfra-watch.service" not in worker and "skyinfra-interrupt.service" in worker
    assert max(map(len, (data.head, data.worker))) < 100_000


def test_terraform_gets_project_and_region() -> None:
    [one] = sky.GCP(project="my-project", region="us-east4").terraform()
    assert one.configuration() == {"alias": "us-east4_my-project", "region": "us-east4", "project": "my-project"}
    [other] = sky.GCP().terraform()
    assert other.configuration() == {"alias": "us-central1", "region": "us-central1"}


def test_inputs() -> None:
    own = "projects/p/regions/us-central1/subnetworks/mine"
    given = {"subnetwork": own, "network_tags": ["in"], "zones": ["us-central1-c"], "service_account": "a@b.c"}
    inputs = select("L4", gcp={**given, "reservation": "mine", "compact_placement": True, "head_volume_gb": 50}).inputs
    assert {**given, "reservation": "mine", "compact_placement": True, "head_volume_gb": 50}.items() <= inputs.items()
    assert {"flex_start_seconds", "group"}.isdisjoint(inputs)


def test_nodes_that_are_bound_to_their_reservation() -> None:
    bound = select("B200:8", gcp={"reservation": "mine", "reservation_bound": True}).inputs
    assert (bound["reservation"], bound["reservation_bound"]) == ("mine", True)
    assert (
        refused(sky.InvalidField, "B200:8", gcp={"reservation": "mine", "reservation_bound": True}, spot=True).field
        == "provider.reservation"
    )


@pytest.mark.parametrize("accelerator", ["H200:8", "B200:8"])
def test_gpudirect_of_machines_that_have_rdma(accelerator: str) -> None:
    reserved = {"gpudirect": True, "reservation": "mine"}
    assert select(accelerator, gcp=reserved, nodes=2).inputs["gpudirect"] is True
    error = refused(sky.InvalidField, accelerator, gcp={"gpudirect": True}, nodes=2, spot=True)
    assert error.field == "provider.gpudirect" and "no group" in str(error)


@pytest.mark.parametrize(
    ("accelerator", "machine_type", "words"),
    [
        ("H100:8", "a3-megagpu-8g", "GPUDirect-TCPXO goes through a daemon in a privileged container"),
        ("H100:8", "a3-highgpu-8g", "GPUDirect-TCPX goes through a daemon in a privileged container"),
        ("A100-40GB:8", "a2-highgpu-8g", "it has no interfaces of its own for GPUs"),
    ],
)
def test_gpudirect_that_nodes_cannot_use_is_refused(accelerator: str, machine_type: str, words: str) -> None:
    error = refused(sky.NotSupported, accelerator, gcp={"gpudirect": True, "instance_types": [machine_type]})
    assert error.field == "provider.gpudirect" and f"not on {machine_type}: " in str(error) and words in str(error)


@pytest.mark.parametrize(
    ("field", "fields"),
    [
        ("GCP.zones", {"gcp": {"zones": ["us-east1-b"]}}),
        ("GCP.zones", {"gcp": {"zones": ["us-central1"]}}),
        ("GCP.zones", {"gcp": {"zones": ["us-south1-ai1b"]}}),
        ("GCP.zones", {"gcp": {"zones": ["us-central1-1"]}}),
        ("GCP.allow_cidrs", {"gcp": {"allow_cidrs": ["fd00::/8"]}}),
        ("GCP.allow_cidrs", {"gcp": {"allow_cidrs": ["10.0.0.1/8"]}}),
        ("GCP.region", {"gcp": {"region": "us-central1-a"}}),
        ("GCP.image", {"gcp": {"image": "ubuntu"}}),
        ("GCP.subnetwork", {"gcp": {"subnetwork": "default"}}),
        ("GCP.flex_start_hours", {"gcp": {"flex_start_hours": 200}}),
        ("provider.flex_start_hours", {"gcp": {"flex_start_hours": 1}, "spot": True}),
        ("provider.reservation", {"gcp": {"reservation": "mine"}, "spot": True}),
        ("provider.flex_start_hours", {"gcp": {"flex_start_hours": 1, "group": True}}),
        ("GCP.reservation_bound", {"gcp": {"reservation_bound": True}}),
        ("labels", {"labels": {"Team": "ml"}}),
        ("labels", {"labels": {"team": "m l"}}),
        ("labels", {"labels": {"skyinfra-pool": "x"}}),
        ("labels", {"labels": {f"l{n}": "x" for n in range(61)}}),
    ],
)
def test_what_is_refused_is_named(field: str, fields: dict[str, Any]) -> None:
    assert refused(sky.InvalidField, "L4", **fields).field == field


@pytest.mark.parametrize(
    ("accelerator", "machine_type"),
    [("RTX PRO 6000", "g4-standard-48"), ("RTX PRO 6000:8", "g4-standard-384"), ("RTX PRO 6000:2", "g4-standard-96")],
)
def test_machines_of_g4(accelerator: str, machine_type: str) -> None:
    found = select(accelerator)
    assert found.machine_types == (machine_type,) and found.image.endswith("amd64-with-nvidia-580")
    # No source lists its regions: another one is allowed, and said.
    elsewhere = select(accelerator, gcp={"region": "europe-west4"})
    assert elsewhere.machine_types == (machine_type,)
    assert f"no source here says that europe-west4 has {machine_type}" in elsewhere.price_note


def test_g4_is_partitioned_by_its_runner() -> None:
    found = compiled("RTX PRO 6000:2/1g.24gb*4")
    assert found.selection.machine_types == ("g4-standard-96",) and len(found.slots) == 8
    [row] = [each for each in offers.load() if each.machine_type == "g4-standard-96"]
    assert row.mig_model == "rtx_pro_6000_96gb" and row.form_factor == "Server"


@pytest.mark.parametrize(("accelerator", "machine_type"), [("H200:8", "a3-ultragpu-8g"), ("B200:8", "a4-highgpu-8g")])
def test_a3_ultra_and_a4_are_not_sold_on_demand(accelerator: str, machine_type: str) -> None:
    error = refused(sky.NotSupported, accelerator)
    assert f"{machine_type} is not sold on demand" in str(error)
    for way in ("spot=True", "sky.GCP(flex_start_hours=...)", "sky.GCP(reservation=...,"):
        assert way in str(error)
    for fields in ({"spot": True}, {"gcp": {"flex_start_hours": 24}}, {"gcp": {"reservation": "mine"}}):
        assert select(accelerator, **fields).machine_types[0] == machine_type
    [row] = [each for each in offers.load() if each.machine_type == machine_type]
    assert any("on demand" in note for note in row.notes)


def test_gb200_is_of_arm_and_takes_a_reservation() -> None:
    error = refused(sky.NotSupported, "GB200:4")
    assert "a4x-highgpu-4g is not sold on demand" in str(error) and "reservation_bound=True" in str(error)
    found = select("GB200:4", gcp={"reservation": "mine", "reservation_bound": True})
    assert found.machine_types == ("a4x-highgpu-4g",) and found.image.endswith("arm64-with-nvidia-580")
    error = refused(sky.NotSupported, "GB200:4", gcp={"reservation": "mine"}, rdma=True)
    assert error.field == "rdma" and "its interfaces are others than those of A4" in str(error)


def test_tpu7x_is_known_and_not_of_the_cloud_tpu_api() -> None:
    [row] = [each for each in offers.load() if each.machine_type == "tpu7x-standard-4t"]
    assert (row.accelerator, row.chips, row.regions) == ("TPU7x-8", 4, ("us-central1",))
    assert "sells it otherwise" in str(providers.refuses(row))
    for named in ("TPU7x:4", "TPU7x-8", "tpu7x-standard-4t"):
        error = refused(sky.NotSupported, named)
        assert "none of TPU7x and later" in str(error) and "TPUv6e" in str(error)
    # Not by a runtime version of one's own either.
    with pytest.raises(sky.NotSupported, match="none of TPU7x"):
        pool = sky.ComputePool(provider=sky.GCPTPU(runtime_version="v2-alpha-tpu7-ubuntu2404"), accelerator="TPU7x-8")
        compile_pool(pool, "s")


@pytest.mark.parametrize(
    ("accelerator", "region", "machine_type", "version", "chips"),
    [
        ("TPUv5e", "us-central1", "v5litepod-1", "v2-alpha-tpuv5-lite", 1),
        ("TPUv5e:8", "us-central1", "v5litepod-8", "v2-alpha-tpuv5-lite", 8),
        ("TPUv5p-8", "europe-west4", "v5p-8", "v2-alpha-tpuv5", 4),
        ("TPUv6e:4", "us-east5", "v6e-4", "v2-alpha-tpuv6e", 4),
        ("TPUv4-8", "us-central2", "v4-8", "tpu-ubuntu2204-base", 4),
    ],
)
def test_tpu_slices_on_one_host(accelerator: str, region: str, machine_type: str, version: str, chips: int) -> None:
    made = compiled(accelerator, gcp={"region": region}, nodes=2)
    selected = made.selection
    assert made.pool.provider.kind == made.worker.provider == "gcptpu"
    assert (selected.machine_types, selected.image, selected.count) == ((machine_type,), version, chips)
    assert [slot.kind for slot in made.slots] == ["chip"] * chips
    assert made.head.scheduler_only and selected.head_machine == "e2-standard-2"
    zones = selected.inputs["zones"]
    assert isinstance(zones, list) and zones and {zone.rpartition("-")[0] for zone in zones} == {region}
    names = [(each.name, each.alias) for each in made.pool.provider.terraform()]
    assert names == [("google", region), ("google-beta", region)]
    data = user_data(made)
    assert data.worker.startswith("#!/bin/sh") and "skyinfra-interrupt" not in data.worker.split("units")[-1]


@pytest.mark.parametrize(
    ("accelerator", "region", "machine_type", "hosts"),
    [
        ("TPUv5e:16", "us-central1", "v5litepod-16", 4),
        ("TPUv5p-16", "us-central1", "v5p-16", 2),
        ("TPUv6e-256", "us-east5", "v6e-256", 64),
        ("TPUv4-64", "us-central2", "v4-64", 8),
        ("TPUv3-32", "europe-west4", "v3-32", 4),
        ("TPUv2-32", "us-central1", "v2-32", 4),
    ],
)
def test_tpu_slices_of_several_hosts(accelerator: str, region: str, machine_type: str, hosts: int) -> None:
    made = compiled(accelerator, gcp={"region": region})
    selected, worker = made.selection, made.worker
    assert (selected.machine_types, selected.hosts, selected.inputs["hosts"]) == ((machine_type,), hosts, hosts)
    assert worker.accelerator is not None and (worker.accelerator.count, worker.slice_hosts) == (4, hosts)
    assert [(slot.kind, slot.gpu) for slot in made.slots] == [("host", None)]
    assert made.head.scheduler_only and not made.head.slice_hosts
    shown = describe(made)
    assert (shown["nodes"], shown["accelerators_per_node"], shown["slots_per_node"]) == (1, hosts * 4, hosts)
    # The configuration is the same on all hosts: each makes its own of it, first of all.
    files = written(user_data(made).worker)
    assert "/etc/skyinfra/slice.json" in files and "/etc/skyinfra/node.json" not in files
    first, *others = json.loads(files["/opt/skyinfra/steps.json"])["steps"]
    assert first["operation"] == "slice_host" and "node_name" not in {step["operation"] for step in others}
    assert "/etc/skyinfra/node.json" in written(user_data(made).head)


@pytest.mark.parametrize("block", ["google", "google.mine"])
def test_tpus_take_no_block_of_the_stack(block: str) -> None:
    """Their module has two providers: with one given, the other would look at another account."""
    with pytest.raises(sky.NotSupported, match="two providers, google-beta and google") as caught:
        compiled("TPUv6e:4", gcp={"region": "us-east5", "provider": block})
    assert caught.value.field == "GCP.provider" and "project=" in caught.value.hint


def test_tpus_take_what_google_cloud_takes() -> None:
    given = {"subnetwork": "projects/p/regions/us-central1/subnetworks/mine", "zones": ["us-central1-b"]}
    inputs = select("TPUv5e:4", gcp={**given, "head_volume_gb": 30}, spot=True, nodes=3).inputs
    assert {**given, "head_volume_gb": 30}.items() <= inputs.items()
    assert {"reservation", "group", "layout", "compact_placement"}.isdisjoint(inputs)
    own = sky.GCPTPU(runtime_version="tpu-ubuntu2204-base")
    pool = sky.ComputePool(provider=own, accelerator="TPUv5e:4")
    assert compile_pool(pool, "s").selection.image == "tpu-ubuntu2204-base"


def test_tpus_that_are_refused() -> None:
    several = refused(sky.NotSupported, "TPUv5e:16", nodes=2)
    assert several.field == "nodes" and "4 hosts, which run one program" in str(several)
    there = {"region": "us-central2"}
    mismatch = refused(sky.ConcurrencyMismatch, "TPUv4-64", gcp=there, worker=sky.Worker(concurrency=4))
    assert "1 slot on each node" in str(mismatch)
    assert select("TPUv4-64", gcp=there, worker=sky.Worker(concurrency=1)).hosts == 8
    assert refused(sky.NotSupported, "TPUv5e:4", gcp={"flex_start_hours": 2}).field == "GCPTPU.flex_start_hours"
    assert refused(sky.NotSupported, "TPUv5e:4", gcp={"gpudirect": True}).field == "GCPTPU.gpudirect"
    assert refused(sky.InvalidField, "TPUv5e:4", labels={"Team": "ml"}).field == "labels"
    assert refused(sky.NotSupported, "TPUv5e:4", disk_gb=200).field == "disk_gb"
    assert "Declare a pool for each" in str(refused(sky.NotSupported, ["TPUv5e:4", "L4"]))
    assert "Declare a pool for each" in str(refused(sky.NotSupported, ["T4:16", "TPUv5e:4"]))
    spot = refused(sky.NotOffered, "TPUv5e:4", gcp={"region": "me-west1"})
    assert spot.field in ("region", "accelerator")


@pytest.mark.parametrize(
    ("cause", "said"),
    [
        (
            "CapacityUnavailable",
            "Error waiting for instance to create: The zone 'projects/p/zones/us-central1-a' does not have enough "
            "resources available to fulfill the request. '(resource type:compute)'.",
        ),
        (
            "CapacityUnavailable",
            "Error waiting: A n1-standard-4 VM instance with 1 nvidia-tesla-t4 accelerator(s) is "
            "currently unavailable in the us-central1-b zone. Consider trying your request in the us-central1-a zone",
        ),
        (
            "CloudRefused",
            "Error creating instance: googleapi: Error 412: Constraint constraints/compute.vmExternalIpAccess violated "
            "for project 1. Add instance projects/p/zones/z/instances/x to the constraint, conditionNotMet",
        ),
        (
            "QuotaExceeded",
            "Error creating instance: googleapi: Error 403: QUOTA_EXCEEDED: Quota 'GPUS_ALL_REGIONS' exceeded.  Limit: "
            "0.0 globally.",
        ),
        ("QuotaExceeded", "Error waiting: Quota 'NVIDIA_L4_GPUS' exceeded.  Limit: 0.0 in region us-east4."),
        (
            "CloudPermissionDenied",
            "Error creating Network: googleapi: Error 403: Required 'compute.networks.create' permission for "
            "'projects/p/global/networks/x', forbidden",
        ),
        (
            "CloudCredentialsRefused",
            "Attempted to load application default credentials since neither `credentials` nor `access_token` was set.",
        ),
        (
            "CloudCredentialsRefused",
            "googleapi: Error 403: Compute Engine API has not been used in project 1 before or it is disabled.",
        ),
    ],
)
def test_what_its_api_refuses_is_known(cause: str, said: str) -> None:
    [found] = refusals([("module.p.google_compute_instance.node", f"Error: {said}")])
    assert found.cause == cause
    assert found.hint in {row["hint"] for row in read("gcp").errors}


@pytest.mark.parametrize(("zone", "elsewhere"), [("us-central1-a", False), ("us-central10-a", True)])
def test_a_price_of_the_region_is_one_of_its_zones(zone: str, elsewhere: bool) -> None:
    machine = providers.machines_of("google_compute_instance", {"machine_type": "a2-highgpu-8g", "zone": zone})
    assert machine is not None and machine.price is not None
    assert (machine.price.region, machine.elsewhere) == ("us-central1", elsewhere)


def test_the_price_of_a_slice_that_runs() -> None:
    machine = providers.machines_of("google_tpu_v2_vm", {"accelerator_type": "v5p-8", "zone": "us-east5-a"})
    assert machine is not None and machine.provider == "gcptpu" and machine.price is not None
    assert (machine.price.usd_per_hour, machine.elsewhere) == (17.83782, True)
