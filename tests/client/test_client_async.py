"""The client of coroutines over a real fleet."""

from __future__ import annotations

import asyncio
import inspect
import itertools
import os
import time
from pathlib import Path

import pytest
from tasks_on_nodes.gangs import fail_as, say_rank, stop

import skyinfra as sky
from skyinfra.client import AsyncPool, connect_async, open_pool
from skyinfra.tasks import Task


@sky.compute
def double(x: int) -> int:
    return 2 * x


@sky.compute
def double_after(path: str, x: int) -> int:
    deadline = time.monotonic() + 60
    while not Path(path).exists():
        if time.monotonic() > deadline:
            raise TimeoutError(path)
        time.sleep(0.01)
    return 2 * x


@sky.compute
def fail() -> None:
    raise LookupError("not here")


@sky.compute
def spin(path: str) -> None:
    Path(path).touch()
    try:
        while True:
            time.sleep(0.02)
    except KeyboardInterrupt:
        Path(path + ".stopped").touch()
        raise


def test_it_takes_what_connect_takes():
    ours, theirs = (inspect.signature(each).parameters for each in (connect_async, sky.connect))
    assert list(ours.values()) == list(theirs.values())


def test_the_operators_give_what_can_be_awaited(fleet):
    async def main() -> None:
        async with connect_async(fleet.manifest) as pool:
            assert await (double(2) >> pool) == 4
            assert await (double(3) @ pool) == [6, 6, 6, 6]
            assert await pool.run(double(4)) == 8
            assert await pool.submit(double, 5) == 10
            assert await (sky.gather(double(1), double(2)) >> pool) == (2, 4)
            assert [x async for x in sky.gather(double(1), double(2), stream=True) >> pool] == [2, 4]
            assert [x async for x in pool.map(double, range(20))] == [2 * x for x in range(20)]
            assert {x async for x in pool.map(double, range(20), ordered=False)} == {2 * x for x in range(20)}
            assert len(await pool.slots()) == 4
            assert len(await pool.select(node="n0").slots()) == 2
            assert [node.name for node in pool.nodes()] == ["n0", "n1"]

    asyncio.run(main())


def test_many_tasks_wait_at_once_and_the_loop_goes_on(fleet, tmp_path):
    path = tmp_path / "go"

    async def tick() -> None:
        for _ in range(30):
            await asyncio.sleep(0)
        path.touch()

    async def main() -> None:
        async with connect_async(fleet.manifest) as pool:
            # No task ends before the loop has gone round while all of them are awaited.
            waiting = [pool.run(double_after(str(path), x)) for x in range(30)]
            results = await asyncio.gather(*waiting, tick())
            assert results == [*(2 * x for x in range(30)), None]

    asyncio.run(main())


def test_what_a_task_raises_is_raised_where_it_is_awaited(fleet):
    async def main() -> None:
        async with connect_async(fleet.manifest) as pool:
            with pytest.raises(LookupError, match="not here"):
                await (fail() >> pool)
            with pytest.raises(LookupError, match="not here"):
                await (fail() @ pool)
            with pytest.raises(LookupError, match="not here"):
                async for _ in sky.gather(double(1), fail(), stream=True) >> pool:
                    pass

    asyncio.run(main())


@pytest.mark.parametrize("wait", ["future", "run", "broadcast"])
def test_a_coroutine_that_is_cancelled_stops_its_task(fleet, tmp_path, wait):
    path = tmp_path / "spin"

    async def main() -> None:
        async with connect_async(fleet.manifest) as pool:
            slots = (await pool.slots())[:1]
            ways = {
                "future": lambda: pool.submit(spin(str(path))),
                "run": lambda: pool.run(spin(str(path))),
                "broadcast": lambda: pool.broadcast(spin(str(path)), slots=slots),
            }

            async def waiting() -> None:
                await ways[wait]()

            task = asyncio.create_task(waiting())
            while not path.exists():
                await asyncio.sleep(0.02)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
            async with asyncio.timeout(30):
                while not Path(f"{path}.stopped").exists():
                    await asyncio.sleep(0.02)

    asyncio.run(main())


def test_a_map_that_is_left_takes_no_more_items(fleet):
    taken = []

    def numbers():
        for number in itertools.count():
            taken.append(number)
            yield number

    async def main() -> None:
        async with connect_async(fleet.manifest) as pool:
            slots = sum(len(fleet.manifest.slots_of(node)) for node in fleet.manifest.nodes)
            # Two messages of 64 tasks for each slot, and as many results that nobody has taken yet.
            for window, most in ((None, 2 * 2 * 64 * slots), (4, 30)):
                taken.clear()
                results = pool.map(double, numbers(), window=window)
                async for result in results:
                    if result == 10:
                        break
                await results.aclose()
                seen = len(taken)
                assert await pool.run(double(1)) == 2
                assert len(taken) == seen <= most

    asyncio.run(main())


def test_a_future_of_the_plain_client_can_be_awaited(pool):
    async def main() -> int:
        return await pool.submit(double, 4)

    assert asyncio.run(main()) == 8


def test_connecting_can_be_awaited_and_its_errors_arrive(fleet):
    async def main() -> None:
        pool = await connect_async(fleet.manifest)
        assert isinstance(pool, AsyncPool)
        assert repr(pool).startswith("<AsyncPool stack/pool")
        await pool.close()
        with pytest.raises(sky.InvalidManifest):
            await connect_async(Path("no-such.json"))

    asyncio.run(main())


def test_a_connection_that_nobody_waits_for_any_more_is_closed(fleet, monkeypatch):
    made = []

    def slow(*args, **kwargs):
        pool = open_pool(fleet.manifest)
        made.append(pool)
        time.sleep(0.5)
        return pool

    monkeypatch.setattr("skyinfra.client.asynchronous.connect", slow)

    async def main() -> None:
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.1):
                await connect_async(fleet.manifest)
        async with asyncio.timeout(30):
            while not made or "closed" not in repr(made[0]):
                await asyncio.sleep(0.02)

    asyncio.run(main())


def test_another_pool_cannot_stand_behind_the_operators(fleet):
    with pytest.raises(TypeError):
        Task(os.getpid) >> object()  # type: ignore[operator]


def test_a_gang_is_awaited_and_the_loop_goes_on(fleet):
    async def main() -> None:
        lines: list[tuple[int, str, str]] = []
        beats = 0

        async def beat() -> None:
            nonlocal beats
            while True:
                await asyncio.sleep(0.001)
                beats += 1

        beating = asyncio.ensure_future(beat())
        async with connect_async(fleet.manifest) as pool:

            def on_line(*line: object) -> None:
                asyncio.get_running_loop()
                lines.append(line)

            found = await pool.launch(say_rank, "hello", nodes=2, per_node=1, framework="none", on_line=on_line)
            assert found == [0, 1]
            with pytest.raises(LookupError, match="not here"):
                await pool.launch(fail_as, 1, framework="none")
        beating.cancel()
        assert sorted(lines) == [(0, "stdout", "hello"), (1, "stdout", "hello")]
        assert beats > 2

    asyncio.run(main())


@pytest.mark.slow
def test_a_gang_that_is_cancelled_ends_all_ranks(pool, fleet, tmp_path):
    async def main() -> None:
        async with connect_async(fleet.manifest) as pool:
            waiting = asyncio.ensure_future(pool.launch(stop, str(tmp_path), framework="none"))
            while len(list(tmp_path.iterdir())) < 4:
                await asyncio.sleep(0.01)
            waiting.cancel()
            with pytest.raises(asyncio.CancelledError):
                await waiting
            # All slots are free again.
            assert await (double(1) @ pool) == [2, 2, 2, 2]

    asyncio.run(main())


def test_it_launches_as_the_plain_client_does():
    ours, theirs = (inspect.signature(each.launch).parameters for each in (AsyncPool, sky.Pool))
    assert {n: (p.kind, p.default) for n, p in ours.items()} == {n: (p.kind, p.default) for n, p in theirs.items()}


def test_it_has_every_method_that_tasks_and_jobs_need():
    missing = {name for name in vars(sky.Job) if not name.startswith("_")} - set(dir(sky.AsyncJob))
    assert missing == {"brought", "waiting", "result_of", "exception_of"}
