"""The ledger of the head: it outlives heads and nodes, and no hour is in it twice."""

from __future__ import annotations

import asyncio
import json
import time
from pathlib import Path

import pytest

from skyinfra.hours import ledger as hours_ledger
from skyinfra.hours.ledger import FILE, Ledger
from skyinfra.protocol.readings import FleetHours, MachineRun, SlotUse

USE = SlotUse("2026-11-20", "ann@desk", "job", "train", 3600.0, 1800.0)


def run(node: str = "n1", machine: str = "a", began: float = 1000.0, seconds: float = 60.0) -> MachineRun:
    return MachineRun(node, machine, began, seconds)


def saved(ledger: Ledger, uses: list[SlotUse] | None = None) -> None:
    """A head that has served with *ledger* and ends."""
    given = uses or []

    def drain() -> list[SlotUse]:
        now = list(given)
        given.clear()
        return now

    async def serve() -> None:
        ledger.start(drain)
        await ledger.stop()

    asyncio.run(serve())


def test_the_next_head_knows_what_the_last_one_did(tmp_path: Path) -> None:
    first = Ledger(tmp_path / "jobs")
    first.take("n1", [run()])
    first.take("n2", [run("n2", "b"), run("n2", "b", 9000)])
    saved(first, [USE, USE])
    following = Ledger(tmp_path / "jobs")
    following.load()
    assert following.hours().ledger == first.hours().ledger
    # While no head was there, the machine ran on, and another one took its name.
    following.take("n1", [run(seconds=7200)])
    following.take("n1", [run("n1", "c", 9000, 30)])
    found = following.hours()
    assert [(each.node, each.machine, each.seconds) for each in found.runs] == [
        ("n1", "a", 7200),
        ("n2", "b", 60),
        ("n2", "b", 60),
        ("n1", "c", 30),
    ]
    assert [(each.slot_seconds, each.node_seconds) for each in found.uses] == [(7200, 3600)]
    assert FleetHours.read(json.loads(json.dumps(found.to_json()))) == found


def test_a_node_speaks_for_itself_alone(tmp_path: Path) -> None:
    ledger = Ledger(tmp_path)
    ledger.take("n1", [run("n2"), run(seconds=-5), run()])
    assert [each.node for each in ledger.hours().runs] == ["n1"]


@pytest.mark.parametrize("text", ["", "[]", '{"version": 2, "ledger": "x"}', '{"version": 1, "runs": {}}'])
def test_a_file_that_cannot_be_read_is_put_aside(tmp_path: Path, text: str) -> None:
    (tmp_path / FILE).write_text(text)
    ledger = Ledger(tmp_path)
    ledger.load()
    ledger.take("n1", [run()])
    saved(ledger)
    assert (tmp_path / f"{FILE}.unread").read_text() == text
    assert json.loads((tmp_path / FILE).read_text())["runs"][0]["node"] == "n1"


def test_a_node_whose_clock_is_wrong_ends_now(tmp_path: Path) -> None:
    ledger = Ledger(tmp_path)
    ledger.take("n1", [run(seconds=60), run(began=-5e9, seconds=3600)])
    first, last = ledger.hours().runs
    assert (first.began, first.seconds) == (1000, 60)
    assert abs(last.ended - ledger.hours().at) < 60 and last.seconds == 3600


def test_many_names_are_counted_together_and_no_hour_is_lost(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hours_ledger, "MOST", 10)
    ledger = Ledger(tmp_path)
    for number in range(50):
        ledger.take(f"n{number}", [run(f"n{number}", str(number), 1000 + number)])
    uses = [SlotUse("2026-11-20", f"u{number}", "task", "f" * 5000, 10.0, 5.0) for number in range(50)]
    saved(ledger, uses)
    found = ledger.hours()
    assert len(found.runs) <= 10 and sum(each.seconds for each in found.runs) == 50 * 60
    assert {each.node for each in found.runs} >= {"others", "n49"}
    assert len(found.uses) <= 11 and sum(each.slot_seconds for each in found.uses) == 500
    assert max(len(each.name) for each in found.uses) == 100


def test_thousands_of_machines_are_taken_in_a_moment(tmp_path: Path) -> None:
    ledger = Ledger(tmp_path)
    for number in range(3000):
        ledger.take(f"n{number}", [run(f"n{number}", str(number))])
    began = time.process_time()
    saved(ledger)
    assert len(ledger.hours().runs) == 3000
    assert (tmp_path / FILE).stat().st_size < 3000 * 120
    assert time.process_time() - began < 20, "no square of the machines"


def test_nothing_is_written_into_a_folder_that_was_removed(tmp_path: Path) -> None:
    ledger = Ledger(tmp_path / "jobs", lambda: True)
    ledger.take("n1", [run()])
    saved(ledger)
    assert not (tmp_path / "jobs").exists()


def test_a_disk_that_is_full_is_said_and_stops_nothing(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "file").touch()
    ledger = Ledger(tmp_path / "file" / "jobs")
    ledger.take("n1", [run()])
    saved(ledger)
    assert "cannot be written" in caplog.text
    assert ledger.hours().runs
