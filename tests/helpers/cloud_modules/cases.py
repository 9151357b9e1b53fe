"""The modules, each with what the contract of all modules is tested with. A new module is a new case."""

from __future__ import annotations

import json
import tomllib
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from mock_provider.schema import Schema
from mock_provider.world import World
from support import ROOT, module_source

from cloud_modules import marketplaces
from skyinfra.providers import read

Inputs = dict[str, Any]


def nothing(world: World) -> None:
    """A module whose cloud needs no answers."""


@dataclass(frozen=True)
class ModuleCase:
    """``name`` is its folder. ``mock`` names the schemas of its providers; without, it is applied for real.

    ``types`` matches the machine types of its offers that are its own.
    ``inputs`` make two nodes, ``layout`` are those that a changed layout changes. ``nodes`` matches the addresses of
    machines in the module, ``carriers`` those that a changed layout may replace, since they are no machines. The
    machines of ``over_ssh`` are set up by ssh, whose far end is then the stand-in of `far_end`.
    ``layouts`` is false where nobody partitions: then other user data of the same revision change nothing. ``api`` is
    the server that its programs ask, with the variables by which they find it.
    """

    name: str
    inputs: Inputs
    layout: Inputs
    nodes: str
    types: str = ""
    mock: tuple[str, ...] = ()
    carriers: str = r"(?!)"
    layouts: bool = True
    providers: dict[str, Any] = field(default_factory=dict)
    answers: Callable[[World], None] = nothing
    over_ssh: bool = False
    api: Callable[[World], AbstractContextManager[tuple[object, dict[str, str]]]] | None = None

    @property
    def folder(self) -> Path:
        return ROOT / "modules" / self.name

    @property
    def source(self) -> str:
        return module_source(self.name)

    @property
    def examples(self) -> list[Path]:
        return sorted(path.parent for path in self.folder.glob("examples/*/main.tf"))


def root(case: ModuleCase, **inputs: Any) -> str:
    """A root that calls the module, as JSON."""
    sources = {name: f"registry.terraform.io/{Schema.read(name).source}" for name in case.mock}
    content: dict[str, Any] = {
        "terraform": {"required_providers": {name: {"source": source} for name, source in sources.items()}},
        "provider": case.providers,
        "module": {"train": {"source": case.source, "name": "train", **case.inputs, **inputs}},
        "output": {"fleet": {"value": "${module.train.fleet}", "sensitive": True}},
    }
    return json.dumps(
        {key: value for key, value in content.items() if value and value != {"required_providers": {}}}, indent=1
    )


_MADE_OF = {"user_data_revision": "1", "versions": {"python": "3.12", "requirements": ["cloudpickle==3.1.2"]}}
# Of clouds that have a place for the layout, and read cloud-config.
_DATA = "#cloud-config\n# @SKYINFRA_NODE@ @SKYINFRA_HEAD@ @SKYINFRA_BUCKET@/secret"
_CLOUD_CONFIG = {
    "user_data_head": f"{_DATA} @SKYINFRA_VOLUME@\n",
    "user_data_worker": f"{_DATA}\n",
    "layout": "a",
    **_MADE_OF,
}
_OTHER_LAYOUT = {"layout": "b", **dict.fromkeys(("user_data_head", "user_data_worker"), "#cloud-config\n# b\n")}

# modules/aws


AWS_ZONES = [f"us-east-1{letter}" for letter in "abcdef"]
AWS_SUBNETS = {"subnet-1": "us-east-1b", "subnet-2": "us-east-1c"}


def aws_answers(world: World) -> None:
    """An account with two subnets in the VPC vpc-mine, where every zone has every machine type."""
    world.answer("data.aws_caller_identity", {"account_id": "123456789012"})
    world.answer("data.aws_region", {"id": "us-east-1", "name": "us-east-1"})
    world.answer("data.aws_partition", {"partition": "aws", "dns_suffix": "amazonaws.com"})
    world.answer("data.aws_availability_zones", {"names": AWS_ZONES})
    world.answer("data.aws_ec2_instance_type_offerings", {"locations": AWS_ZONES})
    world.answer("data.aws_ssm_parameter", {"insecure_value": "ami-{n}"})
    world.answer("data.aws_ami", {"architecture": "x86_64", "root_device_name": "/dev/sda1"})
    for subnet, zone in AWS_SUBNETS.items():
        world.answer("data.aws_subnet", {"vpc_id": "vpc-mine", "availability_zone": zone}, where={"id": subnet})


AWS = ModuleCase(
    name="aws",
    mock=("aws",),
    providers={"aws": {"region": "us-east-1"}},
    inputs={
        "machine_types": ["g5.xlarge"],
        **_CLOUD_CONFIG,
    },
    layout=_OTHER_LAYOUT,
    nodes=r"aws_instance\.",
    answers=aws_answers,
)


# modules/gcp


GCP_ZONES = [f"us-central1-{letter}" for letter in "abcf"]
# Of which the module only counts how many there are.
GCP_TYPE = {
    **dict.fromkeys(("architecture", "description", "self_link"), ""),
    **dict.fromkeys(("guest_cpus", "maximum_persistent_disks", "maximum_persistent_disks_size_gb", "memory_mb"), 1),
    "accelerators": [],
    "deprecated": [],
    "is_shared_cpus": False,
    "name": "a2-highgpu-1g",
}


def gcp_answers(world: World) -> None:
    """A project where every zone has every machine type."""
    world.answer("data.google_compute_zones", {"names": GCP_ZONES})
    world.answer("data.google_compute_machine_types", {"machine_types": [GCP_TYPE]})
    world.answer("data.google_compute_image", {"self_link": "projects/p/global/images/image-{n}"})
    world.answer("google_compute_address", {"address": "10.84.0.{n}"})


def of_project(world: World, project: str) -> None:
    """Every resource of Google Cloud says that it is in *project*, as with a provider of that one."""
    for kind in {*Schema.read("google").resources, *Schema.read("google-beta").resources}:
        world.answer(kind, {"project": project})


GCP = ModuleCase(
    name="gcp",
    # But slices of TPUs.
    types=r"(?!v\d)",
    mock=("google",),
    providers={"google": {"project": "p", "region": "us-central1"}},
    inputs={
        "machine_types": ["a2-highgpu-1g"],
        **_CLOUD_CONFIG,
    },
    layout=_OTHER_LAYOUT,
    nodes=r"module\.google\.google_compute_instance\.",
    answers=gcp_answers,
)


# modules/local


def _local_data(cpu_slots: int) -> Inputs:
    node = {"version": 1, "stack": "default", "pool": "train", "node": "@SKYINFRA_NODE@", "provider": "local"}
    node |= {"cpu_slots": cpu_slots, "secret_file": "../secret"}
    return {
        "user_data_head": json.dumps({**node, "head": True, "scheduler": "127.0.0.1:0"}),
        "user_data_worker": json.dumps({**node, "head": False, "scheduler": "@SKYINFRA_HEAD@"}),
        "slots": [{"index": index, "kind": "cpu"} for index in range(cpu_slots)],
    }


LOCAL = ModuleCase(
    name="local",
    inputs=_local_data(1),
    layout=_local_data(2),
    nodes=r"terraform_data\.node\[",
    # A configuration is a resource of its own, which the running node takes over.
    carriers=r"terraform_data\.(head|worker)\b",
)

# The modules whose machines are set up over SSH


PUBLIC_KEY = "ssh-ed25519 AAAAC3NzaC1lZDI1NTE5AAAAIJ8VhYh0z0o0m7m4b3qvJqk0d1k2m3n4p5q6r7s8t9u0"


def _script(layout: str) -> Inputs:
    """What a machine is set up with, as much of it as the far end's stand-in needs: the configuration of the node."""
    put = """put() { mkdir -p "$DISK$(dirname "$2")" && printf '%s' "$3" >"$DISK$2"; }"""
    node = json.dumps({"node": "@SKYINFRA_NODE@", "head": "@SKYINFRA_HEAD@", "layout": layout})
    text = f"#!/bin/sh\n{put}\nput 0644 /etc/skyinfra/node.json '{node}\n'\n"
    return {"user_data_head": text, "user_data_worker": text}


def lambda_answers(world: World) -> None:
    """An account whose firewall lets in SSH, as it is made, and the scheduler's port."""
    rules = [
        {"protocol": "tcp", "port_range": [port, port], "source_network": "0.0.0.0/0", "description": ""}
        for port in (22, 8786)
    ]
    world.answer("data.lambdalabs_firewall", {"rules": rules})


def over_ssh(name: str, answers: Callable[[World], None] = nothing, **given: Any) -> ModuleCase:
    """The case of a module whose machines are set up over SSH. given: inputs (besides the usual ones), mock and
    providers, as in tests/clouds."""
    common = {
        **_script("a"),
        **_MADE_OF,
        "ssh_public_key": PUBLIC_KEY,
        **given["inputs"],
    }
    return ModuleCase(
        name=name,
        mock=tuple(given.get("mock", ())),
        inputs=common,
        layout=_script("b"),
        nodes=r"(?!terraform_data)\w+\.node\[",
        # What sets a machine up, or hands a layout on, is none.
        carriers=r"module\.hosts\.terraform_data\.(layout|worker_layout)\b",
        answers=answers,
        providers=given.get("providers", {}),
        over_ssh=True,
    )


# By kind, from tests/clouds/KIND.toml: mock, the schemas of the Terraform providers; providers, their configuration;
# inputs of the module; replacing, changes of them that make a machine anew; pool and provider, the fields of a pool
# there and of its provider besides the key and the networks.
CLOUDS: dict[str, dict[str, Any]] = {
    path.stem: tomllib.loads(path.read_text()) for path in sorted((ROOT / "tests" / "clouds").glob("*.toml"))
}
_OVER_SSH = {
    kind: over_ssh(kind, {"lambda": lambda_answers}.get(kind, nothing), **given) for kind, given in CLOUDS.items()
}
AZURE, DIGITALOCEAN, LAMBDA, NEBIUS, VERDA = (
    _OVER_SSH[kind] for kind in ("azure", "digitalocean", "lambda", "nebius", "verda")
)


def access(kind: str) -> Inputs:
    """Returns the variables that the provider of a cloud over SSH needs."""
    access = {"ssh_public_key": PUBLIC_KEY, "allow_cidrs": ["203.0.113.7/32"]}
    return {name: value for name, value in access.items() if read(kind).takes(name)} | CLOUDS[kind].get("provider", {})


# modules/runpod


_SCRIPT = "#!/bin/sh\n# @SKYINFRA_NODE@ @SKYINFRA_BUCKET@/secret"
_STARTED = {"user_data_head": f"{_SCRIPT}\n", "user_data_worker": f"{_SCRIPT} @SKYINFRA_HEAD@\n", **_MADE_OF}
_OTHER_START = dict.fromkeys(("user_data_head", "user_data_worker"), f"{_SCRIPT} b\n")

RUNPOD = ModuleCase(
    name="runpod",
    mock=("runpod",),
    providers={"runpod": {}},
    inputs={
        "machine_types": ["2x NVIDIA GeForce RTX 4090 (secure)"],
        **_STARTED,
    },
    layouts=False,
    layout=_OTHER_START,
    nodes=r"runpod_pod\.",
    api=marketplaces.runpod,
)


# modules/vastai


def vastai_offers() -> list[Inputs]:
    """Four offers that will do, 103 the cheapest, and from 200 on one that lacks each thing, which is cheaper."""
    every = Schema.read("vastai").data["vastai_gpu_offers"]["offers"].fields
    good = {
        **dict.fromkeys(every),
        "reliability": 0.99,
        "direct_port_count": 10,
        "disk_space_gb": 500,
        "cpu_cores": 16,
        "cpu_ram_gb": 64,
        "cuda_version": 12.8,
        "min_bid": 0.2,
        "geolocation": "Sweden, SE",
        "verification": "verified",
    }
    lacking = (
        {"reliability": 0.9},
        {"direct_port_count": 1},
        {"disk_space_gb": 10},
        {"cpu_cores": 2},
        {"cpu_ram_gb": 4},
        {"cuda_version": 12.1},
        {"geolocation": "Texas, US"},
    )
    found = [{**good, "id": 100 + n, "price_per_hour": 1.5 - n / 10} for n in range(4)]
    return found + [{**good, **each, "id": 200 + n, "price_per_hour": 0.1} for n, each in enumerate(lacking)]


def vastai_answers(world: World) -> None:
    world.answer("data.vastai_gpu_offers", {"offers": vastai_offers()})
    world.answer("vastai_instance", {"geolocation": "Sweden, SE"})


VASTAI = ModuleCase(
    name="vastai",
    mock=("vastai",),
    providers={"vastai": {}},
    inputs={
        "machine_types": ["2x-RTX_4090-32-65536"],
        **_STARTED,
        "min_vcpus": 8,
        "min_memory_gb": 32,
        "min_cuda": "12.4",
        "countries": ["SE"],
    },
    layouts=False,
    layout=_OTHER_START,
    nodes=r"vastai_instance\.",
    answers=vastai_answers,
    api=marketplaces.vastai,
)


CASES = (LOCAL, AWS, GCP, RUNPOD, VASTAI, *_OVER_SSH.values())

# Modules that need an engine or machines, or whose nodes no manifest lists: their whole life is in tests of their own.
BY_THEMSELVES = {
    "container": "tests/integration/test_containers.py",
    "gcptpu": "tests/integration/test_gcptpu_module.py",
    "ssh": "tests/integration/boot/test_ssh_hosts_boot.py",
}
