"""Layouts that follow the work against fixed ones and whole GPUs: waiting time and utilization over traces.

The simulation is that of `skyinfra.mig.simulation`. A trace is made up here from a seed, or is a file given as
``--trace FILE``: one that `sky.mig.read_trace` reads, or a list of pods as that of Alibaba's cluster-trace-gpu-v2023
(``openb_pod_list_default.csv``; github.com/alibaba/clusterdata).
"""

from __future__ import annotations

import csv
import itertools
import math
import random
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

from benchmarks.measure import Result
from skyinfra import mig
from skyinfra.mig import Follow
from skyinfra.mig.simulation import CHANGE_S, Outcome, read_trace
from skyinfra.mig.simulation import TraceTask as Job
from skyinfra.mig.simulation import simulate as simulate_layouts

GEOMETRY = mig.geometry("h100_80gb")
AMONG = ("1g.10gb*7", "2g.20gb*3+1g.10gb", "3g.40gb*2", "7g.80gb")
GPUS = 8
IDLE_S = 60.0


def simulate(
    trace: Sequence[Job], begin: Sequence[str], policy: Follow | None = None, *, whole: bool = False
) -> Outcome:
    """Runs *trace* on GPUs with the layouts *begin*, which follow *policy*; *whole*: a task has a GPU for itself."""
    layouts = [mig.resolve(text, GEOMETRY, 1)[0] for text in begin]
    return simulate_layouts(trace, layouts, GEOMETRY, policy, whole=whole)


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
    if not rows or "gpu_milli" not in rows[0]:
        return read_trace(path)
    pods = [_pod(row) for row in rows if row["num_gpu"] == "1" and row["scheduled_time"]]
    return [pod for pod in pods if pod.duration <= 4 * 3600]


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
            wait = f"{found.mean:.0f} s" if found.waits else "-"
            print(
                f"{name:<10} {label:<26} {wait:>10} {f'{found.p95:.0f} s':>10} {found.utilization:>6.0%}"
                f" {found.changes:>8} {found.lost:>6}"
            )
        rest = {label: found for label, found in rows.items() if label != "follow"}
        best = min(rest, key=lambda label: (rest[label].lost, rest[label].wait))
        base = rest[best].wait
        ratio = following.wait / base if 0 < base < math.inf else math.nan
        yield Result(f"follow, {name}: mean wait", best, following.wait, ratio, figure=f"{following.wait:.0f} s")
