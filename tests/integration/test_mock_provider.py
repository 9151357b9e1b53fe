"""The mock bed itself: a provider made of a schema, driven by a real Terraform."""

from __future__ import annotations

import json
import zipfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from cloud_modules.droplets import PROVIDER, REQUIRED, droplets
from mock_provider.bed import Bed, served
from mock_provider.schema import SCHEMAS, Schema
from mock_provider.world import Failure
from support import first_fast

from tools import provider_schema

HEAD = REQUIRED + PROVIDER
DROPLETS = (
    HEAD
    + droplets('  user_data = "first"\n  timeouts {\n    delete = "10m"\n  }\n')
    + """
resource "digitalocean_firewall" "this" {
  name        = "train"
  droplet_ids = digitalocean_droplet.node[*].id
  inbound_rule {
    protocol         = "tcp"
    port_range       = "8786"
    source_addresses = ["198.51.100.0/24"]
  }
  inbound_rule {
    protocol         = "tcp"
    port_range       = "22"
    source_addresses = ["198.51.100.7/32", "203.0.113.0/24"]
  }
}
data "digitalocean_image" "given" {
  slug = "gpu-h100x8-base"
}
output "nodes" {
  value = [for each in digitalocean_droplet.node : "${each.id} ${each.ipv4_address}"]
}
output "image" {
  value = data.digitalocean_image.given.id
}
"""
)


@pytest.fixture
def bed(tmp_path: Path) -> Iterator[Bed]:
    with served(tmp_path, "digitalocean") as made:
        made.write(DROPLETS)
        made.run("init", "-no-color")
        yield made


NODES = {f"digitalocean_droplet.node[{index}]" for index in (0, 1)}


def test_a_fleet_from_its_plan_to_its_end(bed: Bed) -> None:
    bed.world.answer("data.digitalocean_image", {"id": 4711}, where={"slug": "gpu-h100x8-base"})
    assert set(bed.changes().values()) == {"create"}
    bed.apply()
    outputs = json.loads(bed.run("output", "-json"))
    assert outputs["image"]["value"] == 4711
    assert sorted(outputs["nodes"]["value"]) == ["1 203.0.113.1", "2 203.0.113.2"]
    assert bed.changes() == {}

    # What changes in place, and what does not.
    bed.write(DROPLETS.replace('"8786"', '"8787"').replace("gpu-h100x1-80gb", "gpu-h100x8-640gb"))
    assert bed.changes() == {"digitalocean_firewall.this": "update", **dict.fromkeys(NODES, "update")}
    bed.write(DROPLETS.replace('"first"', '"second"'))
    assert bed.changes() == {"digitalocean_firewall.this": "update", **dict.fromkeys(NODES, "replace")}
    bed.apply()
    assert {each["user_data"] for each in bed.world.asked("digitalocean_droplet")} == {"second"}
    # The provider keeps a hash of the user data.
    assert "second" not in (bed.folder / "terraform.tfstate").read_text()
    bed.write(DROPLETS.replace('"first"', '"third"\n  lifecycle {\n    ignore_changes = [user_data]\n  }'))
    assert bed.changes() == {}

    # Behind Terraform's back: one is taken away, one is changed.
    taken, other = bed.world.existing("digitalocean_droplet").items()
    (bed.world.folder / taken[0]).unlink()
    (bed.world.folder / other[0]).write_text(json.dumps({**other[1], "size": "s-1vcpu-1gb"}))
    assert sorted(bed.changes().values()) == ["create", "update", "update"]
    bed.apply()
    assert bed.changes() == {}
    bed.destroy()
    assert bed.world.existing() == {}


@pytest.mark.parametrize(
    ("wrong", "right", "words"),
    [
        ("imagee     =", "image     =", 'An argument named "imagee" is not expected here. Did you mean "image"?'),
        ("port_rnge       =", "port_range       =", 'Did you mean "port_range"?'),
        ("count     = 2\n  disk = 5", "count     = 2", "Can't configure a value for disk"),
        ("port_range       = 8786\n    protocol = 1", 'port_range       = "8786"', "was already set"),
    ],
)
def test_a_wrong_argument_is_refused(bed: Bed, wrong: str, right: str, words: str) -> None:
    bed.write(DROPLETS.replace(right, wrong, 1))
    assert words in bed.run("validate", "-no-color", code=1)


@pytest.mark.parametrize(
    ("wrong", "right", "words"),
    [
        ('user_data = "first"\n  tags = ["a b"]', 'user_data = "first"', "invalid value for tags: a b does not match"),
        (
            'protocol         = "sctp"',
            'protocol         = "tcp"',
            'expected protocol to be one of ["tcp" "udp" "icmp"]',
        ),
        (
            'user_data = "first"\n  backup_policy {\n    hour = 21\n  }',
            'user_data = "first"',
            "expected hour to be in the range (0 - 20), got 21",
        ),
    ],
)
def test_a_value_that_the_provider_does_not_take_is_refused(bed: Bed, wrong: str, right: str, words: str) -> None:
    bed.write(DROPLETS.replace(right, wrong, 1))
    assert words in bed.run("validate", "-no-color", code=1)


def _sample(name: str, before: str = "", after: str = "") -> str:
    text = (SCHEMAS.parent / "samples" / f"{name}.tf").read_text()
    assert before in text
    return text.replace(before, after)


@pytest.mark.parametrize(
    ("name", "before", "after", "words"),
    [
        (
            "azurerm",
            "  source_image_reference {",
            '  source_image_id = "/subscriptions/s"\n\n  source_image_reference {',
            "exactly one of os_managed_disk_id, source_image_id, source_image_reference must be specified",
        ),
        ("runpod", '  gpu_type_id = "NVIDIA H100 80GB HBM3"\n', "", "exactly one of cpu_type_id, gpu_type_id"),
        (
            "scaleway",
            "ip_id = scaleway_instance_ip.head.id",
            'ip_id = "i"\n  ip_ids = ["i"]',
            "ip_id: conflicts with ip_ids",
        ),
    ],
)
def test_arguments_that_do_not_go_together_are_refused(
    name: str, before: str, after: str, words: str, tmp_path: Path
) -> None:
    with served(tmp_path, name) as bed:
        bed.write(_sample(name, before, after))
        bed.run("init", "-no-color")
        assert words in bed.run("validate", "-no-color", code=1)


def test_what_a_provider_leaves_unknown_is_an_error(tmp_path: Path) -> None:
    with served(tmp_path, "vastai") as bed:
        bed.write(_sample("vastai", "  use_jupyter_lab = false\n"))
        bed.run("init", "-no-color")
        said = bed.apply(code=1)
        assert "still indicated an unknown value for vastai_instance.use_jupyter_lab" in said
        # It stands, and is known.
        assert len(bed.world.existing("vastai_instance")) == 1
        assert bed.changes() == {"vastai_instance.head": "replace"}


def test_what_only_a_refresh_finds_is_a_change(tmp_path: Path) -> None:
    with served(tmp_path, "lambdalabs") as bed:
        bed.write(_sample("lambdalabs", "  file_system_names = []\n"))
        bed.run("init", "-no-color")
        bed.apply()
        assert bed.changes() == {"lambdalabs_instance.head": "update"}
        assert "Unsupported Method" in bed.apply(code=1)


def test_a_provider_may_not_bear_that_something_is_gone(tmp_path: Path) -> None:
    with served(tmp_path, "lambdalabs") as bed:
        bed.write(_sample("lambdalabs"))
        bed.run("init", "-no-color")
        bed.apply()
        [file] = bed.world.existing("lambdalabs_instance")
        (bed.world.folder / file).unlink()
        assert "Could not find Lambdalabs SSH Key ID" in bed.run("plan", "-no-color", code=1)
        bed.run("state", "rm", "lambdalabs_instance.head")
        assert bed.changes() == {"lambdalabs_instance.head": "create"}


def test_a_change_may_have_to_be_allowed(tmp_path: Path) -> None:
    with served(tmp_path, "scaleway") as bed:
        bed.write(_sample("scaleway"))
        bed.run("init", "-no-color")
        bed.apply()
        bed.write(_sample("scaleway", '"L4-1-24G"', '"H100-1-80G"'))
        assert "cannot change server type" in bed.run("plan", "-no-color", code=1)
        bed.write(_sample("scaleway", '"L4-1-24G"', '"H100-1-80G"\n  replace_on_type_change = true'))
        assert bed.changes() == {"scaleway_instance_server.head": "replace"}


def test_a_create_that_fails_leaves_what_the_real_one_would(bed: Bed) -> None:
    says = "POST https://api.digitalocean.com/v2/droplets: 422 (request 1) gpu-h100x1-80gb is not available in tor1"
    failed = Failure("create", "digitalocean_droplet", says, {"name": "train-1"}, times=1)
    bed.world.fail(failed)
    assert says in bed.apply("-parallelism=1", code=1)
    # What was made before stands, and is known.
    assert len(bed.world.existing("digitalocean_droplet")) == 1
    assert sorted(bed.changes()) == ["digitalocean_droplet.node[1]", "digitalocean_firewall.this"]

    bed.world.fail(Failure("create", "digitalocean_droplet", "timed out", leaves="tainted", times=1))
    bed.apply(code=1)
    assert bed.changes()["digitalocean_droplet.node[1]"] == "replace"
    bed.apply()
    bed.world.fail(Failure("delete", "digitalocean_droplet", "still busy", times=1))
    assert "still busy" in bed.destroy(code=1)
    assert len(bed.world.existing("digitalocean_droplet")) == 1
    bed.destroy()

    bed.world.fail(Failure("create", "digitalocean_droplet", "no answer", leaves="outside", times=1))
    bed.apply(code=1)
    bed.destroy()
    # Nobody knows of it any more.
    assert list(bed.world.existing()) != [] and "digitalocean_droplet" in next(iter(bed.world.existing()))


def test_what_the_cloud_refuses_is_refused_at_create(bed: Bed) -> None:
    bed.write(DROPLETS.replace('"first"', f'"{"x" * 65537}"'))
    assert set(bed.changes().values()) == {"create"}
    assert "user_data: 65537 bytes, and at most 65536 are allowed" in bed.apply(code=1)


FRAMEWORK = """
terraform {
  required_providers {
    verda = { source = "registry.terraform.io/verda-cloud/verda" }
  }
}
resource "verda_startup_script" "this" {
  name   = "head"
  script = "true"
}
resource "verda_instance" "head" {
  hostname          = "head"
  description       = "head"
  image             = "ubuntu-24.04-cuda-12.8-open"
  instance_type     = "1H100.80S.30V"
  startup_script_id = verda_startup_script.this.id
  is_spot           = false
  os_volume = {
    name = "os"
    size = 50
    type = "NVMe"
  }
}
output "ip" {
  value = verda_instance.head.ip
}
output "cores" {
  value = verda_instance.head.cpu.number_of_cores
}
"""


@pytest.fixture
def verda(tmp_path: Path) -> Iterator[Bed]:
    with served(tmp_path, "verda") as made:
        yield made


def test_a_framework_provider_with_nested_attributes(verda: Bed) -> None:
    bed = verda
    bed.write(FRAMEWORK)
    bed.run("init", "-no-color")
    bed.world.answer("verda_instance", {"ip": "203.0.113.{n}"})
    bed.apply()
    assert json.loads(bed.run("output", "-json", "ip")) == "203.0.113.1"
    assert bed.changes() == {}
    # The flaw of the real one: another kind of purchase is planned in place, which it cannot do.
    bed.write(FRAMEWORK.replace("is_spot           = false", "is_spot           = true"))
    assert bed.changes() == {"verda_instance.head": "update"}
    assert "Instances cannot be updated" in bed.apply(code=1)
    bed.write(FRAMEWORK.replace("size = 50", "size = 60"))
    assert bed.changes() == {"verda_instance.head": "replace"}
    bed.destroy()
    assert bed.world.existing() == {}
    bed.write(FRAMEWORK.replace("size = 50", "sise = 50"))
    assert 'attribute "size" is required' in bed.run("validate", "-no-color", code=1)


@dataclass(frozen=True)
class Change:
    """A change of a file in samples/, and what it does to which resource."""

    before: str
    after: str
    does: dict[str, str]


SAMPLES = {
    "azurerm": [
        Change('base64encode("first")', 'base64encode("second")', {"azurerm_linux_virtual_machine.head": "replace"}),
        Change('pool = "train"', 'pool = "other"', {"azurerm_linux_virtual_machine.head": "update"}),
    ],
    "google": [
        Change('"first"', '"second"', {f"google_compute_instance.node[{index}]": "update" for index in (0, 1)}),
        Change('"SPOT"', '"STANDARD"', {f"google_compute_instance.node[{index}]": "replace" for index in (0, 1)}),
        Change("count        = 2", "count        = 1", {"google_compute_instance.node[1]": "delete"}),
    ],
    "google-beta": [
        Change('"first"', '"second"', {"google_tpu_v2_vm.slice": "update"}),
        Change('"v5p-8"', '"v5p-16"', {"google_tpu_v2_vm.slice": "replace"}),
    ],
    "lambdalabs": [
        # It replaces nothing, and cannot update.
        Change('"gpu_1x_h100_pcie"', '"gpu_8x_h100_sxm5"', {"lambdalabs_instance.head": "update"}),
    ],
    "runpod": [
        Change('NODE = "head"', 'NODE = "other"', {"runpod_pod.head": "update"}),
        Change("gpu_count   = 1", "gpu_count   = 2", {"runpod_pod.head": "replace"}),
        # Left out they are unknown in the plan of any other change, as its documentation warns.
        Change('cloud       = "SECURE"\n  disk        = 50', "disk        = 60", {"runpod_pod.head": "replace"}),
    ],
    "scaleway": [
        Change('["train"]', '["other"]', {"scaleway_instance_server.head": "update"}),
        Change('"sbs_volume"', '"l_ssd"', {"scaleway_instance_server.head": "replace"}),
    ],
    "vastai": [
        Change("bid_price   = 1.5", "bid_price   = 1.6", {"vastai_instance.head": "update"}),
        Change("  bid_price   = 1.5\n", "", {"vastai_instance.head": "replace"}),
    ],
    "vultr": [
        Change('"first"', '"second"', {"vultr_instance.head": "replace"}),
        Change('"train-0"', '"train-1"', {"vultr_instance.head": "update"}),
    ],
}


@pytest.mark.parametrize("name", first_fast(SAMPLES, 3))
def test_a_machine_of_each_provider(name: str, tmp_path: Path) -> None:
    text = (SCHEMAS.parent / "samples" / f"{name}.tf").read_text()
    with served(tmp_path, name) as bed:
        bed.write(text)
        assert bed.run("fmt", "-check") == ""
        bed.run("init", "-no-color")
        bed.apply()
        assert bed.changes() == {}
        for change in SAMPLES[name]:
            assert change.before in text
            bed.write(text.replace(change.before, change.after))
            assert bed.changes() == change.does
        bed.destroy()
        assert bed.world.existing() == {}


def test_terraform_takes_every_schema(tmp_path: Path) -> None:
    names = sorted(path.stem for path in SCHEMAS.glob("*.json"))
    sources = {name: Schema.read(name).source for name in names}
    blocks = "".join(f'{name} = {{ source = "registry.terraform.io/{source}" }}\n' for name, source in sources.items())
    with served(tmp_path, *names) as bed:
        bed.write(f"terraform {{\nrequired_providers {{\n{blocks}}}\n}}\n")
        bed.run("init", "-no-color")
        shown = json.loads(bed.run("providers", "schema", "-json"))
    assert {each.removeprefix("registry.terraform.io/") for each in shown["provider_schemas"]} == set(sources.values())


PULUMI = {
    "pulumi_box/pulumi-plugin.json": '{"name": "terraform-provider", "parameterization": {"version": "1.2.3"}}',
    "pulumi_box/_inputs.py": """
class InstanceDiskArgs:
    def __init__(__self__, *,
                 size: pulumi.Input[_builtins.int],
                 kind: pulumi.Input[Optional[_builtins.str]] = None): ...
""",
    "pulumi_box/outputs.py": """
class InstanceDisk(dict):
    @_builtins.property
    @pulumi.getter
    def size(self) -> _builtins.int: ...
    @_builtins.property
    @pulumi.getter
    def serial(self) -> Optional[_builtins.str]: ...
""",
    "pulumi_box/instance.py": """
class InstanceArgs:
    def __init__(__self__, *,
                 disks: pulumi.Input[Sequence[pulumi.Input['InstanceDiskArgs']]],
                 root: pulumi.Input[Optional['InstanceDiskArgs']] = None,
                 labels: pulumi.Input[Optional[Mapping[str, pulumi.Input[_builtins.str]]]] = None,
                 user_data: pulumi.Input[Optional[_builtins.str]] = None,
                 zone: pulumi.Input[Optional[_builtins.str]] = None): ...
class _InstanceState: ...
class Instance(pulumi.CustomResource):
    def _internal_init(__self__):
        secret_opts = pulumi.ResourceOptions(additional_secret_outputs=["userData"])
    @_builtins.property
    @pulumi.getter
    def ips(self) -> pulumi.Output[Sequence[_builtins.str]]: ...
    @_builtins.property
    @pulumi.getter(name="userData")
    def user_data(self) -> pulumi.Output[Optional[_builtins.str]]: ...
    @_builtins.property
    @pulumi.getter
    def zone(self) -> pulumi.Output[_builtins.str]: ...
""",
}


@pytest.mark.parametrize("framework", [False, True])
def test_a_wheel_of_pulumi_says_the_schema(tmp_path: Path, framework: bool) -> None:
    with zipfile.ZipFile(tmp_path / "box.whl", "w") as wheel:
        for name, text in PULUMI.items():
            wheel.writestr(name, text)
    said = provider_schema.Pulumi(tmp_path / "box.whl", framework=framework)
    found = said("box_instance")
    within = {
        "kind": {"type": "string", "optional": True},
        "serial": {"type": "string", "computed": True},
        "size": {"type": "number", "required": True},
    }
    assert said.version == "1.2.3"
    assert found == {
        "disks": {"nesting": "list", "required": True, "attributes": within}
        if framework
        else {"nesting": "list", "min": 1, "block": within},
        "id": {"type": "string", "computed": True},
        "ips": {"type": ["list", "string"], "computed": True},
        "labels": {"type": ["map", "string"], "optional": True},
        "root": {"nesting": "single", "optional": True, "attributes": within}
        if framework
        else {"nesting": "list", "max": 1, "block": within},
        "user_data": {"type": "string", "optional": True, "sensitive": True},
        "zone": {"type": "string", "optional": True, "computed": True},
    }
    named = provider_schema.named_as_before(found, {"disk": {"nesting": "set"}, "label": {}})
    assert {"disk", "label", "ips"} < set(named) and "disks" not in named
