"""Silent connections to the head, all from one address: what clients and its memory notice, against before them."""

from __future__ import annotations

import resource
import select
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

from benchmarks.engine import RunningNode, pss, serving
from benchmarks.measure import Result
from skyinfra.client import Pool
from skyinfra.head import start

COUNT = 10_000
# Of the files that a process may open, for all others.
SPARE = 500
SLOTS = 2
RUNS = 200

# Opens so many connections, says so, and closes them when it is told to.
STRANGERS = """
import resource, socket, sys
host, port, count = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
opened = [socket.create_connection((host, port)) for _ in range(count)]
print("open", flush=True)
sys.stdin.read()
"""


def run() -> Iterator[Result]:
    count = min(COUNT, resource.getrlimit(resource.RLIMIT_NOFILE)[1] - SPARE)
    with (
        tempfile.TemporaryDirectory() as folder,
        serving(Path(folder) / "fleet", SLOTS) as (node, _),
        node.pool() as pool,
    ):
        _figures(node, pool)
        before = _figures(node, pool)
        with _strangers(node, count) as strangers:
            coming = [_trip(pool)]
            while not select.select([strangers.stdout], [], [], 0)[0]:
                coming.append(_trip(pool))
            existing = _figures(node, pool)
            strangers.communicate()
        after = _figures(node, pool)
    trip = statistics.median(coming)
    what = f"round trip of an empty task, {count:,} silent sockets"
    yield Result(f"{what} come", "before them", trip, trip / before[0], "", f"{trip * 1000:.2f} ms")
    for when, found in (("stand", existing), ("left", after)):
        yield Result(f"{what} {when}", "before them", found[0], found[0] / before[0], "", f"{found[0] * 1000:.2f} ms")
        yield Result(f"a client connects, they {when}", "before them", found[1], found[1] / before[1])
        yield Result(
            f"memory of the head, they {when}", "before them", 0, found[2] / before[2], "", f"{found[2]:.0f} MB"
        )


def _strangers(node: RunningNode, count: int) -> subprocess.Popen[str]:
    head = start.parse(node.directory.scheduler_file.read_text())
    command = [sys.executable, "-c", STRANGERS, head.address, str(head.port), str(count)]
    return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)


def _figures(node: RunningNode, pool: Pool) -> tuple[float, float, float]:
    """The round trip of an empty task, the time until a new client has one done, and the MB of the head."""
    trip = statistics.median(_trip(pool) for _ in range(RUNS))
    begun = time.perf_counter()
    with node.pool() as another:
        _trip(another)
    runner = node.status().pid
    assert runner is not None
    return trip, time.perf_counter() - begun, pss(runner)


def _trip(pool: Pool) -> float:
    begun = time.perf_counter()
    pool.submit(int).result()
    return time.perf_counter() - begun
