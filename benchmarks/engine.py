"""Shipping tasks: every figure against plain `distributed`, and against Ray where it is installed.

Plain `distributed` is a scheduler and Nannies of Dask with its own defaults and the same TLS, see `benchmarks.plain`:
the head of a fleet takes no tasks from a plain client.
``python benchmarks/engine.py --quick`` is the short form: fewer runs, and not the 200 slots.
"""

from __future__ import annotations

import contextlib
import importlib.util
import itertools
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(part) for part in (ROOT, ROOT / "tests", ROOT / "tests" / "helpers") if str(part) not in sys.path]

from distributed import Client  # noqa: E402
from local_fleets.running_node import SECRET, RunningNode  # noqa: E402
from support import debian_torch  # noqa: E402

from benchmarks import ray_engine, tasks  # noqa: E402
from benchmarks.measure import Result, show  # noqa: E402
from skyinfra.client import Pool  # noqa: E402
from skyinfra.engine.credentials import Credentials  # noqa: E402
from skyinfra.node import processes  # noqa: E402
from skyinfra.protocol.nodeconfig import NodeConfig  # noqa: E402
from skyinfra.tasks import Task  # noqa: E402

SLOTS, MANY = 8, 200
PLAIN = "plain distributed"
LARGE = tasks.LARGE
# What a plain client asks for, so that its tasks wait for the slots as ours do.
SLOT = {"slot": 1}
# How many tasks are in flight for each slot, where each is sent on its own: a plain client sends all at once.
WINDOW = 4
WAIT_S = 600


def run(*, quick: bool = False) -> Iterator[Result]:
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder)
        ours = Ours()
        with serving(root / "fleet", SLOTS) as (node, _), node.pool() as pool, _plain_client() as plain:
            yield from _round_trips(pool, plain, ours, runs=200 if quick else 500)
            yield from _throughput(pool, plain, ours, tasks=5000, runs=1 if quick else 3)
            yield from _large(pool, plain, ours, runs=3 if quick else 5)
            yield from _second(pool)
            yield _fence(pool, ours)
        yield from _short(root, tasks=2000 if quick else 10_000)
        yield from _starts(root, ours, runs=2 if quick else 3)
        yield from _preloaded(root, runs=1 if quick else 3)
        if not quick:
            yield from _many(root, ours)
        yield from ray_engine.compare(ours, slots=SLOTS, runs=200 if quick else 500)


@dataclass
class Ours:
    """What was measured of us, in seconds and tasks per second, to be compared with Ray."""

    round_trip: float = 0.0
    per_second: float = 0.0
    out: float = 0.0
    back: float = 0.0
    start: float = 0.0


@contextlib.contextmanager
def serving(
    path: Path, slots: int, *, preload: tuple[str, ...] = (), prepare: Callable[[Path], None] | None = None
) -> Iterator[tuple[RunningNode, float]]:
    """A head with so many CPU slots, and how many seconds it took from its start to the last slot.

    prepare: is called with its folder before.
    """
    config = NodeConfig(
        1, "bench", "cpu", "n0", "local", head=True, scheduler="127.0.0.1:0", cpu_slots=slots, preload=preload
    )
    node = RunningNode(path, config)
    if prepare is not None:
        prepare(path)
    command = [sys.executable, "-m", "skyinfra.runner", "boot", "--config", str(node.file), "--detach"]
    try:
        start = time.perf_counter()
        subprocess.run([*command, "--wait", str(WAIT_S)], check=True, cwd=ROOT, stdout=subprocess.DEVNULL)
        yield node, time.perf_counter() - start
    finally:
        node.run("stop", "--timeout", "30")


@contextlib.contextmanager
def _plain_client() -> Iterator[Client]:
    """A client of a plain fleet beside ours, whose head takes no tasks from one."""
    security = Credentials.derive(SECRET, role="client", name="bench").security()
    with _plain() as (_, found), Client(found["address"], security=security, set_as_default=False) as client:
        yield client


@contextlib.contextmanager
def _plain(*preload: str) -> Iterator[tuple[int, dict[str, Any]]]:
    """A fleet of `benchmarks.plain`: its process id, and what it prints once all workers are there."""
    command = [sys.executable, "-m", "benchmarks.plain", str(SLOTS), *preload]
    pipe, null = subprocess.PIPE, subprocess.DEVNULL
    program = subprocess.Popen(
        command, cwd=ROOT, stdin=pipe, stdout=pipe, stderr=null, text=True, start_new_session=True
    )
    try:
        program.stdin.write(SECRET + "\n")
        program.stdin.flush()
        yield program.pid, json.loads(program.stdout.readline())
    finally:
        program.communicate()


# Tasks --------------------------------------------------------------------------------------------------------------


def _round_trips(pool: Pool, plain: Client, ours: Ours, *, runs: int) -> Iterator[Result]:
    """An empty task after the other, ten of ours and ten of the baseline in turn."""
    times: tuple[list[float], list[float]] = [], []
    calls = (lambda: pool.submit(int).result(), lambda: plain.submit(int, pure=False, resources=SLOT).result())
    for turn in range(runs // 10 + 1):
        for call, found in zip(calls, times, strict=True):
            new = [_seconds(call) for _ in range(10)]
            found.extend(new if turn else [])
    for name, aim, point in (("p50", "<= 0.5x", 0.5), ("p99", "", 0.99)):
        mine, theirs = (sorted(found)[int(len(found) * point)] for found in times)
        yield Result(f"round trip of an empty task, {name}", PLAIN, mine, mine / theirs, aim, f"{mine * 1000:.2f} ms")
    ours.round_trip = statistics.median(times[0])


def _throughput(pool: Pool, plain: Client, ours: Ours, *, tasks: int, runs: int) -> Iterator[Result]:
    """How many tasks per second; the ratio is of that, so that more is better."""

    def mine(count: int) -> None:
        assert sum(1 for _ in pool.map(int, range(count), ordered=False)) == count

    def alone(count: int) -> None:
        # Items without a length travel each in a message of its own.
        assert sum(1 for _ in pool.map(int, iter(range(count)), window=WINDOW * SLOTS, ordered=False)) == count

    def theirs(count: int) -> None:
        found = plain.gather(plain.map(int, range(count), pure=False, resources=SLOT))
        assert len(found) == count

    mine(200), alone(200), theirs(200)
    every = [[_seconds(lambda call=call: call(tasks)) for call in (mine, alone, theirs)] for _ in range(runs)]
    for column, what, aim in ((0, "", ">= 0.95x"), (1, f", each on its own, {WINDOW} in flight a slot", "")):
        seconds = statistics.median(row[column] for row in every)
        ratio = statistics.median(row[2] / row[column] for row in every)
        name = f"{tasks:,} tasks per second{what}"
        yield Result(name, f"{PLAIN}, all at once", seconds, ratio, aim, f"{tasks / seconds:.0f}/s")
        ours.per_second = max(ours.per_second, tasks / seconds)


def _short(root: Path, *, tasks: int) -> Iterator[Result]:
    """Tasks of 2 ms on a few slots, against the time that they take by themselves."""
    slots, each = 4, 0.002
    ideal = tasks * each / slots
    with serving(root / "short", slots) as (node, _), node.pool() as pool:
        for what, items in (("", [each] * tasks), (", items without a length", None)):
            given = items or (each for _ in range(tasks))
            list(pool.map(time.sleep, [each] * 200))
            seconds = _seconds(lambda given=given: list(pool.map(time.sleep, given)))
            yield Result(
                f"{tasks:,} tasks of 2 ms on {slots} slots{what}", "ideal", seconds, seconds / ideal, "<= 1.3x"
            )


def _large(pool: Pool, plain: Client, ours: Ours, *, runs: int) -> Iterator[Result]:
    # What a fleet has already is not sent again: each is another one.
    fresh = [os.urandom(LARGE) for _ in range(runs)]
    data = fresh[0]

    def scattered() -> int:
        # Dask warns of large arguments; this is the way that it recommends.
        [future] = plain.scatter([data], hash=False)
        return plain.submit(len, future, pure=False).result()

    ours.out, out = _paired(lambda: pool.submit(len, fresh.pop()).result(), scattered, runs)
    yield Result("100 MB to a task", f"{PLAIN}, scattered", ours.out, out, "", f"{ours.out * 1000:.0f} ms")
    # What a fleet has kept of an earlier result does not travel again: each is another one.
    numbers = itertools.count(1)
    for what, function in (("100 MB", tasks.zeros), ("an array of 100 MB", tasks.array_of)):
        seconds, ratio = _paired(
            lambda function=function: pool.submit(function, next(numbers)).result(),
            lambda function=function: plain.submit(function, next(numbers), pure=False, resources=SLOT).result(),
            runs,
        )
        yield Result(f"{what} from a task", PLAIN, seconds, ratio)
        ours.back = ours.back or seconds


def _fence(pool: Pool, ours: Ours) -> Result:
    """What surrounds an empty task in its process, by itself, against its round trip."""

    seconds = Task(tasks.fenced) >> pool
    return Result(
        what="the fence around an empty task",
        baseline="its round trip",
        seconds=seconds,
        ratio=seconds / ours.round_trip,
        aim="< 0.2 ms",
        figure=f"{seconds * 1e6:.0f} µs",
    )


def _second(pool: Pool) -> Iterator[Result]:
    slot = pool.slots()[:1]
    first, second = (pool.broadcast(Task(tasks.import_something), slots=slot)[0] for _ in range(2))
    yield Result("second task on a slot: what it imports", "the first task", second, second / first)


# Processes ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Started:
    """What a start took, and what runs then.

    seconds: until the last slot was there. workers: of these, since the first worker's process began. head, worker,
    total: MB (PSS) of the process with the scheduler, of a worker, of all.
    """

    seconds: float
    workers: float
    head: float
    worker: float
    total: float


def _starts(root: Path, ours: Ours, *, runs: int) -> Iterator[Result]:
    pairs = [(_start_ours(root / f"start{index}"), _start_plain()) for index in range(runs)]
    fields: dict[str, Callable[[Started], float]] = {
        f"{SLOTS} slots from the start of the runner": lambda each: each.seconds,
        f"{SLOTS} slots from the start of their first process": lambda each: each.workers,
        "memory of the head's runner (PSS)": lambda each: each.head,
        "memory of a worker (PSS)": lambda each: each.worker,
        f"memory of a node with {SLOTS} slots (PSS)": lambda each: each.total,
    }
    for number, (what, value) in enumerate(fields.items()):
        median = statistics.median(value(mine) for mine, _ in pairs)
        ratio = statistics.median(value(mine) / value(theirs) for mine, theirs in pairs)
        aim = "below 1 s" if number == 1 else ""
        yield Result(what, PLAIN, median, ratio, aim, figure=f"{median:.0f} MB" if number > 1 else "")
    ours.start = statistics.median(mine.seconds for mine, _ in pairs)


def _start_ours(path: Path, *, preload: tuple[str, ...] = ()) -> Started:
    start = time.perf_counter()
    with serving(path, SLOTS, preload=preload) as (node, seconds), node.pool() as pool:
        up = time.clock_gettime(time.CLOCK_BOOTTIME)
        runner = node.status().pid
        assert runner is not None
        workers = [pid for pid, _ in Task(tasks.process_with, preload) @ pool]
        if preload:
            assert all(imported for _, imported in Task(tasks.process_with, preload) @ pool), preload
            seconds = time.perf_counter() - start
        return _started(seconds, up, runner, workers)


def _start_plain(*, preload: tuple[str, ...] = ()) -> Started:
    start = time.perf_counter()
    with _plain(*preload) as (pid, found):
        up = time.clock_gettime(time.CLOCK_BOOTTIME)
        return _started(time.perf_counter() - start, up, pid, found["workers"])


def _preloaded(root: Path, *, runs: int) -> Iterator[Result]:
    """The start until every slot has a large module imported: what ``Image(preload=)`` does, and Dask's own preload."""
    with _importable(root) as module:
        if module is None:
            print("left out: the rows of slots with torch imported; `make torch` brings it", file=sys.stderr)
            return
        pairs = [
            (_start_ours(root / f"preload{index}", preload=(module,)), _start_plain(preload=(module,)))
            for index in range(runs)
        ]
    baseline = f"{PLAIN}, its preload"
    seconds = statistics.median(mine.seconds for mine, _ in pairs)
    ratio = statistics.median(mine.seconds / theirs.seconds for mine, theirs in pairs)
    yield Result(f"{SLOTS} slots, each with {module} imported", baseline, seconds, ratio)
    total = statistics.median(mine.total for mine, _ in pairs)
    ratio = statistics.median(mine.total / theirs.total for mine, theirs in pairs)
    yield Result(f"memory of a node with them and {module} (PSS)", baseline, 0, ratio, figure=f"{total:.0f} MB")


@contextlib.contextmanager
def _importable(root: Path) -> Iterator[str | None]:
    """The module that is preloaded, torch; None where there is none, or where it cannot be imported."""
    if importlib.util.find_spec("torch") is not None:
        yield "torch"
    elif not debian_torch.there():
        yield None
    else:
        folder = root / "torch"
        folder.mkdir()
        before = dict(os.environ)
        os.environ.update(debian_torch.variables(folder))
        works = subprocess.run([sys.executable, "-c", "import torch"], capture_output=True, check=False)
        try:
            yield "torch" if works.returncode == 0 else None
        finally:
            os.environ.clear()
            os.environ.update(before)


def _started(seconds: float, up: float, head: int, workers: list[int]) -> Started:
    total = sum(pss(process.pid) for process in processes.of_session(head))
    since = up - min(map(_begun, workers))
    return Started(seconds, since, pss(head), statistics.mean(map(pss, workers)), total)


def _begun(pid: int) -> float:
    """When a process began, in seconds since this machine did: see proc_pid_stat(5)."""
    ticks = int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19])
    return ticks / os.sysconf("SC_CLK_TCK")


def pss(pid: int) -> float:
    """MB of memory of a process, of which what it shares counts in parts: see proc_pid_smaps(5)."""
    lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("Pss:")) / 1000


# Many slots ---------------------------------------------------------------------------------------------------------


def _many(root: Path, ours: Ours) -> Iterator[Result]:
    with serving(root / "many", MANY) as (node, seconds), node.pool() as pool, node.client() as plain:
        scaled = ours.start * MANY / SLOTS
        yield Result(f"start of {MANY} slots", f"{SLOTS} slots, {MANY // SLOTS} times", seconds, seconds / scaled)
        slots = [slot.slot for slot in pool.slots()]

        def broadcast() -> None:
            futures = [plain.submit(int, pure=False, resources={f"slot:{slot}": 1}) for slot in slots]
            plain.gather(futures)

        mine, ratio = _paired(lambda: Task(int) @ pool, broadcast, 5)
        yield Result(f"a task on each of {MANY} slots", PLAIN, mine, ratio)
        count = 20_000
        mine, ratio = _paired(
            lambda: sum(1 for _ in pool.map(int, range(count), ordered=False)),
            lambda: plain.gather(plain.map(int, range(count), pure=False, resources=SLOT)),
            1,
        )
        yield Result(f"map of {count:,} over {MANY} slots", f"{PLAIN}, all at once", mine, ratio)


def _paired(candidate: Callable[[], object], baseline: Callable[[], object], runs: int) -> tuple[float, float]:
    """The median of *candidate* in seconds, and of its ratios to *baseline*, which runs in turn with it."""
    pairs = [(_seconds(candidate), _seconds(baseline)) for _ in range(runs)]
    return statistics.median(a for a, _ in pairs), statistics.median(a / b for a, b in pairs)


def _seconds(call: Callable[[], object]) -> float:
    start = time.perf_counter()
    call()
    return time.perf_counter() - start


if __name__ == "__main__":
    show(run(quick="--quick" in sys.argv))
