"""Projects whose command lines run against the tests' AWS: the real skyinfra, Terraform and aws provider."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

from terraform_projects.mirrors import provider_configuration

from moto_aws.cloud import Cloud

STACK = "fleet"


class Project:
    """A project folder with one stack, `fleet`, whose commands see the tests' AWS."""

    def __init__(self, folder: Path, cloud: Cloud) -> None:
        self.folder = folder
        self.printed: list[str] = []
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "cdktf.json").write_text('{"language": "python", "app": "python main.py"}')
        self.environment = {**cloud.environment(), "CHECKPOINT_DISABLE": "1"}
        configuration = provider_configuration(folder)
        if configuration:
            self.environment["TF_CLI_CONFIG_FILE"] = str(configuration)
        self.environment["PATH"] = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"

    def declare(self, *pools: str, backend: str = "None") -> None:
        """The pools of the stack, and where its state is, in Python."""
        declared = "".join(f"    {pool},\n" for pool in pools)
        (self.folder / "main.py").write_text(
            "import os\n"
            "from cdktf import App\n"
            "import skyinfra as sky\n\n"
            "app = App()\n"
            f"sky.FleetStack(app, {STACK!r}, backend={backend}, pools=[\n{declared}])\n"
            "app.synth()\n"
        )

    def try_run(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        """A command, whatever its exit code. Nobody ever sees a traceback."""
        done = subprocess.run(
            [sys.executable, "-m", "skyinfra.cli", *arguments],
            cwd=self.folder,
            env=self.environment,
            capture_output=True,
            text=True,
            stdin=subprocess.DEVNULL,
            timeout=900,
        )
        assert "Traceback" not in done.stderr and "defect" not in done.stderr, done.stderr
        self.printed += [done.stdout, done.stderr]
        return done

    def run(self, *arguments: str) -> str:
        """What a command prints that must succeed."""
        done = self.try_run(*arguments)
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    def refused(self, *arguments: str) -> str:
        """The error of a command that must fail with exit code 1."""
        done = self.try_run(*arguments)
        assert done.returncode == 1, done.stdout + done.stderr
        assert done.stderr.count("error: ") == 1, done.stderr
        return done.stderr[done.stderr.index("error: ") :]

    def state(self) -> dict[str, Any]:
        """Terraform's state; empty where there is none."""
        file = self.folder / f"terraform.{STACK}.tfstate"
        return json.loads(file.read_text()) if file.exists() else {"resources": []}

    def instances(self) -> set[str]:
        """The ids of the instances that are in the state."""
        found = [each for each in self.state()["resources"] if each["type"] == "aws_instance"]
        return {instance["attributes"]["id"] for resource in found for instance in resource["instances"]}

    def secrets(self) -> list[str]:
        return secrets_of(self.state())


def secrets_of(state: dict[str, Any]) -> list[str]:
    """The secrets of the fleets in a *state*."""
    found = [r for r in state["resources"] if r["type"] == "terraform_data" and r["name"] == "secret"]
    values = [instance["attributes"]["triggers_replace"] for r in found for instance in r["instances"]]
    return [value["value"] if isinstance(value, dict) else value for value in values]
