"""Generators: their items come one by one."""

from __future__ import annotations

import asyncio
import concurrent.futures
import gc
import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

import skyinfra as sky
from skyinfra.client import connect_async
from skyinfra.protocol.calls import MOST_ITEMS, Item
from skyinfra.submission import items as client_items
from skyinfra.submission.fleet import Fleet


@sky.compute
def count(to: int, end: str | None = None, item: int = 0) -> Iterator[object]:
    """The numbers below *to*, of *item* bytes beside them; *end*: a file that is written when it is left."""
    try:
        for number in range(to):
            yield (number, b"." * item) if item else number
    finally:
        if end is not None:
            Path(end).write_text(f"after {number + 1}")


@sky.compute
def step_by_step(folder: str, to: int) -> Iterator[int]:
    for number in range(to):
        while not Path(folder, str(number)).exists():
            time.sleep(0.01)
        yield number


@sky.compute
def fail_after(to: int) -> Iterator[int]:
    yield from range(to)
    raise LookupError(to)


@sky.compute
def die_once(mark: str, to: int) -> Iterator[int]:
    for number in range(to):
        if number == to // 2 and not Path(mark).exists():
            Path(mark).touch()
            time.sleep(0.3)
            os.kill(os.getpid(), signal.SIGKILL)
        yield number


@sky.compute
def unpicklable() -> Iterator[object]:
    yield 1
    yield (each for each in "a")


@sky.compute
def double(x: int) -> int:
    return 2 * x


@sky.cls
class Model:
    def tokens(self, text: str) -> Iterator[str]:
        yield from text.split()


def eventually(path: Path, text: str) -> None:
    deadline = time.monotonic() + 20
    while not path.exists() or path.read_text() != text:
        assert time.monotonic() < deadline, path.read_text() if path.exists() else "it was not left"
        time.sleep(0.02)


def test_an_item_comes_once_it_is_yielded(pool, tmp_path):
    (tmp_path / "0").touch()
    stream = step_by_step(str(tmp_path), 3) >> pool
    for number in range(3):
        (tmp_path / str(number)).touch()
        assert next(stream) == number
    with pytest.raises(StopIteration):
        next(stream)
    with pytest.raises(StopIteration):
        next(stream)


@pytest.mark.parametrize("number", [0, 1, MOST_ITEMS, 5 * MOST_ITEMS + 1])
def test_all_items_come_in_order(pool, number):
    assert list(count(number) >> pool) == list(range(number))


@pytest.mark.parametrize("size", [10_000, 5 * 2**20])
def test_large_items_come_by_way_of_the_head(pool, size):
    assert [(number, len(data)) for number, data in count(5, item=size) >> pool] == [(n, size) for n in range(5)]


def test_the_exception_comes_after_the_last_item(pool):
    stream = fail_after(3) >> pool
    assert [next(stream) for _ in range(3)] == [0, 1, 2]
    with pytest.raises(LookupError) as caught:
        next(stream)
    assert caught.value.args == (3,)


def test_what_fails_before_the_first_item_fails_at_once(pool):
    with pytest.raises(LookupError):
        fail_after(0) >> pool
    stream = unpicklable() >> pool
    assert next(stream) == 1
    with pytest.raises(sky.TaskNotPicklable, match=r"(?s)an item of unpicklable.*generator"):
        next(stream)


def test_one_that_is_ahead_waits(pool, tmp_path):
    end = tmp_path / "end"
    stream = count(10_000, str(end)) >> pool
    assert next(stream) == 0
    time.sleep(1)
    stream.close()
    eventually(end, f"after {MOST_ITEMS + 1}")


def test_who_leaves_it_cancels_the_task(pool, tmp_path):
    end = tmp_path / "end"
    for number in count(10_000, str(end)) >> pool:
        if number == 3:
            break
    gc.collect()
    eventually(end, f"after {MOST_ITEMS + 1}")
    assert double(1) @ pool == [2] * len(pool.slots())


def test_a_task_that_starts_again_gives_each_item_once(pool, tmp_path):
    assert list(die_once(str(tmp_path / "mark"), 300) >> pool) == list(range(300))
    assert list(die_once(str(tmp_path / "other"), 6) >> pool) == list(range(6))


def test_retries_go_on_where_the_items_ended(pool, tmp_path):
    @sky.compute(retries=1)
    def fail_once(mark: str) -> Iterator[int]:
        for number in range(6):
            if number == 3 and not Path(mark).exists():
                Path(mark).touch()
                raise OSError
            yield number

    assert list(fail_once(str(tmp_path / "mark")) >> pool) == list(range(6))


def test_what_is_lost_with_the_connection_is_sent_again(pool, monkeypatch):
    add, lost = client_items.Arrivals.add, []

    def lossy(arrivals: client_items.Arrivals, key: str, item: Item) -> bool:
        if item.number in (2, 100) and item.number not in lost:
            lost.append(item.number)
            return True
        return add(arrivals, key, item)

    monkeypatch.setattr(client_items.Arrivals, "add", lossy)
    assert list(count(120) >> pool) == list(range(120))
    assert lost == [2, 100]


def test_the_last_item_may_be_lost(pool, monkeypatch):
    add, lost = client_items.Arrivals.add, []

    def lossy(arrivals: client_items.Arrivals, key: str, item: Item) -> bool:
        if item.number == 4 and not lost:
            lost.append(item.number)
            return True
        return add(arrivals, key, item)

    monkeypatch.setattr(client_items.Arrivals, "add", lossy)
    assert list(count(5) >> pool) == list(range(5))
    assert lost


def test_what_the_client_took_may_be_lost_too(pool, monkeypatch):
    acknowledged = client_items.Arrivals._acknowledged
    lost = []

    async def lossy(arrivals: client_items.Arrivals) -> None:
        if not lost:
            lost.append(True)
            arrivals._acknowledging = False
            return
        await acknowledged(arrivals)

    monkeypatch.setattr(client_items.Arrivals, "_acknowledged", lossy)
    assert list(count(300) >> pool) == list(range(300))
    assert lost


def test_a_message_that_fails_is_followed_by_others(pool, monkeypatch):
    run_on, failed = Fleet.run_on, []

    async def failing(fleet: Fleet, worker: str, function: object, *arguments: object) -> None:
        if not failed:
            failed.append(True)
            raise LookupError("a defect")
        await run_on(fleet, worker, function, *arguments)

    monkeypatch.setattr(Fleet, "run_on", failing)
    assert list(count(300) >> pool) == list(range(300))
    assert failed


def test_each_way_to_run_streams(pool):
    model = Model()
    ways = {
        "map": [list(each) for each in pool.map(count, [3, 2, 0])],
        "starmap": [list(each) for each in pool.starmap(count, [(3,), (2,), (0,)])],
        "gather": [list(each) for each in sky.gather(count(3), count(2), count(0)) >> pool],
        "submit": [list(pool.submit(count, number).result()) for number in (3, 2, 0)],
    }
    assert all(found == [[0, 1, 2], [0, 1], []] for found in ways.values()), ways
    assert sorted(len(list(each)) for each in pool.map(count, range(20), ordered=False)) == list(range(20))
    assert [list(each) for each in count(2) @ pool] == [[0, 1]] * len(pool.slots())
    assert list(model.tokens("to be or not") >> pool) == ["to", "be", "or", "not"]
    assert [list(each) for each in pool.map(model.tokens, ["a b", "c"])] == [["a", "b"], ["c"]]
    model.release() @ pool


def test_a_future_is_done_with_the_first_item(pool, tmp_path):
    future = pool.submit(step_by_step, str(tmp_path), 2)
    assert not concurrent.futures.wait([future], timeout=0.5).done
    (tmp_path / "0").touch()
    assert concurrent.futures.wait([future], timeout=20).done == {future}
    assert future.result() is future.result()
    assert not future.cancel()
    (tmp_path / "1").touch()
    assert list(future.result()) == [0, 1]


def test_the_exception_of_a_map_names_its_item(pool):
    streams = pool.map(fail_after, [2, 1])
    first = next(streams)
    assert [next(first), next(first)] == [0, 1]
    with pytest.raises(LookupError) as caught:
        next(first)
    assert "Raised for item 0 of the map, counted from 0." in caught.value.__notes__


def test_jobs_and_ranks_give_one_value(pool):
    for send in (lambda: pool.submit(count, 3, detach="items"), lambda: pool.launch(count(3))):
        with pytest.raises(sky.TaskNotPicklable, match=r"(?s)count is a generator.*list"):
            send()


def test_a_coroutine_goes_over_them(fleet):
    async def run() -> list[list[int]]:
        async with connect_async(fleet.manifest) as pool:
            first = [item async for item in await (count(3) >> pool)]
            second = [[item async for item in stream] async for stream in pool.map(count, [2, 1])]
            async for item in await (count(10_000) >> pool):
                if item == 2:
                    break
            return [first, *second]

    assert asyncio.run(run()) == [[0, 1, 2], [0, 1], [0]]


def test_coroutines_that_wait_for_items_take_no_thread(fleet, tmp_path):
    async def run() -> None:
        asyncio.get_running_loop().set_default_executor(concurrent.futures.ThreadPoolExecutor(1))
        async with connect_async(fleet.manifest) as pool:
            (tmp_path / "0").touch()
            stream = await (step_by_step(str(tmp_path), 2) >> pool)
            assert await anext(stream) == 0
            waiting = asyncio.create_task(anext(stream))
            await asyncio.sleep(0)  # it begins
            try:
                async with asyncio.timeout(60):
                    assert await pool.slots()
            finally:
                (tmp_path / "1").touch()
            assert await waiting == 1
            with pytest.raises(StopAsyncIteration):
                await anext(stream)

    asyncio.run(run())


def test_who_waits_for_slots_that_nobody_frees_is_told(pool, monkeypatch):
    monkeypatch.setattr("skyinfra.submission.dispatch._STALLED_S", 1.0)
    held = [pool.submit(count, 10_000).result() for _ in pool.slots()]
    with pytest.raises(sky.SlotsHeld, match=r"double cannot start: generators.*count"):
        double(1) >> pool
    for stream in held:
        stream.close()
    assert double(1) >> pool == 2
