"""The meter of a node, with clocks that jump, runners that are killed and machines that are booted again."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from skyinfra.errors import InvalidNodeConfig
from skyinfra.idle.meter import FILE, Meter, since_boot, span
from skyinfra.protocol.nodeconfig import SETUP_S

SERVED = Meter(boot="a", at=100.0, served=True, config="c")


def later(meter: Meter, now: float, **given: object) -> Meter:
    return meter.advanced(**{"boot": "a", "now": now, "ready": True, "config": "c", **given})  # type: ignore[arg-type]


def test_it_counts_from_the_last_use() -> None:
    assert later(SERVED, 160.0).idle_s == 60.0
    assert later(later(SERVED, 160.0).used(), 190.0).idle_s == 30.0
    assert later(later(SERVED, 160.0).used(), 190.0).lived_s == 90.0


def test_a_setup_is_not_idle_for_a_day() -> None:
    meter = Meter(boot="a", at=0.0, config="c")
    for now in (600.0, 1200.0, 7200.0, SETUP_S - 100):
        meter = later(meter, now, ready=False)
        assert (meter.idle_s, meter.lived_s) == (0.0, now)
    end = SETUP_S + 100
    assert later(meter, end).idle_s == 0.0
    assert later(later(meter, end), end + 60).idle_s == 60.0


def test_a_node_that_is_not_ready_after_a_day_is_idle_from_then_on() -> None:
    meter = later(Meter(boot="a", at=0.0, config="c"), SETUP_S + 1, ready=False)
    assert meter.idle_s == 0.0
    meter = later(meter, SETUP_S + 61, ready=False)
    assert (meter.idle_s, meter.served) == (60.0, False)
    assert later(meter.heard(5.0, 0.0, True), SETUP_S + 71, ready=False).idle_s == 15.0
    # It is ready after all, or boots again: the time begins anew.
    assert later(meter, SETUP_S + 71).idle_s == 0.0
    again = later(meter, 100.0, boot="b", ready=False)
    assert later(again, 200.0, boot="b", ready=False).idle_s == 0.0


def test_one_that_was_ready_and_has_lost_its_slots_is_idle() -> None:
    """Its head is gone, for instance: nothing makes it ready again."""
    assert later(SERVED, 1900.0, ready=False).idle_s == 1800.0


def test_a_machine_that_was_booted_again_is_not_idle_and_has_lived_as_long() -> None:
    meter = replace(SERVED, idle_s=1750.0, lived_s=5000.0)
    again = later(meter, 30.0, boot="b", ready=False)
    assert (again.idle_s, again.lived_s, again.served) == (0.0, 5030.0, False)
    # Its setup takes long; then it counts from the beginning.
    again = later(again, 900.0, boot="b", ready=True)
    assert (again.idle_s, again.lived_s) == (0.0, 5900.0)


def test_a_clock_that_goes_back_takes_nothing_away() -> None:
    meter = later(replace(SERVED, idle_s=50.0, lived_s=70.0), 20.0)
    assert (meter.idle_s, meter.lived_s) == (50.0, 70.0)


def test_the_time_of_day_moves_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    meter = Meter(boot="a", at=since_boot(), served=True, config="c")
    monkeypatch.setattr("time.time", lambda: 4e9)
    assert later(meter, since_boot()).idle_s < 60


def test_a_killed_runner_goes_on_with_the_file(tmp_path: Path) -> None:
    meter = replace(later(SERVED, 160.0), keep_s=7.0)
    (tmp_path / FILE).write_text(meter.dumps())
    found = Meter.find(tmp_path)
    assert found == meter
    # What passed while no runner was there counts too.
    assert later(found, 400.0).idle_s == 300.0


def test_a_configuration_that_has_changed_is_a_use() -> None:
    assert later(SERVED, 1900.0, config="d").idle_s == 0.0


def test_what_the_head_knows_counts_where_it_is_less() -> None:
    meter = later(SERVED, 160.0)
    assert meter.heard(5.0, 0.0, False).idle_s == 5.0
    assert meter.heard(500.0, 0.0, False).idle_s == 60.0
    assert meter.heard(-1.0, 0.0, False).idle_s == 0.0
    assert meter.heard(500.0, 90.0, False).keep_s == 90.0


def test_whether_there_was_a_use_is_known_until_the_next_boot() -> None:
    assert not SERVED.heard(0.0, 0.0, False).begun
    assert SERVED.heard(50.0, 0.0, True).begun and SERVED.used().heard(50.0, 0.0, False).begun
    assert later(SERVED.used(), 160.0).begun
    assert not later(SERVED.used(), 160.0, boot="b").begun


def test_keeping_ends_without_the_head_too() -> None:
    assert later(replace(SERVED, keep_s=90.0), 160.0).keep_s == 30.0
    assert later(replace(SERVED, keep_s=90.0), 260.0).keep_s == 0.0


def test_one_that_ended_itself_begins_anew(tmp_path: Path) -> None:
    (tmp_path / FILE).write_text(replace(SERVED, idle_s=1800.0, lived_s=9000.0, ended="not used for 30m").dumps())
    found = Meter.find(tmp_path)
    assert (found.idle_s, found.lived_s, found.ended) == (0.0, 0.0, None)


@pytest.mark.parametrize("text", ["", "{", "[]", '{"version": 2}', '{"version": 1, "idle_s": "x"}'])
def test_a_spoiled_file_is_a_new_meter(tmp_path: Path, text: str) -> None:
    (tmp_path / FILE).write_text(text)
    assert Meter.find(tmp_path).lived_s == 0.0
    with pytest.raises(InvalidNodeConfig):
        Meter.load(tmp_path / FILE)


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(1800, "30m"), (5400, "1h 30m"), (43_200, "12h"), (45, "45s"), (0, "0s"), (93_784, "1d 2h"), (0.4, "0s")],
)
def test_lengths_of_time(seconds: float, text: str) -> None:
    assert span(seconds) == text
