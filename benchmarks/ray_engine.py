"""Ray's figures for `benchmarks.engine`, where it is installed, in a process of its own: it is no dependency of ours.

``python -m benchmarks.ray_engine SLOTS RUNS`` prints them as JSON.
"""

from __future__ import annotations

import importlib.util
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from benchmarks.measure import Result

if TYPE_CHECKING:
    from benchmarks.engine import Ours

ROOT = Path(__file__).resolve().parent.parent
TASKS = 5000
LARGE = 100_000_000


def compare(ours: Ours, *, slots: int, runs: int) -> Iterator[Result]:
    """Returns our measurements against Ray, or a line that says that it is not there."""
    if importlib.util.find_spec("ray") is None:
        print("engine: Ray is not installed (`pip install ray`); left out", file=sys.stderr)
        return
    command = [sys.executable, "-m", "benchmarks.ray_engine", str(slots), str(runs)]
    done = subprocess.run(command, cwd=ROOT, check=False, capture_output=True, text=True)
    if done.returncode:
        print(f"engine: Ray failed; left out: {done.stderr.strip().splitlines()[-1]}", file=sys.stderr)
        return
    theirs = json.loads(done.stdout.splitlines()[-1])
    yield _result("round trip of an empty task, p50", ours.round_trip, theirs["round_trip"])
    ratio = ours.per_second / theirs["per_second"]
    what = f"{TASKS:,} tasks per second"
    yield Result(what, "Ray, all at once", TASKS / ours.per_second, ratio, "", f"{ours.per_second:.0f}/s")
    yield _result("100 MB to a task", ours.out, theirs["out"])
    yield _result("100 MB from a task", ours.back, theirs["back"])
    yield _result(f"{slots} slots from the start", ours.start, theirs["start"])


def _result(what: str, mine: float, theirs: float) -> Result:
    return Result(what, f"Ray: {theirs * 1000:.2f} ms", mine, mine / theirs)


def _measure(slots: int, runs: int) -> dict[str, float]:
    import ray

    start = time.perf_counter()
    ray.init(num_cpus=slots, include_dashboard=False, log_to_driver=False)
    try:
        number = ray.remote(num_cpus=1)(_number)
        ray.get([ray.remote(num_cpus=1)(_sleep).remote(0.5) for _ in range(slots)])
        started = time.perf_counter() - start - 0.5
        trips = [_seconds(lambda: ray.get(number.remote(0))) for _ in range(runs + 20)][20:]
        rate = TASKS / _seconds(lambda: ray.get([number.remote(each) for each in range(TASKS)]))
        length, make, data = ray.remote(_length), ray.remote(_make), os.urandom(LARGE)
        out = [_seconds(lambda: ray.get(length.remote(ray.put(data)))) for _ in range(3)]
        back = [_seconds(lambda: ray.get(make.remote(LARGE))) for _ in range(3)]
    finally:
        ray.shutdown()
    return {
        "round_trip": statistics.median(trips),
        "per_second": rate,
        "out": statistics.median(out),
        "back": statistics.median(back),
        "start": started,
    }


def _sleep(seconds: float) -> None:
    # Ray takes no function that is built in.
    time.sleep(seconds)


def _number(value: int) -> int:
    return value


def _length(data: bytes) -> int:
    return len(data)


def _make(size: int) -> bytes:
    return bytes(size)


def _seconds(call: Callable[[], object]) -> float:
    start = time.perf_counter()
    call()
    return time.perf_counter() - start


if __name__ == "__main__":
    print(json.dumps(_measure(int(sys.argv[1]), int(sys.argv[2]))))
