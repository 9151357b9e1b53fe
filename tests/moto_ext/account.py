"""What an account has: its quotas, reserved capacity, and how AWS scores spot capacity. moto has none of it for EC2.

Quotas are those that the test tells, 100,000 where it tells none; nothing is reserved or sold in blocks; every zone has
the same score.
"""

from __future__ import annotations

import json
from typing import Any

from moto.core.responses import ActionResult
from moto.ec2.responses import EC2Response
from moto.servicequotas.responses import ServiceQuotasResponse

from moto_ext import world

QUOTA = 100_000
SCORE = 7


def get_service_quota(self: Any) -> str:
    asked = json.loads(self.body)
    value = dict(world.told("quotas")).get(asked["QuotaCode"], QUOTA)
    quota = {"ServiceCode": asked["ServiceCode"], "QuotaCode": asked["QuotaCode"], "Value": value}
    return json.dumps({"Quota": quota})


def describe_capacity_reservations(self: Any) -> ActionResult:
    return ActionResult({"CapacityReservations": []})


def describe_capacity_block_offerings(self: Any) -> ActionResult:
    return ActionResult({"CapacityBlockOfferings": []})


def get_spot_placement_scores(self: Any) -> ActionResult:
    zones = self.ec2_backend.describe_availability_zones()
    scores = [
        {"Region": self.ec2_backend.region_name, "AvailabilityZoneId": zone.zone_id, "Score": SCORE} for zone in zones
    ]
    return ActionResult({"SpotPlacementScores": scores})


def install() -> None:
    ServiceQuotasResponse.get_service_quota = get_service_quota
    for made in (describe_capacity_reservations, describe_capacity_block_offerings, get_spot_placement_scores):
        assert not hasattr(EC2Response, made.__name__), f"moto has {made.__name__} now: drop this one"
        setattr(EC2Response, made.__name__, made)
