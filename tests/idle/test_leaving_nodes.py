"""When a node of a fleet whose size follows the work leaves it, look by look."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
from local_fleets.watched_node import World

from skyinfra.idle.meter import FILE
from skyinfra.idle.watch import IdleWatch
from skyinfra.node.node import Node


@dataclass
class Leaving:
    """A node that had no task for a while, and the answers of its head."""

    world: World
    allowed: bool | None = True
    asked: int = 0
    last: bool = False

    def start(self) -> None:
        async def retire(_: Node, last: bool) -> bool | None:
            self.asked += 1
            self.last = last
            return self.allowed

        self.world.node = self.world.start()
        self.world.node.retire = retire

    def look(self, seconds: float = 5.0) -> IdleWatch:
        return self.world.look(seconds, idle_seconds=0.0, node_idle_seconds=600.0)


@pytest.fixture
def leaving(world: World) -> Leaving:
    made = Leaving(world)
    made.start()
    made.look()
    return made


def test_a_node_without_tasks_asks_closes_looks_again_and_ends(leaving: Leaving) -> None:
    leaving.look(590.0)
    assert leaving.asked == 0 and leaving.world.drain is None
    leaving.look(20.0)
    drain = leaving.world.drain
    assert leaving.asked == 1 and drain is not None and drain.why == "it had no task for 10m (idle_seconds)"
    assert not leaving.world.asked
    leaving.world.closed = True
    for _ in range(2):
        leaving.look()
        assert not leaving.last and not leaving.world.asked
    leaving.look()
    assert leaving.last and leaving.world.asked and leaving.asked == 4


def test_a_node_that_the_head_needs_stays(leaving: Leaving) -> None:
    leaving.allowed = False
    for _ in range(20):
        leaving.look(600.0)
    assert leaving.asked > 10 and leaving.world.drain is None and not leaving.world.asked


def test_a_node_that_gets_a_task_while_it_is_about_to_end_serves_on(leaving: Leaving) -> None:
    # https://github.com/kubernetes-sigs/karpenter/issues/3185
    leaving.look(610.0)
    assert leaving.world.drain is not None
    leaving.world.runs = True
    leaving.world.closed = True
    leaving.look()
    assert leaving.world.drain is None and not leaving.world.asked
    leaving.world.runs = False
    leaving.look(590.0)
    assert leaving.world.drain is None, "the time begins anew"


def test_a_head_that_takes_it_back_between_two_looks(leaving: Leaving) -> None:
    leaving.look(610.0)
    leaving.world.closed = True
    leaving.look()
    leaving.allowed = False
    leaving.look()
    assert leaving.world.drain is None and not leaving.world.asked


def test_a_setup_is_no_idleness_of_a_node(leaving: Leaving) -> None:
    # https://github.com/skypilot-org/skypilot/issues/715
    leaving.world.ready = False
    (leaving.world.folder / FILE).unlink(missing_ok=True)
    leaving.world.now = 30.0
    leaving.start()
    leaving.look(1700.0)
    leaving.look(1700.0)
    assert leaving.asked == 0 and leaving.world.drain is None


def test_a_fleet_that_is_kept_lets_no_node_go(leaving: Leaving) -> None:
    leaving.world.head = (5000.0, 7200.0, True)
    leaving.look(610.0)
    leaving.look(610.0)
    assert leaving.asked == 0


def test_a_head_that_says_no_to_the_last_question_keeps_the_node(leaving: Leaving) -> None:
    leaving.look(610.0)
    leaving.world.closed = True
    leaving.look()
    leaving.look()
    leaving.allowed = False
    leaving.look()
    assert leaving.last and leaving.world.drain is None and not leaving.world.asked


def test_a_machine_that_was_told_to_end_takes_no_task_before_it_is_said_to_have_refused(leaving: Leaving) -> None:
    leaving.look(610.0)
    leaving.world.closed = True
    for _ in range(3):
        leaving.look()
    assert leaving.world.asked
    # Work that comes now is for another node: root ends this one at any moment.
    leaving.allowed = False
    leaving.look(30.0)
    assert leaving.world.drain is not None and leaving.world.node.over is not None
    leaving.look(40.0)
    assert leaving.world.drain is None and leaving.world.node.over is None


def test_a_head_that_is_away_for_a_moment_lets_no_node_go_and_one_that_stays_away_does(leaving: Leaving) -> None:
    leaving.world.head = (0.0, 0.0, True)
    leaving.allowed = False
    for _ in range(10):
        leaving.look(600.0)
    leaving.allowed = leaving.world.head = None
    for _ in range(5):
        leaving.look(600.0)
    assert leaving.world.drain is None
    leaving.look(700.0)
    drain = leaving.world.drain
    assert drain is not None and drain.why == "it had no task and no head for 1h"
    leaving.world.closed = True
    for _ in range(3):
        leaving.look()
    assert leaving.world.asked


def test_a_node_without_a_head_that_has_a_task_stays(leaving: Leaving) -> None:
    leaving.allowed, leaving.world.runs = None, True
    for _ in range(20):
        leaving.look(3600.0)
    assert leaving.world.drain is None and not leaving.world.asked


def test_a_machine_that_is_never_ready_ends_and_so_does_its_bill(leaving: Leaving) -> None:
    world = leaving.world
    world.ready, world.now = False, 30.0
    (world.folder / FILE).unlink(missing_ok=True)
    leaving.start()
    leaving.look()
    leaving.look(3500.0)
    assert world.drain is None
    leaving.look(100.0)
    assert world.drain is not None and world.drain.why == "it was not ready within 1h"
    world.closed = True
    for _ in range(3):
        leaving.look()
    assert world.asked and leaving.asked == 0
