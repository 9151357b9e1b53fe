"""Images, subnets, security groups, and the pool's own network."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from moto_aws.account import Cloud
from terraform_projects.synthesized import synthesized

import skyinfra as sky
from skyinfra.preflight import preflight

# Each question of these to the simulated account takes its time.
pytestmark = pytest.mark.slow

Make = Callable[..., sky.ComputePool]

DLAMI = "/aws/service/deeplearning/ami/x86_64/base-oss-nvidia-driver-gpu-ubuntu-24.04/latest/ami-id"


def vpc(cloud: Cloud, cidr: str = "10.0.0.0/16") -> str:
    return str(cloud.ec2.create_vpc(CidrBlock=cidr)["Vpc"]["VpcId"])


def subnet(cloud: Cloud, vpc_id: str, cidr: str, zone: str = "us-east-1a") -> str:
    made = cloud.ec2.create_subnet(VpcId=vpc_id, CidrBlock=cidr, AvailabilityZone=zone)
    return str(made["Subnet"]["SubnetId"])


def test_the_image_behind_a_parameter(cloud: Cloud, pool: Make) -> None:
    ami = cloud.images["x86_64"]
    line = cloud.line("image", pool("L4"))
    assert (line.result, line.found) == ("pass", f"{DLAMI}: {ami}, base x86_64 65, x86_64, 15 GiB")


def test_a_parameter_that_is_not_there(cloud: Cloud, pool: Make) -> None:
    cloud.refuse("ssm", "GetParameter", "ParameterNotFound", "")
    line = cloud.line("image", pool("L4"))
    assert (line.result, line.found) == ("fail", f"us-east-1 has no SSM parameter {DLAMI}")


def test_what_is_no_image_is_not_shown(cloud: Cloud, pool: Make) -> None:
    cloud.parameter("hunter2")
    line = cloud.line("image", pool("L4", aws={"ami": "/my/password"}))
    assert line.result == "fail" and "hunter2" not in str(line)


def test_an_image_that_is_not_there(cloud: Cloud, pool: Make) -> None:
    line = cloud.line("image", pool("L4", aws={"ami": "ami-0123456789abcdef0"}))
    assert (line.result, line.found) == ("fail", "there is no image ami-0123456789abcdef0 in us-east-1")


@pytest.mark.parametrize(
    ("field", "value", "result", "words"),
    [
        ("state", "pending", "fail", "is pending"),
        ("architecture", "arm64", "fail", "is for arm64; g6.xlarge needs x86_64"),
        ("platform", "windows", "fail", "is for Windows"),
        ("deprecation_time", "2020-01-02T00:00:00.000Z", "warn", "is deprecated since 2020-01-02"),
        ("deprecation_time", "2999-01-02T00:00:00.000Z", "pass", "x86_64"),
    ],
)
def test_images_that_do_not_serve(cloud: Cloud, pool: Make, field: str, value: str, result: str, words: str) -> None:
    ami = cloud.images["x86_64"]
    image: dict[str, Any] = cloud.ec2.describe_images(ImageIds=[ami])["Images"][0]
    name = "".join(part.capitalize() for part in field.split("_"))
    cloud.answer("ec2", "DescribeImages", {"Images": [{**image, name: value}]})
    line = cloud.line("image", pool("L4", aws={"ami": ami}))
    assert (line.result, words in line.found) == (result, True)


def test_an_image_for_the_head_and_one_for_the_nodes(cloud: Cloud, pool: Make) -> None:
    cloud.parameter("x86_64")
    nodes, head = cloud.lines("image", pool("T4G", spot=True, nodes=2))
    assert (nodes.result, "is for x86_64; g5g.xlarge" in nodes.found) == ("fail", True)
    assert (head.result, "ubuntu" in head.found) == ("pass", True)


def test_a_disk_that_is_smaller_than_the_image(cloud: Cloud, pool: Make) -> None:
    line = cloud.line("image", pool("L4", disk_gb=10))
    assert (line.result, line.to_do) == ("fail", "Declare disk_gb=15 or more, or none.")
    assert cloud.line("image", pool("L4", disk_gb=15)).result == "pass"


def test_subnets_with_free_addresses(cloud: Cloud, pool: Make) -> None:
    own = {"subnet_ids": [subnet(cloud, vpc(cloud), "10.0.1.0/24")]}
    line = cloud.line("network", pool("L4", nodes=3, aws=own))
    assert line.result == "pass"
    assert line.found == "251 free addresses in us-east-1a; 3 nodes to come with 1 interface each"


def test_every_interface_takes_an_address(cloud: Cloud, pool: Make) -> None:
    own = {"subnet_ids": [subnet(cloud, vpc(cloud), "10.0.1.0/28")], "efa": True}
    line = cloud.line("network", pool("A100-40GB:8", nodes=2, aws=own))
    assert (line.result, line.found.endswith("2 nodes to come with 4 interfaces each")) == ("pass", True)
    line = cloud.line("network", pool("A100-40GB:8", nodes=3, aws=own))
    assert (line.result, line.found.endswith("3 nodes to come with 4 interfaces each need 12")) == ("fail", True)


def test_nodes_that_run_have_their_addresses(cloud: Cloud, pool: Make) -> None:
    made = subnet(cloud, vpc(cloud), "10.0.1.0/28")
    own = {"subnet_ids": [made]}
    assert cloud.line("network", pool("L4", nodes=12, aws=own)).result == "fail"
    cloud.run("g6.xlarge", 2, {"skyinfra:stack": "s", "skyinfra:pool": "p"}, SubnetId=made)
    line = cloud.line("network", pool("L4", nodes=11, aws=own))
    assert (line.result, "9 nodes to come" in line.found) == ("pass", True)


def test_a_group_that_fits_in_all_zones_together(cloud: Cloud, pool: Make) -> None:
    network = vpc(cloud)
    small, other = subnet(cloud, network, "10.0.1.0/28"), subnet(cloud, network, "10.0.2.0/28", "us-east-1b")
    line = cloud.line("network", pool("L4", nodes=15, spot=True, aws={"subnet_ids": [small, other]}))
    assert (line.result, "should one zone alone" in line.to_do) == ("warn", True)
    line = cloud.line("network", pool("L4", nodes=23, spot=True, aws={"subnet_ids": [small, other]}))
    assert line.result == "fail"


def test_subnets_that_cannot_be_used(cloud: Cloud, pool: Make) -> None:
    line = cloud.line("network", pool("L4", aws={"subnet_ids": ["subnet-0123456789abcdef0"]}))
    assert (line.result, "subnet-0123456789abcdef0" in line.found) == ("fail", True)
    first, second = vpc(cloud), vpc(cloud, "10.1.0.0/16")
    several = [subnet(cloud, first, "10.0.1.0/24"), subnet(cloud, second, "10.1.1.0/24")]
    line = cloud.line("network", pool("L4", aws={"subnet_ids": several}))
    assert (line.result, line.to_do) == ("fail", "Declare subnets of one VPC.")
    line = cloud.line("network", pool("L4", aws={"subnet_ids": several[:1], "vpc_id": second}))
    assert (line.result, line.to_do) == ("fail", f"Declare vpc_id='{first}', or none.")


def test_a_network_of_its_own_needs_a_vpc_and_addresses(cloud: Cloud, pool: Make) -> None:
    cloud.quotas.update({"L-F678F1CE": 5, "L-0263D0A3": 5})
    network, addresses = cloud.lines("network", pool("L4"))
    assert (network.result, network.found) == (
        "pass",
        "a network of its own: 1 of 5 VPCs are in use, and 1 more needed (L-F678F1CE)",
    )
    assert (addresses.result, addresses.found) == (
        "pass",
        "0 of 5 Elastic IPs are in use, and 1 more needed (L-0263D0A3)",
    )
    pools = [pool("L4", name=f"p{index}") for index in range(4)]
    efa = pool("A100-40GB:8", name="efa", nodes=2, aws={"efa": True})  # a NAT gateway besides the head
    lines = [line for line in cloud.check(*pools, efa).lines if line.check == "network" and line.pool == "efa"]
    assert [line.result for line in lines] == ["fail", "fail"]
    assert lines[0].to_do.startswith("Declare subnet_ids, or: aws service-quotas") and "vpc" in lines[0].to_do
    assert "0 of 5 Elastic IPs are in use, and 6 more needed" in lines[1].found


def test_a_network_that_this_stack_has_made_is_not_in_the_way(cloud: Cloud, pool: Make) -> None:
    cloud.quotas["L-F678F1CE"] = 2
    made = vpc(cloud)
    assert cloud.lines("network", pool("L4"))[0].result == "fail"
    tags = [{"Key": "skyinfra:stack", "Value": "s"}, {"Key": "skyinfra:pool", "Value": "p"}]
    cloud.ec2.create_tags(Resources=[made], Tags=tags)
    assert cloud.lines("network", pool("L4"))[0].result == "pass"


def test_a_network_that_may_not_be_asked(cloud: Cloud, pool: Make) -> None:
    cloud.refuse("ec2", "DescribeVpcs", "UnauthorizedOperation", status=403)
    line = cloud.line("network", pool("L4"))
    assert (line.result, "ec2:DescribeVpcs" in line.to_do) == ("warn", True)


def test_security_groups(cloud: Cloud, pool: Make) -> None:
    network = vpc(cloud)
    made = cloud.ec2.create_security_group(GroupName="g", Description="g", VpcId=network)["GroupId"]
    own = {"subnet_ids": [subnet(cloud, network, "10.0.1.0/24")], "security_group_ids": [made]}
    line = cloud.line("security group", pool("L4", aws=own))
    assert (line.result, "no rule lets all traffic in" in line.found) == ("warn", True)
    rule = {"IpProtocol": "-1", "UserIdGroupPairs": [{"GroupId": made}]}
    cloud.ec2.authorize_security_group_ingress(GroupId=made, IpPermissions=[rule])
    line = cloud.line("security group", pool("L4", aws=own))
    assert (line.result, line.found) == ("pass", f"{made} in {network}, open to their own members")
    strange = cloud.ec2.create_security_group(GroupName="h", Description="h", VpcId=vpc(cloud))["GroupId"]
    line = cloud.line("security group", pool("L4", aws={**own, "security_group_ids": [strange]}))
    assert (line.result, line.to_do) == ("fail", f"Declare security groups of {network}.")
    line = cloud.line("security group", pool("L4", aws={**own, "security_group_ids": ["sg-0123456789abcdef0"]}))
    assert (line.result, "sg-0123456789abcdef0" in line.found) == ("fail", True)


def test_outputs_of_other_constructs_are_not_asked_for(cloud: Cloud, pool: Make) -> None:
    """A stack gives them to its module as local values, which Terraform alone knows."""
    stack = synthesized(cloud.folder, pool("L4", aws={"subnet_ids": ["subnet-1"], "ami": "ami-1"}))
    inputs = {"subnet_ids": "${local.p_subnet_ids}", "image": "${local.p_image}", "vpc_id": "${local.p_vpc_id}"}
    made = replace(stack, modules={"p": {**stack.modules["p"], **inputs}})
    lines = {line.check: line for line in preflight(made, session=cloud.session).lines}
    assert lines["network"].result == lines["image"].result == "warn"
    assert "outputs of other constructs" in lines["network"].found
    assert not any("${" in str(line) for line in lines.values())
