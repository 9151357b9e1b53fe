"""Spot capacity: the price now, and the placement score."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from moto_aws.account import Cloud

import skyinfra as sky

# Each question of these to the simulated account takes its time.
pytestmark = pytest.mark.slow

Make = Callable[..., sky.ComputePool]

A, B = "us-east-1a", "us-east-1b"


def test_a_price_as_shipped(cloud: Cloud, pool: Make) -> None:
    cloud.spot(("p5.48xlarge", A, 27.0), ("p5.48xlarge", B, 25.5))
    line = cloud.line("spot price", pool("H100:8", spot=True))
    assert line.result == "pass"
    # One node stands in one zone.
    assert line.found == "p5.48xlarge: $27.00/h in us-east-1a; the shipped price is ~$26.42/h in us-east-1, 2025-07-28"


def test_the_newest_price_counts(cloud: Cloud, pool: Make) -> None:
    cloud.spot(("p5.48xlarge", A, 90.0), ("p5.48xlarge", A, 27.0))
    assert "$27.00/h in us-east-1a" in cloud.line("spot price", pool("H100:8", spot=True)).found


def test_a_price_far_above_the_shipped_one(cloud: Cloud, pool: Make) -> None:
    cloud.spot(("p5.48xlarge", A, 40.0))
    line = cloud.line("spot price", pool("H100:8", spot=True))
    assert (line.result, line.to_do) == ("warn", "The costs that plan and deploy show are too low.")


def test_a_price_above_the_maximum(cloud: Cloud, pool: Make) -> None:
    cloud.spot(("p5.48xlarge", A, 27.0))
    line = cloud.line("spot price", pool("H100:8", spot=True, aws={"spot_max_price": 20.0}))
    assert (line.result, line.to_do) == ("fail", "Raise spot_max_price above $27.00.")
    line = cloud.line("spot price", pool("H100:8", spot=True, max_hourly_cost=26.5))
    assert (line.result, line.to_do) == ("fail", "Raise max_hourly_cost above $27.00.")


def test_a_price_above_the_maximum_in_some_zones(cloud: Cloud, pool: Make) -> None:
    cloud.spot(("p5.48xlarge", A, 27.0), ("p5.48xlarge", B, 31.0))
    line = cloud.line("spot price", pool("H100:8", nodes=2, spot=True, aws={"spot_max_price": 30.0}))
    assert (line.result, line.to_do) == ("warn", "No node comes from us-east-1b at that price.")


def test_a_group_takes_the_machine_whose_price_it_may_pay(cloud: Cloud, pool: Make) -> None:
    cloud.spot(("g6.xlarge", A, 0.9), ("g6.2xlarge", A, 0.4))
    types = {"instance_types": ["g6.xlarge", "g6.2xlarge"], "spot_max_price": 0.5}
    first, second = cloud.lines("spot price", pool("L4", nodes=2, spot=True, aws=types))
    assert (first.result, second.result) == ("warn", "pass")


def test_no_price_at_all(cloud: Cloud, pool: Make) -> None:
    cloud.spot(("p5.48xlarge", B, 27.0))
    line = cloud.line("spot price", pool("H100:8", spot=True, aws={"zones": [A]}))
    assert (line.result, "it may not be sold there" in line.found) == ("warn", True)


def test_what_is_not_spot_is_not_asked(cloud: Cloud, pool: Make) -> None:
    assert cloud.lines("spot price", pool("L4")) == [] and cloud.lines("spot score", pool("L4")) == []
    assert not {"DescribeSpotPriceHistory", "GetSpotPlacementScores"} & set(cloud.asked)


def test_scores(cloud: Cloud, pool: Make) -> None:
    cloud.scores(a=9, b=3)
    line = cloud.line("spot score", pool("L4", nodes=3, spot=True, aws={"zones": [A, B]}))
    assert (line.result, line.found) == ("pass", "9 of 10 in us-east-1a, 3 of 10 in us-east-1b for 3 nodes")
    cloud.scores(a=3, b=2)
    line = cloud.line("spot score", pool("L4", nodes=3, spot=True, aws={"zones": [A, B]}))
    assert (line.result, "Declare more machine types" in line.to_do) == ("warn", True)
    cloud.answer("ec2", "GetSpotPlacementScores", {"SpotPlacementScores": []})
    assert cloud.line("spot score", pool("L4", nodes=3, spot=True)).found == "AWS scores no zone for 3 nodes"


def test_a_low_score_of_a_single_machine_type_says_little(cloud: Cloud, pool: Make) -> None:
    cloud.scores(a=3)
    line = cloud.line("spot score", pool("H100:8", spot=True))
    assert line.result == "pass"
    assert line.found == "3 of 10 in us-east-1a for 1 node; with fewer than 3 machine types AWS always says little"
    cloud.scores(a=1)
    assert cloud.line("spot score", pool("H100:8", spot=True)).result == "warn"


def test_a_score_that_may_not_be_asked(cloud: Cloud, pool: Make) -> None:
    cloud.refuse("ec2", "GetSpotPlacementScores", "UnauthorizedOperation", status=403)
    line = cloud.line("spot score", pool("H100:8", spot=True))
    assert (line.result, "ec2:GetSpotPlacementScores" in line.to_do) == ("warn", True)
    cloud.refuse("ec2", "GetSpotPlacementScores", "MaxConfigLimitExceeded", "too many new ones in 24 hours")
    line = cloud.line("spot score", pool("H100:8", spot=True))
    assert line.result == "warn"
    assert line.found.endswith("MaxConfigLimitExceeded: too many new ones in 24 hours")
