"""Short tasks of a map travel together, and are as if each had travelled alone."""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import itertools
import os
import pickle
import time
from concurrent.futures import CancelledError, ThreadPoolExecutor
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

import skyinfra as sky
from skyinfra.client import open_pool
from skyinfra.protocol.calls import Outcome
from skyinfra.submission.flow import Flow, Pace
from skyinfra.submission.futures import Future
from skyinfra.worker import streaming

MANY = 400


def double(x: int) -> int:
    return 2 * x


def appended(x: int, shared: list[int]) -> list[int]:
    shared.append(x)
    return shared


def speak(x: int) -> str:
    if x % 3 == 0:
        print("line of", x)
        os.write(1, b"and one of native code\n")
    return sky.instance_info().slot


def wait_for_next(x: int, at: int, folder: str) -> int:
    """Item *at* waits until the item after it has been executed."""
    if x == at:
        deadline = time.monotonic() + 60
        while not Path(folder, str(at + 1)).exists():
            if time.monotonic() > deadline:
                raise TimeoutError("the next one waits behind this one")
            time.sleep(0.01)
    elif x == at + 1:
        Path(folder, str(x)).touch()
    return x


def told_before(x: int) -> list[object]:
    """Returns what stands as the progress of this task before it reports any."""
    before = streaming.last_progress()
    sky.progress(x, MANY)
    return [before]


def die_once(x: int, at: int, folder: str) -> int:
    with open(f"{folder}/starts-{x}", "a") as file:  # noqa: PTH123
        file.write(".")
    if x == at and len(Path(folder, f"starts-{x}").read_text()) == 1:
        os._exit(1)
    return x


def die(x: int, at: int) -> int:
    if x == at:
        os._exit(1)
    return x


def large(x: int) -> bytes:
    return bytes(20_000 if x % 5 == 0 else 10)


def fail_at(x: int, at: int) -> int:
    return 1 // (at - x)


def first_then_hang(x: int, folder: str) -> int:
    if x < MANY // 2:
        return x
    Path(folder, f"hangs-{os.getpid()}").touch()
    time.sleep(600)
    return x


def die_then_hang(x: int, at: int, folder: str) -> int:
    if x == at:
        if not Path(folder, "died").exists():
            Path(folder, "died").touch()
            os._exit(1)
        Path(folder, "hangs").touch()
        time.sleep(600)
    return x


def touched(x: int, folder: str) -> int:
    Path(folder, str(x)).touch()
    return x


@pytest.fixture
def sent(pool, monkeypatch):
    """The names of what was sent to the head, with how many tasks there were in each message."""
    found: list[int] = []
    connection = pool._fleet.connection
    submit = connection.submit

    def noting(key, header, call, resources, waited):
        found.append(header.count(b'"chunk": true'))
        return submit(key, header, call, resources, waited)

    monkeypatch.setattr(connection, "submit", noting)
    return found


def test_short_tasks_travel_together(pool, sent):
    # How many travel together follows from how long they take, on a machine with other work too.
    assert list(pool.map(double, range(MANY))) == list(range(0, 2 * MANY, 2))
    assert len(sent) < MANY
    assert sum(sent), "chunks, and not fewer tasks"
    sent.clear()
    assert sorted(pool.map(double, range(MANY), ordered=False)) == list(range(0, 2 * MANY, 2))
    assert len(sent) < MANY


def test_they_do_for_coroutines(fleet):
    async def main() -> list[int]:
        async with sky.connect_async(fleet.manifest) as pool:
            return [x async for x in pool.map(double, range(MANY))]

    assert asyncio.run(main()) == list(range(0, 2 * MANY, 2))


def test_items_without_a_length_travel_together_as_they_come(pool, sent):
    assert list(pool.map(double, iter(range(MANY)))) == list(range(0, 2 * MANY, 2))
    assert len(sent) < MANY
    assert sum(sent), "chunks, and not fewer tasks"


def test_none_waits_for_an_item_that_has_not_come(pool, tmp_path):
    """Each item but the first comes when the task of the one before it has run; they do not come together."""

    def items():
        for number in range(MANY):
            yield number
            # Others may be on their way already, while the iterator waits for this one.
            if number % 50 == 49:
                deadline = time.monotonic() + 60
                while not (tmp_path / str(number)).exists():
                    assert time.monotonic() < deadline, f"item {number} waits for the one after it"
                    time.sleep(0.01)

    assert list(pool.map(touched, items(), itertools.repeat(str(tmp_path)))) == list(range(MANY))


def test_items_of_which_many_come_are_not_all_fetched_where_their_calls_are_large(pool):
    fetched = 0

    def items():
        nonlocal fetched
        for _ in range(300):
            fetched += 1
            yield bytes(20_000)

    for seen, _ in enumerate(pool.map(len, items())):
        # Four slots, as many results that are kept, and the one or two by which it was found that they are large.
        assert fetched - seen < 40


def test_what_has_a_timeout_or_may_be_retried_travels_alone(pool, sent):
    for limited in (sky.compute(timeout=60)(double), sky.compute(retries=1)(double)):
        assert list(pool.map(limited, range(100))) == list(range(0, 200, 2))
        assert sent == [0] * 100
        sent.clear()


def test_each_has_arguments_of_its_own(pool, sent):
    shared: list[int] = []
    assert list(pool.map(appended, range(MANY), [shared] * MANY)) == [[x] for x in range(MANY)]
    assert sum(sent)


def test_each_has_output_of_its_own(fleet, sent, wait_until):
    lines: list[tuple[str, str]] = []
    with open_pool(fleet.manifest, output=lambda *line: lines.append(line)) as pool:
        slots = list(pool.map(speak, range(MANY)))
        expected = [(slots[x], text) for x in range(0, MANY, 3) for text in (f"line of {x}", "and one of native code")]
        with contextlib.suppress(AssertionError):  # the next one says which are missing
            wait_until(lambda: len(lines) >= len(expected))
    assert sorted(lines) == sorted(expected)
    kept = [file.read_text() for node in ("n0", "n1") for file in (fleet.root / node / "tasks").glob("speak-*.log")]
    for x in range(0, MANY, 3):
        assert f"line of {x}\nand one of native code\n" in kept


def test_each_has_progress_of_its_own(pool, sent):
    assert list(pool.map(told_before, range(MANY))) == [[None]] * MANY
    assert len(sent) < MANY


def test_none_waits_behind_a_long_one(pool, tmp_path):
    items = range(MANY)
    assert list(pool.map(wait_for_next, items, [250] * MANY, [str(tmp_path)] * MANY)) == list(items)


def test_a_lost_worker_process_loses_none(pool, tmp_path):
    items = range(MANY)
    assert list(pool.map(die_once, items, [250] * MANY, [str(tmp_path)] * MANY)) == list(items)
    assert len((tmp_path / "starts-250").read_text()) == 2


@pytest.mark.slow
def test_one_that_ends_its_process_is_named_and_the_others_are_not(pool):
    results = pool.map(die, range(MANY), [MANY - 100] * MANY)
    done = []
    with pytest.raises(sky.TaskAttemptsExceeded, match="die ended its worker process 3 times"):
        done.extend(results)
    assert done == list(range(len(done)))
    assert list(pool.map(double, range(20))) == list(range(0, 40, 2))


def test_large_results_among_small_ones(pool):
    assert [len(data) for data in pool.map(large, range(MANY))] == [20_000 if x % 5 == 0 else 10 for x in range(MANY)]


def test_a_failure_in_the_middle_is_the_tasks_own(pool):
    results = pool.map(fail_at, range(MANY), [MANY - 100] * MANY)
    with pytest.raises(ZeroDivisionError) as raised:
        list(results)
    assert raised.traceback[-1].name == "fail_at"


def test_leaving_the_map_stops_them(fleet, pool, tmp_path):
    async def main() -> None:
        async with sky.connect_async(fleet.manifest) as there:

            async def all_of_them() -> None:
                async for _ in there.map(first_then_hang, range(MANY), [str(tmp_path)] * MANY, ordered=False):
                    pass

            mapping = asyncio.create_task(all_of_them())
            while not any(tmp_path.iterdir()):
                await asyncio.sleep(0.05)
            mapping.cancel()
            with pytest.raises(asyncio.CancelledError):
                await mapping
            # No slot is left to those that hang.
            assert await asyncio.wait_for(sky.compute(double)(1) @ there, 60) == [2] * 4

    asyncio.run(main())


def test_closing_the_pool_ends_whoever_waits_for_one(fleet, tmp_path):
    """Its chunk is over, and it was sent alone."""
    pool = open_pool(fleet.manifest)
    with ThreadPoolExecutor(1) as threads:
        items = range(MANY), [MANY // 2] * MANY, [str(tmp_path)] * MANY
        mapping = threads.submit(list, pool.map(die_then_hang, *items))
        while not (tmp_path / "hangs").exists():
            time.sleep(0.05)
        pool.close()
        with pytest.raises((CancelledError, sky.FleetError)):
            mapping.result(timeout=60)


# Without a fleet ----------------------------------------------------------------------------------------------------


def _ended(seconds: float | None) -> Outcome:
    return Outcome(result=b"", seconds=seconds)


def test_the_mean_of_the_latest_says_how_many_go_together():
    pace = Pace()
    assert pace.size == 1
    for _ in range(40):
        pace.saw(_ended(0.001))
    assert (pace.size, pace.least) == (40, 3)
    # One that the machine had no time for is none of them all.
    pace.saw(_ended(0.033))
    assert (pace.size, pace.least) == (20, 1)
    for unlike in (
        _ended(2.0),
        None,
        Outcome(result=bytes(10_000), seconds=0.001),
        Outcome(parts=("x",), seconds=0.001),
    ):
        for _ in range(40):
            pace.saw(_ended(0.0))
        assert pace.size == 64
        pace.saw(unlike)
        assert pace.size == 1


class _Slots:
    """Futures that end when they are told to."""

    def __init__(self) -> None:
        self.waiting: list[tuple[int, object]] = []
        self.messages: list[set[int]] = []
        self.most = self.most_messages = 0

    def send(self, tasks, most):
        assert len(tasks) <= most
        futures = []
        for task in tasks:
            inner: concurrent.futures.Future = concurrent.futures.Future()
            self.waiting.append((task, inner))
            futures.append(Future("f", inner, key=str(task)))
            futures[-1].together = True
        self.messages.append(set(tasks))
        waiting = {task for task, _ in self.waiting}
        self.most = max(self.most, len(self.waiting))
        self.most_messages = max(self.most_messages, sum(not message.isdisjoint(waiting) for message in self.messages))
        return futures


@given(
    count=st.integers(0, 60),
    slots=st.integers(1, 5),
    window=st.none() | st.integers(1, 12),
    known=st.booleans(),
    ordered=st.booleans(),
    seconds=st.sampled_from([0.0, 0.004, 1.0]),
    choices=st.lists(st.integers(0, 1000), max_size=60),
)
def test_all_are_sent_once_and_no_more_than_may_be(count, slots, window, known, ordered, seconds, choices):
    there, ended, given_out = _Slots(), [], []
    flow = Flow(
        iter(range(count)),
        send=there.send,
        slots=lambda: slots,
        window=window,
        total=count if known else None,
        ordered=ordered,
        when_done=ended.append,
        counting=contextlib.nullcontext(lambda: None),
    )
    with flow:
        while True:
            ready = flow.advance()
            if ready is not None:
                given_out.append(ready.result())
            elif flow.over:
                break
            elif ended:
                flow.take(ended.pop(0))
            else:
                choice = choices.pop() if choices else 0
                task, inner = there.waiting.pop(choice % len(there.waiting))
                inner.set_result(Outcome(result=pickle.dumps(task), seconds=seconds))
    assert sorted(given_out) == list(range(count))
    if ordered:
        assert given_out == sorted(given_out)
    if window is not None:
        assert there.most <= window
    elif seconds == 1.0:
        assert there.most <= slots
    elif known:
        assert there.most_messages <= 2 * slots
