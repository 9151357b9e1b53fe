"""Where in a fleet a task may run, and what becomes of it when the layout changes."""

from __future__ import annotations

import contextlib
import dataclasses
import os
from types import SimpleNamespace

import pytest

import skyinfra as sky
from skyinfra.client import lookup, open_pool
from skyinfra.mig import Follow
from skyinfra.protocol.fleet import STATE_VERSION, FleetState, FollowState, SizeState
from skyinfra.protocol.instance import GPU_MEMORY, InstanceInfo
from skyinfra.protocol.manifest import Endpoint, Manifest, ManifestNode, ManifestSlot
from skyinfra.submission.snapshot import ANYWHERE, Snapshot, Target
from skyinfra.tasks import Task
from skyinfra.worker.process import resources

MANIFEST = Manifest(
    version=1,
    stack="stack",
    pool="pool",
    provider="local",
    head=Endpoint("127.0.0.1", 1),
    nodes=(ManifestNode("n1", "n1", "127.0.0.1"), ManifestNode("n2", "n2", "127.0.0.1")),
    slots=(ManifestSlot(0, "partition", "H100", "3g.40gb", 0), ManifestSlot(1, "partition", "H100", "3g.40gb", 0)),
    secret="s" * 64,
)


def slot(name: str, profile: str | None = "2g.20gb") -> InstanceInfo:
    node, index = name.split("/")
    return InstanceInfo(node, int(index), name, "partition", "stack/pool", profile)


def told(**nodes: tuple[str, ...]) -> FleetState:
    return FleetState(STATE_VERSION, nodes)


@pytest.mark.parametrize(
    ("state", "names"),
    [
        (None, ["n1/0", "n1/1", "n2/0", "n2/1", "n3/4"]),
        (told(), ["n1/0", "n1/1", "n2/0", "n2/1", "n3/4"]),
        (told(n1=("n1/0",)), ["n1/0", "n2/0", "n2/1", "n3/4"]),
        (told(n1=("n1/0", "n1/3"), n2=("n2/0",), n3=("n3/4", "n3/5")), ["n1/0", "n1/3", "n2/0", "n3/4"]),
    ],
)
def test_the_slots_that_there_are_to_be(state, names):
    """What a node has told counts, then the manifest; of other nodes only what is there."""
    present = (slot("n1/0"), slot("n2/0"), slot("n3/4"))
    assert Snapshot(present, state=state).promised(MANIFEST) == names


def test_a_group_promises_nothing_on_its_head_and_counts_the_nodes_that_are_there():
    head = ManifestNode("pool-head", "i-0", "10.0.0.1", head=True)
    group = dataclasses.replace(MANIFEST, nodes=(head,), group_nodes=3)
    assert Snapshot((), state=told()).promised(group) == []
    present = (slot("pool-i-1/0"), slot("pool-i-1/1"))
    state = told(**{"pool-i-1": ("pool-i-1/0", "pool-i-1/1"), "pool-i-0": ("pool-i-0/0",)})
    assert Snapshot(present, state=state).promised(group) == ["pool-i-1/0", "pool-i-1/1"]
    assert (group.node_count, group.slots_of(head)) == (3, ())
    assert (MANIFEST.node_count, MANIFEST.slots_of(MANIFEST.nodes[0])) == (2, MANIFEST.slots)


def test_nodes_that_are_not_declared_any_more_are_not_waited_for(monkeypatch):
    """The head remembers the slots of a node that was destroyed."""
    present = tuple(map(slot, ("n1/0", "n1/1", "n2/0")))
    state = told(n1=("n1/0", "n1/1"), n2=("n2/0",), n3=("n3/0", "n3/1"))
    heads = contextlib.nullcontext(SimpleNamespace(look=lambda: Snapshot(present, state=state)))
    monkeypatch.setattr(lookup, "open_questions", lambda *_, **__: heads)
    heard = []
    lookup.wait_until_ready(MANIFEST, patience=0, on_change=heard.append)
    assert heard == ["boots", "3 of 3 slots are ready"]


BEFORE = told(n1=("n1/0", "n1/1"), n2=("n2/0",))


@pytest.mark.parametrize(
    ("target", "prospect"),
    [
        (ANYWHERE, "there"),
        (Target(slot="n1/0"), "there"),
        (Target(slot="n1/0", profile="2g.20gb"), "there"),
        (Target(slot="n1/0", profile="3g.40gb"), "gone"),
        (Target(slot="n1/7"), "gone"),
        (Target(slot="n1/1"), "missing"),
        (Target(slot="n3/0"), "missing"),
        (Target(node="n2"), "there"),
        (Target(node="n3"), "missing"),
        (Target(profile="2g.20gb"), "there"),
        (Target(profile="3g.40gb"), "missing"),
    ],
)
def test_what_to_expect_of_a_target(target, prospect):
    assert Snapshot((slot("n1/0"), slot("n2/0")), state=BEFORE).prospect(target) == prospect


def test_while_a_node_drains_its_new_slots_are_on_their_way():
    now = Snapshot((slot("n2/0"),), (slot("n1/0", "3g.40gb"),), BEFORE)
    assert now.prospect(Target(slot="n1/0", profile="3g.40gb")) == "there", "it may run there"
    assert now.prospect(Target(slot="n1/1")) == "coming"
    assert now.prospect(Target(profile="1g.10gb")) == "coming"
    assert now.prospect(Target(node="n2", profile="1g.10gb")) == "missing"


def test_a_profile_is_gone_once_everything_is_there():
    complete = Snapshot((slot("n1/0"), slot("n1/1"), slot("n2/0")), state=BEFORE)
    assert complete.prospect(Target(profile="3g.40gb")) == "gone"
    assert dataclasses.replace(complete, state=None).prospect(Target(profile="3g.40gb")) == "missing"
    assert Snapshot((), state=told()).prospect(Target(profile="3g.40gb")) == "missing"
    assert complete.profiles() == "2g.20gb*3"


def test_targets_ask_for_what_the_slots_have():
    selected = Target(slot="n1/0", node="n1", profile="3g.40gb")
    assert selected.resources == {"slot": 1, "slot:n1/0": 1, "node:n1": 1, "profile:3g.40gb": 1}
    assert ANYWHERE.resources == {"slot": 1}
    assert selected.takes(slot("n1/0", "3g.40gb"))
    assert not selected.takes(slot("n1/0", "2g.20gb"))
    assert not Target(profile="2g.20gb").takes(slot("n1/0", None))
    names = [str(Target(profile="3g.40gb")), str(Target(node="n1")), str(Target(slot="n1/0"))]
    assert names == ["every slot with the profile 3g.40gb", "every slot of n1", "slot n1/0"]


def test_a_target_by_memory_takes_what_has_as_much_or_more():
    selected = Target(memory_gb=19.5)
    assert selected.resources == {"slot": 1, GPU_MEMORY: 19500}
    large, small = (dataclasses.replace(slot("n1/0"), memory_gb=each) for each in (20.0, 10.0))
    assert selected.takes(large)
    assert not selected.takes(small)
    assert not selected.takes(slot("n1/0")), "one whose memory nobody knows"
    assert resources(large)[GPU_MEMORY] == 20000
    assert selected.narrowed(memory_gb=30, node="n1") == Target(node="n1", memory_gb=30)
    assert selected.narrowed() == selected
    assert str(selected) == "every slot with 19.5 GB at least"


def test_what_layouts_that_follow_the_work_can_give_is_waited_for():
    follow_state = FollowState(Follow(["1g.10gb*7", "3g.40gb*2"]), "h100_80gb", {"n1": 2, "n2": 1})
    now = Snapshot((slot("n1/0", "1g.10gb"),), state=dataclasses.replace(told(n1=("n1/0",)), follow=follow_state))
    for target, prospect, possible in [
        (Target(profile="1g.10gb"), "there", 21),
        (Target(profile="3g.40gb"), "coming", 6),
        (Target(profile="3g.40gb", node="n2"), "coming", 2),
        (Target(memory_gb=11), "coming", 6),
        (Target(memory_gb=11, profile="1g.10gb"), "gone", 0),
        (Target(memory_gb=41), "gone", 0),
        (Target(profile="7g.80gb"), "gone", 0),
        (Target(profile="3g.40gb", slot="n1/9"), "gone", 0),
        (ANYWHERE, "there", 0),
    ]:
        assert (now.prospect(target), now.possible(target)) == (prospect, possible), target
    assert FleetState.read(now.state.to_json()) == now.state


def test_what_nodes_that_come_can_give_with_any_layout_is_waited_for():
    coming = [
        InstanceInfo("p", i, f"p/{i}", "partition", "s/p", "1g.10gb", "H100", i // 7, memory_gb=10) for i in (0, 7)
    ]
    whole = InstanceInfo("p", 2, "p/2", "gpu", "s/p", accelerator="H100", gpu=2, memory_gb=80)
    size = SizeState(0, 4, 1, 1, 0.0, "", slots=(*coming, whole))
    follow_state = FollowState(Follow(["1g.10gb*7", "3g.40gb*2"]), "h100_80gb", {"n1": 2})
    state = dataclasses.replace(told(), follow=follow_state, size=size)
    for target, prospect, possible in [
        (Target(profile="1g.10gb"), "coming", 56),
        (Target(profile="3g.40gb"), "coming", 16),
        (Target(profile="3g.40gb", accelerator="A100"), "missing", 0),
        (Target(profile="3g.40gb", node="n1"), "coming", 4),
        (Target(profile="7g.80gb"), "missing", 0),
        (Target(memory_gb=11), "coming", 4 + 16),
        (Target(memory_gb=41), "coming", 4),
        (Target(slot="n1/9"), "missing", 0),
        (ANYWHERE, "coming", 12),
    ]:
        found = Snapshot((), state=state)
        assert (found.prospect(target), found.possible(target)) == (prospect, possible), target


def where() -> str:
    return sky.instance_info().slot


def test_where_chooses_slots(pool):
    assert [info.node for info in pool.select(node="n1").slots()] == ["n1", "n1"]
    assert Task(where) @ pool.select(node="n1") == ["n1/0", "n1/1"]
    assert (Task(where) >> pool.select(node="n0")).startswith("n0/")
    selected = pool.select(profile="3g.40gb").select(node="n0")
    assert set(selected.map(where_of, range(8))) <= {"n0/0", "n0/1"}
    assert len(pool.select(profile="3g.40gb").slots()) == 4
    assert pool.broadcast(Task(where), slots=[]) == []


def where_of(_: int) -> str:
    return where()


def test_a_node_that_the_fleet_has_not_is_not_waited_for(fleet):
    with open_pool(fleet.manifest, patience=600) as pool:
        future = pool.select(node="n7").submit(os.getpid)
        with pytest.raises(sky.SlotLost, match=r"stack/pool has no slot of n7, which getpid waits for"):
            future.result(timeout=60)
        # One that is to be there, and is not yet, is.
        other = dataclasses.replace(fleet.manifest, nodes=(*fleet.manifest.nodes, ManifestNode("n7", "n7", "")))
        assert pool.look().unknown(Target(node="n7"), fleet.manifest)
        assert not pool.look().unknown(Target(node="n7"), other)


def test_a_profile_that_no_slot_has(fleet):
    with open_pool(fleet.manifest, patience=1) as pool:
        for start in (lambda selected: Task(os.getpid) >> selected, lambda selected: Task(os.getpid) @ selected):
            with pytest.raises(
                sky.SlotLost, match=r"stack/pool has no slot with the profile 9g\.99gb, which getpid waits"
            ):
                start(pool.select(profile="9g.99gb"))


def test_a_pool_and_its_choice_close_together(fleet):
    with open_pool(fleet.manifest) as pool:
        selected = pool.select(node="n0")
    with pytest.raises(sky.FleetError, match="is closed"):
        selected.submit(os.getpid)
