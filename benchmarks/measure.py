"""Measuring whole processes, the candidate and its baseline in turn, and single calls."""

from __future__ import annotations

import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import TypeVarTuple, Unpack

from skyinfra.terraform.project import node_environment

_A = TypeVarTuple("_A")


@dataclass(frozen=True)
class Result:
    """Medians over the runs: ``seconds`` of the candidate, ``ratio`` to the baseline, pair by pair.

    figure: what is shown in the place of the seconds, where the candidate is measured in something else.
    """

    what: str
    baseline: str
    seconds: float
    ratio: float
    aim: str = ""
    figure: str = ""

    @property
    def shown(self) -> str:
        """The figure, by default the seconds."""
        seconds = self.seconds
        return self.figure or (f"{seconds * 1000:.0f} ms" if seconds >= 0.01 else f"{seconds * 1000:.2f} ms")


def compare(
    what: str,
    candidate: Sequence[str],
    baseline: str,
    baseline_command: Sequence[str],
    *,
    runs: int = 7,
    aim: str = "",
    folder: Path | None = None,
    environment: Mapping[str, str] = MappingProxyType({}),
) -> Result:
    """Runs both commands in turn, one uncounted pair first. *environment*: what both have in theirs besides."""
    turns = range(runs + 1)
    pairs = [[_seconds(each, folder, environment) for each in (candidate, baseline_command)] for _ in turns][1:]
    return Result(
        what=what,
        baseline=baseline,
        seconds=statistics.median(a for a, _ in pairs),
        ratio=statistics.median(a / b for a, b in pairs),
        aim=aim,
    )


def seconds_of(call: Callable[[Unpack[_A]], object], *arguments: *_A, runs: int = 5) -> float:
    """The median of *runs* calls in this process, one uncounted call first."""
    times = []
    for _ in range(runs + 1):
        start = time.perf_counter()
        call(*arguments)
        times.append(time.perf_counter() - start)
    return statistics.median(times[1:])


def python(program: str) -> list[str]:
    """The command that runs *program* with this Python."""
    return [sys.executable, "-c", program]


def show(results: Iterable[Result]) -> None:
    """Prints each as soon as it is there."""
    print(f"{'what':<52} {'baseline':<34} {'ratio':>7}  {'median':>10}  aim")
    for result in results:
        row = f"{result.what:<52} {result.baseline:<34} {result.ratio:>6.2f}x  {result.shown:>10}  {result.aim}"
        print(row, flush=True)


def _seconds(command: Sequence[str], folder: Path | None, environment: Mapping[str, str]) -> float:
    start = time.perf_counter()
    everything = {**os.environ, **node_environment(), **environment}
    done = subprocess.run(command, check=False, cwd=folder, env=everything, capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(f"{' '.join(command)[:200]} exited with {done.returncode}:\n{done.stderr}")
    return time.perf_counter() - start
