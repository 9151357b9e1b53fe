"""A client that waits for nodes of a pool whose size follows the work is told why, since when, and what comes next."""

from __future__ import annotations

import time
from dataclasses import replace
from typing import Any

import pytest
from local_fleets.client_fixtures import open_pool

import skyinfra as sky
from skyinfra.client import notifying
from skyinfra.engine.notifications import Notice
from skyinfra.protocol.fleet import STATE_VERSION, FleetState, SizeState
from skyinfra.submission import lacks
from skyinfra.submission.lacks import Lacks
from skyinfra.submission.snapshot import Snapshot

REFUSED = SizeState(
    0,
    4,
    1,
    1,
    1e9,
    "3 tasks wait for a slot",
    "no room",
    lack="refused",
    said="no more nodes have come for 1m: no room",
)


@sky.compute
def holds(seconds: float) -> None:
    time.sleep(seconds)


def state(size: SizeState | None) -> FleetState:
    return FleetState(STATE_VERSION, size=size)


def test_each_reason_is_said_once_in_a_while(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    # https://github.com/ray-project/ray/issues/29026: the same line every ten seconds.
    now = 1000.0
    monkeypatch.setattr(lacks.time, "monotonic", lambda: now)
    said = Lacks("demo/cpu")
    starting = replace(REFUSED, lack="starting", said="1 of 1 node has been starting for 2s")
    for _ in range(100):
        for size in (None, replace(REFUSED, lack="", said=""), starting, REFUSED):
            said.tell(state(size))
        now += 2
    assert capsys.readouterr().err.splitlines() == [
        "demo/cpu: work waits: 1 of 1 node has been starting for 2s",
        "demo/cpu: work waits: no more nodes have come for 1m: no room",
    ]
    now += 900
    said.tell(state(REFUSED))
    said.tell(None)
    assert capsys.readouterr().err.count("\n") == 1


def test_what_a_cloud_says_moves_no_cursor(capsys: pytest.CaptureFixture[str]) -> None:
    Lacks("demo/cpu").tell(state(replace(REFUSED, said="no \x1b[2J room")))
    assert "\x1b" not in capsys.readouterr().err


def test_a_fleet_of_before_says_nothing_of_it() -> None:
    assert "lack" not in replace(REFUSED, lack="", said="").to_json()
    assert SizeState.read(REFUSED.to_json()) == REFUSED


def test_who_has_no_slot_is_told_and_who_has_one_is_not(
    fleets: Any, capfd: pytest.CaptureFixture[str], wait_until: Any
) -> None:
    fleet = fleets(nodes=["n0"], slots=1)
    with open_pool(fleet.manifest) as first, open_pool(fleet.manifest) as second:
        first._fleet.in_loop(first._fleet.connection.head.test_size(size=REFUSED.to_json()))
        running = first.submit(holds(3600.0))
        wait_until(lambda: any(first.running().values()))
        capfd.readouterr()
        waiting = second.submit(holds(0.0))
        seen: list[str] = []

        def told() -> bool:
            seen.append(capfd.readouterr().err)
            return "work waits" in "".join(seen)

        wait_until(told)
        # Two looks later: the one that has the slot is still told nothing, and the other one nothing more.
        time.sleep(3)
        text = "".join([*seen, capfd.readouterr().err])
        assert text.count(f"{fleet.manifest.fleet}: work waits: no more nodes have come for 1m: no room\n") == 1
        running.cancel()
        waiting.result(timeout=60)


def test_targets_are_notified_once_that_no_more_nodes_are_started(monkeypatch: pytest.MonkeyPatch) -> None:
    sent: list[Notice] = []
    over = iter([False, False, False, True])
    monkeypatch.setattr(notifying, "send", lambda targets, notice: sent.append(notice))

    class Pool:
        manifest = type("Manifest", (), {"fleet": "demo/cpu", "nodes": ()})()
        looks = iter([REFUSED, *[replace(REFUSED, lack="stopped")] * 3])

        def look(self) -> Snapshot:
            return Snapshot((), state=state(next(self.looks)))

    class Over:
        def wait(self, seconds: float) -> bool:
            return next(over)

    notifying._watch(["command:true"], Pool(), Over())  # type: ignore[arg-type]
    [notice] = sent
    assert (notice.state, notice.problem) == ("size", "starts no more nodes: no room")
