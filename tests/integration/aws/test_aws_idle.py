"""Instances that end themselves, by the real provider against a moto server: what is asked for, and the next plan."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from moto_aws.cloud import Cloud, tags
from moto_aws.projects import Project

pytestmark = pytest.mark.slow

SHUTDOWN = "instanceInitiatedShutdownBehavior"
ENDS = 'stop_after_idle="30m"'
PROGRAM = """
import cdktf
import skyinfra as sky

app = cdktf.App()
aws = sky.AWS(zones=["us-east-1b"])
sky.FleetStack(app, "train", pools=[
    sky.ComputePool(name="pair", nodes=2, provider=aws, accelerator="L4", {ends}),
    sky.ComputePool(name="group", nodes=2, provider=aws, accelerator="L4", spot=True, {ends}),
])
app.synth()
"""


def changes(project: Project) -> dict[str, str]:
    made = json.loads(project.run("plan", "train", "--json"))["changes"]
    return {each["address"]: each["action"] for each in made}


def deploy(project: Project, ends: str) -> None:
    (project.folder / "main.py").write_text(PROGRAM.format(ends=ends))
    project.run("deploy", "train", "--auto-approve", "--no-wait")


def jobs(cloud: Cloud) -> list[str]:
    """The volumes with the jobs of the heads."""
    found = cloud.client("ec2").describe_volumes()["Volumes"]
    return sorted(each["VolumeId"] for each in found if tags(each).get("Name", "").endswith("/jobs"))


def test_instances_that_end_themselves_are_terminated_and_planned_anew(tmp_path: Path, cloud: Cloud) -> None:
    project, ec2, groups = Project(tmp_path, cloud), cloud.client("ec2"), cloud.client("autoscaling")
    deploy(project, ENDS)
    assert len(cloud.instances()) == 5 and len(jobs(cloud)) == 2
    assert changes(project) == {}
    named = [each for each in cloud.instances() if "skyinfra:node" in tags(each)]
    asked = [ec2.describe_instance_attribute(InstanceId=i["InstanceId"], Attribute=SHUTDOWN) for i in named]
    assert [each[SHUTDOWN[0].upper() + SHUTDOWN[1:]]["Value"] for each in asked] == ["terminate"] * 3
    group = cloud.group("group")
    assert (group["MinSize"], group["DesiredCapacity"], group["MaxSize"]) == (0, 2, 2)
    # What shuts down is terminated; what is of the group leaves it, as its nodes ask for.
    ec2.terminate_instances(InstanceIds=[each["InstanceId"] for each in named])
    for each in group["Instances"]:
        groups.terminate_instance_in_auto_scaling_group(
            InstanceId=each["InstanceId"], ShouldDecrementDesiredCapacity=True
        )
    assert cloud.instances() == []
    found = changes(project)
    assert found["module.group.aws_autoscaling_group.workers[0]"] == "update"
    machines = {each for each, action in found.items() if "aws_instance" in each and action == "create"}
    assert len(machines) == 3 and not {"delete", "replace"} & set(found.values())
    said = " ".join(project.try_run("plan", "train").stderr.split())
    assert "pair: 2 nodes ended without a deploy, as stop_after_idle=30m has it, probably; a deploy brings 2" in said
    assert "group: 3 nodes ended without a deploy" in said
    # Their jobs are where they were, and a deploy brings all nodes back.
    kept = jobs(cloud)
    assert len(kept) == 2
    deploy(project, ENDS)
    assert len(cloud.instances()) == 5 and jobs(cloud) == kept
    again = cloud.group("group")
    assert again["AutoScalingGroupName"] == group["AutoScalingGroupName"]
    assert (again["MinSize"], again["DesiredCapacity"], again["MaxSize"]) == (0, 2, 2)
    assert changes(project) == {}


def test_a_stack_is_destroyed_when_its_instances_have_ended(tmp_path: Path, cloud: Cloud) -> None:
    project, ec2, groups = Project(tmp_path, cloud), cloud.client("ec2"), cloud.client("autoscaling")
    deploy(project, ENDS)
    unused = ("destroy", "train", "--when-idle", "30m", "--auto-approve")
    # Nothing answers at the addresses of moto's instances: that is not idle.
    said = project.try_run(*unused)
    assert said.returncode == 1 and said.stdout.endswith("train: not destroyed\n")
    assert said.stderr.count("nobody knows whether it is used") == 2 and len(cloud.instances()) == 5
    named = [each["InstanceId"] for each in cloud.instances() if "skyinfra:node" in tags(each)]
    # One that still runs may be used.
    ec2.terminate_instances(InstanceIds=named[:-1])
    assert project.try_run(*unused).returncode == 1
    ec2.terminate_instances(InstanceIds=named)
    for each in cloud.group("group")["Instances"]:
        groups.terminate_instance_in_auto_scaling_group(
            InstanceId=each["InstanceId"], ShouldDecrementDesiredCapacity=True
        )
    assert project.run(*unused).endswith("train: destroyed\n")
    assert jobs(cloud) == []
