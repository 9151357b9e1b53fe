"""Layouts that follow the work against fixed ones and whole GPUs: waiting time and utilization over traces.

The simulation makes its choices with `skyinfra.mig.follow.choose`, as a head does. A trace is a list of tasks with
their arrivals, durations and what they ask for: made up here from a seed, or a file given as ``--trace FILE``, CSV
with the columns ``arrival,duration,profile,memory_gb`` (seconds; one of the last two may be empty), or a list of pods
as that of Alibaba's cluster-trace-gpu-v2023 (``openb_pod_list_default.csv``; github.com/alibaba/clusterdata).
"""

from __future__ import annotations

import csv
import itertools
import math
import random
import statistics
import sys
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from benchmarks.measure import Result
from skyinfra import mig
from skyinfra.mig import Follow, Layout, Placement, follow

GEOMETRY = mig.geometry("h100_80gb")
AMONG = ("1g.10gb*7", "2g.20gb*3+1g.10gb", "3g.40gb*2", "7g.80gb")
GPUS = 8
IDLE_S = 60.0
# From a choice until workers take tasks; a booted node in a test takes 4 s, a GPU's driver some seconds more.
CHANGE_S = 10.0
_MEMORY = {profile.name: float(profile.memory_gb) for profile in GEOMETRY.profiles}
_SLICES = {profile.name: profile.compute_slices for profile in GEOMETRY.profiles}
_ALL = GEOMETRY.compute_slices or 1
_WHOLE = (Placement("7g.80gb", 0, 8),)


@dataclass(frozen=True)
class Job:
    """A task: when it comes and how long it runs, in seconds, and what it asks for."""

    arrival: float
    duration: float
    profile: str | None = None
    memory_gb: float = 0.0

    @property
    def kind(self) -> tuple[str | None, float]:
        """Returns the profile and the memory that it asks for."""
        return self.profile, self.memory_gb

    def fits(self, profile: str) -> bool:
        """Whether a partition of *profile* takes it."""
        return self.profile in (None, profile) and _MEMORY[profile] >= self.memory_gb

    @property
    def slices(self) -> int:
        """The compute slices of the smallest partition that takes it."""
        return min(_SLICES[name] for name in _SLICES if self.fits(name))


# Those that wait, by what they ask for, the oldest first.
Waiting = dict[tuple[str | None, float], deque[Job]]


@dataclass
class Slot:
    """A partition; free: when its last task ends, or ended."""

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
    """waits: seconds from arrival to start, of the tasks that ran. lost: tasks that nothing takes. busy: slices that
    were used, times seconds. begin, end: of the first task and the last."""

    waits: list[float] = field(default_factory=list)
    lost: int = 0
    busy: float = 0.0
    begin: float = 0.0
    end: float = 0.0
    changes: int = 0

    @property
    def wait(self) -> float:
        """The mean; infinite where a task never ran."""
        return math.inf if self.lost else statistics.fmean(self.waits)

    @property
    def p95(self) -> float:
        """The time that 95 of 100 tasks wait at most."""
        return sorted(self.waits)[int(len(self.waits) * 0.95)] if self.waits else 0.0

    @property
    def utilization(self) -> float:
        """The share of the compute slices that was used until the last task ended."""
        return self.busy / ((self.end - self.begin) * _ALL * GPUS) if self.waits else 0.0


def simulate(
    trace: Sequence[Job], begin: Sequence[str], policy: Follow | None = None, *, whole: bool = False
) -> Outcome:
    """Runs *trace* on GPUs with the layouts *begin*, which follow *policy*; *whole*: a task has a GPU for itself."""
    layouts: list[Layout] = [_WHOLE if whole else mig.resolve(text, GEOMETRY, 1)[0] for text in begin]
    cards = [Card([Slot(place) for place in layout]) for layout in layouts]
    takes: Callable[[Job, str], bool] = (lambda job, _: job.memory_gb <= 80) if whole else Job.fits
    found, waiting, coming = Outcome(), Waiting(), sorted(trace, key=lambda job: job.arrival)
    possible = {p.place.profile for card in cards for p in card.slots} | {
        name for text in (policy.among if policy else ()) for name in follow.profiles(text, GEOMETRY)
    }
    coming = [job for job in coming if any(takes(job, name) for name in possible)]
    found.begin = coming[0].arrival if coming else 0.0
    found.lost = len(trace) - len(coming)
    now, done = 0.0, 0
    while done < len(coming) or waiting:
        while done < len(coming) and coming[done].arrival <= now:
            waiting.setdefault(coming[done].kind, deque()).append(coming[done])
            done += 1
        _start(waiting, cards, now, takes, found)
        if policy is not None and waiting:
            found.changes += _follow(policy, waiting, cards, now)
        now = _next(now, coming[done].arrival if done < len(coming) else math.inf, waiting, cards, policy is not None)
    return found


def _next(now: float, arrival: float, waiting: Waiting, cards: Sequence[Card], follows: bool) -> float:
    """The next moment at which something may start; a head looks every second while tasks wait."""
    ends = (max(slot.free, card.ready) for card in cards for slot in card.slots)
    following = now + 1 if follows and waiting else math.inf
    found = min(arrival, following, *(end for end in ends if end > now and waiting), math.inf)
    return found if found < math.inf else now + 1


def _start(
    waiting: Waiting, cards: Sequence[Card], now: float, takes: Callable[[Job, str], bool], found: Outcome
) -> None:
    """Starts what can start, the oldest first, on the smallest free partition that takes it."""
    free = [slot for card in cards if card.ready <= now for slot in card.slots if slot.free <= now]
    free.sort(key=lambda slot: (_MEMORY[slot.place.profile], slot.free))
    while free:
        heads = sorted((queue[0] for queue in waiting.values()), key=lambda job: job.arrival)
        fitting = ((job, slot) for job in heads for slot in free if takes(job, slot.place.profile))
        job, slot = next(fitting, (None, None))
        if job is None or slot is None:
            return
        waiting[job.kind].popleft()
        if not waiting[job.kind]:
            del waiting[job.kind]
        free.remove(slot)
        slot.free = now + job.duration
        found.waits.append(now - job.arrival)
        found.busy += job.duration * job.slices
        found.end = max(found.end, slot.free)


def _follow(policy: Follow, waiting: Waiting, cards: Sequence[Card], now: float) -> int:
    queue = [follow.Want(*kind, tuple(job.arrival for job in jobs)) for kind, jobs in waiting.items()]
    gpus = [_seen(index, card, now) for index, card in enumerate(cards)]
    changes = follow.choose(policy, GEOMETRY, queue, gpus, now)
    for change in changes:
        card = cards[change.index]
        standing = tuple(slot.place for slot in card.slots)
        used = {slot.place.start for slot in card.slots if now - slot.free < policy.idle_seconds}
        desired = mig.resolve(change.layout, GEOMETRY, 1)[0]
        after = mig.rearranged(desired, standing, GEOMETRY, in_use=used)
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


def best_mix(trace: Sequence[Job]) -> tuple[str, Outcome]:
    """The fixed layouts under which fewest tasks never run, then the mean wait is shortest: each on as many GPUs as the
    text says, in the order of `AMONG`, in quarters. Found with the whole trace in hand, which nobody has beforehand."""
    quarter = GPUS // 4
    splits = [each for each in itertools.product(range(5), repeat=len(AMONG)) if sum(each) == 4]
    mixes = [[text for text, n in zip(AMONG, split, strict=True) for _ in range(n * quarter)] for split in splits]
    found = [simulate(trace, mix) for mix in mixes]
    best = min(range(len(splits)), key=lambda i: (found[i].lost, sum(found[i].waits)))
    return ":".join(str(n * quarter) for n in splits[best]), found[best]


# Traces ---------------------------------------------------------------------------------------------------------------


def shifts(seed: int = 1) -> list[Job]:
    """Small tasks by day, large ones by night, four times over."""
    rng, jobs = random.Random(seed), []
    for half in range(8):
        start, small = half * 3600.0, half % 2 == 0
        for at in _arrivals(rng, start, 3600.0, 4.0 if small else 45.0):
            profile, seconds = ("1g.10gb", 120.0) if small else ("7g.80gb", 300.0)
            jobs.append(Job(at, rng.expovariate(1 / seconds), profile))
    return jobs


def mixed(seed: int = 2) -> list[Job]:
    """All sizes at once, steadily, by profile."""
    rng = random.Random(seed)
    kinds = [("1g.10gb", 0.6, 90.0), ("2g.20gb", 0.2, 180.0), ("3g.40gb", 0.12, 240.0), ("7g.80gb", 0.08, 300.0)]
    return _drawn(rng, 4 * 3600.0, 8.0, kinds)


def memory(seed: int = 3) -> list[Job]:
    """Tasks that say their memory alone: mostly little, in bursts much."""
    rng = random.Random(seed)
    jobs = [Job(at, rng.expovariate(1 / 150), None, 9.0) for at in _arrivals(rng, 0.0, 4 * 3600.0, 5.0)]
    for start in (1800.0, 7200.0, 10800.0):
        jobs += [Job(at, rng.expovariate(1 / 240), None, 70.0) for at in _arrivals(rng, start, 900.0, 20.0)]
    return jobs


def sweep(seed: int = 4) -> list[Job]:
    """A search: many small trials, then a few large runs of the best, again and again, with pauses."""
    rng, jobs = random.Random(seed), []
    for start in (0.0, 5000.0, 10000.0):
        jobs += [Job(start + i * 0.5, rng.uniform(60, 240), "1g.10gb") for i in range(400)]
        jobs += [Job(start + 2000 + i, rng.uniform(600, 1200), "7g.80gb") for i in range(8)]
    return jobs


def _arrivals(rng: random.Random, start: float, length: float, mean: float) -> Iterator[float]:
    at = start
    while (at := at + rng.expovariate(1 / mean)) < start + length:
        yield at


def _drawn(rng: random.Random, length: float, mean: float, kinds: Sequence[tuple[str, float, float]]) -> list[Job]:
    shares = [share for _, share, _ in kinds]
    jobs = []
    for at in _arrivals(rng, 0.0, length, mean):
        profile, _, seconds = rng.choices(kinds, shares)[0]
        jobs.append(Job(at, rng.expovariate(1 / seconds), profile))
    return jobs


def recorded(path: Path) -> list[Job]:
    """The trace of a CSV file; of a list of pods of Alibaba, those of one GPU that ran four hours at most."""
    with path.open(newline="", encoding="utf-8") as file:
        rows = list(csv.DictReader(file))
    if rows and "gpu_milli" in rows[0]:
        pods = [_pod(row) for row in rows if row["num_gpu"] == "1" and row["scheduled_time"]]
        return [pod for pod in pods if pod.duration <= 4 * 3600]
    return [
        Job(float(row["arrival"]), float(row["duration"]), row.get("profile") or None, float(row.get("memory_gb") or 0))
        for row in rows
    ]


def _pod(row: dict[str, str]) -> Job:
    """The share of a GPU is taken to be that of its memory."""
    seconds = float(row["deletion_time"]) - float(row["scheduled_time"])
    return Job(float(row["creation_time"]), seconds, None, 80 * float(row["gpu_milli"]) / 1000)


def run(traces: dict[str, list[Job]] | None = None) -> Iterator[Result]:
    """Prints the table of traces and policies; yields, for each trace, following against the best fixed layout."""
    files = [Path(sys.argv[at + 1]) for at, word in enumerate(sys.argv[:-1]) if word == "--trace"]
    traces = traces or {each.__name__: each() for each in (shifts, mixed, memory, sweep)}
    traces |= {path.stem: recorded(path) for path in files}
    policy = Follow(AMONG, idle_seconds=IDLE_S)
    print(f"{GPUS} H100, among {', '.join(AMONG)}, {IDLE_S:g} s idle, {CHANGE_S:g} s for a change")
    print(f"{'TRACE':<10} {'POLICY':<26} {'MEAN WAIT':>10} {'95 OF 100':>10} {'USED':>6} {'CHANGES':>8} {'NEVER':>6}")
    for name, trace in traces.items():
        following = simulate(trace, [AMONG[0]] * GPUS, policy)
        fixed = {f"fixed {text}": simulate(trace, [text] * GPUS) for text in AMONG}
        mix, mixed_best = best_mix(trace)
        whole = simulate(trace, [AMONG[0]] * GPUS, whole=True)
        rows = {"follow": following, **fixed, f"best mix {mix}": mixed_best, "whole GPUs": whole}
        for label, found in rows.items():
            wait = f"{statistics.fmean(found.waits):.0f} s" if found.waits else "-"
            print(
                f"{name:<10} {label:<26} {wait:>10} {f'{found.p95:.0f} s':>10} {found.utilization:>6.0%}"
                f" {found.changes:>8} {found.lost:>6}"
            )
        rest = {label: found for label, found in rows.items() if label != "follow"}
        best = min(rest, key=lambda label: (rest[label].lost, rest[label].wait))
        base = rest[best].wait
        ratio = following.wait / base if 0 < base < math.inf else math.nan
        yield Result(f"follow, {name}: mean wait", best, following.wait, ratio, figure=f"{following.wait:.0f} s")
