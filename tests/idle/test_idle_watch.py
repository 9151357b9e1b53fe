"""When a node ends itself, look by look: with clocks, drains by hand, terminals, and machines that stay even so."""

from __future__ import annotations

import errno
import os
import tempfile
import time
from pathlib import Path

import pytest
from devices.small_disks import disk
from local_fleets.watched_node import IDLE, World

from skyinfra.drain import request
from skyinfra.drain.request import Drain
from skyinfra.errors import NodeFailed, StateDirectoryError
from skyinfra.idle import ending, meter
from skyinfra.idle.meter import FILE, Meter
from skyinfra.node import folder
from skyinfra.node.folder import NodeDirectory
from skyinfra.protocol.nodeconfig import SETUP_S, NodeBudget


def test_slots_are_closed_looked_at_twice_and_then_the_machine_ends(world: World) -> None:
    world.used_once()
    assert world.look(IDLE - 10).over is None and world.drain is None
    world.look(20)
    assert world.drain is not None and (world.drain.by, world.drain.until) == (request.IDLE, None)
    assert world.look().over is None
    world.closed = True
    for _ in range(2):
        assert world.look().over is None and not world.asked
    assert world.look().over == "not used for 30m (stop_after_idle)"
    assert world.asked


def test_a_task_that_is_still_there_takes_it_back(world: World) -> None:
    """karpenter#3185."""
    world.used_once()
    world.look(IDLE + 10)
    world.closed = world.runs = True
    for _ in range(5):
        assert world.look().over is None
    assert world.drain is None and not world.asked
    world.runs = False
    assert world.look(IDLE - 60).over is None and world.drain is None


def test_a_use_that_the_head_has_seen_takes_it_back(world: World) -> None:
    world.used_once()
    world.look(IDLE + 10)
    world.closed = True
    world.look()
    world.head = 0.0, 0.0, True
    assert world.look().over is None and world.drain is None
    world.head = None
    assert world.look().over is None and world.drain is None


def test_a_machine_that_refuses_to_end_is_asked_again_and_says_so(world: World) -> None:
    world.used_once()
    world.look(IDLE + 10)
    world.closed = True
    for _ in range(3):
        world.look()
    assert world.asked and world.node.problem is None
    assert world.look(30).problem is None and not world.asked
    problem = world.look(40).problem
    assert problem is not None and "is still there: not used for 30m" in problem
    assert world.asked
    assert world.drain is not None  # and it takes no tasks


def test_a_runner_that_is_started_again_meanwhile_goes_on(world: World) -> None:
    world.used_once()
    world.look(IDLE + 10)
    world.node = world.start()
    world.closed = True
    for _ in range(3):
        world.look()
    assert world.asked


def test_a_machine_that_had_stopped_and_is_started_again_begins_anew(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its lifetime as well: it would end again at once. Until it has booted again, it is the one that is to end."""
    world.used_once()
    world.look(IDLE, idle_seconds=0.0, lifetime_seconds=IDLE)
    assert world.node.over is not None and world.asked
    world.node = world.start()
    world.look()
    assert world.node.over is not None
    for module in (meter, request):
        monkeypatch.setattr(module, "this_boot", lambda: "the next")
    world.now, world.node = 20.0, world.start()
    assert world.look().over is None and world.drain is None
    assert world.look(IDLE - 60).over is None
    assert world.look(60).over is not None


def test_a_container_that_was_killed_and_is_deployed_again_is_not_ended_at_once(world: World) -> None:
    (world.folder / "systemd").rmdir()
    world.used_once()
    world.look(IDLE - 10)
    world.node = world.start()
    assert world.look(3 * IDLE).stops is None and world.drain is None
    # It has a lifetime all the same, and ends where nobody uses it.
    assert Meter.load(world.folder / FILE).lived_s > 3 * IDLE
    world.look(IDLE + 1)
    assert world.drain is not None and world.drain.by == request.IDLE


def test_an_apply_beside_it_is_a_use(world: World) -> None:
    world.used_once()
    world.look(IDLE + 10)
    world.closed = True
    world.look(env={"A": "1"})
    assert world.node.over is None and world.drain is None
    assert world.look(IDLE - 10).over is None


def test_a_setup_is_not_idle_for_a_day(world: World) -> None:
    """skypilot#715."""
    world.ready = False
    for _ in range(10):
        assert world.look(3600).over is None and world.drain is None
    assert world.node.stops is None


def test_a_machine_that_is_never_ready_ends(world: World) -> None:
    """Its packages cannot be installed, or its head has ended before it came."""
    world.ready, world.closed = False, True
    world.look()
    world.look(SETUP_S)
    assert world.look(IDLE - 10).over is None and world.drain is None
    # Its runner fails at each start: no second look comes.
    world.node = world.start()
    world.look(20)
    assert world.node.over == "it was not ready within 1d" and world.asked


def test_a_machine_that_is_never_ready_and_has_tasks_or_a_fleet_that_is_used_stays(world: World) -> None:
    """One of its slots is missing, for instance."""
    world.ready, world.runs = False, True
    for _ in range(5):
        assert world.look(SETUP_S).over is None
    world.runs, world.head = False, (0.0, 0.0, True)
    for _ in range(5):
        assert world.look(SETUP_S).over is None and world.drain is None
    world.head = None
    world.look(IDLE + 10)
    # Its slots are closed first.
    assert world.node.over is None and world.drain is not None
    world.closed = True
    assert world.look().over == "it was not ready within 1d"


def test_a_container_that_is_started_again_is_set_up_as_long_as_before(world: World) -> None:
    (world.folder / "systemd").rmdir()
    world.ready = False
    world.look()
    world.node = world.start()
    world.look(2 * SETUP_S)
    world.closed = True
    for _ in range(10):
        assert world.look(3600).over is None and world.drain is None


def test_a_fleet_that_nothing_has_used_waits_for_nodes_that_boot(world: World) -> None:
    for _ in range(3):
        world.look(300, idle_seconds=300.0)
        assert world.drain is None
    world.look(300)
    assert world.drain is not None


def test_a_drain_by_hand_stays_and_keeps_nothing(world: World) -> None:
    by_hand = Drain(request.VERSION, request.OPERATOR, "drained by hand")
    request.write(world.directory, by_hand)
    world.used_once()
    world.closed = True
    world.look(IDLE + 10)
    assert world.drain == by_hand
    for _ in range(3):
        world.look()
    assert world.asked
    world.runs = True
    world.look()
    assert world.drain == by_hand


def recommended() -> Drain:
    return Drain(request.VERSION, "aws", "AWS recommends to leave", None, request.this_boot(), if_others=True)


def test_a_recommendation_that_nobody_follows_keeps_nothing(world: World) -> None:
    world.used_once()
    request.write(world.directory, recommended())
    world.look(IDLE + 10)
    assert world.drain is not None and world.drain.by == request.IDLE
    world.closed = True
    for _ in range(3):
        world.look()
    assert world.asked


def test_a_recommendation_that_the_node_follows_holds_after_its_end_is_taken_back(world: World) -> None:
    world.used_once()
    request.write(world.directory, recommended())
    world.closed = True
    world.look(IDLE + 10)
    world.runs = True
    world.look()
    assert world.drain == recommended()


def test_a_lifetime_is_said_to_tasks_where_a_recommendation_is_not_followed(world: World) -> None:
    world.runs = True
    world.look(idle_seconds=0.0, lifetime_seconds=7200.0)
    request.write(world.directory, recommended())
    world.look(7100)
    assert world.drain is not None and world.drain.by == request.LIFETIME


def test_it_warns_before(world: World) -> None:
    world.used_once()
    assert world.look(IDLE - 700).stops is None
    assert world.look(350).stops == "stops in 6m: nothing has used it for 30m then (stop_after_idle)"
    assert world.look(300).stops == "stops in less than a minute: nothing has used it for 30m then (stop_after_idle)"
    world.runs = True
    assert world.look().stops is None


def test_a_lifetime_ends_what_runs_and_says_so_to_tasks(world: World) -> None:
    """skypilot#10628."""
    world.runs = True
    world.look(idle_seconds=0.0, lifetime_seconds=7200.0)
    assert world.look(6000).stops is None
    assert world.look(700).stops == "ends in 9m: its max_lifetime of 2h is over then, whatever runs"
    assert world.drain is None
    world.look(400)
    assert world.drain is not None and world.drain.by == request.LIFETIME
    assert world.drain.until is not None and 60 < world.drain.until - time.time() < 120
    world.look(110)
    assert world.node.over == "its max_lifetime of 2h is over" and world.asked


def test_a_budget_ends_what_runs_by_the_account_of_the_head(world: World) -> None:
    budget = NodeBudget(usd=200.0, head=25.0, node=25.0, pool=50.0)
    world.runs = True
    world.head = 0.0, 0.0, True, 7200.0
    # Of two nodes: for four hours. The head knows of machines that were there before.
    assert world.look(idle_seconds=0.0, budget=budget).stops is None
    world.head = None  # it is gone for good
    world.look(6800)
    assert world.node.stops == "ends in 7m: the budget of $200.00 is spent then, whatever runs"
    world.head = 0.0, 0.0, True, 9000.0  # the other node was away
    assert world.look(20).stops is None
    world.head = None
    world.look(8900)
    assert world.drain is not None and world.drain.why == "the budget of $200.00"
    world.look(110)
    assert world.node.over == "the budget of $200.00 is spent" and world.asked


def test_a_node_that_never_heard_of_the_account_lives_for_an_hour(world: World) -> None:
    """A budget that only the head enforces fails open; that of a head that has ended is spent."""
    budget = NodeBudget(usd=200.0, head=25.0, node=25.0, pool=50.0)
    world.ready = False
    # The meter begins with the first look.
    assert world.look(idle_seconds=0.0, budget=budget).over is None
    assert world.look(3500.0).over is None
    world.look(110.0)
    assert world.node.over == "the budget of $200.00 is spent" and world.asked


def test_a_node_whose_head_keeps_no_account_lives_as_long_as_all_nodes_may(world: World) -> None:
    budget = NodeBudget(usd=200.0, head=25.0, node=25.0, pool=50.0)
    world.ready, world.head = False, (0.0, 0.0, False)
    world.look(idle_seconds=0.0, budget=budget)
    world.head = None
    assert world.look(3 * 3600.0).over is None
    world.look(3600.0 + 10)
    assert world.node.over == "the budget of $200.00 is spent" and world.asked


def test_of_a_budget_and_a_lifetime_the_first_counts(world: World) -> None:
    budget = NodeBudget(usd=200.0, head=25.0, node=25.0, pool=50.0)
    world.head = (0.0, 0.0, False)
    world.look(2 * 3600.0, lifetime_seconds=7200.0, budget=budget)
    assert world.node.over is None
    world.look(3600.0 * 2)
    assert world.node.over == "its max_lifetime of 2h is over"


def test_another_lifetime_takes_it_back(world: World) -> None:
    world.look(idle_seconds=0.0, lifetime_seconds=7200.0)
    world.look(7150)
    assert world.drain is not None and world.drain.by == request.LIFETIME
    world.look(lifetime_seconds=14_400.0)
    assert world.drain is None and world.node.over is None and world.node.stops is None


def test_a_terminal_in_which_somebody_types_is_a_use_and_a_silent_one_is_none(world: World) -> None:
    terminal = world.folder / "pts" / "3"
    terminal.touch()
    (world.folder / "pts" / "ptmx").touch()
    world.used_once()
    for _ in range(3):
        world.look(500)
    os.utime(terminal, (5e9, 1.0))  # what was typed last, by a clock that jumps
    assert world.look(500).over is None and world.drain is None
    world.look(IDLE + 10)
    assert world.drain is not None


def test_the_terminals_of_this_machine_are_none_of_a_local_node(world: World) -> None:
    (world.folder / "pts" / "3").touch()
    world.runs = True
    world.look(folder=None)
    world.runs = False
    os.utime(world.folder / "pts" / "3", (5e9, 1.0))
    world.look(IDLE + 10)
    assert world.drain is not None


def test_a_kept_fleet_stays(world: World) -> None:
    world.used_once()
    world.head = 0.0, 7200.0, True
    world.look()
    world.head = None
    for _ in range(7):
        assert world.look(1000).over is None and world.drain is None
    # It is over, and the fleet idle from then on.
    world.look(1000)
    assert world.drain is None
    world.look(IDLE)
    assert world.drain is not None


def test_a_full_disk_ends_nothing_wrongly(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise StateDirectoryError("cannot be written: No space left on device")

    world.used_once()
    monkeypatch.setattr(world.directory, "write", refuse)
    world.look(IDLE + 10)
    assert world.node.over is None
    assert Meter.load(world.folder / FILE).idle_s == 0.0


def test_a_node_that_declares_no_end_counts_all_the_same(world: World) -> None:
    with pytest.raises(NodeFailed, match="has just started"):
        world.node.use(False)
    # Before it is ready once, nothing counts: a fleet that boots is not idle.
    world.ready = False
    world.look(3600.0, idle_seconds=0.0)
    assert world.look(3600.0).use(False) == {"idle_s": 0.0, "keep_s": 0.0}
    world.ready = True
    world.look()
    assert world.look(60.0).use(False)["idle_s"] == 60.0
    # A program of `skyinfra exec` since the last look.
    assert world.node.use(True)["idle_s"] == 0.0
    assert (world.node.over, world.node.stops, world.drain) == (None, None, None)
    # A shell of `skyinfra ssh` in which somebody types.
    (world.folder / "pts" / "1").touch()
    assert world.node.use(False)["idle_s"] == 0.0
    assert world.look(60.0).use(False)["idle_s"] == 0.0
    assert world.look(1e6).use(False)["idle_s"] == 1e6
    assert (world.node.over, world.node.stops, world.drain) == (None, None, None)
    world.runs = True
    assert world.look().use(False)["idle_s"] == 0.0
    world.runs, world.head = False, (5.0, 3600.0, True)
    assert world.look(60.0).use(False) == {"idle_s": 0.0, "keep_s": 3600.0}


def fill(patch: pytest.MonkeyPatch) -> None:
    """Fills the disk: files can be made, nothing can be written to them."""

    def refuse(*_: object, **__: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    patch.setattr(tempfile, "mkstemp", refuse)


def test_a_full_disk_keeps_no_idle_node(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    world.used_once()
    fill(monkeypatch)
    # Its slots stay open: a task that comes meanwhile takes it back.
    assert world.look(IDLE + 10).over is None and world.drain is None
    world.runs = True
    assert world.look().over is None
    world.runs = False
    world.look(IDLE + 10)
    for _ in range(2):
        assert world.node.over is None and not world.asked
        world.look()
    assert world.node.over == "not used for 30m (stop_after_idle)" and world.asked


def test_a_disk_that_has_become_read_only_keeps_no_idle_node(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Root looks at the runner's own folder, which is in memory, as well."""
    monkeypatch.setattr(folder, "_RUN", tmp_path)
    own = tmp_path / "skyinfra-runner"
    own.mkdir()
    with disk(tmp_path / "node") as small:
        world = World(small.path, monkeypatch)
        world.node.directory = NodeDirectory(small.path, tmp_path)
        world.used_once()
        small.read_only()
        for _ in range(4):
            world.look(IDLE + 10)
        assert world.node.over == "not used for 30m (stop_after_idle)"
        assert (own / ending.REQUEST).exists() and not (small.path / ending.REQUEST).exists()


def test_a_full_disk_keeps_no_node_beyond_its_lifetime(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    world.look(idle_seconds=0.0, lifetime_seconds=7200.0)
    fill(monkeypatch)
    world.look(7300)
    assert world.node.over == "its max_lifetime of 2h is over" and world.asked
