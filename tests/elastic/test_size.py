"""Which nodes may end: asked by the nodes themselves, of a head that knows what waits, runs and is leased."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from distributed.core import Status

from skyinfra.elastic import size
from skyinfra.elastic.size import FleetSize
from skyinfra.idle.use import FleetUse
from skyinfra.mig import Follow, Placement
from skyinfra.node.folder import NodeDirectory
from skyinfra.protocol.fleet import NodeFailure
from skyinfra.protocol.nodeconfig import NodeAccelerator, NodeConfig


@dataclass
class Place:
    """A place that gives what it is asked for, or not."""

    asked: list[int] = field(default_factory=list)
    boot_s: float = 0.0
    patience_s: float = 100.0
    made: str = "of this"
    failed: list[str] = field(default_factory=list)

    def broken(self) -> list[str]:
        found, self.failed = self.failed, []
        return found

    def made_of(self) -> str:
        return self.made

    def where(self) -> str:
        return ""

    def bounds(self) -> None:
        return None

    def held(self) -> None:
        return None

    def problem(self) -> None:
        return None

    def tend(self) -> None:
        pass

    def ask(self, size: int) -> None:
        self.asked.append(size)

    async def close(self) -> None:
        pass


class World:
    """A head whose fleet may have 0 to 4 nodes."""

    def __init__(self, folder: Path, patch: pytest.MonkeyPatch, least: int = 0) -> None:
        self.scheduler: Any = SimpleNamespace(
            workers={}, unrunnable=[], queued=[], leased=set(), gangs={}, handlers={}, size_state=None
        )
        self.failures: dict[str, NodeFailure] = {}
        self.told: list[tuple[str, str]] = []
        self.scheduler.boot_failures = lambda within_s: dict(self.failures)
        self.scheduler.use = FleetUse(lambda: False)
        self.scheduler.use.on_stops = lambda node, text: self.told.append((node, text))
        self.place, self.now = Place(), 1000.0
        self.jobs: dict[str, dict[str, float]] = {}
        patch.setattr(size, "group_of", lambda *_: self.place)
        patch.setattr(size, "since_boot", lambda: self.now)
        self.folder, self.config = (
            folder,
            NodeConfig(
                1, "d", "p", "p-0", "local", True, "h:1", cpu_slots=1, scheduler_only=True, min_nodes=least, max_nodes=4
            ),
        )
        self.start()

    def start(self) -> None:
        """Another head."""
        self.head = FleetSize(self.scheduler, lambda: self.jobs, NodeDirectory(self.folder), lambda: "h:1")

        async def update() -> None:
            self.head.update(self.config)
            await self.head.close()

        asyncio.run(update())

    def node(self, name: str, *tasks: str) -> None:
        processing = [SimpleNamespace(key=each, resource_restrictions={"slot": 1}) for each in tasks]
        self.scheduler.workers[name] = SimpleNamespace(
            name=f"{name}/0", status=Status.running, processing=processing, resources={"slot": 1, f"node:{name}": 1}
        )

    def waits(self, *keys: str) -> None:
        self.scheduler.unrunnable = [SimpleNamespace(key=key, resource_restrictions={"slot": 1}) for key in keys]

    def look(self, seconds: float = 1.0, at: float = 5e9) -> None:
        self.now += seconds
        self.head._look(self.config, self.place, self.now, at)


@pytest.fixture
def world(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[World]:
    yield World(tmp_path, monkeypatch)


def test_a_node_without_a_task_may_go_and_the_size_says_so(world: World) -> None:
    world.node("a")
    world.node("b", "t")
    world.look()
    assert world.head.retire("a", False) and not world.head.retire("b", False)
    assert world.head.retire("a", True)
    world.look()
    # It is none of the fleet any more, whether it is still there or not.
    for _ in range(2):
        state = world.scheduler.size_state
        assert (state.nodes, state.wanted, state.why) == (1, 1, "a had no task for a while") and world.place.asked == []
        world.scheduler.workers.pop("a", None)
        world.look()


def test_the_least_stays_whoever_asks_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    world = World(tmp_path, monkeypatch, least=2)
    for name in "abc":
        world.node(name)
    world.look()
    # All of them in the same moment, and again.
    assert [world.head.retire(name, False) for name in "abcabc"] == [True, False, False, True, False, False]


def test_a_node_whose_slots_a_gang_has_stays(world: World) -> None:
    world.node("a")
    world.node("b")
    world.look()
    world.scheduler.leased = {"a/0"}
    assert not world.head.retire("a", False) and world.head.retire("b", False)
    world.scheduler.leased, world.scheduler.gangs = set(), {"gang": False}
    assert not world.head.retire("a", False) and not world.head.retire("b", False)


def test_a_node_that_was_let_go_is_called_back_by_work(world: World) -> None:
    # https://github.com/kubernetes-sigs/karpenter/issues/3185
    world.node("a")
    world.look()
    assert world.head.retire("a", False)
    world.scheduler.workers["a"].status = Status.paused
    world.waits("t1")
    world.look()
    world.look()
    assert not world.head.retire("a", False)


def test_work_that_comes_while_nodes_end_gets_others_at_once(world: World) -> None:
    # The group has shrunk by those that end: who counts them as there waits for what nobody starts.
    for name in "abcd":
        world.node(name)
    world.look()
    for name in "abcd":
        assert world.head.retire(name, False) and world.head.retire(name, True)
        world.scheduler.workers[name].status = Status.paused
    world.look()
    assert world.scheduler.size_state.wanted == 0
    world.waits("t1", "t2")
    world.look()
    world.look()
    assert world.place.asked == [2]
    world.scheduler.workers.clear()
    world.look()
    assert world.scheduler.size_state.wanted == 2


def test_work_that_waits_for_a_closed_slot_has_it_back_before_the_last_question(world: World) -> None:
    # https://github.com/kubernetes-sigs/karpenter/issues/3185
    world.node("a")
    world.look()
    assert world.head.retire("a", False)
    world.scheduler.workers["a"].status = Status.paused
    world.waits("t1")
    assert not world.head.retire("a", True), "the head has not even looked since"


def test_a_node_that_refuses_to_end_is_counted_again_once_it_is_needed(world: World) -> None:
    world.node("a")
    world.look()
    assert world.head.retire("a", False)
    # It asks again and again, and lowers nothing twice.
    world.node("b", "t")
    world.look()
    for _ in range(20):
        assert world.head.retire("a", True)
        world.look(5.0)
    assert world.scheduler.size_state.wanted == 1
    world.waits("t1")
    assert not world.head.retire("a", True)
    world.look()
    # It was asked for one once, to see whether the place takes it.
    assert world.scheduler.size_state.nodes == 2 and world.place.asked == [1]


def test_a_node_that_said_it_ends_and_says_nothing_more_is_counted_again(world: World) -> None:
    world.node("a")
    world.look()
    assert world.head.retire("a", True)
    world.look(1000.0)
    assert world.scheduler.size_state.nodes == 1


def test_work_asks_for_nodes_and_at_most_for_so_many(world: World) -> None:
    world.waits(*(f"t{number}" for number in range(20)))
    world.look()
    assert world.place.asked == [], "it may have a slot in a moment"
    world.look()
    world.look()
    assert world.place.asked == [4] and world.scheduler.size_state.why == "20 tasks wait for a slot"


def test_a_task_that_only_another_layout_takes_asks_for_a_node_and_keeps_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    world = World(tmp_path, monkeypatch)
    small = tuple(Placement("1g.10gb", start, 1) for start in range(7))
    world.config = replace(
        world.config,
        cpu_slots=0,
        accelerator=NodeAccelerator("H100", "nvidia", 2, 80.0, "h100_80gb", (small, ())),
        follow=Follow(["1g.10gb*7", "3g.40gb*2"]),
    )
    world.start()
    # No layout has it.
    world.scheduler.unrunnable = [SimpleNamespace(key="no", resource_restrictions={"slot": 1, "profile:7g.80gb": 1})]
    for _ in range(3):
        world.look()
    assert world.place.asked == []
    world.scheduler.unrunnable = [
        SimpleNamespace(key=key, resource_restrictions={"slot": 1, "profile:3g.40gb": 1}) for key in "ab"
    ]
    for _ in range(3):
        world.look()
    assert world.place.asked == [1] and world.scheduler.size_state.why == "a task waits for another layout"
    world.node("n")
    world.look()
    assert world.scheduler.size_state.wanted == 1 and not world.head.retire("n", False)
    world.scheduler.unrunnable = []
    world.look()
    assert world.head.retire("n", False)


def test_a_job_that_waits_asks_for_a_node_and_keeps_those_that_could_run_it(world: World) -> None:
    world.jobs = {"j1": {"slot": 1}}
    for _ in range(3):
        world.look()
    assert world.place.asked == [1]
    world.node("a")
    assert not world.head.retire("a", False)


def test_a_gang_asks_for_its_nodes(world: World) -> None:
    world.node("a")
    world.look()
    world.head.demand("gang", 3, {"slot": 1.0}, 1)
    world.look()
    assert world.place.asked == [3] and world.scheduler.size_state.why == "a gang waits for 3 nodes"
    assert not world.head.retire("a", False)
    world.look(60.0)
    assert world.head.retire("a", False), "a gang that says nothing any more waits no longer"


def test_a_gang_behind_another_gang_gets_nodes_of_its_own_and_no_more(world: World) -> None:
    for name in "ab":
        world.node(name)
    world.scheduler.leased, world.scheduler.gangs = {"a/0", "b/0"}, {"first": True, "second": False}
    world.look()
    world.head.demand("second", 2, {"slot": 1.0}, 1)
    world.look()
    assert world.place.asked == [4]
    for name in "cd":
        world.node(name)
    world.scheduler.leased, world.scheduler.gangs = {"a/0", "b/0", "c/0", "d/0"}, {"first": True, "second": True}
    for _ in range(5):
        world.look()
    assert world.place.asked == [4] and world.scheduler.size_state.wanted == 4


def test_a_task_of_a_slot_that_is_gone_starts_no_node(world: World) -> None:
    world.scheduler.unrunnable = [SimpleNamespace(key="t", resource_restrictions={"slot": 1, "node:gone": 1})]
    for _ in range(5):
        world.look()
    assert world.place.asked == []


def test_a_clock_that_jumps_changes_nothing(world: World) -> None:
    world.waits("t")
    for at in (5e9, 5e9 + 1e6, 1.0, 5e9):
        world.look(at=at)
    assert world.place.asked == [1]


def test_a_head_that_starts_anew_goes_on_with_the_size(world: World) -> None:
    world.waits("t1", "t2", "t3")
    world.look()
    world.look()
    assert world.place.asked == [3]
    world.start()
    for _ in range(30):
        world.look()
    assert world.place.asked == [3] and world.scheduler.size_state.wanted == 3
    (world.folder / "size.json").write_text('{"size": "many"')
    world.start()
    world.look()


def test_two_heads_for_a_moment_let_no_node_go_twice(world: World) -> None:
    world.node("a")
    world.node("b")
    world.look()
    first = world.head
    assert first.retire("a", False)
    world.start()
    world.look()
    # The node asks one of them, and the other counts it for as long as it is there.
    assert world.head.retire("b", False) and world.head.retire("a", False)
    world.config = NodeConfig(**{**vars(world.config), "min_nodes": 1})
    world.start()
    world.look()
    assert world.head.retire("b", False) and not world.head.retire("a", False)


def fail(world: World, *nodes: str) -> None:
    """Machines say that they could not be set up."""
    world.failures = {node: NodeFailure("packages", "404") for node in nodes}


def test_machines_that_become_no_nodes_are_counted_and_the_webhooks_of_jobs_are_told_once(world: World) -> None:
    world.waits("t1", "t2")
    for number in range(3):
        for _ in range(500):
            world.look()
            if world.place.asked and world.place.asked[-1]:
                break
        world.place.asked.clear()
        fail(world, *(f"p-{number}-{each}" for each in range(2)))
        world.look()
        world.look()
    [(node, text)] = world.told
    assert node == "p-0" and text.startswith("starts no more nodes: 3 tries in a row") and "step packages: 404" in text
    state = world.scheduler.size_state
    assert state.lack == "stopped" and "404" in state.problem and "404" in state.said
    # `skyinfra keep` says that somebody is there, and another image is another chance.
    world.scheduler.use.keep(60.0)
    world.look()
    assert world.place.asked[-1] == 2
    fail(world, "p-9")
    world.look()
    assert world.place.asked[-1] == 0
    world.place.made = "of something else"
    world.look()
    assert world.place.asked[-1] == 2


def test_a_node_that_served_and_fails_later_is_no_broken_machine(world: World) -> None:
    world.node("a")
    world.look()
    del world.scheduler.workers["a"]
    fail(world, "a")
    world.waits("t1")
    for _ in range(5):
        world.look()
    assert world.head._sizing.failed == 0 and world.scheduler.size_state.lack == "starting"
