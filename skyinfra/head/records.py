"""Records of the tasks that ended, on the head: what they asked for, how long they waited and ran, and where.

They live in the memory of the scheduler and go with it. What a task used its node tells, see
`skyinfra.readings.figures`.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Mapping
from typing import Any, NamedTuple

from distributed import Scheduler
from distributed.diagnostics.plugin import SchedulerPlugin

from skyinfra.errors import InvalidNodeConfig
from skyinfra.protocol import rpc
from skyinfra.protocol.instance import GPU_MEMORY, STARTUP_KEY, InstanceInfo
from skyinfra.protocol.readings import TaskRecord

# So many of the last ones are kept, of some 300 bytes each.
_KEPT = 5000
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

    def records(self) -> list[TaskRecord]:
        """Returns the last tasks that ended, in the order of their ends."""
        slots = {id(each.worker): slot_of(each.worker) for each in {id(e.worker): e for e in self._kept}.values()}
        since = time.time() - time.monotonic()
        return [_record(each, slot, since) for each in self._kept if (slot := slots[id(each.worker)]) is not None]

    def came(self, key: str, waited: float) -> None:
        """Notes that the task *key*, which is about to come, has waited for so many seconds, at its client or here."""
        self._came.setdefault(key, time.monotonic() - max(0.0, waited))

    def transition(self, key: str, start: str, finish: str, *_: Any, **details: Any) -> None:
        """Notes when a task comes, where it is sent, and when it ends."""
        if finish in _WAITS:
            self._came.setdefault(key, time.monotonic())
            self._sent.pop(key, None)  # its worker is gone: it is sent anew
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
        task = self._scheduler.tasks.get(key)
        if came is None or sent is None or task is None:
            return
        worker, started = sent
        now = time.monotonic()
        # The worker says how long it ran; a task that lay behind another one on its slot waited there.
        ran = [each["stop"] - each["start"] for each in measured or () if each.get("action") == "compute"]
        if ran:
            started = max(started, now - sum(ran))
        self._kept.append(_Ended(key, came, started, now, worker, task.resource_restrictions or {}))


def slot_of(extra: Described) -> InstanceInfo | None:
    """Returns the slot of a worker; None for one that does not say what it is."""
    try:
        return InstanceInfo.read(rpc.lists(extra.get(STARTUP_KEY)))
    except InvalidNodeConfig:
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
