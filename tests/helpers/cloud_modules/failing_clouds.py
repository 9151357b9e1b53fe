"""A pool with places on clouds of the mock bed, which refuse as they are told."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from mock_provider.bed import Bed, served
from mock_provider.world import Failure
from support import module_source
from terraform_projects.synthesized import document_of, write

import skyinfra as sky
from cloud_modules.cases import aws_answers, gcp_answers, of_project
from skyinfra.bootstrap import runner_wheel
from skyinfra.deploy.apply import carry_out
from skyinfra.failover.deploying import Failover
from skyinfra.places.choices import Choices
from skyinfra.terraform.program import Plan
from skyinfra.terraform.project import Project
from skyinfra.terraform.synthesized import SynthesizedStack

ZONE_A, ZONE_B = "gcp us-central1 us-central1-a p", "gcp us-central1 us-central1-b p"
EAST, AMAZON = "gcp us-east1 us-east1-b p", "aws us-east-1"
GOOGLE_MACHINE, AWS_MACHINE = "google_compute_instance", "aws_instance"
# Recorded answers of the clouds, see skyinfra/failover/answers.toml.
NO_ROOM = (
    "Error waiting for instance to create: The zone 'projects/p/zones/{}' does not have enough resources available "
)
NO_ROOM += "to fulfill the request. '(resource type:compute)'."
NO_AWS = Failure(
    "create",
    AWS_MACHINE,
    "creating EC2 Instance: operation error EC2: RunInstances, https response error StatusCode: 500, RequestID: r-1, "
    "api error InsufficientInstanceCapacity: We currently do not have sufficient p4d.24xlarge capacity in the "
    "Availability Zone you requested (us-east-1a).",
)

# A marketplace needs the hash of a runner.
_IMAGE = sky.Image(runner=f"https://packages.example.com/skyinfra-0.1.0-py3-none-any.whl#sha256={'a' * 64}")


def exhausted(zone: str, **more: Any) -> Failure:
    return Failure("create", GOOGLE_MACHINE, NO_ROOM.format(zone), {"zone": zone}, **more)


@dataclass
class Deploys:
    """Deploys of one pool in the project of a bed, in this process and without Node."""

    bed: Bed
    places: Callable[[], Any]
    said: list[str] = field(default_factory=list)
    asked: list[str] = field(default_factory=list)
    answer: bool = True
    nodes: int = 1
    accelerator: Any = "A100-40GB:8"
    pool: dict[str, Any] = field(default_factory=dict)

    @property
    def project(self) -> Path:
        return self.bed.folder

    def synthesize(self) -> SynthesizedStack:
        given = {"nodes": self.nodes, "accelerator": self.accelerator, "image": _IMAGE, **self.pool}
        pool = sky.ComputePool(name="t", provider=self.places(), **given)
        document = document_of("s", [pool], Choices.read(self.project).fleets)
        for module in document["module"].values():
            module["source"] = module_source(module["source"].removeprefix("./"))
            module["runner_file"] = str(self.project / "skyinfra-0.1.0-py3-none-any.whl")
        document.setdefault("terraform", {})["backend"] = {"local": {"path": str(self.project / "s.tfstate")}}
        write(self.project, "s", document)
        return Project.find(self.project).stack("s")

    def failover(self, **changes: Any) -> Failover:
        def attempt(stack: SynthesizedStack, again: bool = False) -> Plan | None:
            return carry_out(stack)

        def ask(question: str) -> bool:
            self.asked.append(question)
            return self.answer

        given = {"synthesize": self.synthesize, "attempt": attempt, "ask": ask, "say": self.said.append, **changes}
        return Failover(self.synthesize(), Choices.read(self.project), **given)

    def choice(self) -> dict[str, Any]:
        found: dict[str, Any] = json.loads((self.project / "skyinfra.places.json").read_text())["fleets"]["s/t"]
        return found

    def machines(self) -> dict[str, int]:
        found = {kind: len(self.bed.world.existing(kind)) for kind in (GOOGLE_MACHINE, AWS_MACHINE)}
        return {kind: count for kind, count in found.items() if count}

    def modules(self) -> set[str]:
        state = json.loads((self.project / "s.tfstate").read_text())
        named = (each.get("module", "") for each in state["resources"] if each["mode"] == "managed")
        return {each.split(".")[1] for each in named}


def everywhere() -> list[sky.CloudProvider]:
    return [
        sky.GCP(project="p", zones=["us-central1-a", "us-central1-b"]),
        sky.GCP(project="p", region="us-east1", zones=["us-east1-b"]),
        sky.AWS(),
    ]


@pytest.fixture
def deploys(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Deploys]:
    with served(tmp_path, "google", "aws") as bed:
        gcp_answers(bed.world)
        aws_answers(bed.world)
        of_project(bed.world, "p")
        bed.world.answer("data.google_compute_zones", {"names": ["us-central1-a", "us-central1-b", "us-east1-b"]})
        (bed.folder / "cdktf.json").write_text('{"app": "true"}')
        wheel = runner_wheel.wheel()
        (bed.folder / "skyinfra-0.1.0-py3-none-any.whl").write_bytes(wheel.content[:1000])
        for name in ("TF_CLI_CONFIG_FILE", "TF_REATTACH_PROVIDERS"):
            monkeypatch.setenv(name, bed.environment[name])
        yield Deploys(bed, everywhere)
