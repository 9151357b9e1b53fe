"""A Terraform root in a cloud of the bed."""

from __future__ import annotations

import json
import os
import platform
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from support import ROOT, python_path
from terraform_projects.mirrors import mirror_configuration

from mock_provider.schema import Schema
from mock_provider.world import World
from skyinfra.terraform.program import find_program

_MACHINES = {"x86_64": "amd64", "aarch64": "arm64"}
PLATFORM = f"{sys.platform}_{_MACHINES.get(platform.machine(), platform.machine())}"


def install(folder: Path, names: tuple[str, ...]) -> Path:
    """A mirror of the providers *names* in *folder*; returns the configuration of the terraform program that uses it.

    ``init`` installs from it, by the constraints of the modules, and starts nothing. What it installs never runs.
    """
    addresses = []
    for schema in map(Schema.read, names):
        address = f"registry.terraform.io/{schema.source}"
        program = folder / address / schema.version / PLATFORM / f"terraform-provider-{address.split('/')[-1]}"
        program.parent.mkdir(parents=True, exist_ok=True)
        program.write_text("#!/bin/sh\necho 'tests/mock_provider serves it by TF_REATTACH_PROVIDERS' >&2\nexit 1\n")
        program.chmod(0o755)
        addresses.append(address)
    return mirror_configuration(folder, folder, addresses)


@dataclass
class Bed:
    """A root in ``folder``, its cloud in ``world``. ``printed`` is all that its commands printed."""

    folder: Path
    world: World
    environment: dict[str, str]
    printed: list[str] = field(default_factory=list)

    def write(self, text: str, name: str = "main.tf") -> None:
        (self.folder / name).write_text(text)

    def run(self, *arguments: str, code: int = 0) -> str:
        """What the command printed, without the frames of Terraform's errors; it must end with *code*."""
        result = subprocess.run(
            [*find_program(), *arguments],
            cwd=self.folder,
            env=self.environment,
            capture_output=True,
            text=True,
            stdin=subprocess.DEVNULL,
            timeout=300,
        )
        printed = result.stdout + result.stderr
        self.printed.append(printed)
        assert result.returncode == code, printed
        return " ".join(printed.replace("│", " ").replace("╷", " ").replace("╵", " ").split())

    def changes(self, *arguments: str) -> dict[str, str]:
        """What a plan would do, by address: ``create``, ``update``, ``replace``, ``delete``."""
        self.run("plan", "-json", "-input=false", *arguments)
        events = [json.loads(line) for line in self.printed[-1].splitlines() if line.startswith("{")]
        found = [each["change"] for each in events if each["type"] == "planned_change"]
        return {each["resource"]["addr"]: each["action"] for each in found if each["action"] not in ("noop", "read")}

    def output(self, name: str) -> Any:
        """The value of an output, a sensitive one too."""
        printed = self.printed
        self.printed = []
        try:
            self.run("output", "-json", name)
            return json.loads(self.printed[0])
        finally:
            self.printed = printed

    def outliving(self, kind: str) -> set[str]:
        """The addresses of what is there before every resource of the type *kind*, and as long as it."""
        state = json.loads((self.folder / "terraform.tfstate").read_text())
        made = [each for each in state["resources"] if (each["mode"], each["type"]) == ("managed", kind)]
        return set.intersection(*(set(each["dependencies"]) for resource in made for each in resource["instances"]))

    def apply(self, *arguments: str, code: int = 0) -> str:
        return self.run("apply", "-no-color", "-input=false", "-auto-approve", *arguments, code=code)

    def destroy(self, code: int = 0) -> str:
        return self.run("destroy", "-no-color", "-input=false", "-auto-approve", code=code)


@contextmanager
def served(folder: Path, *names: str) -> Iterator[Bed]:
    """A bed in *folder* with the providers *names*, each by its file in schemas/."""
    world = World(folder / "world")
    for path in (world.folder, folder / "root", folder / "mirror"):
        path.mkdir(parents=True)
    with subprocess.Popen(
        [sys.executable, "-m", "mock_provider", world.folder, *names],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": python_path(ROOT / "tests")},
    ) as process:
        assert process.stdout is not None
        environment = {
            **os.environ,
            "TF_IN_AUTOMATION": "1",
            "TF_CLI_CONFIG_FILE": str(install(folder / "mirror", names)),
            "TF_REATTACH_PROVIDERS": process.stdout.readline(),
        }
        yield Bed(folder / "root", world, environment)
