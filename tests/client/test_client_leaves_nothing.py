"""What tasks and clients that have ended leave in the processes of a fleet: nothing that grows."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import distributed
from support import python_path

from skyinfra.client import Pool, open_pool
from skyinfra.tasks import Task

DIES = """
import json, os, sys
from skyinfra.client import open_pool
from skyinfra.protocol.manifest import Manifest

pool = open_pool(Manifest.read(json.loads(sys.stdin.readline())))
pool.submit(int).result()
print(pool._fleet.topic, flush=True)
os.kill(os.getpid(), 9)
"""


def kept(pool: Pool):
    """What the head keeps, see `client_fleet.OtherScheduler`."""

    async def ask():
        return await pool._fleet.connection.head.test_kept()

    return pool._fleet.loop.run(ask())


def measured() -> int:
    """Of how many things the worker keeps a sum."""
    return len(distributed.get_worker().digests_total)


def test_the_head_keeps_no_events_of_a_client_that_died(fleet, pool, wait_until):
    client = subprocess.run(
        [sys.executable, "-c", DIES],
        env={**os.environ, "PYTHONPATH": python_path()},
        input=json.dumps(fleet.manifest.to_json()) + "\n",
        capture_output=True,
        text=True,
    )
    topic = client.stdout.strip()
    assert topic.startswith("skyinfra-"), client.stderr
    wait_until(lambda: topic not in kept(pool)["topics"])


def test_the_head_keeps_no_events_of_a_client_that_left(fleet, pool, wait_until):
    with open_pool(fleet.manifest) as other:
        other.submit(int).result()
        assert other._fleet.topic in kept(pool)["topics"]
    wait_until(lambda: other._fleet.topic not in kept(pool)["topics"])


def test_tasks_one_after_the_other_are_forgotten(pool):
    """Dask takes each of them for a computation of its own, and remembers all computations."""
    slot = pool.slots()[:1]
    before = kept(pool)["spans"]
    counts = [pool.broadcast(Task(measured), slots=slot)[0] for _ in range(30)]
    assert kept(pool)["spans"] == before
    assert counts[-1] - counts[5] <= 2


def worker_sent() -> int:
    return len(distributed.get_worker().batched_stream.recent_message_log)


def test_messages_are_not_kept(pool):
    """Dask keeps the last thousand of each connection, of up to 1 MB each."""
    assert list(pool.map(len, [b"x"] * 50)) == [1] * 50
    assert kept(pool)["sent"] == 0
    assert Task(worker_sent) @ pool == [0] * 4
    assert len(pool._fleet.connection.client.scheduler_comm.recent_message_log) == 0
