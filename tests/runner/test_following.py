"""Layouts that follow the work, on simulated GPUs: the head chooses, the nodes change, and no task is ended by it."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from local_fleets.running_node import RunningNode, h100, until

from skyinfra import desired, instance_info
from skyinfra.client import Pool
from skyinfra.errors import SlotLost
from skyinfra.mig import Follow
from skyinfra.tasks import Task

MakeNode = Callable[..., RunningNode]

SMALL = tuple(("2g.20gb", start, 2) for start in (0, 2, 4))
MEDIUM = (("3g.40gb", 0, 4), ("3g.40gb", 4, 4))
BIG = (("7g.80gb", 0, 8),)
POLICY = Follow(["2g.20gb*3", "3g.40gb*2", "7g.80gb"], idle_seconds=1)


def work(folder: str, seconds: float) -> tuple[str | None, float | None]:
    """Notes each start, so that one that was ended and started again is found."""
    info = instance_info()
    with (Path(folder) / "starts").open("a") as file:
        file.write(f"{os.getpid()}\n")
    time.sleep(seconds)
    return info.profile, info.memory_gb


def changes(pool: Pool) -> list[tuple[str, int, str, str]]:
    state = pool.look().state
    assert state is not None
    assert state.follow is not None
    return [(each.node, each.gpu, each.before, each.layout) for each in state.follow.changes]


@pytest.mark.slow
def test_the_layout_follows_a_queue_that_changes_from_small_to_large_and_back(
    make_node: MakeNode, tmp_path: Path
) -> None:
    head = make_node("n1", accelerator=h100(SMALL), follow=POLICY)
    head.boot()
    task = Task(work, (str(tmp_path), 0.5))
    with head.pool() as pool:
        until(lambda: pool.look().state.follow, "the head follows")  # type: ignore[union-attr]
        assert [found for found, _ in pool.map(work, [str(tmp_path)] * 6, [0.2] * 6)] == ["2g.20gb"] * 6
        # Small tasks run when large ones come: they end first.
        small = [pool.submit(task.options(profile="2g.20gb", timeout=60)) for _ in range(3)]
        large = [pool.submit(task.options(profile="7g.80gb")) for _ in range(3)]
        assert [each.result()[0] for each in large] == ["7g.80gb"] * 3
        assert [each.result()[0] for each in small] == ["2g.20gb"] * 3
        assert changes(pool) == [("n1", 0, "2g.20gb*3", "7g.80gb")]
        # By memory, as a job, and back.
        job = pool.submit(task.options(gpu_memory_gb=30, profile="3g.40gb"), detach="medium")
        assert job.result() == ("3g.40gb", 40.0)
        tiny = [pool.submit(task.options(gpu_memory_gb=19.5, profile="2g.20gb")) for _ in range(6)]
        assert {each.result() for each in tiny} == {("2g.20gb", 20.0)}
        assert changes(pool)[1:] == [("n1", 0, "7g.80gb", "3g.40gb*2"), ("n1", 0, "3g.40gb*2", "2g.20gb*3")]
        # What no layout gives is refused as ever.
        with pytest.raises(SlotLost, match=r"no slot with the profile 1g\.10gb"):
            task.options(profile="1g.10gb") >> pool
        with pytest.raises(SlotLost, match="no slot with 81 GB at least"):
            task.options(gpu_memory_gb=81) >> pool
    assert len((tmp_path / "starts").read_text().split()) == 6 + 3 + 3 + 1 + 6, "no task ran twice"
    log = head.quiet_log()
    assert "n1 GPU 0: 2g.20gb*3 -> 7g.80gb: 1 task for 7g.80gb waited" in log
    assert "waits for work" not in log, "a task was in the way"
    assert head.status().layout_from == "work"


@pytest.mark.slow
def test_each_gpu_of_each_node_follows_on_its_own_and_a_deploy_undoes_nothing(
    make_node: MakeNode, tmp_path: Path
) -> None:
    policy = Follow(["3g.40gb*2", "7g.80gb"], idle_seconds=1, keep="3g.40gb*2")
    layouts = {"accelerator": h100(MEDIUM, MEDIUM), "follow": policy}
    head = make_node("n1", **layouts)
    address = head.boot().scheduler
    worker = make_node("n2", head=False, scheduler=address, **layouts)
    worker.boot()
    long = Task(work, (str(tmp_path), 6.0))
    with head.pool(worker) as pool:
        until(lambda: len(pool.slots()) == 8, "all slots are there")
        # One task keeps a partition of the worker's first GPU: that GPU stays, and of the others one is kept.
        kept = pool.select(node="n2").submit(long)
        where = until(lambda: [slot for slot, tasks in pool.running().items() if tasks], "the task runs")
        (gpu,) = {slot.gpu for slot in pool.slots() if slot.slot == where[0]}
        large = [pool.submit(Task(work, (str(tmp_path), 3.0)).options(profile="7g.80gb")) for _ in range(4)]
        assert {each.result()[0] for each in large} == {"7g.80gb"}
        made = changes(pool)
        assert {(node, index) for node, index, _, _ in made} == {("n1", 0), ("n1", 1), ("n2", 1 - gpu)}
        assert kept.result()[0] == "3g.40gb"
        # The same layout, deployed again in a configuration that has changed otherwise.
        for node in (head, worker):
            node.configure(env={"AGAIN": "1"})
            node.boot()
        until(lambda: worker.status().state == head.status().state == "ready", "both are ready again")
        assert head.status().layouts == ("7g.80gb", "7g.80gb")
        assert sorted(worker.status().layouts) == ["3g.40gb*2", "7g.80gb"]
        # The head starts again and goes on where it was.
        head.run("stop")
        head.boot()
        until(lambda: head.status().state == "ready", "the head is ready")
        assert head.status().layouts == ("7g.80gb", "7g.80gb")
        # Without it, the declared layout counts.
        for node in (head, worker):
            node.configure(follow=None)
            node.boot()
        until(lambda: head.status().layouts == worker.status().layouts == ("3g.40gb*2",) * 2, "as declared")


@pytest.mark.slow
def test_a_task_that_begins_on_a_slot_that_goes_is_waited_for(make_node: MakeNode, tmp_path: Path) -> None:
    """It came between the choice and the drain. What is declared would end it at once here."""
    head = make_node("n1", accelerator=h100(MEDIUM), follow=POLICY, drain_seconds=0.0)
    head.boot()
    with head.pool() as pool:
        future = pool.submit(Task(work, (str(tmp_path), 5.0)))
        until(lambda: (tmp_path / "starts").exists(), "the task runs")
        desired.follow(head.directory, {"n1": ["7g.80gb"]})
        until(lambda: head.status().state == "draining", "its slot drains")
        assert future.result() == ("3g.40gb", 40.0)
        until(lambda: [slot.profile for slot in pool.slots()] == ["7g.80gb"], "the GPU has changed")
    assert len((tmp_path / "starts").read_text().split()) == 1


@pytest.mark.slow
def test_what_a_task_writes_in_the_place_of_the_choice_is_no_layout(make_node: MakeNode) -> None:
    head = make_node("n1", accelerator=h100(BIG), follow=POLICY)
    head.directory.desired_file.write_text("{")
    assert head.boot().layouts == ("7g.80gb",)
    for layouts in (["1g.10gb*7"], ["--help"], ["2g.20gb*3", "2g.20gb*3"]):
        head.directory.desired_file.write_text(json.dumps({"version": 1, "by_node": {"n1": layouts}}))
        time.sleep(1)
        assert head.status().layouts == ("7g.80gb",)
