"""Advice on a fixed layout: the one under which the tasks of a trace wait least, by simulation.

A node's GPUs get one layout each, of those beside which nothing more fits and of the whole GPU; every node of the fleet
gets the same. Where there are few combinations all are tried; else it begins with the best of those with the same
layout on every GPU, and changes one GPU at a time for as long as that makes the wait shorter.
"""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import combinations_with_replacement
from pathlib import Path

from skyinfra.errors import InvalidField, LayoutError, TooLittleMeasured, UnknownProfile, at, counted
from skyinfra.mig.geometry import Geometry, geometry
from skyinfra.mig.grid import parts
from skyinfra.mig.layout import OFF, Declared, PerGpu, is_off, text
from skyinfra.mig.layouts import maximal_multisets, plain_profiles
from skyinfra.mig.parted import declared_text
from skyinfra.mig.placement import resolve
from skyinfra.mig.simulation import WHOLE, Outcome, Sizes, TraceTask, read_trace, simulate

# Fewer tasks than that say nothing.
_LEAST = 20
# So much of the tasks' time has to be of tasks of which it is known what they need.
_KNOWN = 0.5
# The last tasks of a longer trace count: a simulation of so many takes a tenth of a second.
_MOST = 2000
# Combinations of layouts that are tried at most.
_TRIES = 200
# A wait that is shorter by no more than that, in seconds or in part, is the same.
_SAME_S, _SAME = 1.0, 0.02

# One layout for each GPU of a node, as text, in order.
Node = tuple[str, ...]


@dataclass(frozen=True)
class Trial:
    """A layout in the simulation.

    layouts: of each GPU of a node, "off" for a whole one. wait: the mean in seconds from arrival to start of the tasks
    that ran, p95: 95 of 100 waited no longer. utilization: the share of the compute slices that tasks needed, from the
    first arrival to the last end. never: tasks that no slot takes.
    """

    layouts: Node
    wait: float
    p95: float
    utilization: float
    never: int


@dataclass(frozen=True)
class Carried:
    """The part of the partitions of one profile ("gpu": whole GPUs) in the work.

    count: of them in the fleet. tasks: the share of all tasks that they had. busy: the share of the time.
    """

    profile: str
    count: int
    tasks: float
    busy: float


@dataclass(frozen=True)
class Advice:
    """The layout under which the tasks of a trace wait least.

    tasks, seconds: of the trace that was simulated, until its last arrival. unknown: tasks of which it is not known
    what they need; any slot takes them. advised, declared, whole: the best layout, that which is declared, and whole
    GPUs; *advised* is *declared* where no other one makes the wait noticeably shorter. carried: by the advised layout,
    the smallest profile first. tried, possible: how many layouts were simulated, and how many there are.
    """

    tasks: int
    seconds: float
    unknown: int
    advised: Trial
    declared: Trial
    whole: Trial
    carried: tuple[Carried, ...]
    tried: int
    possible: int

    @property
    def keeps(self) -> bool:
        """Whether the declared layout is to be kept."""
        return self.advised.layouts == self.declared.layouts

    @property
    def declaration(self) -> str:
        """The argument that declares the advised layout, for the factory of an accelerator or its `with_`."""
        layouts = self.advised.layouts
        if len(set(layouts)) > 1:
            return f"mig=sky.mig.per_gpu({', '.join(json.dumps(each) for each in layouts)})"
        return "mig=None" if layouts[0] == OFF else f"mig={json.dumps(layouts[0])}"


def advise(
    trace: str | Path | Iterable[TraceTask],
    model: str | Geometry,
    *,
    gpus: int = 1,
    nodes: int = 1,
    declared: Declared | PerGpu | None = None,
) -> Advice:
    """Recommends the layout for *nodes* nodes of *gpus* GPUs each under which the tasks of *trace* wait least.

    trace: tasks, or the path of a CSV file with the columns arrival, duration, profile, memory_gb and compute, see
    `TraceTask` and `read_trace`. model: a geometry or its key, such as ``h100_80gb``. declared: the layout to compare
    with, None for whole GPUs. Raises `TooLittleMeasured`, `InvalidField`, what reading a layout raises, and
    `MigNotSupported` for a GPU whose profiles are not known.
    """
    known = geometry(model) if isinstance(model, str) else model
    known.check_known()
    if min(gpus, nodes) < 1:
        raise InvalidField("a number from 1", field="gpus" if gpus < 1 else "nodes", given=min(gpus, nodes))
    tasks = _checked(_read(trace, known) if isinstance(trace, str | Path) else list(trace), known)
    search = _Search(tasks, known, gpus, nodes)
    existing = _node(declared, known, gpus)
    before = search.outcome(existing)
    best = search.best(existing)
    if not _shorter(search.outcome(best), before):
        best = existing
    found = search.outcome(best)
    whole = simulate(tasks, [None] * gpus * nodes, known, whole=True)
    return Advice(
        tasks=len(tasks),
        seconds=tasks[-1].arrival - tasks[0].arrival,
        unknown=sum(_unknown(task) for task in tasks),
        advised=_trial(best, found),
        declared=_trial(existing, before),
        whole=_trial((OFF,) * gpus, whole),
        carried=_carried(best, found, known, nodes),
        tried=len(search.outcomes),
        possible=search.possible,
    )


def _read(path: str | Path, known: Geometry) -> list[TraceTask]:
    """Returns the tasks in a file. Raises UnknownProfile for one that asks for what the GPU does not have."""
    tasks = read_trace(path)
    for line, task in enumerate(tasks, start=2):
        with at(f"{path}, line {line}: profile", UnknownProfile):
            known.divided(task.profile or known.profiles[0].name)
    return tasks


def _checked(trace: Sequence[TraceTask], known: Geometry) -> list[TraceTask]:
    """The last tasks by arrival, each with a memory that is one of a profile's, so that those alike wait together."""
    tasks = sorted(trace, key=lambda task: task.arrival)[-_MOST:]
    if len(tasks) < _LEAST:
        raise TooLittleMeasured(
            f"{counted(len(tasks), 'task')} measured, too few for advice on a layout",
            hint=f"It takes {_LEAST} at least. Ask again when the fleet has had more work.",
        )
    time = sum(task.duration for task in tasks)
    explained = sum(task.duration for task in tasks if not _unknown(task))
    if explained < _KNOWN * time or not time:
        raise TooLittleMeasured(
            f"of {len(tasks)} tasks it is known for {explained / time if time else 0:.0%} of their time what they need",
            hint="Half of it is needed. Tasks of two seconds and more are measured where their device tells how much "
            "of its memory is used; others may say it: @sky.compute(gpu_memory_gb=20).",
        )
    sizes = sorted({0.0, *Sizes.of(known).memory.values()})
    return [_sized(task, sizes) for task in tasks]


def _sized(task: TraceTask, sizes: Sequence[float]) -> TraceTask:
    memory = next((size for size in sizes if size >= task.memory_gb), task.memory_gb)
    return TraceTask(task.arrival, task.duration, task.profile, memory, task.compute)


def _unknown(task: TraceTask) -> bool:
    return task.profile is None and not task.memory_gb


def _node(declared: Declared | PerGpu | None, known: Geometry, gpus: int) -> Node:
    """Returns the declared layout of each GPU as text."""
    if declared is None or (isinstance(declared, str) and is_off(declared)):
        return (OFF,) * gpus
    with at("declared", LayoutError):
        return tuple(declared_text(layout, known) or OFF for layout in resolve(declared, known, gpus))


class _Search:
    """The combinations of layouts for the GPUs of a node, and what came of those that were simulated."""

    def __init__(self, tasks: Sequence[TraceTask], known: Geometry, gpus: int, nodes: int) -> None:
        self._tasks, self._known, self._gpus, self._nodes = tasks, known, gpus, nodes
        self._layouts = _candidates(tasks, known)
        self._ranks = {each: rank for rank, each in enumerate(self._layouts)}
        self.outcomes: dict[Node, Outcome] = {}
        self.possible = math.comb(len(self._layouts) + gpus - 1, gpus)

    def outcome(self, node: Node) -> Outcome:
        """Simulates the tasks where every node has these layouts."""
        order = tuple(sorted(node))  # which GPU has which is the same
        if order not in self.outcomes:
            layouts = [None if each == OFF else resolve(each, self._known, 1)[0] for each in order]
            self.outcomes[order] = simulate(self._tasks, layouts * self._nodes, self._known)
        return self.outcomes[order]

    def best(self, existing: Node) -> Node:
        """Returns the layouts under which tasks wait least; from *existing* on, where not all can be tried."""
        if self.possible <= _TRIES:
            return min(combinations_with_replacement(self._layouts, self._gpus), key=self._rank)
        best = min([(each,) * self._gpus for each in self._layouts] + [existing], key=self._rank)
        while len(self.outcomes) < _TRIES:
            near = [self._replaced(best, gone, come) for gone in sorted(set(best)) for come in self._layouts]
            better = min(near[: _TRIES - len(self.outcomes)], key=self._rank)
            if self._rank(better) >= self._rank(best):
                break
            best = better
        return best

    def _replaced(self, node: Node, gone: str, come: str) -> Node:
        at = node.index(gone)
        return tuple(sorted((*node[:at], come, *node[at + 1 :]), key=lambda each: self._ranks.get(each, -1)))

    def _rank(self, node: Node) -> tuple[float, ...]:
        """The lowest is the best: fewest that never run, then the shortest wait; of equals, fewest partitions."""
        found = self.outcome(node)
        slots = sum(1 if each == OFF else len(parts(resolve(each, self._known, 1)[0])) for each in node)
        return found.lost, round(found.mean, 1), round(found.p95, 1), slots


def _candidates(tasks: Sequence[TraceTask], known: Geometry) -> list[str]:
    """Returns the layouts of one GPU that are tried: those beside which nothing more fits, and the whole GPU.

    Of profiles that are not plain, such as 1g.10gb+me, those that tasks ask for. A partition of the size of the GPU
    takes what the whole GPU takes; it is tried where tasks ask for it.
    """
    names = {profile.name for profile in known.profiles}
    asked = {task.profile for task in tasks if task.profile in names}
    profiles = [*plain_profiles(known), *sorted(name for name in asked if name not in plain_profiles(known))]
    maximal = maximal_multisets(known, profiles)
    found = [text(each, known) for each in maximal if set(each) & asked or _divides(each, known)]
    return [OFF, *found]


def _divides(names: Sequence[str], known: Geometry) -> bool:
    return len(names) > 1 or known.profile(names[0]).compute_slices < (known.compute_slices or 0)


def _shorter(found: Outcome, before: Outcome) -> bool:
    """Returns whether tasks wait noticeably less, or fewer never run."""
    if found.lost != before.lost:
        return found.lost < before.lost
    return before.mean - found.mean > max(_SAME_S, _SAME * before.mean)


def _trial(node: Node, found: Outcome) -> Trial:
    return Trial(node, round(found.mean, 1), round(found.p95, 1), round(found.utilization, 4), found.lost)


def _carried(node: Node, found: Outcome, known: Geometry, nodes: int) -> tuple[Carried, ...]:
    counts: Counter[str] = Counter()
    for each in node:
        layout = () if each == OFF else resolve(each, known, 1)[0]
        counts.update([part.name for part in parts(layout)] if layout else [WHOLE])
    memory = Sizes.of(known).memory
    tasks, seconds = sum(found.ran.values()) or 1, (found.end - found.begin) or 1.0
    return tuple(
        Carried(
            name,
            counts[name] * nodes,
            round(found.ran[name] / tasks, 4),
            round(found.used.get(name, 0.0) / (seconds * counts[name] * nodes), 4),
        )
        for name in sorted(counts, key=lambda name: (memory[name], name))
    )
