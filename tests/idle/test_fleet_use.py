"""For how long nobody has used a fleet, as its head knows it."""

from __future__ import annotations

import math

from skyinfra.idle.use import FleetUse


class Clock:
    def __init__(self) -> None:
        self.now = 1000.0
        self.busy = False

    def use(self) -> FleetUse:
        return FleetUse(lambda: self.busy, lambda: self.now)


def test_the_least_that_anyone_knows_counts() -> None:
    clock = Clock()
    fleet = clock.use()
    assert fleet.report("n0", 300.0, 0.0) == (300.0, 0.0, False, None)
    assert fleet.report("n1", 20.0, 0.0) == (20.0, 0.0, False, None)
    clock.now += 10
    assert fleet.report("n0", 310.0, 0.0) == (30.0, 0.0, False, None)


def test_a_head_that_starts_anew_knows_no_use_and_ends_nothing() -> None:
    clock = Clock()
    assert clock.use().report("n0", 12.0, 0.0)[0] == 12.0
    assert math.isfinite(clock.use().report("n0", 12.0, 0.0)[0])


def test_what_runs_or_waits_is_a_use() -> None:
    clock = Clock()
    fleet = clock.use()
    clock.busy = True
    assert fleet.report("n0", 900.0, 0.0)[0] == 0.0
    clock.busy = False
    clock.now += 7
    assert fleet.report("n0", 907.0, 0.0) == (7.0, 0.0, True, None)


def test_a_node_that_tells_nothing_any_more_holds_nobody() -> None:
    clock = Clock()
    fleet = clock.use()
    fleet.report("n1", 0.0, 0.0)
    clock.now += 59
    assert fleet.report("n0", 900.0, 0.0)[0] == 59.0
    clock.now += 2
    assert fleet.report("n0", 902.0, 0.0)[0] == 902.0


def test_keeping_is_known_to_all_and_can_be_ended() -> None:
    clock = Clock()
    fleet = clock.use()
    fleet.keep(7200.0)
    clock.now += 200
    assert fleet.report("n0", 300.0, 0.0)[1] == 7000.0
    # A head that starts anew has it from its nodes.
    another = clock.use()
    assert another.report("n0", 300.0, 7000.0)[1] == 7000.0
    assert another.report("n1", 300.0, 0.0)[1] == 7000.0
    another.keep(0.0)
    assert another.report("n0", 300.0, 7000.0)[1] == 0.0
    assert another.report("n2", 300.0, 7000.0)[1] == 0.0
    # Also where one that has just started tells it first; and what a node has from its head makes it no longer.
    third = clock.use()
    assert third.report("n1", 300.0, 0.0)[1] == 0.0
    assert third.report("n0", 300.0, 7000.0)[1] == 7000.0
    clock.now += 10
    assert third.report("n1", 310.0, 6990.5)[1] == 6990.0


def test_what_a_node_says_of_its_end_goes_with_it() -> None:
    clock = Clock()
    fleet = clock.use()
    fleet.report("n0", 1700.0, 0.0, True, "stops in 2m")
    assert fleet.stops == {"n0": "stops in 2m"}
    fleet.report("n1", 1700.0, 0.0)
    assert fleet.stops == {"n0": "stops in 2m"}
    fleet.report("n0", 0.0, 0.0)
    assert fleet.stops == {}


def test_a_use_that_a_node_alone_has_seen_is_known_to_all() -> None:
    clock = Clock()
    fleet = clock.use()
    assert fleet.report("n0", 30.0, 0.0) == (30.0, 0.0, False, None)
    fleet.report("n1", 0.0, 0.0, True)
    assert fleet.report("n0", 30.0, 0.0) == (0.0, 0.0, True, None)


def test_who_asks_hears_it_at_once_and_nothing_before_a_node_has_said_something() -> None:
    clock = Clock()
    fleet = clock.use()
    assert fleet.idle_s is None
    fleet.report("n0", 300.0, 0.0, ends=False)
    clock.now += 50
    assert (fleet.idle_s, fleet.ends) == (350.0, False)
    # What came since the last report counts.
    fleet.note()
    clock.now += 3
    assert fleet.idle_s == 3.0
    clock.busy = True
    assert fleet.idle_s == 0.0
    clock.busy = False
    clock.now += 8
    assert fleet.idle_s == 8.0
    fleet.keep(60.0)
    assert fleet.idle_s == 0.0
    clock.now += 61
    assert fleet.idle_s == 69.0


def test_a_fleet_ends_where_a_node_does() -> None:
    fleet = Clock().use()
    fleet.report("n0", 1.0, 0.0, ends=False)
    assert not fleet.ends
    fleet.report("n1", 1.0, 0.0)
    assert fleet.ends
