"""Records of the tasks that ended, on the head: what they asked for, how long they waited and ran, and where; and how
many wait, and ended, over the last hour.

They live in the memory of the scheduler and go with it. What a task used its node tells, see
`skyinfra.readings.figures`. Whose tasks had which slots for how long is counted besides, for `skyinfra.hours.ledger`.
"""

from __future__ import annotations

import time
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Mapping
from typing import Any, Literal, NamedTuple

from distributed import Scheduler
from distributed.diagnostics.plugin import SchedulerPlugin

from skyinfra.errors import InvalidManifest, InvalidNodeConfig
from skyinfra.head.execution import tasks_on_slots
from skyinfra.protocol import rpc
from skyinfra.protocol.instance import GPU_MEMORY, STARTUP_KEY, InstanceInfo
from skyinfra.protocol.readings import REPORT, FleetWork, SlotReport, SlotUse, TaskRecord

# So many of the last ones are kept, of some 300 bytes each.
_KEPT = 5000
# How many wait and ended is counted in periods of so many seconds; those of an hour are kept.
PERIOD_S = 10.0
_PERIODS = 360
_WAITS = ("waiting", "queued", "no-worker")

Described = Mapping[str, Any]


class _Ended(NamedTuple):
    """A task that ended, in times of ``time.monotonic``; worker: the description of its slot, which is read when
    somebody asks."""

    key: str
    submitted: float
    started: float
    ended: float
    worker: Described
    resources: Mapping[str, float]


class Records(SchedulerPlugin):  # type: ignore[misc]
    """Notes the tasks that end on slots of *scheduler*."""

    name = "skyinfra-records"

    def __init__(self, scheduler: Scheduler) -> None:
        self._scheduler = scheduler
        self._kept: deque[_Ended] = deque(maxlen=_KEPT)
        # When each task that has not ended came, and where it was last sent to, with the time.
        self._came: dict[str, float] = {}
        self._sent: dict[str, tuple[Described, float]] = {}
        self._began = time.monotonic()
        # Tasks that waited at the end of each period, and that ended in it.
        self._periods: deque[tuple[int, int | None]] = deque(maxlen=_PERIODS)
        # How many tasks each worker had ended when it was asked last, by its address.
        self._counted: dict[str, int] = {}
        # Who submitted a task, where its client says so; of a job its head knows that, by its key.
        self._submitters: dict[str, str] = {}
        self.submitter_of_job: Callable[[str], str | None] = lambda key: None
        # Seconds by whom and slot since they were drained; of them, those of tasks that still run.
        self._used: defaultdict[tuple[str, Literal["job", "task"], str, str], float] = defaultdict(float)
        self._seconds: dict[str, float] = {}
        # The part of its node that each slot is, or was, and the workers by which that was found.
        self._known_parts: dict[str, float] = {}
        self._workers: set[str] = set()

    def records(self) -> list[TaskRecord]:
        """Returns the last tasks that ended, in the order of their ends."""
        slots = {id(each.worker): slot_of(each.worker) for each in {id(e.worker): e for e in self._kept}.values()}
        since = time.time() - time.monotonic()
        return [_record(each, slot, since) for each in self._kept if (slot := slots[id(each.worker)]) is not None]

    def count(self) -> None:
        """Ends a period; is called every `PERIOD_S` seconds. A short task travels with others in one message, so that
        the workers count those that ended."""
        reports = {address: report_of(worker) for address, worker in self._scheduler.workers.items()}
        counts = {address: report.ended for address, report in reports.items() if report is not None}
        ended = sum(max(0, count - self._counted.get(address, 0)) for address, count in counts.items())
        self._periods.append((self._waiting, ended if len(counts) == len(reports) else None))
        self._counted = counts

    def work(self) -> FleetWork:
        """Returns what waits and ended, and how far the running tasks are that tell it."""
        progress, running = {}, tasks_on_slots(self._scheduler)
        for worker in self._scheduler.workers.values():
            report = report_of(worker)
            # A report is of the task that ran then: it may have ended, and the next one has told nothing yet.
            if report is not None and report.progress is not None and running[str(worker.name)]:
                progress[str(worker.name)] = report.progress
        waited, ended = zip(*self._periods, strict=True) if self._periods else ((), ())
        return FleetWork(time.monotonic() - self._began, self._waiting, PERIOD_S, waited, ended, progress)

    @property
    def _waiting(self) -> int:
        """The number of tasks that no slot has begun: of those that were sent to one, the first one runs."""
        return len(self._came) - len({id(extra) for extra, _ in self._sent.values()})

    def came(self, key: str, waited: float, submitter: str = "") -> None:
        """Notes that the task *key*, which is about to come, has waited for so many seconds, at its client or here."""
        self._came.setdefault(key, time.monotonic() - max(0.0, waited))
        if submitter:
            self._submitters.setdefault(key, submitter)

    def transition(self, key: str, start: str, finish: str, *_: Any, **details: Any) -> None:
        """Notes when a task comes, where it is sent, and when it ends."""
        if finish in _WAITS:
            self._came.setdefault(key, time.monotonic())
            self._sent.pop(key, None)  # its worker is gone: it is sent anew
            self._seconds.pop(key, None)
        elif finish == "processing":
            now = time.monotonic()
            self._came.setdefault(key, now)
            task = self._scheduler.tasks.get(key)
            if task is not None and task.processing_on is not None:
                self._sent[key] = task.processing_on.extra, now
        elif finish in ("memory", "erred", "forgotten"):
            # Forgotten: a client took it back while it ran, or had its outcome and left before its worker said so.
            self._end(key, details.get("startstops"))

    def _end(self, key: str, measured: Any) -> None:
        came, sent = self._came.pop(key, None), self._sent.pop(key, None)
        task, submitter = self._scheduler.tasks.get(key), self._submitters.pop(key, "")
        counted = self._seconds.pop(key, 0.0)
        if came is None or sent is None or task is None:
            return
        worker, started = sent
        now = time.monotonic()
        # The worker says how long it ran; a task that lay behind another one on its slot waited there.
        ran = [each["stop"] - each["start"] for each in measured or () if each.get("action") == "compute"]
        if ran:
            started = max(started, now - sum(ran))
        self._kept.append(_Ended(key, came, started, now, worker, task.resource_restrictions or {}))
        slot = str((worker.get(STARTUP_KEY) or {}).get("slot", ""))
        self._used[(*self._whose(key, submitter), slot)] += max(0.0, now - started - counted)

    def _whose(self, key: str, submitter: str) -> tuple[str, Literal["job", "task"], str]:
        """Returns who submitted the task *key*, and what it is of which name."""
        of_job = None if submitter else self.submitter_of_job(key)
        name = key.rpartition("-")[0] or key
        return (submitter, "task", name) if of_job is None else (of_job, "job", name)

    def drain_uses(self) -> list[SlotUse]:
        """Returns the uses of slots since it was called last, also by tasks that still run."""
        for slot, tasks in tasks_on_slots(self._scheduler).items():
            for key, _, seconds in tasks:
                if (sent := self._sent.get(key)) is not None:
                    # One that began before this head, of a job, was counted by the head of before.
                    seconds = min(seconds, time.monotonic() - sent[1])
                counted = self._seconds.get(key, 0.0)
                self._used[(*self._whose(key, self._submitters.get(key, "")), slot)] += max(0.0, seconds - counted)
                self._seconds[key] = max(seconds, counted)
        day, parts = time.strftime("%Y-%m-%d", time.gmtime()), self._parts()
        found = [
            SlotUse(day, submitter, kind, name, seconds, seconds * parts.get(slot, 0.0))
            for (submitter, kind, name, slot), seconds in self._used.items()
        ]
        self._used.clear()
        return found

    def _parts(self) -> dict[str, float]:
        """Returns the part of its node that each slot is, or was: of its GPU by memory, of a CPU node by number."""
        if (there := set(self._scheduler.workers)) == self._workers:
            return self._known_parts
        self._workers = there
        slots = [slot for each in self._scheduler.workers.values() if (slot := slot_of(each.extra)) is not None]
        number, gpus = Counter(slot.node for slot in slots), Counter[str]()
        for slot in slots:
            gpus[slot.node] = max(gpus[slot.node], -1 if slot.gpu is None else slot.gpu + 1)
        self._known_parts |= {slot.slot: _part(slot, gpus[slot.node] or number[slot.node]) for slot in slots}
        return self._known_parts


def _part(slot: InstanceInfo, of: int) -> float:
    """Returns the part of its node that *slot* is, which has that many GPUs, or slots without one."""
    part = slot.size / slot.units if slot.size and slot.units else 1.0
    if slot.compute is not None and slot.memory_gb and slot.own_memory_gb:
        part *= slot.own_memory_gb / slot.memory_gb  # of what several share
    return part / of


def slot_of(extra: Described) -> InstanceInfo | None:
    """Returns the slot of a worker; None for one that does not say what it is."""
    try:
        return InstanceInfo.read(rpc.lists(extra.get(STARTUP_KEY)))
    except InvalidNodeConfig:
        return None


def report_of(worker: Any) -> SlotReport | None:
    """Returns what the worker has reported of its tasks; None for one of an earlier version, which does not."""
    try:
        return SlotReport.read(rpc.lists(worker.metrics.get(REPORT)))
    except InvalidManifest:
        return None


def _record(ended: _Ended, slot: InstanceInfo, since: float) -> TaskRecord:
    # The resource "slot", without a name behind it, is that of every task.
    named = {kind: value for kind, _, value in (name.partition(":") for name in ended.resources) if value}
    bound = slot.profile if named.keys() & {"slot", "node"} else None
    return TaskRecord(
        key=ended.key,
        submitted=since + ended.submitted,
        started=since + ended.started,
        ended=since + ended.ended,
        slot=slot.slot,
        profile=named.get("profile") or bound,
        memory_gb=ended.resources.get(GPU_MEMORY, 0) / 1000,
        slot_profile=slot.profile,
        slot_memory_gb=slot.memory_gb,
    )
