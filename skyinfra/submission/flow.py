"""Many tasks of one `Pool.map`: in which order they are sent and their results are returned, and how short ones travel
in one message, see `skyinfra.worker.execute`. Nothing here waits in the thread of its caller."""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import contextvars
import itertools
import pickle
import statistics
import threading
import types
from collections import deque
from collections.abc import Callable, Coroutine, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import KW_ONLY, dataclass, replace
from typing import Any, Generic, Self, TypeVar

from skyinfra.errors import SlotFailed, TaskAttemptsExceeded
from skyinfra.protocol.calls import SMALL_OUTCOME, Outcome
from skyinfra.submission.dispatch import Dispatcher
from skyinfra.submission.futures import Future, cancel_all
from skyinfra.submission.snapshot import Target
from skyinfra.tasks.pickling import Shipment
from skyinfra.tasks.task import Options, Task

T = TypeVar("T")


# Tasks of one message take about that long on their slot: much longer than the message itself, and not noticeable.
_WORTH_S = 0.04
# So much work goes in one message even where other slots have none then: the message takes about that long itself.
_MESSAGE_S = 0.003
_MOST_TOGETHER = 64
# The mean of so many latest tasks is the estimate for the next ones: what takes longer is given back by the slot.
_LATEST = 32
# Calls of more bytes are sent alone.
_SMALL_CALL = 8192
# For so long, others are waited for that may travel with a task, where nobody knows whether any come.
GATHER_S = 0.001
# Messages of short tasks that each slot has: the next one is there when it has done one.
_EACH = 2


class Pace:
    """Computes how many tasks travel in one message, from the run times of the latest ones."""

    def __init__(self) -> None:
        self._latest: deque[float] = deque(maxlen=_LATEST)
        # At least 1; and of which the message takes as long as they do.
        self.size = self.least = 1

    def saw(self, outcome: Outcome | None) -> None:
        """Takes the outcome of a task. One that failed, or has a large result, does not count as short."""
        short = outcome is not None and outcome.result is not None and len(outcome.result) < SMALL_OUTCOME
        seconds = outcome.seconds if outcome is not None and short else None
        self._latest.append(float("inf") if seconds is None else seconds)
        mean = statistics.fmean(self._latest)
        self.size, self.least = (
            max(1, min(_MOST_TOGETHER if mean * _MOST_TOGETHER <= worth else int(worth / mean), 2 * len(self._latest)))
            for worth in (_WORTH_S, _MESSAGE_S)
        )


@dataclass
class _Message:
    """left: number of its tasks that have not ended."""

    left: int


@dataclass(eq=False)
class Flow(Generic[T]):
    """Sends *tasks* and keeps their results until they are taken. Leaving its `with` block cancels the others.

    send: sends tasks, together if there are several. slots: returns the number of slots. window: tasks in flight at
    most; None is one for each slot, or two messages of short tasks. Where *total* is not known, the iterator may take
    any time for the next one: *send* gets a task as soon as it is there, and how many may travel together, and gathers
    what comes until it is sent. when_done: called in any
    thread with each future that has ended; the caller passes it to `take`. ordered: results in the order of the tasks,
    else as they end. counting: its value is called once per task that has ended. place: the words for the place of a
    task, for the notes of its exception, as ``item {} of the map``.
    """

    tasks: Iterator[Task[T]]
    _: KW_ONLY
    send: Callable[[Sequence[Task[T]], int], Sequence[Future[T]]]
    slots: Callable[[], int]
    window: int | None
    total: int | None
    ordered: bool
    place: str = "task {}"
    when_done: Callable[[Future[T]], object]
    counting: AbstractContextManager[Callable[[], None]]

    def __post_init__(self) -> None:
        self._left = self.total
        self._pace = Pace()
        self._kept: dict[Future[T], None] = {}  # sent and not returned, in the order of sending
        self._ready: deque[Future[T]] = deque()
        self._counted: set[Future[T]] = set()
        self._running: dict[Future[T], _Message] = {}
        self._messages = 0
        self._exhausted = False
        self._numbers = itertools.count()

    @property
    def over(self) -> bool:
        """Whether all results were returned."""
        return self._exhausted and not self._kept

    def advance(self) -> Future[T] | None:
        """Sends tasks. Returns the next future that has ended, or None."""
        self._fill()
        first = next(iter(self._kept), None) if self.ordered else next(iter(self._ready), None)
        if first is None or not first.done():
            return None
        del self._kept[first]
        if not self.ordered:
            self._ready.popleft()
        self._count(first)
        return first

    def _fill(self) -> None:
        while not self._exhausted:
            size = self._size()
            at_once = 1 if self._left is None else size
            if not self._has_room(at_once, size):
                return
            tasks = list(itertools.islice(self.tasks, at_once))
            if not tasks:
                self._exhausted = True
                return
            if self._left is not None:
                self._left -= len(tasks)
            message = _Message(len(tasks))
            self._messages += 1
            futures = self.send(tasks, size)
            if size > 1 and not all(future.together for future in futures):
                self._pace.saw(None)  # its calls are large, or have options
            for future in futures:
                future.noted(f"Raised for {self.place.format(next(self._numbers))}, counted from 0.")
                self._kept[future] = None
                self._running[future] = message
                future.when_done(self.when_done)

    def _size(self) -> int:
        """Number of tasks for the next message; smaller at the end, so that every slot has some."""
        slots = self.slots()
        most = self._pace.size if self._left is None else min(self._pace.size, self._left // (2 * slots))
        if self.window is not None:
            most = min(most, max(self.window // slots, min(self._pace.least, self.window // 2)))
        return max(1, most)

    def _has_room(self, count: int, size: int) -> bool:
        """Returns whether so many tasks may be sent now, of which *size* travel together."""
        if self.window is not None:
            return len(self._running) + count <= self.window and len(self._kept) + count <= 2 * self.window
        messages = self.slots() * (2 if size > 1 else 1)
        in_flight = self._messages < messages if self._left is not None else len(self._running) < messages * size
        return in_flight and len(self._kept) + count <= 2 * messages * size

    def take(self, ended: Future[T]) -> None:
        """Takes a future that has ended."""
        message = self._running.pop(ended)
        message.left -= 1
        if message.left == 0:
            self._messages -= 1
        self._pace.saw(ended.outcome())
        self._count(ended)
        if not self.ordered:
            self._ready.append(ended)

    def _count(self, ended: Future[T]) -> None:
        """Counts each task once: `advance` may return it before or after `take`."""
        if ended in self._counted:
            self._counted.remove(ended)
        else:
            self._counted.add(ended)
            self._advance()

    def __enter__(self) -> Self:
        self._advance = self.counting.__enter__()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: types.TracebackType | None
    ) -> None:
        cancel_all(self._kept, error)
        self.counting.__exit__(kind, error, trace)


def suits(shipment: Shipment) -> bool:
    """Returns whether a task may travel with others."""
    # Only options that choose the slot, and variables; whatever else there is is heeded for a task alone.
    plain = replace(shipment.settings, **Options().of("place"), env=None) == Options()
    return plain and shipment.brought and not (shipment.stream or shipment.uses) and len(shipment.call) <= _SMALL_CALL


class Chunk:
    """Sends *shipments* to *target* in one message. windowed: as in `Dispatcher.execute`, also for those sent alone.
    gather_s: for so long, `add` may add others.

    A task without an outcome from the chunk, for whatever reason, is sent again alone.
    """

    def __init__(
        self,
        shipments: Sequence[Shipment],
        target: Target,
        dispatcher: Dispatcher,
        *,
        windowed: bool,
        gather_s: float = 0.0,
    ) -> None:
        self.target = target
        self._gather_s = gather_s
        self._dispatcher = dispatcher
        self._windowed = windowed
        self._key, self._name, self._header = shipments[0].chunk()
        self._shipments = {shipment.key: shipment for shipment in shipments}
        # Guards these until it is sent: another thread adds to them.
        self._adding = threading.Lock()
        self._begun = False
        self._waiting = set(self._shipments)
        self._inner: dict[str, concurrent.futures.Future[Outcome]] = {}

    def send(self, start: Callable[[Coroutine[Any, Any, None]], concurrent.futures.Future[None]]) -> list[Future[Any]]:
        """Sends them, in the loop of *start*. Returns a future for each, which no user has; cancelling one, as a map
        does with all where it is left, cancels all of them.
        """
        with self._adding:
            self._whole = start(self._execute())
            futures = [self._future_of(shipment) for shipment in self._shipments.values()]
        # Those sent alone too: a pool that closes cancels them one by one. It may close before the first step.
        self._whole.add_done_callback(lambda _: self._over())
        return futures

    def add(self, shipment: Shipment, most: int) -> Future[Any] | None:
        """Adds one to those that `send` is about to send; None where it has, or there are *most* of them."""
        with self._adding:
            if self._begun or len(self._shipments) >= most:
                return None
            self._shipments[shipment.key] = shipment
            self._waiting.add(shipment.key)
            return self._future_of(shipment)

    def _future_of(self, shipment: Shipment) -> Future[Any]:
        def ended(inner: concurrent.futures.Future[Outcome]) -> None:
            if inner.cancelled():
                self._whole.cancel()

        inner = self._inner[shipment.key] = concurrent.futures.Future()
        inner.add_done_callback(ended)
        future: Future[Any] = Future(shipment.name, inner, key=shipment.key)
        future.together = True
        return future

    async def _execute(self) -> None:
        """Sets the futures. Raises CancelledError only."""
        # That of who submitted the tasks; outcomes come in another one.
        self._context = contextvars.copy_context()
        async with asyncio.TaskGroup() as self._alone:
            try:
                await self._together()
            except Exception as error:  # noqa: BLE001 - whoever waits for a task is told
                self._begin()
                for key in list(self._waiting):
                    self._settle(key, error)
            for key in list(self._waiting):
                self._send_alone(key)

    def _begin(self) -> int:
        """Nothing is added from now on. Returns how many there are."""
        with self._adding:
            self._begun = True
            return len(self._shipments)

    def _over(self) -> None:
        """Cancels those without an outcome; nobody sets one any more."""
        self._begin()
        for inner in self._inner.values():
            inner.cancel()

    async def _together(self) -> None:
        waiting = self._dispatcher.waiting_for(self._key, self._name, self.target)
        with contextlib.suppress(TaskAttemptsExceeded, SlotFailed), waiting as watched:
            await asyncio.sleep(self._gather_s)
            if self._begin() == 1:
                return
            async with self._dispatcher.place(self.target, windowed=self._windowed, each=_EACH):
                watched.key = self._key
                await self._run()

    async def _run(self) -> None:
        rows = [(shipment.attempt(0)[1], shipment.call) for shipment in self._shipments.values()]
        call = pickle.dumps(rows, protocol=pickle.HIGHEST_PROTOCOL)
        with self._dispatcher.shown(self._shipments):
            ended = await self._dispatcher.executor.attempt(
                self._name, self._key, self._header, call, self.target.resources, self._take
            )
        for key, outcome in ended if isinstance(ended, list | tuple) else ():  # those that are large
            fetched = await self._dispatcher.fetched(outcome)
            if key in self._waiting and fetched is not None and not fetched.missing:
                self._settle(key, fetched)

    def _take(self, ended: Iterable[tuple[str, bytes]]) -> bool | None:
        """Takes outcomes of the chunk. Returns True once all have come."""
        for key, data in ended:
            if key not in self._waiting:
                continue
            outcome = pickle.loads(data) if data else None  # noqa: S301 - the fleet's own, over mutual TLS
            if outcome is None or outcome.missing:
                self._send_alone(key)
            else:
                self._settle(key, self._dispatcher.snapshot.advised(outcome))
        return None if self._waiting else True

    def _send_alone(self, key: str) -> None:
        self._waiting.remove(key)
        self._alone.create_task(self._execute_alone(key), context=self._context.copy())

    async def _execute_alone(self, key: str) -> None:
        try:
            outcome = await self._dispatcher.execute(self._shipments[key], self.target, windowed=self._windowed)
            self._settle(key, outcome)
        except Exception as error:  # noqa: BLE001 - as above
            self._settle(key, error)

    def _settle(self, key: str, outcome: Outcome | Exception) -> None:
        self._waiting.discard(key)
        # It may have been cancelled in this moment.
        with contextlib.suppress(concurrent.futures.InvalidStateError):
            if isinstance(outcome, Exception):
                self._inner[key].set_exception(outcome)
            else:
                self._inner[key].set_result(outcome)
