"""Measures what the tasks of this node use: memory high-water, energy and activity, by readings of their slots.

The runner measures, not the worker: a task in native code stops the other threads of its process, and one that keeps
NVML open would keep a MIG mode from being changed. A reading opens NVML and closes it again. The figures of running
tasks stand in a file, which what serves Prometheus reads too.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from skyinfra.errors import SkyinfraError, StateDirectoryError
from skyinfra.node.folder import NodeDirectory
from skyinfra.protocol.readings import Figures, SlotReading
from skyinfra.worker import attempts

logger = logging.getLogger("skyinfra.runner")

# Between two readings while tasks run.
INTERVAL_S = 2.0
# Of tasks that have ended, the figures of so many are kept.
_KEPT = 1000
_SOURCE = "figures.json"

Measure = Callable[[], list[SlotReading]]


@dataclass
class _Sum:
    """The readings of one task so far. energy: of the slot, at the first reading and at the last."""

    samples: int = 0
    began: float = 0.0
    ended: float = 0.0
    memory_peak: int | None = None
    energy: tuple[float, float] | None = None
    activity: dict[str, tuple[int, float]] = field(default_factory=dict)

    def add(self, reading: SlotReading, now: float) -> None:
        """Adds a *reading* of the task's slot, made at *now* (``time.monotonic``)."""
        self.began = self.began if self.samples else now
        self.samples, self.ended = self.samples + 1, now
        if reading.memory_used is not None:
            self.memory_peak = max(reading.memory_used, self.memory_peak or 0)
        if (energy := reading.slot_energy) is not None:
            self.energy = (self.energy or (energy, energy))[0], energy
        for measure, value in reading.activity.items():
            count, total = self.activity.get(measure, (0, 0.0))
            self.activity[measure] = count + 1, total + value

    def figures(self) -> Figures:
        """Returns the figures of all readings. One reading says nothing of energy."""
        spent = self.energy[1] - self.energy[0] if self.energy is not None and self.samples > 1 else None
        return Figures(
            self.samples,
            round(self.ended - self.began, 1),
            memory_peak=self.memory_peak,
            energy=None if spent is None else round(spent, 3),
            activity={measure: round(total / count, 1) for measure, (count, total) in self.activity.items()},
        )


class TaskFigures:
    """The figures of the tasks on the node in *directory*; *measure* reads its slots."""

    def __init__(self, directory: NodeDirectory, measure: Measure) -> None:
        self._directory = directory
        self._measure = measure
        self._sums: dict[str, _Sum] = {}
        self._failed = ""
        # Until the first look: those that an earlier runner has left.
        self._published = True

    async def run(self, busy: Callable[[], bool]) -> None:
        """Measures until it is cancelled; not while *busy*, when GPUs change and NVML is to be left alone."""
        while True:
            await asyncio.sleep(INTERVAL_S)
            if busy():
                continue
            try:
                await asyncio.to_thread(self.sample)
            except Exception as error:  # noqa: BLE001 - whatever is wrong here, tasks go on
                if str(error) != self._failed:
                    logger.warning("tasks are not measured: %s: %s", type(error).__name__, error)
                self._failed = str(error)

    def sample(self) -> None:
        """Measures the tasks that run now, if any, and writes their figures. Raises what *measure* raises."""
        running = attempts.running(self._directory.path)
        if running:
            now, readings = time.monotonic(), self._measure()
            # A task that ended meanwhile, or began, is not what was measured.
            after = attempts.running(self._directory.path)
            running = {slot: key for slot, key in running.items() if after.get(slot) == key}
            for reading in readings:
                if reading.slot.worker in running:
                    self._add(running[reading.slot.worker], reading, now)
        self._publish(running)

    def of(self, task: str) -> dict[str, Any] | None:
        """Returns the figures of the task with that key as JSON; None where it was not measured, or too long ago."""
        found = self._sums.get(task)
        return None if found is None else found.figures().to_json()

    def all(self) -> dict[str, Any]:
        """Returns the figures of all tasks that are remembered as JSON, by their keys."""
        return {key: found.figures().to_json() for key, found in list(self._sums.items())}

    def _add(self, key: str, reading: SlotReading, now: float) -> None:
        if reading.memory_used is None and reading.slot_energy is None and not reading.activity:
            return
        # The task that was measured last is the last one.
        found = self._sums[key] = self._sums.pop(key, _Sum())
        found.add(reading, now)
        while len(self._sums) > _KEPT:
            del self._sums[next(iter(self._sums))]

    def _publish(self, running: Mapping[int, str]) -> None:
        by_slot = {
            str(slot): {"task": key, "figures": self.of(key)} for slot, key in running.items() if key in self._sums
        }
        if not by_slot and not self._published:
            return
        self._published = bool(by_slot)
        with contextlib.suppress(StateDirectoryError):  # the next ones may find room
            self._directory.write(self._directory.figures_file, json.dumps(by_slot) + "\n")


def published(directory: NodeDirectory) -> dict[int, dict[str, Any]]:
    """Returns ``task`` and ``figures`` of the tasks that ran at the last reading, by the index of their slot."""
    try:
        by_slot = json.loads(directory.figures_file.read_text(encoding="utf-8"))
        return {
            int(slot): {"task": str(each["task"]), "figures": Figures.read(each["figures"], source=_SOURCE)}
            for slot, each in by_slot.items()
        }
    except (OSError, ValueError, KeyError, TypeError, AttributeError, SkyinfraError):
        return {}
