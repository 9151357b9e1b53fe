"""The head remembers the tasks that ended: when they came, began and ended, where, and what they asked for."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
from local_fleets.running_node import BIG, RunningNode, h100, until
from tasks_on_nodes.jobs import add

from skyinfra.client.questions import Questions
from skyinfra.head import records
from skyinfra.head.records import PERIOD_S, Records
from skyinfra.protocol.instance import STARTUP_KEY, InstanceInfo
from skyinfra.protocol.readings import REPORT, Progress, SlotReport, TaskRecord
from skyinfra.tasks import Task

MakeNode = Callable[..., RunningNode]
SLOT = InstanceInfo("n1", 1, "n1/1", "partition", "s/p", profile="3g.40gb", memory_gb=40.0)


class Head:
    """A scheduler with one slot, as far as records look at it."""

    def __init__(self) -> None:
        self.worker = SimpleNamespace(
            name=SLOT.slot, extra={STARTUP_KEY: SLOT.to_json()}, metrics={}, processing=[], executing={}
        )
        self.workers = {"tls://n1:1": self.worker}
        self.tasks: dict[str, SimpleNamespace] = {}
        self.records = Records(self)  # type: ignore[arg-type]

    def come(self, key: str, resources: dict[str, float] | None = None) -> None:
        self.tasks[key] = SimpleNamespace(processing_on=None, resource_restrictions=resources)
        self.records.transition(key, "released", "no-worker")

    def send(self, key: str) -> None:
        self.tasks[key].processing_on = self.worker
        self.records.transition(key, "no-worker", "processing")

    def end(self, key: str, ran: float | None = None, finish: str = "memory") -> None:
        told: list[dict[str, Any]] = [{"action": "transfer", "start": 0.0, "stop": 99.0}]
        if ran is not None:
            told.append({"action": "compute", "start": 5.0, "stop": 5.0 + ran})
        self.records.transition(key, "processing", finish, startstops=told)

    def one(self) -> TaskRecord:
        (record,) = self.records.records()
        return record


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The time of the head, to be set; a second number puts its clock forward."""
    now = [1000.0]
    monkeypatch.setattr(
        records,
        "time",
        SimpleNamespace(
            time=lambda: now[0] + sum(now[1:]), monotonic=lambda: now[0], strftime=time.strftime, gmtime=time.gmtime
        ),
    )
    return now


def test_a_task_from_its_coming_to_its_end(clock: list[float]) -> None:
    head = Head()
    head.come("a-1", {"profile:3g.40gb": 1, "gpu_memory_mb": 20500})
    clock[0] = 1010
    head.send("a-1")
    clock[0] = 1040
    head.end("a-1", ran=12.5)
    assert head.one() == TaskRecord("a-1", 1000, 1027.5, 1040, "n1/1", "3g.40gb", 20.5, "3g.40gb", 40.0)
    clock.append(3600.0)  # the clock of the machine is set: all of it moves
    assert (head.one().submitted, head.one().started, head.one().ended) == (4600, 4627.5, 4640)


def test_one_that_is_lost_came_when_it_came_first(clock: list[float]) -> None:
    head = Head()
    head.come("a-1")
    head.send("a-1")
    clock[0] = 1010
    head.records.transition("a-1", "processing", "released")
    head.come("a-1")
    clock[0] = 1020
    head.send("a-1")
    clock[0] = 1030
    head.end("a-1")
    assert (head.one().submitted, head.one().started, head.one().ended) == (1000, 1020, 1030)
    assert (head.one().profile, head.one().memory_gb) == (None, 0.0)


def test_what_is_taken_back_while_it_runs_had_its_slot_until_then(clock: list[float]) -> None:
    head = Head()
    head.come("a-1")
    head.send("a-1")
    clock[0] = 1050
    head.records.transition("a-1", "processing", "released")
    head.records.transition("a-1", "released", "forgotten")
    assert (head.one().started, head.one().ended) == (1000, 1050)
    head.come("b-1")
    head.send("b-1")
    head.records.transition("b-1", "processing", "released")
    head.records.transition("b-1", "released", "waiting")
    head.records.transition("b-1", "waiting", "forgotten")
    assert head.one().key == "a-1", "the other was lost, and waited"


def test_the_time_before_a_task_was_sent_counts(clock: list[float]) -> None:
    head = Head()
    head.records.came("a-1", 30.5)
    head.come("a-1", {"slot": 1})
    head.send("a-1")
    head.end("a-1")
    assert (head.one().submitted, head.one().started) == (969.5, 1000)
    assert head.one().profile is None, "every task asks for a slot"


def test_what_is_bound_to_a_slot_asks_for_its_profile(clock: list[float]) -> None:
    head = Head()
    for key, resources in {"a-1": {"slot:n1/1": 1.0}, "b-1": {"node:n1": 1.0}}.items():
        head.come(key, resources)
        head.send(key)
        head.end(key)
    assert [each.profile for each in head.records.records()] == ["3g.40gb", "3g.40gb"]


def test_what_never_ran_or_ran_elsewhere_leaves_nothing(clock: list[float]) -> None:
    head = Head()
    head.come("cancelled-1")
    head.records.transition("cancelled-1", "no-worker", "forgotten")
    head.worker.extra = {}  # what is no worker of ours
    head.come("other-1")
    head.send("other-1")
    head.end("other-1")
    assert head.records.records() == []
    assert not head.records._came and not head.records._sent


def test_how_many_wait_and_ended(clock: list[float]) -> None:
    """The workers count what ended: short tasks travel several in a message, which is one task to the head."""
    head = Head()
    head.worker.metrics[REPORT] = SlotReport(5).to_json()
    head.records.count()
    for key in ("a-1", "b-1", "c-1"):
        head.come(key)
    head.send("a-1")
    head.send("b-1")  # behind it
    assert head.records.work().waiting == 2
    head.worker.metrics[REPORT] = SlotReport(69, Progress(3, 4, "x")).to_json()
    first, second = SimpleNamespace(key="a-1"), SimpleNamespace(key="b-1")
    head.worker.processing += [first, second]
    head.worker.executing = SimpleNamespace(items=lambda: [(first, 2.0)])
    head.records.count()
    clock[0] = 1020
    work = head.records.work()
    assert (work.seconds, work.waited, work.ended) == (20, (0, 2), (5, 64))
    assert work.progress == {"n1/1": Progress(3, 4, "x")}
    head.worker.processing.remove(first)
    assert head.records.work().progress == {}, "the next task runs, and has told nothing yet"
    # Another process, which counts from the begin, and one of an earlier version, which does not count.
    head.workers["tls://n1:2"] = head.workers.pop("tls://n1:1")
    head.worker.metrics[REPORT] = SlotReport(2).to_json()
    head.records.count()
    head.worker.metrics[REPORT] = {"ended": "many"}
    head.records.count()
    assert head.records.work().ended[2:] == (2, None)


class HeadOfBefore:
    """The head of an earlier version, which answers None to calls that it does not know."""

    patience = 0.0

    def __getattr__(self, name: str) -> Any:
        async def answer(**_: object) -> None:
            return None

        return answer

    async def again(self, ask: Callable[[Any], Any], patience: float) -> Any:
        return await ask(self)


def test_the_head_of_before_does_not_count() -> None:
    fleet: Any = SimpleNamespace(connection=HeadOfBefore(), in_loop=asyncio.run)
    assert Questions(fleet).work() is None


def test_the_work_of_an_hour_is_kept(clock: list[float]) -> None:
    head = Head()
    for _ in range(400):
        head.records.count()
    assert len(head.records.work().waited) * PERIOD_S == 3600


def test_the_last_ones_are_kept(clock: list[float], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(records, "_KEPT", 2)
    head = Head()
    for key in ("a-1", "b-1", "c-1"):
        head.come(key)
        head.send(key)
        head.end(key)
    assert [each.key for each in head.records.records()] == ["b-1", "c-1"]


def test_a_client_is_told_of_tasks_and_jobs(make_node: MakeNode) -> None:
    head = make_node(accelerator=h100(BIG))
    head.boot()
    begin = time.time()
    with head.pool() as pool:
        assert pool.records() == []
        assert list(pool.map(add, range(3), range(3))) == [0, 2, 4]
        # More than there are slots: the others wait at the client, which says so.
        slow = [pool.submit(Task(time.sleep, (0.5,))) for _ in range(4)]
        assert [each.result() for each in slow] == [None] * 4

        def came() -> list[float]:
            return [each.submitted for each in pool.records() if each.key.startswith("sleep")]

        until(lambda: len(came()) == 4, "the head knows that they have ended")
        assert max(came()) - min(came()) < 0.4
        assert Task(add, (1, 2)).options(gpu_memory_gb=30, profile="3g.40gb") >> pool == 3
        assert pool.submit(add, 1, 2, detach="kept").result(timeout=60) == 3

        def narrow_and_kept() -> list[TaskRecord]:
            found = pool.records()
            there = any(each.memory_gb for each in found) and any(each.key.startswith("kept") for each in found)
            return found if there else []

        asked = until(narrow_and_kept, "both have ended")
        (narrow,) = [each for each in asked if each.memory_gb]
        assert (narrow.profile, narrow.memory_gb, narrow.slot_profile, narrow.slot_memory_gb) == (
            *("3g.40gb", 30.0),
            *("3g.40gb", 40.0),
        )
        assert all(begin - 1 <= each.submitted <= each.started <= each.ended for each in asked)
        assert {each.slot.rpartition("/")[0] for each in asked} == {"n1"}


@pytest.mark.slow
def test_a_head_that_started_anew_knows_of_its_jobs_what_the_journal_does(make_node: MakeNode) -> None:
    head = make_node(accelerator=h100(BIG))
    head.boot()
    with head.pool() as pool:
        assert Task(add, (1, 2)) >> pool == 3
        assert pool.submit(add, 1, 2, detach="kept").result(timeout=60) == 3
    head.run("stop", "--timeout", "10")
    head.boot()
    with head.pool() as pool:
        (job,) = pool.records()
        assert (job.key.startswith("kept-"), job.slot_profile) == (True, None)


class Running(NamedTuple):
    """A task that a worker says it runs."""

    key: str


def running_worker(slot: InstanceInfo, running: dict[str, float] | None = None) -> SimpleNamespace:
    """A worker as the scheduler has it, with the seconds of the tasks that it says it runs."""
    tasks = {Running(key): seconds for key, seconds in (running or {}).items()}
    return SimpleNamespace(name=slot.slot, extra={STARTUP_KEY: slot.to_json()}, executing=tasks, processing=tasks)


def uses(head: Head) -> dict[tuple[str, str, str], tuple[float, float]]:
    """The seconds of slots and in parts of nodes since the last look, by submitter, kind and name."""
    found: dict[tuple[str, str, str], tuple[float, float]] = {}
    for use in head.records.drain_uses():
        slots, nodes = found.get(key := (use.submitter, use.kind, use.name), (0.0, 0.0))
        found[key] = slots + use.slot_seconds, nodes + use.node_seconds
    return {key: (round(slots, 6), round(nodes, 6)) for key, (slots, nodes) in found.items()}


def test_whose_tasks_had_a_slot_and_for_how_long(clock: list[float]) -> None:
    head = Head()
    # Two GPUs; the slot is a half of the first one.
    half = replace(SLOT, gpu=0, start=0, size=4, units=8)
    whole = InstanceInfo("n1", 2, "n1/2", "gpu", "s/p", gpu=1)
    head.worker = running_worker(half)
    head.workers = {"a": head.worker, "b": running_worker(whole)}
    head.records.submitter_of_job = lambda key: "ann@desk" if key.startswith("nightly") else None
    for key, submitter in (("train-1", "bob@lap"), ("nightly-9f.1", ""), ("old-1", "")):
        head.records.came(key, 0, submitter)
        head.come(key)
        head.send(key)
        clock[0] += 100
        head.end(key, ran=40)
    assert uses(head) == {
        ("bob@lap", "task", "train"): (40, 10),
        ("ann@desk", "job", "nightly"): (40, 10),
        ("", "task", "old"): (40, 10),
    }
    assert uses(head) == {}, "each second once"


def test_what_a_job_took_before_its_head_is_not_counted_by_it(clock: list[float]) -> None:
    """The head of before has counted it, and wrote that beside its jobs."""
    head = Head()
    head.worker = running_worker(SLOT, {"nightly-9f.1": 5000.0})
    head.workers = {"a": head.worker}
    head.records.came("nightly-9f.1", 0, "ann@desk")
    head.come("nightly-9f.1")
    head.send("nightly-9f.1")
    assert uses(head)["ann@desk", "task", "nightly"][0] == 0
    clock[0] += 10
    assert uses(head)["ann@desk", "task", "nightly"][0] == 10


def test_a_task_that_runs_for_days_is_counted_as_it_runs(clock: list[float]) -> None:
    head = Head()
    slots = [replace(SLOT, slot=f"n1/{n}", worker=n, gpu=0, start=2 * n, size=2, units=8) for n in range(4)]
    head.workers = {slot.slot: running_worker(slot, {f"f-{slot.worker}": 900.0}) for slot in slots}
    for slot in slots:
        head.worker = head.workers[slot.slot]
        head.records.came(f"f-{slot.worker}", 0, "ann@desk")
        head.come(f"f-{slot.worker}")
        head.send(f"f-{slot.worker}")
    clock[0] += 900
    # Four quarters are one node (Project-HAMi/HAMi#3073).
    assert uses(head) == {("ann@desk", "task", "f"): (3600, 900)}
    assert uses(head) == {("ann@desk", "task", "f"): (0, 0)}
    clock[0] += 1000
    head.worker = head.workers["n1/0"]
    head.worker.processing = {}
    head.end("f-0", ran=1000)
    assert uses(head) == {("ann@desk", "task", "f"): (100, 25)}


def test_an_attempt_that_is_lost_counts_no_less_later(clock: list[float]) -> None:
    head = Head()
    head.worker = running_worker(replace(SLOT, gpu=0), {"f-1": 500.0})
    head.workers = {"a": head.worker}
    head.come("f-1")
    head.send("f-1")
    clock[0] += 500
    assert uses(head) == {("", "task", "f"): (500, 500)}
    head.records.transition("f-1", "processing", "released")
    head.come("f-1")
    head.send("f-1")
    clock[0] += 30
    head.end("f-1", ran=30)
    head.workers = {}
    assert uses(head) == {("", "task", "f"): (30, 30)}, "its slot has gone since, and is known"
