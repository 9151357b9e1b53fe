"""Advice on the layout of a fleet from the tasks that ran on it: their records become a trace of `skyinfra.mig`."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from skyinfra import mig
from skyinfra.accelerators import Accelerator
from skyinfra.errors import UnknownProfile
from skyinfra.mig.advice import Advice
from skyinfra.mig.simulation import Sizes, TraceTask
from skyinfra.protocol.manifest import Manifest
from skyinfra.protocol.readings import TaskRecord

_PATIENCE_S = 3.0
# A reading every two seconds misses what happens between: so much more than the highest one is taken to be needed.
_MARGIN = 1.1
# A task that has that much of its slot's memory may have reserved it, whatever it needs.
_RESERVED = 0.9


@dataclass(frozen=True)
class FleetAdvice:
    """The advice for a fleet, and how its trace came about.

    first, last: UNIX seconds of the first submission and the last end of a task. measured: tasks of which NVML told the
    memory high-water. reserved: those among them that had nine tenths of their slot's memory or more. silent: tasks
    that ask for neither a profile nor memory, and do not fit every partition of the advised layout. trace: of all.
    """

    fleet: str
    first: float
    last: float
    measured: int
    reserved: int
    silent: int
    advice: Advice
    trace: tuple[TraceTask, ...]

    def to_json(self) -> dict[str, Any]:
        """Plain JSON values, without the trace."""
        fields = {name: getattr(self, name) for name in ("fleet", "first", "last", "measured", "reserved", "silent")}
        return {
            **fields,
            **asdict(self.advice),
            "keeps": self.advice.keeps,
            "declaration": self.advice.declaration,
        }


def advice(manifest: Manifest, accelerator: Accelerator) -> FleetAdvice:
    """The advice for the running fleet, whose nodes have *accelerator*. Asks its head and nodes for records of tasks.

    Raises `TooLittleMeasured`, `MigNotSupported` and `FleetError`.
    """
    from skyinfra.client import open_questions

    with open_questions(manifest, timeout=_PATIENCE_S) as fleet:
        now = fleet.look()
        slots = [slot for slot in now.slots + now.draining if slot.gpu is not None]
        records = fleet.records()
    gpus = max([accelerator.count or 1, *(slot.gpu + 1 for slot in slots if slot.gpu is not None)])
    return advice_of(manifest.fleet, records, accelerator.with_(count=gpus), len({slot.node for slot in slots}) or 1)


def advice_of(fleet: str, records: Sequence[TaskRecord], accelerator: Accelerator, nodes: int) -> FleetAdvice:
    """The advice for *nodes* nodes with *accelerator*, with all its GPUs, on which the tasks of *records* ran."""
    geometry = accelerator.mig_geometry()
    trace = trace_of(records, geometry)
    found = mig.advise(trace, geometry, gpus=accelerator.count or 1, nodes=nodes, declared=accelerator.mig)
    smallest = min((Sizes.of(geometry).memory[each.profile] for each in found.carried), default=0.0)
    silent = sum(
        not record.profile and not record.memory_gb and task.memory_gb > smallest
        for record, task in zip(records, trace, strict=True)
    )
    return FleetAdvice(
        fleet,
        min(record.submitted for record in records),
        max(record.ended for record in records),
        sum(_peak(record) > 0 for record in records),
        sum(_reserved(record) for record in records),
        silent,
        found,
        tuple(trace),
    )


def trace_of(records: Iterable[TaskRecord], geometry: mig.Geometry) -> list[TraceTask]:
    """Returns the *records* as a trace, in their order; 0 is the first submission.

    A task needs the memory that it asked for or used, whichever is more: the high-water and a tenth, but no more than
    its slot had. The compute slices that it kept busy follow from the activity of its slot's multiprocessors, where the
    GPU tells that. Of a task that was not measured and asks for nothing it is not known what it needs. Neither is it of
    one in a compute instance: the GPU tells what all of its GPU instance use together.
    """
    found = list(records)
    begin = min((record.submitted for record in found), default=0.0)
    sizes = Sizes.of(geometry)
    return [
        TraceTask(
            record.submitted - begin,
            max(0.0, record.ended - record.started),
            _named(record.profile, geometry),
            _memory(record),
            _compute(record, geometry, sizes),
        )
        for record in found
    ]


def _memory(record: TaskRecord) -> float:
    used = _peak(record) * _MARGIN
    return max(record.memory_gb, min(used, record.slot_memory_gb or used))


def _peak(record: TaskRecord) -> float:
    """Returns the memory high-water in GB; 0 where it was not measured."""
    peak = record.figures.memory_peak if record.figures is not None and not _shares(record) else None
    return (peak or 0) / 1e9


def _shares(record: TaskRecord) -> bool:
    """Returns whether the slot was a compute instance, whose readings are those of its GPU instance."""
    return record.slot_profile is not None and mig.gpu_profile(record.slot_profile) != record.slot_profile


def _reserved(record: TaskRecord) -> bool:
    return record.slot_memory_gb is not None and _peak(record) >= _RESERVED * record.slot_memory_gb


def _compute(record: TaskRecord, geometry: mig.Geometry, sizes: Sizes) -> float:
    """Returns the compute slices that the task kept busy; 0 where that is not known."""
    activity = record.figures.activity.get("sm", 0.0) if record.figures is not None else 0.0
    if not activity or record.slot_memory_gb is None or _shares(record):
        return 0.0
    name = _named(record.slot_profile, geometry)
    return activity / 100 * (sizes.all if name is None else sizes.slices.get(name, 0))


def _named(profile: str | None, geometry: mig.Geometry) -> str | None:
    """The profile by the name that *geometry* has; one that it does not have stays, and no partition takes it."""
    try:
        return None if profile is None else geometry.profile(profile).name
    except UnknownProfile:
        return profile
