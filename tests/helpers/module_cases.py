"""The modules, each with what the contract of all modules is tested with. A new module is a new case."""

from __future__ import annotations

import json
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import marketplaces
from mock_provider.schema import Schema
from mock_provider.world import World
from support import ROOT

Inputs = dict[str, Any]


def nothing(world: World) -> None:
    """A module whose cloud needs no answers."""


@dataclass(frozen=True)
class ModuleCase:
    """``name`` is its folder. ``mock`` names the schemas of its providers; without, it is applied for real.

    ``inputs`` make two nodes, ``layout`` are those that a changed layout changes. ``nodes`` matches the addresses of
    machines in the module, ``carriers`` those that a changed layout may replace, since they are no machines.
    ``layouts`` is false where nobody partitions: then other user data of the same revision change nothing. ``api`` is
    the server that its programs ask, with the variables by which they find it.
    """

    name: str
    inputs: Inputs
    layout: Inputs
    nodes: str
    mock: tuple[str, ...] = ()
    carriers: str = r"(?!)"
    layouts: bool = True
    providers: dict[str, Any] = field(default_factory=dict)
    answers: Callable[[World], None] = nothing
    api: Callable[[World], AbstractContextManager[tuple[object, dict[str, str]]]] | None = None

    @property
    def folder(self) -> Path:
        return ROOT / "modules" / self.name

    @property
    def examples(self) -> list[Path]:
        return sorted(path.parent for path in self.folder.glob("examples/*/main.tf"))


def root(case: ModuleCase, **inputs: Any) -> str:
    """A root that calls the module, as JSON."""
    sources = {name: f"registry.terraform.io/{Schema.read(name).source}" for name in case.mock}
    content: dict[str, Any] = {
        "terraform": {"required_providers": {name: {"source": source} for name, source in sources.items()}},
        "provider": case.providers,
        "module": {"train": {"source": str(case.folder), "name": "train", **case.inputs, **inputs}},
        "output": {"fleet": {"value": "${module.train.fleet}", "sensitive": True}},
    }
    return json.dumps(
        {key: value for key, value in content.items() if value and value != {"required_providers": {}}}, indent=1
    )


# modules/aws


AWS_ZONES = [f"us-east-1{letter}" for letter in "abcdef"]
AWS_SUBNETS = {"subnet-1": "us-east-1b", "subnet-2": "us-east-1c"}


def aws_answers(world: World) -> None:
    """An account with two subnets in the VPC vpc-mine, where every zone has every machine type."""
    world.answer("data.aws_region", {"id": "us-east-1", "name": "us-east-1"})
    world.answer("data.aws_partition", {"partition": "aws", "dns_suffix": "amazonaws.com"})
    world.answer("data.aws_availability_zones", {"names": AWS_ZONES})
    world.answer("data.aws_ec2_instance_type_offerings", {"locations": AWS_ZONES})
    world.answer("data.aws_ssm_parameter", {"insecure_value": "ami-{n}"})
    world.answer("data.aws_ami", {"architecture": "x86_64", "root_device_name": "/dev/sda1"})
    for subnet, zone in AWS_SUBNETS.items():
        world.answer("data.aws_subnet", {"vpc_id": "vpc-mine", "availability_zone": zone}, where={"id": subnet})


_AWS_DATA = "#cloud-config\n# @SKYINFRA_NODE@ @SKYINFRA_HEAD@ @SKYINFRA_BUCKET@/secret"

AWS = ModuleCase(
    name="aws",
    mock=("aws",),
    providers={"aws": {"region": "us-east-1"}},
    inputs={
        "machine_types": ["g5.xlarge"],
        "user_data_head": f"{_AWS_DATA} @SKYINFRA_VOLUME@\n",
        "user_data_worker": f"{_AWS_DATA}\n",
        "user_data_revision": "1",
        "versions": {"python": "3.12", "requirements": ["cloudpickle==3.1.2"]},
        "layout": "a",
    },
    layout={"layout": "b", "user_data_head": "#cloud-config\n# b\n", "user_data_worker": "#cloud-config\n# b\n"},
    nodes=r"aws_instance\.",
    answers=aws_answers,
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


# modules/runpod


_SCRIPT = "#!/bin/sh\n# @SKYINFRA_NODE@ @SKYINFRA_BUCKET@/secret"

RUNPOD = ModuleCase(
    name="runpod",
    mock=("runpod",),
    providers={"runpod": {}},
    inputs={
        "machine_types": ["2x NVIDIA GeForce RTX 4090 (secure)"],
        "user_data_head": f"{_SCRIPT}\n",
        "user_data_worker": f"{_SCRIPT} @SKYINFRA_HEAD@\n",
        "user_data_revision": "1",
        "versions": {"python": "3.12", "requirements": ["cloudpickle==3.1.2"]},
    },
    layouts=False,
    layout={"user_data_head": f"{_SCRIPT} b\n", "user_data_worker": f"{_SCRIPT} b\n"},
    nodes=r"runpod_pod\.",
    api=marketplaces.runpod,
)

CASES = (LOCAL, AWS, RUNPOD)

# Modules that need an engine or machines: their whole life is in tests of their own.
BY_THEMSELVES = {
    "container": "tests/integration/test_containers.py",
    "ssh": "tests/integration/boot/test_ssh_hosts_boot.py",
}
