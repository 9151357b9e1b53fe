"""The executor of calls, on a fleet that ends calls as the test says."""

from __future__ import annotations

import asyncio
import pickle
from collections.abc import Awaitable, Callable
from types import SimpleNamespace
from typing import Any

import distributed
import pytest
from distributed.client import FutureCancelledError

from skyinfra.engine.executor import Executor, may_pass, overdue
from skyinfra.errors import SlotFailed, TaskAttemptsExceeded, TaskTooLarge
from skyinfra.protocol import failures, questions
from skyinfra.protocol.calls import Outcome

DONE = Outcome(result=b"1")


class Sent:
    """The future of a call, as Dask's."""

    def __init__(self, key: str) -> None:
        self.key = key
        self.ended: asyncio.Future[Any] = asyncio.get_running_loop().create_future()

    async def exception(self) -> BaseException | None:
        await asyncio.wait([self.ended])
        return self.ended.exception()

    def __await__(self) -> Any:
        return self.ended.__await__()


class Fleet:
    """One worker, ``tcp://w`` of slot ``n1/0``, which does not listen."""

    alive = True

    def __init__(self) -> None:
        self.sent: list[Sent] = []
        self.cancelled: list[str] = []
        self.asked: list[tuple[str, str, dict[str, Any]]] = []
        self.client = self
        self.scheduler = SimpleNamespace(identity=self.identity, broadcast=self.broadcast)

    async def ready(self) -> None:
        pass

    def submit(self, key: str, header: bytes, call: bytes, resources: dict[str, int], waited: float) -> Sent:
        self.sent.append(Sent(key))
        return self.sent[-1]

    async def processing(self) -> dict[str, list[str]]:
        assert self.alive
        return {"tcp://w": [sent.key for sent in self.sent]}

    async def cancel(self, futures: list[Sent], *, force: bool) -> None:
        self.cancelled += [each.key for each in futures]

    async def broadcast(self, *, msg: dict[str, Any], workers: list[str], on_error: str) -> None:
        await asyncio.sleep(60)

    async def identity(self, n_workers: int) -> dict[str, Any]:
        return {"workers": {"tcp://w": {"name": "n1/0"}}}

    async def ask(self, node: str, question: str, arguments: dict[str, Any], wait_s: float) -> None:
        self.asked.append((node, question, arguments))


def attempted(test: Callable[[Fleet, Executor, asyncio.Task[Any]], Awaitable[None]]) -> None:
    async def run() -> None:
        fleet = Fleet()
        executor = Executor(fleet, lambda key: None)
        task = asyncio.create_task(executor.attempt("f", "f-1", b"", b"", {"slot": 1}))
        while not fleet.sent:
            await asyncio.sleep(0)
        await test(fleet, executor, task)

    asyncio.run(run())


def test_an_outcome_is_taken_from_the_event_or_from_the_result() -> None:
    async def event(fleet: Fleet, executor: Executor, task: asyncio.Task[Any]) -> None:
        await asyncio.sleep(0.01)
        executor.arrived("other", b"")
        executor.arrived("f-1", pickle.dumps(DONE))
        assert await task == DONE
        executor.arrived("f-1", pickle.dumps(DONE))

    async def result(fleet: Fleet, executor: Executor, task: asyncio.Task[Any]) -> None:
        fleet.sent[0].ended.set_result(DONE)
        assert await task == DONE

    attempted(event)
    attempted(result)


def test_a_call_that_the_head_lost_has_no_outcome() -> None:
    async def test(fleet: Fleet, executor: Executor, task: asyncio.Task[Any]) -> None:
        fleet.sent[0].ended.set_exception(FutureCancelledError("f-1", "lost"))
        assert await task is None

    attempted(test)


def test_an_error_of_the_call_itself_is_of_its_slot() -> None:
    """What a task raises is in its outcome: the slot could not even load this one."""

    async def test(fleet: Fleet, executor: Executor, task: asyncio.Task[Any]) -> None:
        fleet.sent[0].ended.set_exception(OSError("no space left"))
        with pytest.raises(SlotFailed, match="a slot could not run the call: OSError: no space left"):
            await task

    attempted(test)


def test_a_call_whose_workers_died_too_often_is_given_up() -> None:
    async def test(fleet: Fleet, executor: Executor, task: asyncio.Task[Any]) -> None:
        fleet.sent[0].ended.set_exception(distributed.KilledWorker("f-1", SimpleNamespace(address="tcp://w"), 3))
        with pytest.raises(TaskAttemptsExceeded, match="f lost its worker process too often"):
            await task

    attempted(test)


def test_a_cancelled_call_is_ended_by_the_runner_where_its_worker_does_not_listen() -> None:
    async def test(fleet: Fleet, executor: Executor, task: asyncio.Task[Any]) -> None:
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        await executor.all_stopped()
        assert fleet.cancelled == ["f-1"]
        assert fleet.asked == [("n1", questions.STOP, {"slot": "n1/0", "key": "f-1"})]

    attempted(test)


def test_nothing_is_asked_where_the_head_is_gone() -> None:
    async def test(fleet: Fleet, executor: Executor, task: asyncio.Task[Any]) -> None:
        assert await executor.on_slot_of("f-2", lambda key: None) is None
        # As of Dask.
        fleet.alive, fleet.scheduler = False, None
        assert await executor.on_slot_of("f-1", lambda key: None) is None
        task.cancel()

    attempted(test)


def test_errors_that_every_attempt_meets_are_not_tried_again() -> None:
    errors = (ValueError("a: b"), TaskTooLarge("c"), SystemExit(3), SystemExit(0), SystemExit())
    failed = [Outcome(failure=failures.of(error, below="")) for error in errors]
    assert [may_pass(outcome) for outcome in [DONE, *failed]] == [False, True, False, True, False, False]


def test_a_task_is_overdue_well_after_its_time() -> None:
    assert overdue("f", None, 1e9) is None and overdue("f", 1, 5) is None
    assert "more than 1 s" in str(overdue("f", 1, 60))
