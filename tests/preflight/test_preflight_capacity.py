"""Capacity blocks and reservations: what is declared, and what can be bought."""

from __future__ import annotations

from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from moto_aws.account import Cloud

import skyinfra as sky

# Each question of these to the simulated account takes its time.
pytestmark = pytest.mark.slow

Make = Callable[..., sky.ComputePool]

BLOCK = {"capacity": sky.CapacityBlock(id="cr-0123"), "zones": ["us-east-1a"]}
RESERVATION = {"capacity": sky.CapacityReservation(id="cr-0123"), "zones": ["us-east-1a"]}
NOW = datetime.now(UTC)


def reserved(cloud: Cloud, **fields: Any) -> None:
    found = {
        "CapacityReservationId": "cr-0123",
        "InstanceType": "p5.48xlarge",
        "AvailabilityZone": "us-east-1a",
        "State": "active",
        "TotalInstanceCount": 4,
        "AvailableInstanceCount": 4,
        "ReservationType": "capacity-block",
        "EndDate": NOW + timedelta(days=3),
        **fields,
    }
    cloud.answer("ec2", "DescribeCapacityReservations", {"CapacityReservations": [found]})


def test_a_capacity_block(cloud: Cloud, pool: Make) -> None:
    reserved(cloud)
    line = cloud.line("reservation", pool("H100:8", nodes=4, aws=BLOCK))
    assert line.result == "pass"
    assert line.found.startswith("cr-0123: 4 x p5.48xlarge in us-east-1a, 4 free, ends at ")


@pytest.mark.parametrize(
    ("fields", "result", "found", "to_do"),
    [
        ({"AvailableInstanceCount": 3}, "fail", "3 free; 4 more needed", "Declare fewer nodes"),
        ({"AvailabilityZone": "us-east-1b"}, "fail", "the nodes stand in us-east-1a", "zones=['us-east-1b']"),
        ({"InstanceType": "p4d.24xlarge"}, "fail", "is not for p5.48xlarge", "instance_types=['p4d.24xlarge']"),
        ({"ReservationType": "default"}, "fail", "is a reservation", "sky.CapacityReservation(id='cr-0123')"),
        ({"State": "expired"}, "fail", "is expired", "one that is active"),
        ({"State": "scheduled", "StartDate": NOW}, "warn", "begins at", "when it has begun"),
        ({"EndDate": NOW + timedelta(hours=5)}, "warn", "ends at", "half an hour before"),
    ],
)
def test_a_block_that_does_not_serve(
    cloud: Cloud, pool: Make, fields: dict[str, Any], result: str, found: str, to_do: str
) -> None:
    reserved(cloud, **fields)
    line = cloud.line("reservation", pool("H100:8", nodes=4, aws=BLOCK))
    assert (line.result, found in line.found, to_do in line.to_do) == (result, True, True), line


def test_a_reservation_is_no_block(cloud: Cloud, pool: Make) -> None:
    reserved(cloud)
    line = cloud.line("reservation", pool("H100:8", aws=RESERVATION))
    assert (line.result, "sky.CapacityBlock(id='cr-0123')" in line.to_do) == ("fail", True)
    reserved(cloud, ReservationType="default")
    assert cloud.line("reservation", pool("H100:8", aws=RESERVATION)).result == "pass"


def test_nodes_that_run_in_it_need_no_more_room(cloud: Cloud, pool: Make) -> None:
    reserved(cloud, AvailableInstanceCount=1)
    cloud.run("p5.48xlarge", 3, {"skyinfra:stack": "s", "skyinfra:pool": "p"})
    assert cloud.line("reservation", pool("H100:8", nodes=4, aws=BLOCK)).result == "pass"


def test_a_reservation_that_is_not_there(cloud: Cloud, pool: Make) -> None:
    line = cloud.line("reservation", pool("H100:8", aws=BLOCK))
    assert (line.result, line.found) == ("fail", "there is no cr-0123 in us-east-1")
    cloud.refuse("ec2", "DescribeCapacityReservations", "InvalidCapacityReservationId.NotFound")
    assert cloud.line("reservation", pool("H100:8", aws=BLOCK)).result == "fail"
    cloud.refuse("ec2", "DescribeCapacityReservations", "UnauthorizedOperation", status=403)
    assert cloud.line("reservation", pool("H100:8", aws=BLOCK)).result == "warn"


def offering(day: int, usd: str, name: str) -> dict[str, Any]:
    return {
        "CapacityBlockOfferingId": name,
        "AvailabilityZone": "us-east-1c",
        "StartDate": datetime(2027, 1, day, 11, 30, tzinfo=UTC),
        "UpfrontFee": usd,
    }


def test_blocks_that_can_be_bought_are_a_hint(cloud: Cloud, pool: Make) -> None:
    def sold(request: dict[str, Any]) -> dict[str, Any]:
        assert (request["InstanceType"], request["InstanceCount"]) == ("p5.48xlarge", 4)
        return {"CapacityBlockOfferings": [offering(3, "900", "cbo-2"), offering(2, "2500.5", "cbo-1")]}

    cloud.answer("ec2", "DescribeCapacityBlockOfferings", sold)
    line = cloud.line("capacity block", pool("H100:8", nodes=3))
    assert line.result == "pass"
    assert line.found == (
        "a capacity block of 4 x p5.48xlarge for 24 hours can be bought: in us-east-1c from 2027-01-02 11:30 UTC for "
        "$2,500.50"
    )
    assert cloud.lines("capacity block", pool("L4")) == []
    assert cloud.lines("capacity block", pool("H100:8", spot=True)) == []


def test_where_there_is_no_other_way_a_block_is_the_next_step(cloud: Cloud, pool: Make) -> None:
    kind = {"InstanceType": "p5.48xlarge", "SupportedUsageClasses": ["capacity-block"]}
    more = {"VCpuInfo": {"DefaultVCpus": 192}, "ProcessorInfo": {"SupportedArchitectures": ["x86_64"]}}
    cloud.answer("ec2", "DescribeInstanceTypes", {"InstanceTypes": [{**kind, **more}]})
    cloud.answer("ec2", "DescribeCapacityBlockOfferings", {"CapacityBlockOfferings": [offering(2, "900", "cbo-1")]})
    line = cloud.line("capacity block", pool("H100:8"))
    assert (line.result, line.to_do) == ("warn", "skyinfra capacity s/p --buy cbo-1")
    cloud.answer("ec2", "DescribeCapacityBlockOfferings", {"CapacityBlockOfferings": []})
    line = cloud.line("capacity block", pool("H100:8"))
    assert (line.result, line.found) == (
        "warn",
        "no capacity block of 1 x p5.48xlarge for 24 hours is on offer in us-east-1",
    )


def test_offerings_that_may_not_be_asked(cloud: Cloud, pool: Make) -> None:
    cloud.refuse("ec2", "DescribeCapacityBlockOfferings", "UnauthorizedOperation", status=403)
    line = cloud.line("capacity block", pool("H100:8"))
    assert (line.result, "ec2:DescribeCapacityBlockOfferings" in line.to_do) == ("warn", True)
