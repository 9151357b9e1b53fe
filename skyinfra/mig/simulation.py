"""Simulation of a fleet on a trace of tasks: waiting time and utilization of fixed layouts and of those that follow.

A trace is a list of tasks with their arrivals, durations and what they ask for. A task takes the smallest idle
partition that fits, the oldest first, as on a head. Layouts that follow the work are chosen by
`skyinfra.mig.follow.choose`, as a head chooses them.
"""

from __future__ import annotations

import csv
import math
import statistics
from collections import Counter, deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from skyinfra.errors import InvalidField, written
from skyinfra.mig import follow
from skyinfra.mig.follow import Follow
from skyinfra.mig.geometry import Geometry, gpu_profile
from skyinfra.mig.grid import Layout, Placement, parts
from skyinfra.mig.placement import rearranged, resolve

# From a choice until workers take tasks; a booted node in a test takes 4 s, a GPU's driver some seconds more.
CHANGE_S = 10.0
# The name of a GPU without MIG, among those of profiles.
WHOLE = "gpu"
_COLUMNS = ("arrival", "duration", "profile", "memory_gb", "compute")


@dataclass(frozen=True, slots=True)
class TraceTask:
    """A task of a trace.

    arrival, duration: seconds, the first from any moment. profile: the only one that takes it, None: any. memory_gb:
    what it needs of a partition; 0 where that is not known. compute: the compute slices that it keeps busy, 0 where
    that is not known: on a partition with fewer it is taken to run longer in proportion, never faster on one with more.
    """

    arrival: float
    duration: float
    profile: str | None = None
    memory_gb: float = 0.0
    compute: float = 0.0

    @property
    def kind(self) -> tuple[str | None, float]:
        """Returns the profile and the memory that it asks for."""
        return self.profile, self.memory_gb


@dataclass(frozen=True)
class Sizes:
    """Memory in GB and compute slices of each partition of a GPU model, by its name; `WHOLE` is the whole GPU.

    Of the memory that compute instances share, each has the part of its compute slices.
    """

    memory: dict[str, float]
    slices: dict[str, int]
    all: int

    @classmethod
    def of(cls, geometry: Geometry) -> Sizes:
        """Returns those of *geometry*."""
        memory = {profile.name: float(profile.memory_gb) for profile in geometry.profiles}
        slices = {profile.name: profile.compute_slices for profile in geometry.profiles}
        for profile in geometry.profiles:
            for size in profile.compute_sizes:
                memory[f"{size}c.{profile.name}"] = profile.memory_gb * size / profile.compute_slices
                slices[f"{size}c.{profile.name}"] = size
        most = geometry.compute_slices or max(slices.values(), default=1)
        return cls({**memory, WHOLE: max(memory.values(), default=0.0)}, {**slices, WHOLE: most}, most)

    def fits(self, task: TraceTask, profile: str) -> bool:
        """Returns whether a partition of that name takes *task*."""
        return task.profile in (None, profile) and self.memory[profile] >= task.memory_gb

    def needs(self, task: TraceTask) -> int:
        """Returns the compute slices of the smallest partition that takes *task*; those of a GPU where none does."""
        fitting = (count for name, count in self.slices.items() if gpu_profile(name) == name and self.fits(task, name))
        return min(fitting, default=self.all)

    def seconds(self, task: TraceTask, profile: str) -> float:
        """Returns how long *task* runs on a partition of *profile*."""
        return task.duration * max(1.0, task.compute / self.slices[profile])


# Those that wait, by what they ask for, the oldest first.
Waiting = dict[tuple[str | None, float], deque[TraceTask]]


@dataclass
class Slot:
    """A partition, or a whole GPU at 0; free: when its last task ends, or ended."""

    place: Placement
    free: float = 0.0


@dataclass
class Card:
    """A GPU. ready: when the partitions of its last change take tasks."""

    slots: list[Slot]
    changed: float = -math.inf
    ready: float = 0.0


@dataclass
class Outcome:
    """The result of a trace.

    waits: seconds from arrival to start, of the tasks that ran. lost: tasks that nothing takes. busy: slices that were
    used, times seconds. begin, end: of the first task and the last. changes: of layouts. ran, used: the tasks that each
    profile had, and the seconds that they took there. slices: of all GPUs.
    """

    slices: int = 0
    waits: list[float] = field(default_factory=list)
    lost: int = 0
    busy: float = 0.0
    begin: float = 0.0
    end: float = 0.0
    changes: int = 0
    ran: Counter[str] = field(default_factory=Counter)
    used: dict[str, float] = field(default_factory=dict)

    @property
    def wait(self) -> float:
        """The mean; infinite where a task never ran."""
        return math.inf if self.lost else self.mean

    @property
    def mean(self) -> float:
        """The mean wait of the tasks that ran, in seconds; 0 for none."""
        return statistics.fmean(self.waits) if self.waits else 0.0

    @property
    def p95(self) -> float:
        """The time that 95 of 100 tasks wait at most."""
        return sorted(self.waits)[int(len(self.waits) * 0.95)] if self.waits else 0.0

    @property
    def utilization(self) -> float:
        """The share of the compute slices that was used until the last task ended."""
        return self.busy / ((self.end - self.begin) * self.slices) if self.end > self.begin else 0.0


def simulate(
    trace: Iterable[TraceTask],
    layouts: Sequence[Layout | None],
    geometry: Geometry,
    policy: Follow | None = None,
    *,
    whole: bool = False,
) -> Outcome:
    """Runs *trace* on GPUs with these *layouts*, None for a whole GPU.

    policy: the layouts follow it. whole: every GPU is whole, and takes the tasks that ask for a profile as well.
    """
    return _Simulation(trace, layouts, geometry, policy, whole=whole).run()


class _Simulation:
    def __init__(
        self,
        trace: Iterable[TraceTask],
        layouts: Sequence[Layout | None],
        geometry: Geometry,
        policy: Follow | None,
        *,
        whole: bool,
    ) -> None:
        self._sizes = Sizes.of(geometry)
        self._geometry, self._policy, self._whole = geometry, policy, whole
        gpu = (Placement(WHOLE, 0, geometry.placement_units or 1),)
        held = [gpu if whole or layout is None else layout for layout in layouts]
        self._cards = [Card([Slot(place) for place in parts(layout)]) for layout in held]
        possible = {slot.place.name for card in self._cards for slot in card.slots} | {
            name for text in (policy.among if policy else ()) for name in follow.profiles(text, geometry)
        }
        self._takes: dict[tuple[tuple[str | None, float], str], bool] = {}
        tasks = sorted(trace, key=lambda task: task.arrival)
        self._coming = deque(task for task in tasks if any(self._fits(task, name) for name in possible))
        self._waiting: Waiting = {}
        first = self._coming[0].arrival if self._coming else 0.0
        self._found = Outcome(self._sizes.all * len(held), lost=len(tasks) - len(self._coming), begin=first)

    def run(self) -> Outcome:
        now, coming = 0.0, self._coming
        while coming or self._waiting:
            while coming and coming[0].arrival <= now:
                task = coming.popleft()
                self._waiting.setdefault(task.kind, deque()).append(task)
            self._start(now)
            if self._policy is not None and self._waiting:
                self._found.changes += self._follow(self._policy, now)
            now = self._next(now)
        return self._found

    def _fits(self, task: TraceTask, profile: str) -> bool:
        known = task.kind, profile
        if known not in self._takes:
            alone = self._whole and task.memory_gb <= self._sizes.memory[WHOLE]
            self._takes[known] = alone or self._sizes.fits(task, profile)
        return self._takes[known]

    def _next(self, now: float) -> float:
        """Returns the next moment at which something may start; a head looks every second while tasks wait."""
        arrival = self._coming[0].arrival if self._coming else math.inf
        if not self._waiting:
            return arrival
        ends = (max(slot.free, card.ready) for card in self._cards for slot in card.slots)
        looks = now + 1 if self._policy is not None else math.inf
        found = min(arrival, looks, min((end for end in ends if end > now), default=math.inf))
        return found if found < math.inf else now + 1

    def _start(self, now: float) -> None:
        """Starts what can start, the oldest first, on the smallest free partition that takes it."""
        free: dict[str, list[Slot]] = {}
        for card in self._cards if self._waiting else ():
            for slot in card.slots if card.ready <= now else ():
                if slot.free <= now:
                    free.setdefault(slot.place.name, []).append(slot)
        for slots in free.values():
            slots.sort(key=lambda slot: slot.free)
            slots.reverse()  # the one that is free for longest is taken from the end
        sizes = self._sizes
        order = sorted(free, key=lambda name: (sizes.memory[name], sizes.slices[name], name))
        while free:
            heads = sorted((queue[0] for queue in self._waiting.values()), key=lambda task: task.arrival)
            fitting = ((task, name) for task in heads for name in order if name in free and self._fits(task, name))
            task, name = next(fitting, (None, ""))
            if task is None:
                return
            slot = free[name].pop()
            if not free[name]:
                del free[name]
            self._run(task, slot, now)

    def _run(self, task: TraceTask, slot: Slot, now: float) -> None:
        queue, profile, found = self._waiting[task.kind], slot.place.name, self._found
        queue.popleft()
        if not queue:
            del self._waiting[task.kind]
        seconds = self._sizes.seconds(task, profile)
        slot.free = now + seconds
        found.waits.append(now - task.arrival)
        found.busy += task.duration * self._sizes.needs(task)
        found.end = max(found.end, slot.free)
        found.ran[profile] += 1
        found.used[profile] = found.used.get(profile, 0.0) + seconds

    def _follow(self, policy: Follow, now: float) -> int:
        queue = [follow.Want(*kind, tuple(task.arrival for task in tasks)) for kind, tasks in self._waiting.items()]
        gpus = [_seen(index, card, now) for index, card in enumerate(self._cards)]
        changes = follow.choose(policy, self._geometry, queue, gpus, now)
        for change in changes:
            card = self._cards[change.index]
            existing = tuple(slot.place for slot in card.slots)
            used = {slot.place.start for slot in card.slots if now - slot.free < policy.idle_seconds}
            desired = resolve(change.layout, self._geometry, 1)[0]
            after = rearranged(desired, existing, self._geometry, in_use=used)
            kept = {slot.place: slot for slot in card.slots if slot.place in after}
            card.slots = [kept.get(place) or Slot(place, now + CHANGE_S) for place in after]
            card.changed, card.ready = now, now + CHANGE_S
        return len(changes)


def _seen(index: int, card: Card, now: float) -> follow.Gpu:
    if card.ready > now:
        return follow.Gpu("", index, (), (), card.changed, tuple(slot.place.profile for slot in card.slots))
    slots = sorted(card.slots, key=lambda slot: slot.place.start)
    used = tuple(math.inf if slot.free > now else slot.free for slot in slots)
    return follow.Gpu("", index, tuple(slot.place for slot in slots), used, card.changed)


def read_trace(path: str | Path) -> list[TraceTask]:
    """Returns the trace in a file: CSV with the columns ``arrival,duration`` and any of ``profile,memory_gb,compute``.

    The fields are those of `TraceTask`; any but the first two may be empty. Raises `InvalidField` with the line.
    """
    try:
        with Path(path).open(newline="", encoding="utf-8") as file:
            if file.read(1) == "\ufeff":
                hint = "Save it as UTF-8 without one."
                raise InvalidField("begins with a byte order mark", field="trace", given=str(path), hint=hint)
            file.seek(0)
            return [_task(row, f"{path}, line {number}") for number, row in enumerate(csv.DictReader(file), start=2)]
    except OSError as error:
        raise InvalidField(f"cannot be read: {error.strerror}", field="trace", given=str(path)) from None
    except (UnicodeDecodeError, csv.Error) as error:
        raise InvalidField(f"is no CSV: {error}", field="trace", given=str(path)) from None


def write_trace(path: str | Path, trace: Iterable[TraceTask]) -> None:
    """Writes what `read_trace` reads. Raises `InvalidField` where the file cannot be written."""
    with written(InvalidField, "trace", str(path)), Path(path).open("w", newline="", encoding="utf-8") as file:
        rows = csv.writer(file, lineterminator="\n")
        rows.writerow(_COLUMNS)
        for each in trace:
            numbers = (round(each.arrival, 3), round(each.duration, 3), round(each.memory_gb, 3))
            rows.writerow((*numbers[:2], each.profile or "", numbers[2] or "", round(each.compute, 3) or ""))


def _task(row: dict[str, str], where: str) -> TraceTask:
    numbers = {}
    for name in ("arrival", "duration", "memory_gb", "compute"):
        text = row.get(name) or ("" if name in _COLUMNS[:2] else "0")
        try:
            numbers[name] = float(text)
        except ValueError:
            numbers[name] = math.nan
        if not math.isfinite(numbers[name]) or (numbers[name] < 0 and name != "arrival"):
            hint = f"The columns are {', '.join(_COLUMNS)}; the first two are needed."
            raise InvalidField("a number", field=f"{where}: {name}", given=row.get(name), hint=hint)
    return TraceTask(profile=row.get("profile") or None, **numbers)
