"""Machine types and quotas: offered, sold as asked, and within what the account may have."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from moto_aws.account import Cloud

import skyinfra as sky

Make = Callable[..., sky.ComputePool]

P = "L-417A185B"
G_SPOT = "L-3819A6DF"
STANDARD = "L-1216C47A"
BLOCK = {"capacity": sky.CapacityBlock(id="cr-0123"), "zones": ["us-east-1a"]}
OWN = {"skyinfra:stack": "s", "skyinfra:pool": "p"}


def test_a_machine_that_is_offered(cloud: Cloud, pool: Make) -> None:
    line = cloud.line("machine", pool("H200:8"))
    assert line.result == "pass"
    assert line.found == "p5en.48xlarge is offered in us-east-1a, us-east-1c; the nodes stand in us-east-1a"


def test_a_machine_that_the_region_has_not(cloud: Cloud, pool: Make) -> None:
    # Shipped offers say it is there; EC2 says it is not.
    cloud.answer("ec2", "DescribeInstanceTypeOfferings", {"InstanceTypeOfferings": []})
    line = cloud.line("machine", pool("A10G"))
    assert (line.result, line.found) == ("fail", "g5.xlarge is not offered in us-east-1")
    assert "Other machines with A10G in us-east-1: g5.2xlarge (A10G:1, $1.21/h)" in line.to_do
    assert "g5.xlarge is also offered in us-east-2" in line.to_do


def test_a_machine_in_other_zones_than_declared(cloud: Cloud, pool: Make) -> None:
    line = cloud.line("machine", pool("H200:8", aws={"zones": ["us-east-1b", "us-east-1d"]}))
    assert line.result == "fail"
    assert line.found == "p5en.48xlarge is offered in us-east-1a, us-east-1c, but not in us-east-1b, us-east-1d"
    assert line.to_do.startswith("Declare zones among us-east-1a, us-east-1c.")


def test_a_zone_that_is_not_there(cloud: Cloud, pool: Make) -> None:
    line = cloud.line("machine", pool("L4", aws={"zones": ["us-east-1z"]}))
    assert (line.result, line.found) == ("fail", "us-east-1z: not among the zones of us-east-1")


def test_a_group_whose_zones_lack_a_machine(cloud: Cloud, pool: Make) -> None:
    zones = {"zones": ["us-east-1d", "us-east-1e"]}
    lines = cloud.lines("machine", pool("L4", spot=True, nodes=2, aws=zones))
    assert {line.result for line in lines} == {"warn"}
    assert lines[0].found == "g6.xlarge is offered in us-east-1d, but not in us-east-1e"


def test_a_group_goes_on_without_a_machine_that_is_not_offered(cloud: Cloud, pool: Make) -> None:
    types = {"instance_types": ["g6.xlarge", "gr6.4xlarge"], "zones": ["us-east-1f"]}
    lines = cloud.lines("machine", pool("L4", nodes=2, aws=types))
    assert [line.result for line in lines] == ["pass", "warn", "pass"]
    assert "gr6.4xlarge is offered in us-east-1a" in lines[1].found
    assert lines[2].found.startswith("the head, m6i.large, is offered")
    nowhere = {"instance_types": ["gr6.4xlarge", "g6.16xlarge"], "zones": ["us-east-1e"]}
    assert [line.result for line in cloud.lines("machine", pool("L4", nodes=2, aws=nowhere))] == ["fail"] * 3


def test_a_machine_that_is_sold_in_blocks_alone(cloud: Cloud, pool: Make) -> None:
    types = [
        {"InstanceType": kind, "SupportedUsageClasses": ["capacity-block"], "VCpuInfo": {"DefaultVCpus": 192}}
        | {"ProcessorInfo": {"SupportedArchitectures": ["x86_64"]}}
        for kind in ("p5en.48xlarge", "p4d.24xlarge")
    ]
    cloud.answer("ec2", "DescribeInstanceTypes", {"InstanceTypes": types})
    line = cloud.line("machine", pool("H200:8"))
    assert (line.result, line.found) == ("fail", "p5en.48xlarge is not sold on-demand, but as capacity blocks")
    assert "sky.CapacityBlock(id='cr-...')" in line.to_do
    spot = cloud.line("machine", pool("H200:8", spot=True))
    assert (spot.result, spot.found) == ("fail", "p5en.48xlarge is not sold as spot capacity, but as capacity blocks")


def test_a_quota_with_room(cloud: Cloud, pool: Make) -> None:
    cloud.quotas[P] = 400
    line = cloud.line("quota", pool("H100:8", nodes=2))
    assert line.result == "pass"
    assert line.found == "Running On-Demand P instances (L-417A185B): 400 vCPUs, 0 in use; p5.48xlarge needs 384"


def test_a_quota_without_room(cloud: Cloud, pool: Make) -> None:
    cloud.quotas[P] = 0
    line = cloud.line("quota", pool("H100:8", nodes=2))
    assert line.result == "fail"
    assert line.to_do == (
        "aws service-quotas request-service-quota-increase --service-code ec2 --quota-code L-417A185B "
        "--desired-value 384 --region us-east-1"
    )


def test_what_runs_is_counted_and_what_is_ours_is_not(cloud: Cloud, pool: Make) -> None:
    cloud.quotas[P] = 480
    cloud.run("p4d.24xlarge", 1)  # 96 vCPUs of the same quota
    cloud.run("g6.xlarge", 5)  # of another
    cloud.run("p5.48xlarge", 1, OWN)
    line = cloud.line("quota", pool("H100:8", nodes=2))
    assert (line.result, "480 vCPUs, 96 in use" in line.found) == ("pass", True)
    cloud.run("p5.48xlarge", 1, {"skyinfra:stack": "s", "skyinfra:pool": "another"})
    line = cloud.line("quota", pool("H100:8", nodes=2))
    assert (line.result, "480 vCPUs, 288 in use" in line.found) == ("fail", True)
    assert "--desired-value 672 " in line.to_do


def test_reserved_capacity_that_does_not_run_is_in_use(cloud: Cloud, pool: Make) -> None:
    cloud.quotas[P] = 400
    reservation = {"InstanceType": "p4d.24xlarge", "AvailableInstanceCount": 1, "ReservationType": "default"}
    block = {"InstanceType": "p5.48xlarge", "AvailableInstanceCount": 4, "ReservationType": "capacity-block"}
    cloud.answer("ec2", "DescribeCapacityReservations", {"CapacityReservations": [reservation, block]})
    line = cloud.line("quota", pool("H100:8", nodes=2))
    assert (line.result, "400 vCPUs, 96 in use" in line.found) == ("fail", True)
    cloud.refuse("ec2", "DescribeCapacityReservations", "UnauthorizedOperation", status=403)
    line = cloud.line("quota", pool("H100:8", nodes=2))
    assert (line.result, "(unused capacity reservations not counted)" in line.found) == ("pass", True)


def test_pools_of_one_stack_share_a_quota(cloud: Cloud, pool: Make) -> None:
    cloud.quotas[P] = 300
    lines = cloud.lines("quota", pool("H100:8", name="a"), pool("A100-40GB:8", name="b"), pool("L4", name="c"))
    assert [line.result for line in lines] == ["pass", "pass", "pass"]
    lines = cloud.lines("quota", pool("H100:8", name="a"), pool("A100-40GB:8", nodes=2, name="b"))
    assert [line.result for line in lines] == ["fail", "fail"]
    assert "the pools a, b together 384" in lines[0].found and "--desired-value 384 " in lines[0].to_do


def test_a_spot_group_falls_back_within_its_quota(cloud: Cloud, pool: Make) -> None:
    cloud.quotas[G_SPOT] = 20
    nodes, head = cloud.lines("quota", pool("L4", spot=True, nodes=3))
    assert (nodes.result, "need 12 to 48" in nodes.found) == ("warn", True)
    assert nodes.to_do.startswith("The larger machines do not fit.") and "--desired-value 48 " in nodes.to_do
    assert (head.result, head.found.endswith("the head m6i.large needs 2")) == ("pass", True)
    cloud.quotas.update({G_SPOT: 8, STANDARD: 1})
    assert [line.result for line in cloud.lines("quota", pool("L4", spot=True, nodes=3))] == ["fail", "fail"]


def test_a_group_from_the_first_node_on(cloud: Cloud, pool: Make) -> None:
    """Its head is a machine besides the nodes, with an image and a quota of its own; it may stand in every zone."""
    grouped, one = pool("L4", name="a", aws={"group": True}), pool("L4", name="b")
    report = [line for line in cloud.check(grouped, one).lines if line.check in ("machine", "quota", "image")]
    found = {name: [(line.check, line.found) for line in report if line.pool == name] for name in ("a", "b")}
    assert sorted(check for check, _ in found["a"]) == ["image"] * 2 + ["machine"] * 2 + ["quota"] * 2
    assert sorted(check for check, _ in found["b"]) == ["image", "machine", "quota"]
    said = "\n".join(text for _, text in found["a"])
    assert "the head, m6i.large, is offered" in said and "the head m6i.large needs 2" in said
    assert "the nodes stand in" not in said and "the nodes stand in" in found["b"][0][1]


def test_spot_and_on_demand_have_quotas_of_their_own(cloud: Cloud, pool: Make) -> None:
    cloud.quotas["L-C4BD4855"] = 0
    line = cloud.line("quota", pool("H100:8", spot=True))
    assert (line.result, "All P5 Spot Instance Requests" in line.found) == ("fail", True)
    assert cloud.line("quota", pool("A100-40GB:8", spot=True)).found.startswith("All P4, P3 and P2 Spot")
    unknown = cloud.line("quota", pool("B200:8", spot=True))
    assert (unknown.result, "the spot quota of p6-b200.48xlarge is not known here" in unknown.found) == ("warn", True)


def test_capacity_that_is_reserved_needs_no_quota(cloud: Cloud, pool: Make) -> None:
    cloud.quotas[P] = 0
    assert cloud.line("quota", pool("H100:8", aws=BLOCK)).result == "pass"
    reserved = {**BLOCK, "capacity": sky.CapacityReservation(id="cr-0123")}
    assert cloud.line("quota", pool("H100:8", aws=reserved)).result == "pass"
    # It leaves the quota to the others.
    cloud.quotas[P] = 192
    lines = cloud.lines("quota", pool("H100:8", name="a", aws=BLOCK), pool("H100:8", name="b"))
    assert [line.result for line in lines] == ["pass", "pass"]


def test_a_quota_that_the_account_has_no_value_of_its_own_for(cloud: Cloud, pool: Make) -> None:
    cloud.refuse("service-quotas", "GetServiceQuota", "NoSuchResourceException", status=400)
    default = {"Quota": {"QuotaCode": P, "Value": 0.0}}
    cloud.answer("service-quotas", "GetAWSDefaultServiceQuota", default)
    assert cloud.line("quota", pool("H100:8")).result == "fail"


@pytest.mark.parametrize(
    ("operation", "action"),
    [("GetServiceQuota", "servicequotas:GetServiceQuota"), ("DescribeInstances", "ec2:DescribeInstances")],
)
def test_a_quota_that_may_not_be_asked(cloud: Cloud, pool: Make, operation: str, action: str) -> None:
    service = "ec2" if operation.startswith("Describe") else "service-quotas"
    cloud.refuse(service, operation, "AccessDeniedException", status=400)
    line = cloud.line("quota", pool("H100:8"))
    assert (line.result, line.found) == ("warn", f"not checked: the credentials may not call {action}")
    assert line.to_do == f"Allow the IAM action {action}, which only reads."
