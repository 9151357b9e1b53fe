"""Clocks that are set while a fleet runs: nothing waits for them to catch up, and nothing seems to have taken hours."""

from __future__ import annotations

import subprocess
import sys

import pytest

# A fleet of one worker in one process, whose clock jumps.
PROGRAM = """
import asyncio, sys, time

real, ahead = time.time, [0.0]
time.time = lambda: real() + ahead[0]

from distributed import Client, Scheduler, Worker

from skyinfra.engine import settings
from skyinfra.engine.loop import LoopThread  # noqa: F401 - as in a client

async def main(jump, scratch):
    settings.configure(scratch=scratch)
    async with Scheduler(port=0, dashboard_address=":0") as scheduler, Worker(scheduler.address) as worker:
        async with Client(scheduler.address, asynchronous=True) as client:
            assert await client.submit(int, "1") == 1
            running = client.submit(time.sleep, 2, pure=False)
            while not worker.active_keys:
                await asyncio.sleep(0.01)
            # In the middle of messages, each of which waits for the time of the one before.
            for number in range(20):
                client.log_event("topic", number)
                await asyncio.sleep(0.001)
            ahead[0] = jump
            await scheduler.check_worker_ttl()
            (state,) = scheduler.workers.values()
            before = state.last_seen
            while state.last_seen == before:
                await asyncio.sleep(0.01)
            assert all(0 <= seconds < 60 for seconds in state.executing.values()), state.executing
            await running
            for number in range(5):
                assert await client.submit(int, number) == number
    print("done")

asyncio.run(asyncio.wait_for(main(float(sys.argv[1]), sys.argv[2]), 30))
"""


@pytest.mark.parametrize("jump", [-3600.0, 3600.0])
def test_a_fleet_goes_on_when_its_clock_is_set(tmp_path: object, jump: float) -> None:
    command = [sys.executable, "-c", PROGRAM, str(jump), str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.stdout == "done\n", done.stderr[-3000:]
