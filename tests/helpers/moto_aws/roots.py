"""Terraform roots in plain HCL that call modules/aws, and running them against the tests' AWS."""

from __future__ import annotations

import json
import re
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from support import ROOT, module_source
from terraform_projects.mirrors import provider_configuration

from moto_aws.cloud import Cloud
from skyinfra.terraform.program import find_program

MODULE = ROOT / "modules" / "aws"
SOURCE = module_source("aws")
# Of the versions the module allows, the one that the tests hold it to.
PROVIDER_VERSION = "5.100.0"

HEAD_DATA = """#cloud-config
write_files:
  - path: /etc/skyinfra/node.json
    content: '{"node":"@SKYINFRA_NODE@","head":true,"scheduler":"0.0.0.0:8786","reached_at":"@SKYINFRA_HEAD@"}'
  - path: /etc/skyinfra/fetched
    content: "@SKYINFRA_BUCKET@/secret"
"""
WORKER_DATA = HEAD_DATA.replace('"head":true', '"head":false').replace("0.0.0.0:8786", "@SKYINFRA_HEAD@")
HEAD_DATA += "# volume: @SKYINFRA_VOLUME@\n"

# A machine type of its own for each: nothing else in the inputs is needed.
VERSIONS = {"python": "3.12", "requirements": ["cloudpickle==3.1.2"]}
BASE: dict[str, Any] = {"user_data_head": HEAD_DATA, "user_data_worker": WORKER_DATA, "versions": VERSIONS}


def plan_counts(text: str) -> tuple[int, int, int]:
    """(to add, to change, to destroy) of a printed plan."""
    if "No changes." in text:
        return (0, 0, 0)
    found = re.search(r"Plan: (\d+) to add, (\d+) to change, (\d+) to destroy", text)
    assert found, text
    return (int(found[1]), int(found[2]), int(found[3]))


_CHANGES = {
    "created": "create",
    "destroyed": "destroy",
    "replaced": "replace",
    "updated in-place": "update",
    "replaced due to changes in replace_triggered_by": "replace",
    "replaced, as requested": "replace",
}


def plan_changes(text: str) -> dict[str, str]:
    """What a printed plan does to which resource: create, update, replace, destroy."""
    found = re.findall(r"^  # (\S+?)(?: is tainted, so)? (?:will|must) be (.+)$", text, re.MULTILINE)
    return {address: _CHANGES[action] for address, action in found if "read during apply" not in action}


def words(text: str) -> str:
    """What Terraform printed, without its frames and line breaks."""
    return " ".join(text.replace("│", " ").replace("╷", " ").replace("╵", " ").split())


@dataclass
class Root:
    """A Terraform root in *folder*. ``printed`` is all that its commands printed, for tests that search it."""

    folder: Path
    cloud: Cloud
    printed: list[str] = field(default_factory=list)

    def write(self, pools: Mapping[str, Mapping[str, Any]], more: str = "", source: str = SOURCE) -> None:
        """The root: a provider for each region, a module for each pool (its inputs; ``region`` picks the provider)."""
        self.folder.mkdir(parents=True, exist_ok=True)
        modules = {name: _module(name, inputs, source) for name, inputs in pools.items()}
        # Few: a real failure is to be a fast one. More than one: the server at times closes a connection in use.
        provider = {"region": "us-east-1", "max_retries": 4}
        content = {
            "terraform": {
                "required_providers": {
                    "aws": {"source": "registry.terraform.io/hashicorp/aws", "version": PROVIDER_VERSION}
                }
            },
            "provider": {"aws": [provider, {**provider, "alias": "west", "region": "us-west-2"}]},
            "module": modules,
            "output": {name: {"value": f"${{module.{name}.fleet}}", "sensitive": True} for name in modules},
        }
        (self.folder / "main.tf.json").write_text(
            json.dumps({key: value for key, value in content.items() if value}, indent=2)
        )
        (self.folder / "more.tf").write_text(more)

    def run(self, *arguments: str, check: bool = True, seconds: float = 600) -> subprocess.CompletedProcess[str]:
        environment = {**self.cloud.environment(), "TF_IN_AUTOMATION": "1", "CHECKPOINT_DISABLE": "1"}
        configuration = provider_configuration(self.folder)
        if configuration:
            environment["TF_CLI_CONFIG_FILE"] = str(configuration)
        result = subprocess.run(
            [*find_program(), *arguments],
            cwd=self.folder,
            env=environment,
            capture_output=True,
            text=True,
            stdin=subprocess.DEVNULL,
            timeout=seconds,
        )
        self.printed.append(result.stdout + result.stderr)
        if check:
            assert result.returncode == 0, result.stdout + result.stderr
        return result

    def init(self) -> None:
        self.run("init", "-no-color", "-input=false")

    def plan(self, *arguments: str) -> str:
        return self.run("plan", "-no-color", "-input=false", *arguments).stdout

    def apply(self, *arguments: str) -> str:
        return self.run("apply", "-no-color", "-input=false", "-auto-approve", *arguments).stdout

    def destroy(self, *arguments: str) -> None:
        self.run("destroy", "-no-color", "-input=false", "-auto-approve", *arguments)

    def refused(self, *arguments: str) -> str:
        """What a plan that fails says."""
        result = self.run("plan", "-no-color", "-input=false", *arguments, check=False)
        assert result.returncode == 1, result.stdout
        return words(result.stderr)

    def manifest(self, pool: str) -> dict[str, Any]:
        return json.loads(self.run("output", "-json", pool).stdout)

    def secrets(self) -> list[str]:
        """The fleet secrets in the state."""
        state = json.loads((self.folder / "terraform.tfstate").read_text())
        found = [r for r in state["resources"] if r["type"] == "terraform_data" and r["name"] == "secret"]
        values = [instance["attributes"]["triggers_replace"] for r in found for instance in r["instances"]]
        return [value["value"] if isinstance(value, dict) else value for value in values]


def _module(name: str, inputs: Mapping[str, Any], source: str) -> dict[str, Any]:
    given = {"source": source, "name": name, **BASE, **inputs}
    module = {key: value for key, value in given.items() if value is not None}
    region = module.pop("region", "us-east-1")
    module["providers"] = {"aws": "aws" if region == "us-east-1" else "aws.west"}
    return module
