"""The figures of the fleet page as they are drawn: what a fleet has cost, and what it did over time."""

from __future__ import annotations

import re
from typing import Any

import pytest
from front_ends.browser import PATIENCE_MS, shown
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


@pytest.mark.parametrize("simulated", [True, False])
def test_figures_over_time_are_there_after_two_looks_and_say_what_is_simulated(chromium: Any, simulated: bool) -> None:
    fleet = busy_fleet()
    fleet.simulated = simulated
    with shown(chromium, LiveFleet(fleet)) as found:
        page = found.page
        page.locator("[data-slot='n1/0']").click()
        found.again()
        page.wait_for_selector("#charts figure >> nth=1", timeout=PATIENCE_MS)
        mark = " (simulated)" if simulated else ""
        rates = {"slots busy": "2, at most 2", "tasks ended, by minute": "30, at most 30"}
        rates["tasks waiting at the head"] = "2, at most 2"
        for id_, figures in (("rates", rates), ("charts", {"use": "91 %", "memory": "50 %"})):
            captions = page.locator(f"#{id_} figcaption").all_inner_texts()
            lasts = [re.sub(r"[0-9.]+ (s|min|h)$", "", each) for each in captions]
            assert lasts == [f"{name}{mark}: {words}, of the last " for name, words in figures.items()]
            lines = page.locator(f"#{id_} polyline").evaluate_all("all => all.map((e) => e.points.numberOfItems)")
            assert len(lines) == len(figures) and min(lines) >= 2
        assert "(simulated)" not in page.locator("#numbers").inner_text(), "tasks and prices are none of a device"
