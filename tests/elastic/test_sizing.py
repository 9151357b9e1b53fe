"""How many nodes a fleet is to have: by what waits and what stands, with clocks by hand."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import pytest

import skyinfra as sky
from skyinfra.compiler import compile_pool
from skyinfra.elastic.sizing import Crowd, Resources, Sizing, coming_slots, fits, lacking, lacking_for
from skyinfra.protocol.nodeconfig import NodeConfig
from skyinfra.worker.process import resources

CPU: Resources = {"slot": 1}
SMALL: Resources = {"slot": 1, "profile:1g.10gb": 1, "accel:H100": 1, "gpu_memory_mb": 10_000}
LARGE: Resources = {"slot": 1, "profile:3g.40gb": 1, "accel:H100": 1, "gpu_memory_mb": 40_000}


def profile(name: str) -> Resources:
    return {"slot": 1, f"profile:{name}": 1}


def memory(gb: int) -> Resources:
    return {"slot": 1, "gpu_memory_mb": gb * 1000}


def slot_of(gb: int) -> Resources:
    return {"slot": 1, "profile:any": 1, "accel:H100": 1, "gpu_memory_mb": gb * 1000}


@pytest.mark.parametrize(
    ("waiting", "free", "each", "most", "nodes"),
    [
        ([], [], [CPU], 8, 0),
        ([CPU] * 3, [], [CPU], 8, 3),
        ([CPU] * 3, [], [CPU, CPU], 8, 2),
        ([CPU] * 3, [CPU], [CPU, CPU], 8, 1),
        ([CPU] * 100_000, [], [CPU], 8, 8),
        ([CPU] * 3, [], [CPU], 0, 0),
        # A profile, a size or an accelerator that the new node has, and one that it has not.
        ([profile("3g.40gb")] * 2, [SMALL] * 4, [LARGE, SMALL], 8, 2),
        ([profile("7g.80gb")], [], [LARGE, SMALL], 8, 0),
        ([{"slot": 1, "gpu_memory_mb": 30_000}], [SMALL], [LARGE, SMALL], 8, 1),
        ([{"slot": 1, "gpu_memory_mb": 50_000}], [], [LARGE, SMALL], 8, 0),
        ([{"slot": 1, "accel:A100": 1}, CPU], [], [LARGE], 8, 1),
        # Each has the smallest slot that it fits, whichever is asked for first, and wherever that stands on the node.
        ([memory(10), memory(20), memory(40)], [], [slot_of(20), slot_of(10), slot_of(10), slot_of(40)], 8, 1),
        ([memory(40), memory(10)], [slot_of(40), slot_of(10)], [LARGE, SMALL], 8, 0),
        ([memory(10), profile("3g.40gb")], [LARGE, slot_of(80)], [LARGE], 8, 0),
        # One of its own slot or node is helped by no other one.
        ([{"slot": 1, "slot:a/0": 1}, {"slot": 1, "node:a": 1}], [], [CPU], 8, 0),
    ],
)
def test_nodes_for_what_waits(
    waiting: list[Resources], free: list[Resources], each: list[Resources], most: int, nodes: int
) -> None:
    assert lacking(waiting, free, each, most) == nodes


def test_a_gang_counts_the_nodes_that_are_there() -> None:
    crowd = Crowd(CPU, nodes=4, per_node=2)
    assert lacking_for(crowd, [], [CPU, CPU]) == 4
    assert lacking_for(crowd, [[CPU, CPU], [CPU]], [CPU, CPU]) == 3
    assert lacking_for(crowd, [[CPU, CPU]] * 5, [CPU, CPU]) == 0
    assert lacking_for(crowd, [], [CPU]) == 0, "no node that comes is large enough"


def test_the_slots_of_a_node_that_comes_are_those_that_it_will_have() -> None:
    declared = "H100:2/3g.40gb+1g.10gb*2"
    pool = sky.ComputePool(provider=sky.Local(simulate=True), accelerator=declared, nodes=sky.Range(0, 2))
    slots = coming_slots(compile_pool(pool, "demo").head)
    assert [(each.gpu, each.profile) for each in slots].count((1, "1g.10gb")) == 2 and len(slots) == 6
    large = next(resources(each) for each in slots if each.profile == "3g.40gb")
    assert fits({"slot": 1, "profile:3g.40gb": 1, "accel:H100": 1, "gpu_memory_mb": 40_000}, large)
    whole = sky.ComputePool(provider=sky.Local(simulate=True), accelerator="A100:2", nodes=sky.Range(0, 2))
    assert [(each.kind, each.memory_gb) for each in coming_slots(compile_pool(whole, "demo").head)] == [("gpu", 80)] * 2


@pytest.mark.parametrize(
    ("accelerator", "memory_gb"),
    [("H100/1c.3g.40gb*3", [13.3] * 3), ("H100/1c.2g.20gb*2+3g.40gb", [10, 10, 40]), ("MI300X/CPX", [24.0] * 8)],
)
def test_a_task_can_count_on_the_memory_of_compute_instances_and_of_amd_partitions(
    accelerator: str, memory_gb: list[float]
) -> None:
    pool = sky.ComputePool(provider=sky.Local(simulate=True), accelerator=accelerator, nodes=sky.Range(0, 2))
    slots = coming_slots(compile_pool(pool, "demo").head)
    assert [round(each.own_memory_gb or 0, 1) for each in slots] == memory_gb


def test_cpu_nodes_have_their_workers() -> None:
    head = NodeConfig(
        1, "demo", "p", "p-0", "local", True, "127.0.0.1:0", cpu_slots=3, scheduler_only=True, max_nodes=2
    )
    assert [each.kind for each in coming_slots(head)] == ["cpu"] * 3
    assert len(coming_slots(replace(head, cpu_slots=1))) == 1


class World:
    """A fleet between 0 and 8 nodes whose size is looked at every second."""

    def __init__(self, patience_s: float = 120.0, boot_s: float = 1e9) -> None:
        self.sizing = Sizing(patience_s, boot_s)
        self.now = 1000.0
        self.bounds = (0, 8)
        # Numbers that the place hears, and those of them that it has not heard just before.
        self.said: list[int] = []
        self.asked: list[tuple[float, int]] = []

    def look(self, there: int, need: int = 0, seconds: float = 1.0, held: int | None = None) -> int:
        """One look, so many seconds after the last one; returns the size."""
        self.now += seconds
        since = self.sizing.since
        if self.sizing.observe(there, need, self.bounds, f"{need} tasks wait", self.now, self.now + 1e9, held):
            self.said.append(self.sizing.size)
            if self.sizing.since != since:
                self.asked.append((self.now, self.sizing.size))
        return self.sizing.size


def test_more_work_asks_once_and_does_not_overshoot() -> None:
    # https://github.com/dask/distributed/issues/1604: nodes that boot are asked for again.
    world = World()
    for _ in range(50):
        assert world.look(0, 3) == 3
    assert world.asked == [(1001.0, 3)] and world.sizing.why == "3 tasks wait"
    assert world.look(2, 1) == 3 and world.look(2, 20) == 8
    assert [size for _, size in world.asked] == [3, 8]


def test_the_least_is_there_without_work() -> None:
    world = World()
    world.bounds = (2, 8)
    assert world.look(0) == 2 and world.sizing.why == "2 is the least"


def test_capacity_that_is_refused_for_an_hour_is_asked_for_less_and_less() -> None:
    world = World()
    while world.now < 1000 + 3600:
        world.look(0, 4)
    begin = [at for at, _ in world.asked]
    assert 4 <= len(begin) <= 8 and {size for _, size in world.asked} == {4}
    pauses = [after - before for before, after in pairwise(begin)]
    assert pauses == sorted(pauses) and pauses[0] >= 120 + 60 and pauses[-1] >= 120 + 480
    assert "4 of 4 nodes did not come within 2m; asked again after" in str(world.sizing.problem)
    # Once there is some, everything is as before.
    world.look(4)
    assert world.sizing.problem is None and world.look(4, 2) == 6


def test_a_place_that_refuses_at_once_is_not_asked_at_each_look() -> None:
    world = World()
    world.look(0, 1)
    world.sizing.refused("no permission", world.now)
    for _ in range(50):
        world.look(0, 1)
    assert len(world.asked) == 1 and world.sizing.problem == "no permission; asked again after 1m"
    for _ in range(20):
        world.look(0, 1)
    assert len(world.asked) == 2


def test_a_lower_most_ends_nothing_and_asks_for_nothing() -> None:
    world = World()
    world.look(0, 6)
    world.look(6)
    world.bounds = (0, 2)
    assert world.look(6, 3) == 6 and len(world.asked) == 1
    world.sizing.left("one had no task", 5.0)
    assert world.look(5) == 5 and world.sizing.why == "one had no task"


def test_a_head_that_takes_over_waits_for_the_nodes_of_the_one_before() -> None:
    world = World()
    world.sizing.size = 4
    assert world.look(0, 1) == 4 and world.look(3, 1) == 4 and not world.asked
    # The one that never comes is not waited for without end.
    for _ in range(400):
        world.look(3, 1)
    assert [size for _, size in world.asked] == [4] and set(world.said) == {4}


def test_where_the_place_knows_its_nodes_one_that_is_lost_is_started_at_once() -> None:
    world = World()
    world.look(0, 4)
    world.look(4, held=4)
    assert world.look(3, 1, held=3) == 4 and len(world.asked) == 2


def test_where_a_group_replaces_a_lost_machine_nobody_asks_for_another_one() -> None:
    world = World()
    world.look(0, 4)
    world.look(4)
    for _ in range(100):
        assert world.look(3, 1) == 4
    assert len(world.asked) == 1


def test_without_work_the_place_is_asked_once_whether_it_takes_a_size() -> None:
    world = World()
    for _ in range(500):
        world.look(0)
    assert world.said == [0]


def test_a_number_that_was_lost_on_its_way_is_said_again() -> None:
    # The node that ended in the same moment has lowered what the head had raised; the watch of the head was restarted.
    world = World(patience_s=900.0)
    world.look(0, 4)
    for _ in range(600):
        assert world.look(3, 1) == 4
    assert len(world.asked) == 1 and 5 <= len(world.said) <= 12 and set(world.said) == {4}
    world.look(4)
    for _ in range(600):
        world.look(4)
    assert len(world.said) <= 12


def test_what_no_work_needs_any_more_is_taken_back_before_it_comes() -> None:
    # Capacity that was refused all day comes at night, where the group still waits for it.
    world = World(patience_s=900.0, boot_s=240.0)
    world.look(0, 8)
    for _ in range(200):
        assert world.look(1, 0) == 8, "nodes that boot are not taken back for a moment without work"
    for _ in range(60):
        world.look(1, 0)
    assert world.asked[-1][1] == 1 and world.sizing.why == "no work needs more"
    count = len(world.said)
    for _ in range(600):
        world.look(1, 0)
    assert len(world.said) == count
    # Those that came all the same stay until they have had no task for a while.
    assert world.look(3, 0) == 3 and len(world.said) == count


def test_what_was_refused_is_taken_back_too_once_no_work_needs_it() -> None:
    world = World(patience_s=120.0, boot_s=240.0)
    for _ in range(130):
        world.look(0, 4)
    assert world.sizing.size == 0 and world.sizing.problem is not None
    for _ in range(250):
        world.look(0, 0)
    assert world.said[-1] == 0 and world.sizing.problem is None
    for _ in range(900):
        world.look(0, 2)
    assert world.asked[-1][1] == 2


def test_work_that_comes_while_nodes_end_gets_others() -> None:
    world = World(patience_s=900.0, boot_s=240.0)
    world.look(0, 8)
    world.look(8)
    for _ in range(8):
        world.sizing.left("it had no task", 5.0)
    # All of them are still there for a moment, and are none of the fleet any more.
    assert world.look(0, 3) == 3 and world.asked[-1] == (world.now, 3)
