"""Runs calls on slots: attempts, lost slots, lost worker processes, cancellation. Clients and the head share it."""

from __future__ import annotations

import asyncio
import contextlib
import pickle
from collections.abc import Callable, Coroutine
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeVar

import distributed
from distributed.client import FutureCancelledError

from skyinfra.engine import dask_client, deaths
from skyinfra.engine.waiting import within
from skyinfra.errors import SkyinfraError, SlotFailed, TaskAttemptsExceeded, TaskTimeout, counted
from skyinfra.protocol import failures, questions
from skyinfra.protocol.calls import Ending, Outcome

T = TypeVar("T")

# Results are released together that often: each release delays the next task of its slot by some milliseconds.
_RELEASE_S = 0.1
# A worker answers in milliseconds, unless native code of its task holds the interpreter.
_LISTENS_S = 0.5
_ANSWER_S = 10.0
# After a connection that failed; Dask needs time to notice that.
_PAUSE_S = 0.1
# Characters of the error of a slot.
_WORDS = 1000
# A task that is over its time is ended on its node within that long.
_OVERTIME_S = 10.0
# A task may be the reason itself where so many slots, on so many nodes, fail with it; and where more slots do.
_FEW_SLOTS, _MANY_NODES, _MOST_SLOTS = 4, 5, 64
# Errors that every attempt meets.
_LASTING = tuple(
    f"skyinfra.{name}" for name in ("TaskNotPicklable", "TaskTooLarge", "TaskAttemptsExceeded", "SlotFailed")
)
# Of a task that called sys.exit() because it was done.
_DONE = ("SystemExit", "SystemExit: 0", "SystemExit: None")


class ItemsLost(Exception):
    """Items of a generator were lost with the connection: the call has to be sent again."""


@dataclass
class Moves:
    """The slots that could not run a task for reasons of their own, and for which it was sent to another one.

    They count as none of its attempts, until it has met so many that it may be the reason itself: on each node that
    has slots for it, or on several.
    """

    slots: list[str] = field(default_factory=list)

    def may_go_on(self, slot: str, nodes: int) -> bool:
        """Notes that *slot* failed; returns whether the task may be sent again; so many *nodes* have slots for it."""
        self.slots.append(slot)
        met = {each.rpartition("/")[0] for each in self.slots}
        return len(self.slots) < _MOST_SLOTS and (len(self.slots) < _FEW_SLOTS or len(met) < min(nodes, _MANY_NODES))

    @property
    def text(self) -> str:
        """A sentence for the error of the task."""
        return f"It was sent to {counted(len(self.slots), 'slot')}, and each failed: {', '.join(self.slots)}."


class Fleet(Protocol):
    """The fleet as an `Executor` needs it. client: of Dask, asynchronous. alive: whether the scheduler is connected."""

    @property
    def client(self) -> Any: ...
    @property
    def alive(self) -> bool: ...
    async def ready(self) -> None:
        """Waits until the scheduler is connected, again if need be."""

    def submit(self, key: str, header: bytes, call: bytes, resources: dict[str, int], waited: float) -> Any:
        """Sends a call, which has waited for so many seconds; its future is done when it has ended."""

    async def ask(self, node: str, question: str, arguments: dict[str, Any], wait_s: float) -> Any:
        """Asks the runner of *node*. Raises the error of the answer."""


class Executor:
    """Runs calls on the slots of *fleet*. *stop*: runs in the process of a slot and ends a task there, by its key.

    name: of the fleet, for commands.
    """

    def __init__(self, fleet: Fleet, stop: Callable[[str], None], name: str = "STACK/POOL") -> None:
        self._name = name
        self._fleet = fleet
        self._stop_task = stop
        self._arrivals: dict[str, Callable[[Any], object]] = {}
        self._done: list[Any] = []
        self._stopping: set[asyncio.Task[None]] = set()

    async def attempt(
        self,
        name: str,
        key: str,
        header: bytes,
        call: bytes,
        resources: dict[str, int],
        take: Callable[[Any], Any] = pickle.loads,
        *,
        waited: float = 0.0,
    ) -> Any:
        """Sends a call once and waits for its end; being cancelled ends the call on its slot.

        waited: for how many seconds the call has waited to be sent, for the records of the head.

        Returns what *take* makes of the events under the key, as soon as that is not None; else the call's result.
        None: the head or the connection lost the call or its result. Raises `TaskAttemptsExceeded`, `SlotFailed`, what
        `Fleet.ready` raises, and `ItemsLost` where *take* does: the call is ended on its slot then.
        """
        await self._fleet.ready()
        try:
            future = self._fleet.submit(key, header, call, resources, waited)
            del call  # the scheduler keeps it while it needs it
            result = await self._end_of(future, take)
        except (asyncio.CancelledError, ItemsLost):
            self.detach(self._stop(future))
            raise
        except distributed.KilledWorker:
            raise TaskAttemptsExceeded(
                f"{name} lost its worker process too often, on several nodes, and is not tried again",
                hint=deaths.printed(self._name, key, ()),
            ) from None
        except (FutureCancelledError, OSError):
            # OSErrors of the task itself are in its outcome: this is the connection.
            await asyncio.sleep(_PAUSE_S)
            return None
        if not self._done:
            asyncio.get_running_loop().call_later(_RELEASE_S, self._done.clear)
        self._done.append(future)
        return result

    def arrived(self, key: str, content: Any) -> None:
        """Takes an event about outcomes, which comes before the news that the call has ended."""
        take = self._arrivals.get(key)
        if take is not None:
            take(content)

    def detach(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        """Runs *work* as a task of its own, which a second Ctrl-C, or the end of the `with` block, spares."""
        task = asyncio.create_task(work)
        self._stopping.add(task)
        task.add_done_callback(self._stopping.discard)
        return task

    async def all_stopped(self) -> None:
        """Waits until every cancelled call has been stopped, and for other detached work; releases all results."""
        self._done.clear()
        await asyncio.gather(*self._stopping)

    async def _end_of(self, future: Any, take: Callable[[Any], Any]) -> Any:
        arrival: asyncio.Future[Any] = asyncio.get_running_loop().create_future()

        def arrived(content: Any) -> None:
            try:
                if not arrival.done() and (taken := take(content)) is not None:
                    arrival.set_result(taken)
            except ItemsLost as error:
                arrival.set_exception(error)

        self._arrivals[future.key] = arrived
        ended = asyncio.ensure_future(future.exception())
        try:
            await asyncio.wait((arrival, ended), return_when=asyncio.FIRST_COMPLETED)
            if arrival.done():
                return arrival.result()
            error = ended.result()
            if isinstance(error, distributed.KilledWorker | FutureCancelledError):
                raise error
            if error is not None:
                # The code that runs a task raises nothing: its slot could not even load it.
                raise SlotFailed(f"a slot could not run the call: {type(error).__name__}: {error}"[:_WORDS])
            return await future
        finally:
            ended.cancel()
            del self._arrivals[future.key]

    async def run_on(self, worker: str, function: Callable[..., object], *arguments: object) -> None:
        """Calls *function* in the process at the address *worker*. Raises OSError, TimeoutError."""
        await within(dask_client.run_on(self._fleet.client, worker, function, *arguments), _ANSWER_S)

    async def on_slot_of(self, key: str, action: Callable[[str], None]) -> str | None:
        """Runs *action* with the key of the last attempt of the call *key* in the process that runs it.

        Returns its slot; None where none runs it, or does not listen.
        """
        if not self._fleet.alive:
            return None
        client = self._fleet.client
        try:
            for worker, keys in (await client.processing()).items():
                for each in [each for each in keys if each == key or each.startswith(f"{key}.")]:
                    await within(dask_client.run_on(client, worker, action, each), _LISTENS_S)
                    known = (await within(client.scheduler.identity(n_workers=-1), _ANSWER_S))["workers"]
                    return str(known[worker]["name"]) if worker in known else None
        except (OSError, FutureCancelledError):
            pass
        return None

    async def _stop(self, future: Any) -> None:
        """Cancels the call, and ends it where it runs already, which Dask does not do."""
        if not self._fleet.alive:
            return
        client, key = self._fleet.client, future.key
        with contextlib.suppress(OSError, FutureCancelledError):
            where = await client.processing()
            await client.cancel([future], force=True)
            for worker in [worker for worker, keys in where.items() if key in keys]:
                await self._stop_on(client, worker, key)

    async def _stop_on(self, client: Any, worker: str, key: str) -> None:
        """Ends the call on *worker*: by itself, or with its process where that does not even listen."""
        try:
            await within(dask_client.run_on(client, worker, self._stop_task, key), _LISTENS_S)
        except TimeoutError:
            # Native code holds the interpreter; the runner of the node is another process.
            known = (await within(client.scheduler.identity(n_workers=-1), _ANSWER_S))["workers"]
            if worker in known:
                slot = str(known[worker]["name"])
                node = slot.rpartition("/")[0]
                with contextlib.suppress(SkyinfraError):
                    await self._fleet.ask(node, questions.STOP, {"slot": slot, "key": key}, _ANSWER_S)


def may_pass(outcome: Outcome | Ending) -> bool:
    """Returns whether the call failed with an error that another attempt may not meet."""
    problem = outcome.problem
    return problem is not None and problem not in _DONE and problem.partition(":")[0] not in _LASTING


def overdue(name: str, timeout: float | None, seconds: float) -> TaskTimeout | None:
    """The error of a task that has run for *seconds*, well over its *timeout*. Most end themselves before that; a task
    whose process died starts again, and has to be ended from outside."""
    return failures.late(name, timeout) if timeout is not None and seconds > timeout + _OVERTIME_S else None
