"""Slots and offers that would carry a task whose device had no more memory."""

from __future__ import annotations

import dataclasses

from skyinfra import offers
from skyinfra.protocol.instance import InstanceInfo
from skyinfra.protocol.shortage import Shortage
from skyinfra.recommendation.shortage import advice, wanted_gb

GB = 10**9


def slot(index: int, profile: str | None, memory_gb: float | None) -> InstanceInfo:
    kind = "partition" if profile else "gpu"
    return InstanceInfo(
        "n0", index, f"n0/{index}", kind, "s/p", profile=profile, accelerator="H100", memory_gb=memory_gb
    )  # type: ignore[arg-type]


SHORT = Shortage("n0/0", "H100", "1g.10gb", has=10 * GB, taken=5 * GB, measured="PyTorch", asked=9 * GB)


def test_the_smallest_slots_of_the_fleet_that_have_room() -> None:
    slots = [slot(0, "1g.10gb", 10), slot(1, "1g.10gb", 10), slot(2, "3g.40gb", 40), slot(3, "1g.20gb", 20)]
    assert advice(SHORT, slots) == (
        "This fleet has larger slots: n0/3 (1g.20gb, 20 GB); n0/2 (3g.40gb, 40 GB). Ask for one: "
        "@sky.compute(gpu_memory_gb=14)."
    )


def test_a_compute_instance_has_its_part_of_what_it_shares() -> None:
    # Such a slot would not take the task that is advised to ask for 14 GB.
    assert advice(SHORT, [slot(0, "1g.10gb", 10), slot(1, "1c.3g.40gb", 40)]).startswith(
        "No slot of this fleet has 14 GB."
    )
    assert advice(SHORT, [slot(0, "1g.10gb", 10), slot(1, "2c.3g.40gb", 40)]).startswith(
        "This fleet has larger slots: n0/1 (2c.3g.40gb, 26.7 GB)."
    )


def test_else_a_larger_profile_and_an_offer() -> None:
    cpu = InstanceInfo("n0", 2, "n0/2", "cpu", "s/p")
    said = advice(SHORT, [slot(0, "1g.10gb", 10), cpu])
    assert said.startswith(
        "No slot of this fleet has 14 GB. A larger profile of its GPU: 1g.20gb. The cheapest offer: "
    )
    # A GPU whose memory nobody has said may have it.
    unknown = advice(SHORT, [slot(0, "1g.10gb", 10), slot(1, None, None)])
    assert unknown == said.replace("fleet has", "fleet is known to have")
    cheapest = min(
        price.usd_per_hour
        for offer in offers.load()
        if offer.fraction == 1 and offer.memory_gb >= 14 and (price := offer.price()) is not None
    )
    assert cheapest > 0 and "$" in said


def test_a_gpu_whose_variants_differ_in_the_profile_that_would_do_has_none() -> None:
    # 7g.80gb is of the H100 with 80 GB alone, and nothing larger is on it.
    whole = dataclasses.replace(SHORT, profile="7g.80gb", has=80 * GB, taken=79 * GB)
    assert "profile" not in advice(whole, [])
    assert "profile" not in advice(dataclasses.replace(SHORT, accelerator="no such"), [])


def test_more_than_the_slot_had_where_the_need_is_not_known() -> None:
    assert wanted_gb(dataclasses.replace(SHORT, asked=None)) == 11
    # What was asked for fits by its size: something else was in the way.
    assert wanted_gb(dataclasses.replace(SHORT, taken=None, asked=GB)) == 11
    assert wanted_gb(SHORT) == 14


def test_more_than_anything_offered() -> None:
    huge = dataclasses.replace(SHORT, asked=10_000 * GB)
    assert advice(huge, []) == "No slot of this fleet has 10005 GB."
