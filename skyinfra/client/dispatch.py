"""Getting a task executed: through worker processes that die, slots that leave and a head that restarts.

Everything here runs in the event loop of a `LoopThread`.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import pickle
import time
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, TypeVar, cast

import distributed
from distributed.client import FutureCancelledError

from skyinfra.client.connection import Connection
from skyinfra.client.snapshot import ANYWHERE, Snapshot, Target
from skyinfra.engine.waiting import within
from skyinfra.errors import NodeError, SlotLost, TaskAttemptsExceeded, TaskInputsLost
from skyinfra.protocol import failures, questions
from skyinfra.protocol.calls import Outcome
from skyinfra.sync import sync
from skyinfra.tasks import pickling
from skyinfra.tasks.pickling import Shipment
from skyinfra.worker import cancellation

T = TypeVar("T")

# How often the head is asked which slots there are, while somebody waits for a task; at most half of the patience.
_LOOK_S = 2.0
# Results are released together that often: each release delays the next task of its slot by some milliseconds.
_RELEASE_S = 0.1
# A worker answers in milliseconds, unless native code of its task holds the interpreter.
_LISTENS_S = 0.5
_ANSWER_S = 10.0
# A task that is over its time is ended on its node within that long.
_OVERTIME_S = 10.0
# How often a task is sent again because the head had no room to keep what it needs.
_LOSSES = 3


@dataclass
class Waiting:
    """Somebody who waits for a task: woken with ``failure`` when its target is gone."""

    name: str
    target: Target
    waiter: asyncio.Task[Any]
    timeout: float | None = None
    future: Any = None
    missing_since: float | None = None
    failure: Exception | None = None


@dataclass
class Window:
    """Lets as many tasks to the fleet at once as it has slots: each one on a dying worker is blamed for its death."""

    limit: int
    _inside: int = 0
    _changed: asyncio.Condition = field(default_factory=asyncio.Condition)

    @contextlib.asynccontextmanager
    async def place(self) -> AsyncIterator[None]:
        """Waits for a place and holds it."""
        async with self._changed:
            await self._changed.wait_for(lambda: self._inside < self.limit)
            self._inside += 1
        try:
            yield
        finally:
            async with self._changed:
                self._inside -= 1
                self._changed.notify()

    async def resize(self, limit: int) -> None:
        """At least one place is always there."""
        async with self._changed:
            self.limit = max(1, limit)
            self._changed.notify_all()


def _the_only(outcome: bytes) -> bytes:
    return outcome


class Dispatcher:
    """Executes shipments on a fleet; knows who waits for what."""

    def __init__(self, connection: Connection) -> None:
        self.connection = connection
        self._windows: dict[Target, Window] = {}
        self._snapshot = Snapshot(())
        self._waiting: dict[str, Waiting] = {}
        self._done: list[Any] = []
        self._arrivals: dict[str, Callable[[Any], object]] = {}
        self._background: set[asyncio.Task[Any]] = set()
        self._stopping: set[asyncio.Task[Any]] = set()
        self._answered = time.monotonic()

    async def start(self) -> None:
        """Begins to look after the tasks that will come."""
        with contextlib.suppress(OSError):  # who waits for a task will hear of it
            await self.saw(await self.connection.look())
        for routine in (self._watch(), self._release()):
            self._keep(asyncio.create_task(routine), self._background)

    async def close(self) -> None:
        """Stops every task that somebody still waits for, also where it runs."""
        for task in self._background:
            task.cancel()
        waiters = [waiting.waiter for waiting in self._waiting.values()]
        for waiter in waiters:
            waiter.cancel()
        await asyncio.gather(*waiters, *self._background, return_exceptions=True)
        await asyncio.gather(*self._stopping)
        self._done.clear()

    @staticmethod
    def _keep(task: asyncio.Task[Any], where: set[asyncio.Task[Any]]) -> None:
        """The loop itself holds tasks weakly."""
        where.add(task)
        task.add_done_callback(where.discard)

    @contextlib.contextmanager
    def waiting_for(self, key: str, name: str, target: Target, timeout: float | None = None) -> Iterator[Waiting]:
        """While the present task of asyncio waits for a task of the fleet. Raises what it was woken with."""
        waiter = asyncio.current_task()
        assert waiter is not None  # noqa: S101 - a coroutine runs in a task
        waiting = self._waiting[key] = Waiting(name, target, waiter, timeout)
        try:
            yield waiting
        except asyncio.CancelledError:
            if waiting.failure is not None:
                raise waiting.failure from None
            raise
        finally:
            del self._waiting[key]

    async def execute(self, shipment: Shipment, target: Target, *, windowed: bool) -> Outcome:
        """Runs one task. Raises `SlotLost`, `FleetUnreachable`, `TaskAttemptsExceeded`; cancelling stops the task."""
        with self.waiting_for(shipment.key, shipment.name, target, shipment.settings.timeout):
            if not shipment.brought:
                await self.bring(shipment)
            async with self.place(target, windowed=windowed):
                return await self._until_done(shipment, target)

    def place(self, target: Target, *, windowed: bool) -> contextlib.AbstractAsyncContextManager[None]:
        """A place in the window of *target*; nothing where the task is not *windowed*."""
        return self.window(target).place() if windowed else contextlib.nullcontext()

    async def _until_done(self, shipment: Shipment, target: Target) -> Outcome:
        """Runs the task, again as often as it may fail."""
        numbers = itertools.count()
        attempt = 0
        while True:
            outcome = await self._one_attempt(shipment, numbers, target)
            attempt += 1
            if attempt > shipment.settings.retries or not pickling.may_pass(outcome):
                return outcome

    async def _one_attempt(self, shipment: Shipment, numbers: Iterator[int], target: Target) -> Outcome:
        """Sends the task, again after every loss of the head: it knows nothing about the tasks of its previous life,
        and may lose what the task needs, or its result."""
        losses = 0
        number = next(numbers)
        while True:
            await self.connection.ready()
            future = self._submit(shipment, number, target)
            self._waiting[shipment.key].future = future
            try:
                outcome = await self._outcome(future)
                self.release(future)
                if outcome is not None and not outcome.missing:
                    return outcome
                if outcome is not None:
                    losses += 1
                    # Under its old key, the head would give what it has: that the task could not run.
                    number = next(numbers)
                    await self._bring_again(shipment, losses)
            except asyncio.CancelledError:
                self.take_back(future)
                raise
            except distributed.KilledWorker:
                raise TaskAttemptsExceeded(
                    f"{shipment.name} lost its worker process too often, on several nodes, and is not tried again"
                ) from None
            except (FutureCancelledError, OSError):
                # OSErrors of the task itself are in its outcome: this is the connection. Give Dask time to notice.
                await asyncio.sleep(0.1)

    async def bring(self, shipment: Shipment, *, files: bool = False) -> None:
        """Makes sure that a large call is at the head, and the *files* that were synced.

        Raises `FleetUnreachable`, `TaskInputsLost`, `TaskTooLarge`, `StateDirectoryError`.
        """
        while True:
            await self.connection.ready()
            try:
                await sync.bring(self.connection.client.scheduler, shipment, files=files)
            except OSError:  # the connection; give Dask time to notice
                await asyncio.sleep(0.1)
            else:
                shipment.brought = True
                return

    async def _bring_again(self, shipment: Shipment, losses: int) -> None:
        if losses > _LOSSES:
            raise TaskInputsLost(
                f"what {shipment.name} needs, or gives, was lost at the head {losses} times",
                hint="What is in flight at once is more than the head can keep: send less, or give it a larger disk.",
            )
        await self.bring(shipment, files=True)

    async def _outcome(self, future: Any) -> Outcome | None:
        """How the task ended; None where that was lost on the way, and the task has to run again."""
        told = await self.told_or_ended(future, _the_only)
        if told is not None:
            outcome = cast(Outcome, pickle.loads(told))  # noqa: S301 - the fleet's own, over mutual TLS
        else:
            outcome = await future
            if outcome is None:
                return None
        return await self.fetched(outcome)

    async def told_or_ended(self, future: Any, take: Callable[[Any], T | None]) -> T | None:
        """What *take* makes of what a task tells under its key, as soon as that is not None; None where the task has
        ended without that. Raises what the engine has to say of it."""
        arrival: asyncio.Future[T] = asyncio.get_running_loop().create_future()

        def arrived(content: Any) -> None:
            taken = take(content)
            if taken is not None and not arrival.done():
                arrival.set_result(taken)

        self._arrivals[future.key] = arrived
        ended = asyncio.ensure_future(future.exception())
        try:
            await asyncio.wait((arrival, ended), return_when=asyncio.FIRST_COMPLETED)
            if arrival.done():
                return arrival.result()
            error = ended.result()
            if error is not None:
                raise error
            return None
        finally:
            ended.cancel()
            del self._arrivals[future.key]

    def arrived(self, key: str, content: Any) -> None:
        """Takes what the task tells of outcomes, which comes ahead of the news that it has ended."""
        take = self._arrivals.get(key)
        if take is not None:
            take(content)

    async def fetched(self, outcome: Outcome) -> Outcome:
        """*outcome* with its result, where that stayed at the head; see `sync.fetched`."""
        return await sync.fetched(self.connection.client.scheduler, outcome)

    def release(self, future: Any) -> None:
        """Nobody needs what the task gave any more."""
        self._done.append(future)

    def take_back(self, future: Any) -> None:
        """Stops the task, on its own, so that a second cancellation (Ctrl-C, then the end of the `with` block) spares
        that."""
        self._keep(asyncio.create_task(self._stop(future)), self._stopping)

    def _submit(self, shipment: Shipment, attempt: int, target: Target) -> Any:
        key, header = shipment.attempt(attempt)
        return self.connection.submit(key, header, shipment.call, target.resources)

    async def _stop(self, future: Any) -> None:
        """Takes the task back, and ends it where it runs already, which Dask does not do."""
        client, key = self.connection.client, future.key
        if not self.connection.alive:
            return
        with contextlib.suppress(OSError, FutureCancelledError):
            where = await client.processing()
            names = {
                worker: str(info["name"]) for worker, info in client.scheduler_info(n_workers=-1)["workers"].items()
            }
            await client.cancel([future], force=True)
            for worker in [worker for worker, keys in where.items() if key in keys]:
                await self._stop_on(worker, names.get(worker), key)

    async def _stop_on(self, worker: str, slot: str | None, key: str) -> None:
        """Ends the task *key* on *worker*: by itself, or with its process where that does not even listen."""
        stop = self.connection.client.run(cancellation.stop, key, workers=[worker], on_error="ignore")
        try:
            await within(stop, _LISTENS_S)
        except TimeoutError:
            # Native code holds the interpreter; the runner of the node is another process.
            if slot is not None:
                node = slot.rpartition("/")[0]
                with contextlib.suppress(NodeError):
                    await self.connection.ask(node, questions.STOP, {"slot": slot, "key": key}, _ANSWER_S)

    async def _release(self) -> None:
        while True:
            await asyncio.sleep(_RELEASE_S)
            self._done.clear()

    async def _watch(self) -> None:
        """Wakes those who wait for a slot or a head that is gone."""
        while True:
            await asyncio.sleep(min(_LOOK_S, self.connection.patience / 2))
            if not self._waiting:
                self._answered = time.monotonic()
                continue
            try:
                now = await self.connection.look() if self.connection.alive else None
            except OSError:
                now = None
            if now is None:
                self._look_for_head()
            else:
                self._answered = time.monotonic()
                await self.saw(now)
                self._look_for_slots(now)
                await self._look_for_overtime()

    async def saw(self, now: Snapshot) -> None:
        """Lets as many tasks to the fleet as it has slots *now*."""
        self._snapshot = now
        for target, window in self._windows.items():
            await window.resize(self._places(target))

    def window(self, target: Target) -> Window:
        """The window of the tasks for *target*."""
        if target not in self._windows:
            self._windows[target] = Window(max(1, self._places(target)))
        return self._windows[target]

    def _places(self, target: Target) -> int:
        return sum(target.takes(slot) for slot in self._snapshot.slots)

    def _look_for_head(self) -> None:
        if time.monotonic() - self._answered > self.connection.patience:
            for waiting in self._waiting.values():
                self._wake(waiting, self.connection.gone())

    def _look_for_slots(self, now: Snapshot) -> None:
        clock = time.monotonic()
        for waiting in self._waiting.values():
            prospect = now.prospect(waiting.target)
            if prospect == "gone" or now.unknown(waiting.target, self.connection.manifest):
                self._wake(waiting, self._changed(waiting, now))
            elif prospect != "missing":
                waiting.missing_since = None
            elif waiting.missing_since is None:
                waiting.missing_since = clock
            elif clock - waiting.missing_since > self.connection.patience:
                self._wake(waiting, self._lost(waiting, now))

    async def _look_for_overtime(self) -> None:
        """A task ends itself when its time is over. One whose process did not live to see that starts again; not
        for ever."""
        limited = {each.future.key: each for each in self._waiting.values() if each.timeout and each.future is not None}
        if not limited:
            return
        with contextlib.suppress(OSError):
            for key, name, seconds in itertools.chain(*(await self.connection.running()).values()):
                waiting = limited.get(key)
                if waiting is not None and seconds > (waiting.timeout or 0) + _OVERTIME_S:
                    self._wake(waiting, failures.late(name, waiting.timeout or 0))

    def _lost(self, waiting: Waiting, now: Snapshot) -> SlotLost:
        what = f"every slot of {self.connection.manifest.fleet}" if waiting.target == ANYWHERE else str(waiting.target)
        return SlotLost(
            f"{what}, which {waiting.name} waits for, is gone for more than {self.connection.patience:g} s",
            hint="\n".join(
                [
                    *now.failures(waiting.target),
                    "pool.slots() lists the slots that are there; pool.broadcast(task, slots=...) uses some of them.",
                ]
            ),
        )

    def _changed(self, waiting: Waiting, now: Snapshot) -> SlotLost:
        left = now.left(waiting.target)
        if left is not None:
            return SlotLost(
                f"{waiting.target}, which {waiting.name} waits for, left {self.connection.manifest.fleet}: {left}",
                hint="Send the task to any slot (`task >> pool`): it moves to another node then.",
            )
        fleet = self.connection.manifest.fleet
        if waiting.target.slot is None:
            what = f"{fleet} has no slot{waiting.target.which}, which {waiting.name} waits for"
        else:
            what = f"{waiting.target}, which {waiting.name} waits for, is not in the layout of {fleet}"
        return SlotLost(what, hint=f"The slots are {now.profiles()} now; pool.slots() lists them.")

    def _wake(self, waiting: Waiting, failure: Exception) -> None:
        if waiting.failure is None:
            waiting.failure = failure
            waiting.waiter.cancel()
