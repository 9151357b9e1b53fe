"""A group whose size follows the work, by the real provider against a moto server: no plan sees its size."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from moto_aws.cloud import Cloud, tags
from moto_aws.projects import Project

pytestmark = pytest.mark.slow

POOL = (
    'sky.ComputePool(name="train", nodes=sky.Range({}, {}), provider=sky.AWS(zones=["us-east-1b"]), accelerator="L4")'
)


def changes(project: Project) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = json.loads(project.run("plan", "fleet", "--json"))["changes"]
    return found


def sizes(cloud: Cloud) -> tuple[int, int, int]:
    group = cloud.group("train")
    return group["MinSize"], group["DesiredCapacity"], group["MaxSize"]


def deploy(project: Project, least: int, most: int) -> None:
    project.declare(POOL.format(least, most))
    project.run("deploy", "fleet", "--auto-approve", "--no-wait")


def test_no_plan_sees_the_size_and_another_most_changes_the_bounds_alone(tmp_path: Path, cloud: Cloud) -> None:
    project, groups, iam = Project(tmp_path, cloud), cloud.client("autoscaling"), cloud.client("iam")
    deploy(project, 0, 8)
    group = cloud.group("train")
    name = group["AutoScalingGroupName"]
    [head] = cloud.instances()
    assert sizes(cloud) == (0, 0, 8) and tags(head)["skyinfra:group"] == f"{name} 0 8"
    assert group["NewInstancesProtectedFromScaleIn"] is True
    assert [each["ProcessName"] for each in group["SuspendedProcesses"]] == ["AZRebalance"]
    # By the role of the machines, on this group alone.
    [role] = [each for each in iam.list_roles()["Roles"] if "train" in each["RoleName"]]
    policy = iam.get_role_policy(RoleName=role["RoleName"], PolicyName="end")["PolicyDocument"]
    [statement] = policy["Statement"]
    assert sorted(statement["Action"]) == [
        "autoscaling:SetDesiredCapacity",
        "autoscaling:TerminateInstanceInAutoScalingGroup",
    ]
    assert statement["Resource"] == group["AutoScalingGroupARN"]
    # What the head asks for, and what the nodes do that end.
    for size in (4, 8):
        groups.set_desired_capacity(AutoScalingGroupName=name, DesiredCapacity=size)
        assert sizes(cloud) == (0, size, 8) and len(cloud.instances()) == size + 1
        assert changes(project) == []
    for each in cloud.group("train")["Instances"][:5]:
        groups.terminate_instance_in_auto_scaling_group(
            InstanceId=each["InstanceId"], ShouldDecrementDesiredCapacity=True
        )
    assert sizes(cloud) == (0, 3, 8) and changes(project) == []
    # An apply beside that: the bounds change in place, and the size stays.
    project.declare(POOL.format(0, 6))
    found = {each["address"]: each["action"] for each in changes(project)}
    assert found == {
        "module.train.aws_autoscaling_group.workers[0]": "update",
        "module.train.aws_instance.head": "update",
    }
    project.run("deploy", "fleet", "--auto-approve", "--no-wait")
    assert sizes(cloud) == (0, 3, 6) and cloud.group("train")["AutoScalingGroupName"] == name
    [head] = [each for each in cloud.instances() if "skyinfra:group" in tags(each)]
    assert tags(head)["skyinfra:group"] == f"{name} 0 6" and changes(project) == []
    # The least is the head's: a group that held it would start nodes for ever once the whole fleet has ended.
    project.declare(POOL.format(2, 6))
    assert [each["address"] for each in changes(project)] == ["module.train.aws_instance.head"]
    project.run("deploy", "fleet", "--auto-approve", "--no-wait")
    assert sizes(cloud) == (0, 3, 6) and changes(project) == []
    for each in cloud.group("train")["Instances"]:
        groups.terminate_instance_in_auto_scaling_group(
            InstanceId=each["InstanceId"], ShouldDecrementDesiredCapacity=True
        )
    assert sizes(cloud) == (0, 0, 6)
    project.run("destroy", "fleet", "--auto-approve")
    assert cloud.instances() == []


def test_a_destroy_ends_nodes_that_are_protected(tmp_path: Path, cloud: Cloud) -> None:
    project, groups = Project(tmp_path, cloud), cloud.client("autoscaling")
    deploy(project, 1, 4)
    name = cloud.group("train")["AutoScalingGroupName"]
    assert sizes(cloud) == (0, 0, 4)
    groups.set_desired_capacity(AutoScalingGroupName=name, DesiredCapacity=3)
    assert len(cloud.instances()) == 4
    project.run("destroy", "fleet", "--auto-approve")
    assert cloud.instances() == []
