"""Futures, as `concurrent.futures` and asyncio know them."""

from __future__ import annotations

import asyncio
import concurrent.futures
import gc
import queue
import threading
import time
import traceback
import weakref
from pathlib import Path

import pytest

import skyinfra as sky
from skyinfra.client import open_pool


@sky.compute
def double(x: int) -> int:
    return 2 * x


@sky.compute
def fail(x: int) -> None:
    raise LookupError(x)


@sky.compute
def nap(path: str) -> str:
    while not Path(path).exists():
        time.sleep(0.01)
    return path


@sky.compute
def stop() -> None:
    raise StopIteration(3)


class Loads:
    """Tells in which thread it was unpickled, and how often."""

    threads: list[str] = []  # noqa: RUF012

    def __reduce__(self) -> tuple[object, ...]:
        return loaded, ()


def loaded() -> Loads:
    made = Loads()
    Loads.threads.append(threading.current_thread().name)
    return made


class Unloadable:
    def __reduce__(self) -> tuple[object, ...]:
        return int, ("no number",)


@pytest.fixture
def gate(tmp_path: Path) -> Path:
    """A file; tasks wait for it."""
    return tmp_path / "gate"


# Of concurrent.futures ----------------------------------------------------------------------------------------------


def test_it_is_one(pool):
    future = pool.submit(double, 2)
    assert isinstance(future, concurrent.futures.Future)
    assert future.result(timeout=60) == 4
    assert (future.done(), future.running(), future.cancelled(), future.cancel()) == (True, False, False, False)


def test_all_are_waited_for(pool):
    futures = [pool.submit(double, n) for n in range(10)]
    done, others = concurrent.futures.wait(futures, timeout=60)
    assert (done, others) == (set(futures), set())
    assert sorted(each.result() for each in concurrent.futures.as_completed(futures)) == [2 * n for n in range(10)]


def test_the_first_exception_ends_a_wait(pool, gate):
    waiting, failing = pool.submit(nap, str(gate)), pool.submit(fail, 1)
    done, others = sky.wait([waiting, failing], timeout=60, return_when="FIRST_EXCEPTION")
    assert (done, others) == ({failing}, {waiting})
    done, others = sky.wait([waiting], timeout=0.05)
    assert (done, others) == (set(), {waiting})
    gate.touch()
    assert sky.wait([waiting, failing], timeout=60).done == {waiting, failing}


def test_a_cancelled_one_is_done(pool, gate):
    waiting = pool.submit(nap, str(gate))
    assert waiting.cancel()
    assert sky.wait([waiting], timeout=60)[0] == {waiting}
    assert waiting.cancelled()
    with pytest.raises(concurrent.futures.CancelledError):
        waiting.result(timeout=60)
    with pytest.raises(concurrent.futures.CancelledError):
        waiting.exception(timeout=60)


def test_one_that_is_cancelled_at_once_gives_its_slot_back(pool, gate):
    for _ in range(10):
        assert pool.submit(nap, str(gate)).cancel()
    # Less than the time after which a worker ends what nobody waits for.
    assert pool.submit(double, 2).result(timeout=30) == 4


def test_what_is_no_future_is_named(pool):
    with pytest.raises(TypeError, match=r"number 1 is a Task: pool\.submit\(task\)"):
        sky.wait([pool.submit(double, 1), double(1)])


def test_callbacks_get_the_future_itself(pool):
    heard: queue.Queue[object] = queue.Queue()
    future = pool.submit(double, 1)
    future.add_done_callback(heard.put)
    future.when_done(heard.put)
    assert [heard.get(timeout=60), heard.get(timeout=60)] == [future, future]
    future.add_done_callback(heard.put)
    assert heard.get_nowait() is future, "of one that is done it is called at once"


def test_callbacks_may_use_the_pool(pool, gate, caplog):
    heard: queue.Queue[object] = queue.Queue()

    def use(future: sky.Future[int]) -> None:
        gate.touch()
        # The slots of tasks that an earlier test has cancelled may still come back.
        slots = {slot.slot for slot in pool.slots()}
        heard.put((future.result(), other.result(), pool.submit(len, bytes(5 * 2**20)).result(), slots <= known))

    def fail_here(future: sky.Future[int]) -> None:
        raise LookupError("of the callback")

    known = {slot.slot for slot in pool.slots()}
    other = pool.submit(nap, str(gate))
    first = pool.submit(double, 1)
    first.add_done_callback(fail_here)
    first.add_done_callback(use)
    assert heard.get(timeout=60) == (2, str(gate), 5 * 2**20, True)
    assert "LookupError: of the callback" in caplog.text


def test_what_would_wait_for_its_own_thread_is_refused(pool, caplog, gate):
    heard: queue.Queue[object] = queue.Queue()

    def use(_: object) -> None:
        try:
            pool.slots()
        except sky.FleetError as error:
            heard.put(error)

    # Of one that has ended it is called here.
    pool.submit(nap, str(gate)).when_done(use)
    gate.touch()
    assert "to another thread" in str(heard.get(timeout=60))
    assert pool.submit(double, 2).result(timeout=60) == 4


# Of asyncio ---------------------------------------------------------------------------------------------------------


def test_asyncio_wraps_it(pool):
    async def main() -> list[object]:
        futures = [pool.submit(double, 1), pool.submit(fail, 2)]
        return await asyncio.gather(*map(asyncio.wrap_future, futures), return_exceptions=True)

    result, error = asyncio.run(main())
    assert result == 2
    assert isinstance(error, LookupError)


def test_the_asyncio_of_python_3_15_copies_what_it_holds(pool, gate):
    """It reads the state of a future at once, by a method of its class."""
    done, failed, waiting = pool.submit(double, 1), pool.submit(fail, 2), pool.submit(nap, str(gate))
    assert waiting._get_snapshot() == (False, False, None, None)
    waiting.cancel()
    sky.wait([done, failed, waiting], timeout=60)
    assert done._get_snapshot() == (True, False, 2, None)
    assert waiting._get_snapshot() == (True, True, None, None)
    is_done, is_cancelled, result, error = failed._get_snapshot()
    assert (is_done, is_cancelled, result) == (True, False, None)
    assert isinstance(error, LookupError) and error.args == (2,)


def test_a_result_that_cannot_be_unpickled_reaches_who_waits_in_a_loop(pool):
    async def main() -> object:
        return await asyncio.wait_for(asyncio.wrap_future(pool.submit(Unloadable)), 60)

    with pytest.raises(ValueError, match="no number"):
        asyncio.run(main())
    with pytest.raises(ValueError, match="no number"):
        pool.submit(Unloadable).result(timeout=60)


def test_one_that_has_ended_may_be_awaited_and_again(pool):
    async def main() -> tuple[int, int]:
        future = pool.submit(double, 1)
        await asyncio.to_thread(sky.wait, [future], 60)
        return await future, await future

    assert asyncio.run(main()) == (2, 2)


# Results ------------------------------------------------------------------------------------------------------------


def test_a_result_is_unpickled_once_and_not_in_the_loop(pool):
    Loads.threads.clear()
    future = pool.submit(Loads)
    sky.wait([future], timeout=60)
    assert Loads.threads == []
    assert future.result() is future.result()
    assert Loads.threads == [threading.current_thread().name]


def test_an_exception_is_the_same_one_and_its_traceback_begins_in_the_task(pool):
    future = pool.submit(fail, 3)
    for _ in range(3):
        with pytest.raises(LookupError) as caught:
            future.result(timeout=60)
        assert caught.value is future.exception()
    assert [frame.name for frame in traceback.extract_tb(future.traceback())] == ["fail"]
    assert [frame.name for frame in traceback.extract_tb(caught.value.__traceback__)][-1] == "fail"


def test_a_dropped_one_is_freed_at_once(pool):
    gc.collect()
    gc.disable()
    try:
        future = pool.submit(Loads)
        alive = weakref.ref(future.result(timeout=60))
        failed = pool.submit(fail, 1)
        with pytest.raises(LookupError):
            failed.result(timeout=60)
        del future
        assert alive() is None
    finally:
        gc.enable()


def test_bytes_of_a_large_result_go_when_it_was_asked_for(pool):
    future = pool.submit(bytes, 10**6)
    sky.wait([future], timeout=60)
    assert len(future.outcome().result) > 10**6
    assert len(future.result()) == 10**6
    assert future.outcome().result is None


# Maps ---------------------------------------------------------------------------------------------------------------


@sky.compute
def odd(x: int) -> int:
    if x % 2 == 0:
        raise LookupError(x)
    return x


def test_the_error_of_a_map_tells_the_number_of_its_item(pool):
    with pytest.raises(LookupError) as caught:
        list(pool.map(odd, [1, 3, 5, 6, 7]))
    assert caught.value.__notes__[-1] == "Raised for item 3 of the map, counted from 0."
    with pytest.raises(LookupError) as caught:
        list(pool.map(odd, (n for n in [1, 3, 6]), ordered=False))
    assert caught.value.__notes__[-1] == "Raised for item 2 of the map, counted from 0."
    with pytest.raises(LookupError) as caught:
        sky.gather(odd(1), odd(2)) >> pool
    assert caught.value.__notes__[-1] == "Raised for task 1 of the gather, counted from 0."


@pytest.mark.parametrize("count", [9, 300])
def test_exceptions_are_returned(pool, count):
    found = list(pool.map(odd, range(count), return_exceptions=True))
    assert [each if isinstance(each, int) else each.args[0] for each in found] == list(range(count))
    assert isinstance(found[4], LookupError)


def test_exceptions_are_returned_to_coroutines(fleet):
    async def main() -> list[object]:
        async with sky.connect_async(fleet.manifest) as pool:
            found = [each async for each in pool.map(odd, range(5), return_exceptions=True)]
            return found + [each async for each in pool.starmap(divmod, [(7, 2)])]

    found = asyncio.run(main())
    assert [type(each) for each in found] == [LookupError, int, LookupError, int, LookupError, tuple]


def test_a_fleet_that_is_gone_is_no_result(fleets):
    fleet = fleets(nodes=("n0",), slots=1)
    with open_pool(fleet.manifest, timeout=5, patience=1) as pool:
        results = pool.map(double, iter(int, 1), return_exceptions=True)
        assert next(results) == 0
        fleet.kill()
        with pytest.raises(sky.FleetUnreachable):
            list(results)


def test_starmap_has_the_arguments_of_a_call_in_each_item(pool):
    assert list(pool.starmap(divmod, [(7, 2), (9, 4)])) == [(3, 1), (2, 1)]
    assert list(pool.starmap(divmod, zip([7], [2], strict=True), window=1)) == [(3, 1)]


def test_an_error_of_the_items_themselves_ends_a_map(pool):
    def items():
        yield 1
        raise OSError("no more")

    with pytest.raises(OSError, match="no more"):
        list(pool.map(double, items()))


def test_an_unknown_word_of_a_map_is_named(pool):
    with pytest.raises(sky.InvalidField, match="ordered"):
        pool.map(double, [1], order=False)


# Arguments that cannot travel ---------------------------------------------------------------------------------------


@sky.compute
def take(x: object) -> None: ...


WAYS = {
    ">>": lambda pool, value: take(value) >> pool,
    "@": lambda pool, value: take(value) @ pool,
    "in a list": lambda pool, value: take([value]) >> pool,
    "map": lambda pool, value: list(pool.map(take, [value])),
    "job": lambda pool, value: pool.detach(take(value)),
    "gang": lambda pool, value: pool.launch(take, value, framework="none"),
}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda pool: pool.submit(double, 1), r"argument 'x' of take.*the future of double.*pass future\.result\(\)"),
        (lambda pool: threading.Lock(), r"argument 'x' of take.*lock"),
        (lambda pool: (each for each in "a"), r"argument 'x' of take.*generator"),
        (lambda pool: pool, r"argument 'x' of take.*a pool is a connection.*sky\.current_pool\(\)"),
    ],
)
def test_it_is_refused_by_name(pool, way, make, words):
    with pytest.raises(sky.TaskNotPicklable, match=words):
        WAYS[way](pool, make(pool))
