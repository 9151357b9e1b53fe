"""A changed account or region forgets no machine: the real provider, two accounts, one input changed at a time."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import boto3
import pytest
from moto_aws.cloud import Cloud, tags
from moto_aws.projects import Project
from moto_aws.roots import words

from skyinfra.terraform.program import find_program

pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("aws-places")]

POOL = "sky.ComputePool(name={name!r}, provider=sky.AWS({provider}))"
FIRST, SECOND = "123456789012", "222222222222"


@dataclass
class Fleet:
    """A fleet that was deployed with the profile `first` of the environment, beside `second` of another account."""

    cloud: Cloud
    project: Project

    def declare(self, provider: str = "", name: str = "cpu") -> None:
        self.project.declare(POOL.format(name=name, provider=provider))

    def running(self, region: str = "us-east-1") -> set[str]:
        return {each["InstanceId"] for each in self.cloud.instances(region=region)}

    def refused(self, *arguments: str, **environment: str) -> str:
        """The error of a command, which changes neither machines nor the state."""
        before = self.running(), self.project.state()
        kept = dict(self.project.environment)
        self.project.environment.update(environment)
        try:
            said = self.project.refused(*arguments)
        finally:
            self.project.environment = kept
        assert (self.running(), self.project.state()) == before and len(before[0]) == 1
        return said


def fleet_in(cloud: Cloud, folder: Path) -> Fleet:
    project = Project(folder, cloud)
    found = boto3.client(
        "sts",
        region_name="us-east-1",
        endpoint_url=cloud.url,
        aws_access_key_id="test",
        aws_secret_access_key="test",
    ).assume_role(RoleArn=f"arn:aws:iam::{SECOND}:role/other", RoleSessionName="other")["Credentials"]
    folder.joinpath("credentials").write_text(
        "[first]\naws_access_key_id = test\naws_secret_access_key = test\n"
        f"[second]\naws_access_key_id = {found['AccessKeyId']}\naws_secret_access_key = {found['SecretAccessKey']}\n"
        f"aws_session_token = {found['SessionToken']}\n"
    )
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        del project.environment[name]
    project.environment["AWS_SHARED_CREDENTIALS_FILE"] = str(folder / "credentials")
    project.environment["AWS_PROFILE"] = "first"
    return Fleet(cloud, project)


@pytest.fixture(scope="module")
def fleet(_server: Cloud, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet]:
    _server.reset()
    made = fleet_in(_server, tmp_path_factory.mktemp("places"))
    made.declare()
    made.project.run("deploy", "--auto-approve", "--no-wait")
    yield made
    made.declare()
    made.project.run("destroy", "--auto-approve")


def test_the_account_stands_in_the_manifest(fleet: Fleet) -> None:
    outputs: dict[str, Any] = fleet.project.state()["outputs"]
    assert outputs["fleet_cpu"]["value"]["account"] == FIRST


def test_another_profile_of_another_account(fleet: Fleet) -> None:
    fleet.declare("profile='second'")
    said = fleet.refused("deploy", "--auto-approve", "--no-wait")
    assert "these credentials are of another account" in said and SECOND in said
    assert f"are in the account_id {FIRST}. Nothing was changed" in said


def test_another_region(fleet: Fleet) -> None:
    fleet.declare("region='us-west-2'")
    said = fleet.refused("deploy", "--auto-approve", "--no-wait")
    assert "in us-east-1: declared elsewhere" in said and "skyinfra destroy fleet" in said
    # The way that the zone of the nodes was moved by.
    fleet.refused("deploy", "--auto-approve", "--no-wait", "--replace", 'module.cpu.terraform_data.zone["head"]')


def test_another_profile_of_the_environment_alone(fleet: Fleet) -> None:
    """It changes nothing in the declaration: no alias, no block."""
    fleet.declare()
    fleet.project.run("synth")
    for command in ("plan", "deploy", "destroy"):
        said = fleet.refused(command, *(["--auto-approve"] if command != "plan" else []), AWS_PROFILE="second")
        assert "these credentials are of another account" in said


def test_another_declared_account(fleet: Fleet) -> None:
    fleet.declare(f"account_id={SECOND!r}")
    assert f"in {FIRST}: declared elsewhere" in fleet.refused("plan")
    fleet.declare(f"account_id={FIRST!r}")
    fleet.project.run("plan")


@pytest.mark.parametrize(
    ("declared", "said"),
    [
        ("profile='second'", f"is in the account {FIRST}, and these credentials are of {SECOND}"),
        ("region='us-west-2'", "The pool is in us-east-1, and the provider is that of us-west-2"),
    ],
)
def test_terraform_itself_refuses(fleet: Fleet, declared: str, said: str) -> None:
    """As `cdktf deploy` and HCP Terraform run it."""
    fleet.declare(declared)
    fleet.project.run("synth")
    folder = fleet.project.folder / "cdktf.out" / "stacks" / "fleet"
    for more in ([], ['-replace=module.cpu.terraform_data.zone["head"]']):
        printed = []
        for command in (["init"], ["plan", *more]):
            done = subprocess.run(
                [*find_program(), *command, "-no-color", "-input=false"],
                cwd=folder,
                env=fleet.project.environment,
                capture_output=True,
                text=True,
            )
            printed.append(words(done.stdout + done.stderr))
        assert done.returncode == 1 and said in printed[-1], printed
        assert "move the nodes" not in printed[-1]


@pytest.mark.long
def test_a_stack_that_gets_another_name_keeps_its_nodes(fleet: Fleet) -> None:
    fleet.declare()
    running, main = fleet.running(), fleet.project.folder / "main.py"
    main.write_text(main.read_text().replace("'fleet'", "'renamed'"))
    assert "skyinfra move fleet STACK" in fleet.project.try_run("plan", "renamed").stderr
    fleet.project.run("move", "fleet", "renamed")
    changes = json.loads(fleet.project.run("plan", "--json"))["changes"]
    assert changes and {each["action"] for each in changes} == {"update"}, changes
    fleet.project.run("deploy", "--auto-approve", "--no-wait")
    assert fleet.running() == running
    fleet.declare()
    fleet.project.run("move", "renamed/cpu", "fleet")
    fleet.project.run("deploy", "--auto-approve", "--no-wait")
    assert fleet.running() == running


# The last ones, in this order: what they leave is another fleet, then none.


def test_a_pool_of_another_name_in_another_region_replaces_it(fleet: Fleet) -> None:
    fleet.declare("region='us-west-2'", name="west")
    fleet.project.run("deploy", "--auto-approve", "--no-wait")
    assert not fleet.running()
    [west] = fleet.cloud.instances(region="us-west-2")
    assert tags(west)["skyinfra:pool"] == "west"


def test_what_was_removed_by_other_means_is_said(fleet: Fleet) -> None:
    fleet.cloud.reset()
    for command in (("plan",), ("destroy", "--auto-approve")):
        said = fleet.project.refused(*command)
        assert "the cloud finds none of 1 machine" in said and "fleet --gone" in said
    assert fleet.project.state()["resources"]
    assert "1 to create" not in fleet.project.run("plan", "--gone")
    fleet.project.run("destroy", "--auto-approve", "--gone")
    assert fleet.project.state()["resources"] == []


@pytest.mark.long
def test_a_pool_that_is_declared_elsewhere_is_destroyed_where_it_stands(fleet: Fleet) -> None:
    before = fleet.cloud.existing()
    fleet.declare()
    fleet.project.run("deploy", "--auto-approve", "--no-wait")
    assert fleet.running()
    fleet.declare("profile='second', region='us-west-2'")
    fleet.project.run("synth")
    fleet.project.run("destroy", "--auto-approve")
    assert fleet.project.state()["resources"] == [] and fleet.cloud.existing() == before
