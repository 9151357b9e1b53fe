"""The head of a large fleet: 10, 100 and 1,000 workers, and up to 99,000 jobs that wait.

The head and one slot are real processes. The other workers are Dask's, all in one process, with a connection each as
any: they register, report and begin tasks, which never end. So each row is of the head, on a machine that has room for
its fleet.

``python -m benchmarks.scale ADDRESS COUNT`` is that process: it reads the fleet secret from its input, prints a line
once all are registered, and ends with its input.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import pickle
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import dask
from distributed import Worker

from benchmarks.engine import ROOT, SECRET, RunningNode, pss, serving
from benchmarks.measure import Result
from skyinfra.client import Pool
from skyinfra.engine.credentials import Credentials
from skyinfra.head.journal import Record
from skyinfra.protocol.calls import Header
from skyinfra.protocol.instance import STARTUP_KEY, InstanceInfo
from skyinfra.protocol.jobs import VERSION, Submission
from skyinfra.tasks import Task
from skyinfra.worker.process import resources

WORKERS = 10, 100, 1000
# The head takes 100,000 that have not ended: some are submitted besides.
JOBS = 1_000, 10_000, 99_000
PROFILE = "3g.40gb"
SLOTS_OF_NODE = 8
STARTED, JOINED = "the head starts", "the workers register"
_AT_ONCE = 8


def run(*, quick: bool = False) -> Iterator[Result]:
    workers, jobs = (WORKERS[:2], JOBS[:1]) if quick else (WORKERS, JOBS)
    least: dict[str, float] = {}
    for count in workers:
        with tempfile.TemporaryDirectory() as folder, fleet(Path(folder), count) as found:
            yield from _rows(f"{count:,} workers", f"{workers[0]} workers", found, least)
    of_largest = {what: found[what] for what in found if what != JOINED}
    for queued in jobs:
        with tempfile.TemporaryDirectory() as folder, fleet(Path(folder), workers[-1], queued) as found:
            of = f"{workers[-1]:,} workers and {queued:,} jobs"
            yield from _rows(of, f"{workers[-1]:,} workers, no job", found, of_largest)


def _rows(of: str, baseline: str, found: dict[str, float], least: dict[str, float]) -> Iterator[Result]:
    for what, figure in found.items():
        ratio = figure / least.setdefault(what, figure)
        shown = f"{figure:.0f} MB" if what.startswith("memory") else ""
        yield Result(f"{of}: {what}", baseline, figure, ratio, figure=shown)


@contextlib.contextmanager
def fleet(folder: Path, count: int, queued: int = 0) -> Iterator[dict[str, float]]:
    """A head with one slot, *count* workers besides and *queued* jobs, and its figures: seconds, and MB of memory."""
    prepare = partial(fill, count=queued) if queued else None
    with serving(folder / "head", 1, prepare=prepare) as (node, seconds), node.pool() as pool:
        address = "tls://" + node.directory.scheduler_file.read_text().strip()
        command = [sys.executable, "-m", "benchmarks.scale", address, str(count)]
        pipe, null = subprocess.PIPE, subprocess.DEVNULL
        begun = time.perf_counter()
        with subprocess.Popen(command, cwd=ROOT, stdin=pipe, stdout=pipe, stderr=null, text=True) as program:
            assert program.stdin is not None and program.stdout is not None
            program.stdin.write(SECRET + "\n")
            program.stdin.flush()
            assert program.stdout.readline()
            found = {STARTED: seconds, JOINED: time.perf_counter() - begun, **looks(node, pool)}
            yield found | (with_jobs(pool) if queued else {})
            program.stdin.close()


def looks(node: RunningNode, pool: Pool) -> dict[str, float]:
    """What clients of the fleet notice, in seconds, and the memory of its head, in MB."""
    real = pool.select(node="n0")
    trips = sorted(_seconds(lambda: real.submit(int).result()) for _ in range(210))[5:-5]
    return {
        "round trip of an empty task, p50": statistics.median(trips),
        "round trip of an empty task, p99": trips[int(len(trips) * 0.99)],
        "what `skyinfra status` asks the head": _median(pool.look),
        "what `skyinfra top` asks the head": _median(lambda: (pool.running(), pool.work())),
        "memory of the head (PSS)": pss(node.status().pid),
    }


def with_jobs(pool: Pool) -> dict[str, float]:
    """What whoever submits jobs notices."""
    task = Task(int).options(profile=PROFILE)
    names = iter(f"more-{number}" for number in range(10_000))
    one = _median(lambda: pool.submit(task, detach=next(names)), 20)
    with ThreadPoolExecutor(_AT_ONCE) as threads:
        begun = time.perf_counter()
        for _ in threads.map(lambda name: pool.submit(task, detach=name), [next(names) for _ in range(400)]):
            pass
        many = (time.perf_counter() - begun) / 400
    return {
        "one more job is submitted": one,
        f"each of many that {_AT_ONCE} threads submit": many,
        "a job is cancelled": _median(lambda: pool.job(f"more-{time.time_ns() % 19}").cancel(), 5),
        "what `skyinfra jobs` asks the head": _median(pool.jobs, 3),
    }


def fill(node: Path, count: int) -> None:
    """Writes a journal with so many jobs that wait, as a head writes it."""
    folder = node / "jobs"
    folder.mkdir(mode=0o700)
    call = pickle.dumps((int, (), {}))
    needs = {"slot": 1, f"profile:{PROFILE}": 1}
    for number in range(count):
        identity = f"{number:032x}"
        header = Header(f"int-{number}", "int", "", whole=True).dumps().decode()
        whose = f"user{number % 5}@host"
        submission = Submission(
            VERSION, identity, f"job-{number}", "int", "function", whose, 0, header, len(call), needs
        )
        place = folder / identity
        place.mkdir(mode=0o700)
        (place / "call").write_bytes(call)
        (place / "job.json").write_text(json.dumps(Record.of(submission, now=1e9 + number).to_json()))


def _seconds(call: Callable[[], object]) -> float:
    start = time.perf_counter()
    call()
    return time.perf_counter() - start


def _median(call: Callable[[], object], runs: int = 10) -> float:
    return statistics.median(_seconds(call) for _ in range(runs))


# The other workers --------------------------------------------------------------------------------------------------


class Never(Executor):
    """Begins what it is given, and never ends it."""

    def submit(self, *_: Any, **__: Any) -> Future[Any]:
        return Future()


class Light(Worker):  # type: ignore[misc]
    """A worker that is there, as the head sees it."""

    def __init__(self, *arguments: Any, slot: InstanceInfo, **keywords: Any) -> None:
        self.slot = slot
        super().__init__(*arguments, **keywords)

    async def get_startup_information(self) -> dict[str, Any]:
        return {**await super().get_startup_information(), STARTUP_KEY: self.slot.to_json()}


# Each worker would measure this machine twice a second, and its own code a hundred times.
_QUIET = {
    "distributed.admin.system-monitor.interval": "1h",
    "distributed.admin.tick.interval": "1h",
    "distributed.worker.profile.enabled": False,
    "distributed.worker.profile.interval": "1h",
}


async def serve(address: str, count: int, secret: str) -> None:
    dask.config.set(_QUIET)
    workers = []
    for number in range(count):
        node, worker = f"many{number // SLOTS_OF_NODE}", number % SLOTS_OF_NODE
        slot = InstanceInfo(
            node, worker, f"{node}/{worker}", "partition", "demo/mig", PROFILE, "H100", memory_gb=40.0, simulated=True
        )
        workers.append(
            Light(
                address,
                name=slot.slot,
                slot=slot,
                nthreads=1,
                host="127.0.0.1",
                security=Credentials.derive(secret, role="worker", name=node).security(),
                resources=resources(slot),
                memory_limit=0,
                dashboard=False,
                dashboard_address="127.0.0.1:0",
                local_directory=tempfile.gettempdir(),
                executor={"default": Never()},
            )
        )
    for begin in range(0, count, 20):
        await asyncio.gather(*workers[begin : begin + 20])
    print("all", flush=True)
    await asyncio.to_thread(sys.stdin.read)
    os._exit(0)


if __name__ == "__main__":
    asyncio.run(serve(sys.argv[1], int(sys.argv[2]), sys.stdin.readline().strip()))
