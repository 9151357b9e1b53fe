"""The figures of the fleet page as they are drawn: what a fleet has cost, and what it did over time."""

from __future__ import annotations

from typing import Any

import pytest
from front_ends.browser import shown
from front_ends.still_fleet import busy_fleet

from skyinfra.page import LiveFleet

pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("fleet-page")]

COST = {"text": "", "hours": 40.0, "usd": 2201.6, "estimated": False, "unknown": [], "budget": None}


def test_what_a_fleet_has_cost_is_that_of_its_machines_where_the_head_knows_it(chromium: Any) -> None:
    with shown(chromium, LiveFleet(busy_fleet(), "2 p5.48xlarge", 98.32, lambda: COST)) as found:
        numbers = found.page.locator("#numbers").inner_text()
    assert "$2,201.60" in numbers and "40.0 node hours" in numbers and "since its head" not in numbers
    assert "~" not in numbers and "not in the sum" not in numbers


@pytest.mark.parametrize(("known", "price", "sum_of_it"), [(2201.6, 98.32, "~$2,201.60"), (None, None, "not known")])
def test_a_part_of_what_a_fleet_has_cost_is_no_whole(
    chromium: Any, known: float | None, price: float | None, sum_of_it: str
) -> None:
    missing = ["the price of p9.huge, whose hours are in no sum of USD", "the hours of n2"]
    cost = {**COST, "usd": known, "estimated": known is not None, "unknown": missing}
    with shown(chromium, LiveFleet(busy_fleet(), "2 p5.48xlarge", price, lambda: cost)) as found:
        card = found.page.locator("#numbers div", has_text="So far").inner_text().splitlines()
    assert card == ["So far", sum_of_it, "40.0 node hours", f"not in the sum: {'; '.join(missing)}"]
