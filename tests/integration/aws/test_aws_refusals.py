"""What AWS refuses to a deploy, through the command line: one message, an intact state, and the next deploy goes on."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import pytest
from first_boots.cloud_config import problems, schema
from moto_aws.cloud import Cloud
from moto_aws.projects import Project
from moto_aws.roots import words

# The fixture that most share is made once: the tests run in one process.
pytestmark = pytest.mark.xdist_group("aws-refusals")

QUOTA = {
    "action": "RunInstances",
    "code": "VcpuLimitExceeded",
    "message": "You have requested more vCPU capacity than your current vCPU limit of 16 allows for the instance "
    "bucket that the specified instance type belongs to. Please visit http://aws.amazon.com/contact-us/ec2-request to "
    "request an adjustment to this limit.",
    "status": 400,
}
CAPACITY = {
    "action": "RunInstances",
    "code": "InsufficientInstanceCapacity",
    "message": "We currently do not have sufficient p5.4xlarge capacity in the Availability Zone you requested "
    "(us-east-1b). Our system will be working on provisioning additional capacity. You can currently get p5.4xlarge "
    "capacity by not specifying an Availability Zone in your request or choosing us-east-1c, us-east-1d.",
    "status": 500,
}
DENIED = {
    "action": "RunInstances",
    "code": "UnauthorizedOperation",
    "message": "You are not authorized to perform this operation. User: arn:aws:iam::123456789012:user/ci is not "
    "authorized to perform: ec2:RunInstances on resource: arn:aws:ec2:us-east-1:123456789012:instance/* because no "
    "identity-based policy allows the ec2:RunInstances action. Encoded authorization failure message: AbCd_ef-123",
    "status": 403,
}
THROTTLED = {
    "action": "RunInstances",
    "code": "RequestLimitExceeded",
    "message": "Request limit exceeded.",
    "status": 503,
}
EXPIRED = {
    "action": "GetCallerIdentity",
    "code": "ExpiredToken",
    "message": "The security token included in the request is expired",
    "status": 403,
}


def subnets(cloud: Cloud) -> list[str]:
    """Two of the account's own subnets: a pool in them makes no network."""
    found = cloud.client("ec2").describe_subnets()["Subnets"]
    return [each["SubnetId"] for each in found if each["AvailabilityZone"] in ("us-east-1b", "us-east-1c")]


def on_demand(cloud: Cloud, nodes: int) -> str:
    return (
        f"sky.ComputePool(name='mig', nodes={nodes}, accelerator='H100/3g.40gb', "
        f"provider=sky.AWS(subnet_ids={subnets(cloud)!r}))"
    )


@dataclass
class Fleet:
    """A deployed stack that grows with every test, so that each sees a refusal beside nodes that run. said: what the
    first deploy said, from nothing: one of two nodes came, the other was refused. first: that one."""

    cloud: Cloud
    project: Project
    nodes: int = 2
    said: str = ""
    first: set[str] = field(default_factory=set)

    def declare(self) -> None:
        self.project.declare(on_demand(self.cloud, self.nodes))

    def running(self) -> set[str]:
        return {each["InstanceId"] for each in self.cloud.instances()}


@pytest.fixture(scope="module")
def deployed(_server: Cloud, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet]:
    _server.reset()
    before = _server.existing()
    made = Fleet(_server, Project(tmp_path_factory.mktemp("refusals"), _server))
    made.declare()
    _server.tell(refuse=[{**QUOTA, "after": 1}])
    made.said = made.project.refused("deploy", "--auto-approve", "--no-wait")
    made.first = made.project.instances()
    assert made.running() == made.first
    _server.tell()
    made.project.run("deploy", "--auto-approve", "--no-wait")
    yield made
    made.project.run("destroy", "--auto-approve")
    assert _server.existing() == before


@pytest.mark.slow
def test_a_quota_that_is_used_up(deployed: Fleet) -> None:
    """The next deploy makes the one alone that was refused."""
    lines = deployed.said.splitlines()
    assert lines[0] == "error: terraform apply failed"
    assert lines[1].startswith("pool mig (aws_instance.")
    assert "the account's quota of vCPUs does not allow it (VcpuLimitExceeded). It says: You have req" in lines[1]
    assert "pool mig alone needs 32 vCPUs of Running On-Demand P instances" in deployed.said
    raising = "aws service-quotas request-service-quota-increase --service-code ec2 --quota-code L-417A185B"
    assert raising in deployed.said
    assert lines[-1].startswith("The state is intact, and what exists is in it.")
    assert lines[-1].endswith("run `skyinfra deploy fleet` again, or `skyinfra destroy fleet`.")

    assert len(deployed.first) == 1
    running = deployed.running()
    assert deployed.first < running and len(running) == deployed.nodes and deployed.project.instances() == running
    for instance in running:
        assert problems(deployed.cloud.user_data(instance), schema()) == []


CAPACITY_SAID = [
    "AWS has no capacity for it now (InsufficientInstanceCapacity). It says: We currently do not have",
    "zones that have it now: us-east-1c, us-east-1d. Declare one: sky.AWS(zones=[...]), and move the pool there",
    "p5.4xlarge is also offered in",
]


# A round takes a minute; tests/test_cloud_errors.py has what is said of other codes.
@pytest.mark.slow
def test_refused_at_apply(deployed: Fleet) -> None:
    before = deployed.running()
    deployed.nodes += 1
    deployed.declare()
    deployed.cloud.tell(refuse=[CAPACITY])
    said = deployed.project.refused("deploy", "--auto-approve", "--no-wait")
    assert not [each for each in CAPACITY_SAID if each not in words(said)], said
    assert said.count("InsufficientInstanceCapacity") == 1, said
    assert "RequestID" not in said
    assert "The state is intact" in said.splitlines()[-1] and "`skyinfra deploy fleet` again" in said.splitlines()[-1]
    assert deployed.running() == before and deployed.project.instances() == before

    deployed.cloud.tell()
    deployed.project.run("deploy", "--auto-approve", "--no-wait")
    after = deployed.running()
    assert before < after and len(after) == len(before) + 1 and deployed.project.instances() == after


@pytest.mark.slow
def test_a_smaller_disk(deployed: Fleet) -> None:
    sizes = {volume["Size"] for each in deployed.running() for volume in deployed.cloud.volumes(each)}
    # Besides that of the head's jobs.
    existing = max(sizes)
    pool = on_demand(deployed.cloud, deployed.nodes)
    deployed.project.declare(pool.replace("name=", f"disk_gb={existing - 1}, name="))
    said = deployed.project.refused("plan")
    assert f"mig.disk_gb: the volumes of the nodes have {existing} GB, and a volume does not shrink" in said
    assert f"Declare at least {existing}" in said
    deployed.project.declare(pool.replace("sky.AWS(", "sky.AWS(head_volume_gb=10, "))
    said = deployed.project.refused("plan")
    assert "mig.head_volume_gb: the volume with the jobs of the head has 20 GB, and a volume does not shrink" in said
    # Where the head alone is replaced, the others keep their disks.
    deployed.project.declare(pool.replace("name=", f"disk_gb={existing - 1}, name="))
    said = deployed.project.refused("deploy", '--replace=module.mig.terraform_data.declared["head"]')
    assert "a volume does not shrink" in said
    deployed.declare()


@pytest.mark.slow
def test_a_moment_of_throttling_is_waited_for(deployed: Fleet) -> None:
    before = deployed.running()
    deployed.nodes += 1
    deployed.declare()
    deployed.cloud.tell(refuse=[{**THROTTLED, "times": 2}])
    deployed.project.run("deploy", "--auto-approve", "--no-wait")
    assert len(deployed.running()) == len(before) + 1


EXPIRED_SAID = ["the AWS credentials have expired (ExpiredToken). It says: The security token", "aws sso login"]
DENIED_SAID = ["the credentials may not do it: ec2:", "(UnauthorizedOperation)", "Have the IAM action allowed"]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("command", "refusal", "expected"),
    [
        ("destroy", EXPIRED, EXPIRED_SAID),
        ("deploy", {**DENIED, "action": "DescribeSubnets"}, DENIED_SAID),
    ],
    ids=["destroy, expired", "deploy, permission"],
)
def test_refused_at_plan(deployed: Fleet, command: str, refusal: dict[str, Any], expected: list[str]) -> None:
    before = deployed.project.state()
    deployed.declare()
    deployed.cloud.tell(refuse=[refusal])
    said = deployed.project.refused(command, "--auto-approve")
    assert not [each for each in expected if each not in words(said)], said
    assert said.splitlines()[-1] == "Nothing was changed."
    assert deployed.project.state() == before
    deployed.cloud.tell()
