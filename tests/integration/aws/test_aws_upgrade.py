"""The part of an upgrade that is Terraform's: another runner in the bucket, and nothing else."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from moto_aws.cloud import Cloud, tags
from moto_aws.projects import STACK, Project

from skyinfra.bootstrap import runner_wheel
from skyinfra.deploy.upgrade import Upgrade, wanted
from skyinfra.errors import UpgradeFailed
from skyinfra.node import code
from skyinfra.terraform import project as projects

pytestmark = pytest.mark.slow

POOL = """sky.ComputePool(name="cpus", nodes=2, provider=sky.AWS(instance_types=["c7i.large"]){more})"""
# The declaring program takes another code for its own.
OTHER = """
from skyinfra.node import code
sources = code.sources
code.sources = lambda: sorted([*sources(), ("skyinfra/runner/added.py", b"pass")])
"""


def carried(cloud: Cloud, project: Project) -> dict[str, Any]:
    """The versions in the bucket, whose wheel is there."""
    objects = {
        each["attributes"]["key"]: each["attributes"]["bucket"]
        for resource in project.state()["resources"] if resource["type"] == "aws_s3_object"
        for each in resource["instances"]
    }  # fmt: skip
    s3 = cloud.client("s3")
    bucket = objects["versions.json"]
    there = {each["Key"] for each in s3.list_objects_v2(Bucket=bucket)["Contents"]}
    found: dict[str, Any] = json.loads(s3.get_object(Bucket=bucket, Key="versions.json")["Body"].read())
    assert there == {"secret", "versions.json", found["wheel"]["name"]}
    return found


def publish(project: Project, monkeypatch: pytest.MonkeyPatch) -> str | None:
    monkeypatch.chdir(project.folder)
    for name, value in project.environment.items():
        monkeypatch.setenv(name, value)
    stack = projects.Project.find().stack(STACK)
    manifest = stack.fleet("cpus")
    Upgrade(stack, manifest, None, [], 0.0, print)._publish()  # type: ignore[arg-type]
    return wanted(stack, manifest)


# test_upgrade_here upgrades a fleet with its jobs; how a bucket is filled is here alone.
@pytest.mark.long
def test_an_upgrade_puts_another_runner_into_the_bucket_and_changes_nothing_else(
    cloud: Cloud, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    project = Project(tmp_path, cloud)
    project.declare(POOL.format(more=""))
    project.run("deploy", "--auto-approve", "--no-wait")
    first = runner_wheel.wheel().version
    assert carried(cloud, project)["wheel"]["name"] == f"skyinfra-{first}-py3-none-any.whl"
    running = {tags(i)["Name"] + i["InstanceId"]: i["LaunchTime"] for i in cloud.instances()}

    # The same runner again is not made anew: its key would be removed with the old one.
    assert publish(project, monkeypatch) == first
    assert carried(cloud, project)["wheel"]["name"] == f"skyinfra-{first}-py3-none-any.whl"

    main = project.folder / "main.py"
    main.write_text(OTHER + main.read_text())
    project.run("synth")
    # A deploy leaves it to an upgrade.
    assert json.loads(project.run("plan", "--json"))["changes"] == []
    version = publish(project, monkeypatch)
    assert version != first
    # Terraform warns of what it leaves out.
    assert "target" not in "".join(capsys.readouterr())
    assert carried(cloud, project)["wheel"]["name"] == f"skyinfra-{version}-py3-none-any.whl"
    assert {tags(i)["Name"] + i["InstanceId"]: i["LaunchTime"] for i in cloud.instances()} == running
    assert json.loads(project.run("plan", "--json"))["changes"] == []
    project.run("destroy", "--auto-approve")


def test_code_that_is_given_is_what_is_counted() -> None:
    assert code.digest(iter([("a", b"b")])) != code.digest(iter([("ab", b"")]))
    assert UpgradeFailed("x").exit_code == 1
