"""Chunks that end otherwise than by their outcomes, and what keeps others from them."""

from __future__ import annotations

import asyncio
import functools
import itertools
import multiprocessing
import os
import time
from collections import Counter
from concurrent.futures import CancelledError
from pathlib import Path

import pytest

import skyinfra as sky
from skyinfra.client import launching, open_pool
from skyinfra.submission.flow import Chunk
from skyinfra.tasks.task import Task

PATIENCE_S = 120.0


def double(x: int) -> int:
    return 2 * x


def hold_at(x: int, at: int, folder: str) -> int:
    """Item *at* takes until it is let through."""
    deadline = time.monotonic() + 3 * PATIENCE_S
    while x == at and not Path(folder, "go").exists():
        assert time.monotonic() < deadline
        time.sleep(0.01)
    return x


def die_at(x: int, every: int) -> int:
    if x % every == every - 1:
        os._exit(1)
    return x


def gathering(pool, monkeypatch):
    """What sends the tasks of a map of an iterator, whose first one waits for others, and that one."""
    # Its module is at the head then: it may travel with others.
    assert pool.submit(double, 1).result() == 2
    monkeypatch.setattr(launching, "GATHER_S", 3600.0)
    send = pool._sending(windowed=True, known=False)
    [first] = send([Task(double, 1)], 64)
    assert first.together
    return send, first


def test_closing_the_pool_ends_those_that_wait_for_others(fleet, monkeypatch):
    pool = open_pool(fleet.manifest)
    send, first = gathering(pool, monkeypatch)
    [second] = send([Task(double, 2)], 64)
    pool.close()
    for future in (first, second):
        with pytest.raises(CancelledError):
            future.result(timeout=PATIENCE_S)
    with pytest.raises(sky.FleetError, match="is closed"):
        send([Task(double, 3)], 64)


def test_they_are_told_of_a_fleet_that_is_gone(fleet, monkeypatch):
    """They are among those that the client looks after, also before they are sent."""
    with open_pool(fleet.manifest) as pool:
        _, first = gathering(pool, monkeypatch)
        dispatcher = pool._fleet.dispatcher

        async def lose() -> None:
            await asyncio.sleep(0)  # the chunk begins to wait
            dispatcher._answered -= 3600
            dispatcher._look_for_head()

        pool._fleet.in_loop(lose())
        with pytest.raises(sky.FleetUnreachable):
            first.result(timeout=PATIENCE_S)


def test_a_forked_process_adds_none_to_them(pool, monkeypatch):
    send, first = gathering(pool, monkeypatch)
    reader, writer = multiprocessing.Pipe(duplex=False)
    child = os.fork()
    if child == 0:
        try:
            send([Task(double, 2)], 64)[0].result(timeout=10)
        except BaseException as error:  # noqa: BLE001 - it is what is asked for
            writer.send(type(error).__name__)
        os._exit(0)
    assert reader.poll(PATIENCE_S)
    assert reader.recv() == "ConnectionForked"
    os.waitpid(child, 0)
    first.cancel()


def test_all_are_cancelled_where_none_was_sent(pool):
    loop = asyncio.new_event_loop()  # it never runs
    shipments = [pool._shipment(Task(double, number)) for number in range(3)]
    chunk = Chunk(shipments, pool.target, pool._fleet.dispatcher, windowed=True)
    waiting = []

    def start(coroutine):
        waiting.append(coroutine)
        return asyncio.run_coroutine_threadsafe(coroutine, loop)

    first, second, third = chunk.send(start)
    first.cancel()
    assert second.cancelled()
    assert third.cancelled()
    assert chunk.add(pool._shipment(Task(double, 4)), 64) is None
    waiting[0].close()
    loop.close()


@pytest.mark.parametrize("known", [True, False])
def test_none_waits_behind_a_long_one_while_others_keep_coming(pool, tmp_path, known):
    """No slot is ever free: each has messages of the map that goes on."""
    at, behind = 1000, 600
    numbers = range(10_000_000) if known else itertools.count()
    results = pool.map(functools.partial(hold_at, at=at, folder=str(tmp_path)), numbers, ordered=False)
    missing = {number for number in range(at + behind) if number != at}
    deadline = time.monotonic() + PATIENCE_S
    for result in results:
        missing.discard(result)
        if not missing:
            break
        assert time.monotonic() < deadline, f"{len(missing)} wait behind item {at}, such as {min(missing)}"
    results.close()


@pytest.mark.slow
def test_several_that_end_their_processes_harm_no_others(pool):
    count, every = 400, 80
    results = list(pool.map(die_at, range(count), [every] * count, return_exceptions=True))
    for number, result in enumerate(results):
        if number % every == every - 1:
            assert isinstance(result, sky.TaskAttemptsExceeded), (number, result)
        else:
            assert result == number


def killer(x: int, at: int, file: str) -> int:
    with Path(file).open("ab", 0) as marks:
        marks.write(b"%d\n" % x)
    if x == at:
        os._exit(1)
    return x


@pytest.mark.parametrize("at", [100, 150, 151])
def test_what_travels_with_one_that_ends_its_process_starts_once_more_on_whichever_node(pool, tmp_path, at):
    found, file = [], tmp_path / "starts"
    with pytest.raises(sky.TaskAttemptsExceeded):
        found.extend(pool.map(killer, range(200), [at] * 200, [str(file)] * 200))
    starts = Counter(map(int, file.read_text().split()))
    del starts[at]
    assert max(starts.values()) <= 2
