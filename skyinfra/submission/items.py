"""The items of a generator that runs on a slot, as they come."""

from __future__ import annotations

import asyncio
import contextlib
import os
import pickle
import threading
import time
from collections import deque
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator
from typing import Any, Generic, Protocol, TypeVar, cast

from skyinfra.engine.waiting import until_called
from skyinfra.errors import ConnectionForked, FleetError, TaskInputsLost
from skyinfra.protocol.calls import MOST_ITEMS, Item, Outcome
from skyinfra.tasks import outcomes
from skyinfra.worker import streaming

T = TypeVar("T")

# Items that the client has taken are told to the slot in groups of that many.
_ACKNOWLEDGED = MOST_ITEMS // 4
_END = object()


class Channel(Protocol):
    """The connection to the fleet, as `Arrivals` need it: see `skyinfra.submission.fleet`."""

    def in_loop(self, coroutine: Coroutine[Any, Any, T]) -> T: ...
    def in_loop_soon(self, coroutine: Coroutine[Any, Any, T]) -> object: ...
    async def run_on(self, worker: str, function: Callable[..., object], *arguments: object) -> None: ...
    async def whole(self, outcome: Outcome) -> Outcome: ...


def forked(name: str) -> ConnectionForked:
    """Returns the error for a process that was forked from the one that has connected to *name*."""
    return ConnectionForked(
        f"the connection to {name} is that of the process from which this one was forked",
        hint="Connect here, too: sky.connect(pool.manifest) works in a forked process.",
    )


class Arrivals:
    """The items of one task that have come, in their order, each once: also where the task starts again.

    They come in the loop of *channel*, and are taken in any thread.
    """

    def __init__(self, channel: Channel) -> None:
        self._channel = channel
        self._changed = threading.Condition()
        self._ready: deque[Outcome] = deque()
        self._came = self._taken = 0
        self._ended = False
        self._begins: Callable[[], object] | None = None
        self._wakes: list[Callable[[], object]] = []
        # Of the process that sends them: its address, and the key of the attempt.
        self._sender = ("", "")
        self._acknowledging: bool | None = False  # None: again, with the number that is true by then
        # Since when the task waits until items are taken (``time.monotonic``).
        self._stalled: float | None = None

    @property
    def came(self) -> int:
        """How many items have come."""
        return self._came

    @property
    def stalled_s(self) -> float:
        """For how many seconds the task has waited until items are taken; 0 where it does not."""
        since = self._stalled
        return 0.0 if since is None else time.monotonic() - since

    def when_first(self, begins: Callable[[], object]) -> None:
        """Calls *begins* once the first item has come, which may be now."""
        with self._changed:
            if not self._came:
                self._begins = begins
                return
        begins()

    def when_more(self, wake: Callable[[], object]) -> None:
        """Calls *wake* once there is an item to take, or none will come any more, which may be now."""
        with self._changed:
            if not (self._ready or self._ended):
                self._wakes.append(wake)
                return
        wake()

    def _wake(self) -> None:
        with self._changed:
            wakes, self._wakes = self._wakes, []
        for wake in wakes:
            wake()

    def add(self, key: str, item: Item) -> bool:
        """Takes an item of the attempt *key*. Returns False where one before it was lost with the connection."""
        if item.number > self._came:
            return False
        self._sender = (item.worker, key)
        if item.number < self._came:
            # It waits until items are taken, has not heard that they were, or has started again.
            if self._ready and item.number == self._came - 1:
                self._stalled = self._stalled or time.monotonic()
            self._acknowledge()
            return True
        outcome = pickle.loads(item.outcome)  # noqa: S301 - the fleet's own, over mutual TLS
        with self._changed:
            self._ready.append(outcome)
            self._came += 1
            begins, self._begins = self._begins, None
            self._changed.notify()
        self._wake()
        if begins is not None:
            begins()
        return True

    def end(self) -> None:
        """No item will come any more."""
        with self._changed:
            self._ended = True
            self._changed.notify_all()
        self._wake()

    def take(self) -> Outcome | None:
        """Waits for the next item; None where there is none any more. Raises `TaskInputsLost`, `FleetUnreachable`."""
        with self._changed:
            self._changed.wait_for(lambda: self._ready or self._ended)
            if not self._ready:
                return None
            outcome = self._ready.popleft()
            self._taken += 1
            self._stalled = None
            due = self._taken % _ACKNOWLEDGED == 0
        if due:
            self._acknowledge()
        return self._channel.in_loop(self._channel.whole(outcome)) if outcome.parts else outcome

    def _acknowledge(self) -> None:
        """Tells the slot how many items were taken: one message at a time."""
        with self._changed:
            before, self._acknowledging = self._acknowledging, None if self._acknowledging is not False else True
            if before is not False or self._ended:
                return
        coroutine = self._acknowledged()
        with contextlib.suppress(FleetError):
            self._channel.in_loop_soon(coroutine)

    async def _acknowledged(self) -> None:
        again = True
        while again:
            worker, key = self._sender
            try:
                with contextlib.suppress(OSError):
                    await self._channel.run_on(worker, streaming.allow, self._taken, key)
            except BaseException:  # the slot asks again
                self._acknowledging = False
                raise
            with self._changed:
                again = self._acknowledging is None
                self._acknowledging = again


class Items(Iterator[T], AsyncIterator[T], Generic[T]):
    """The items of a generator that runs on a slot, for ``for`` and ``async for``: each comes once it was yielded.

    What the generator raises is raised after its last item. `close`, or the end of the last reference to this object,
    cancels the task. Raises ``concurrent.futures.CancelledError`` where the pool was closed.
    """

    def __init__(
        self, name: str, arrivals: Arrivals, finish: Callable[[], object], cancel: Callable[[], object]
    ) -> None:
        """*finish*: waits for the end of the task, and raises what it raised."""
        self._name = name
        self._arrivals = arrivals
        self._finish = finish
        self._cancel = cancel
        self._process = os.getpid()

    def __next__(self) -> T:
        __tracebackhide__ = True
        self._check_process()
        item = self._take()
        if item is _END:
            raise StopIteration
        return cast(T, item)

    def _check_process(self) -> None:
        """Raises `ConnectionForked` in a child of the process that they come to."""
        if os.getpid() != self._process:
            raise forked(f"the fleet of {self._name}")

    def _take(self) -> Any:
        __tracebackhide__ = True
        try:
            outcome = self._arrivals.take()
        except KeyboardInterrupt:
            self.close()
            raise
        if outcome is None:
            self._finish()
            return _END
        if outcome.missing:
            self.close()
            raise TaskInputsLost(
                f"an item of {self._name} was lost at the head before it was taken",
                hint="What is in flight at once is more than the head can keep: give it a larger disk.",
            )
        return outcomes.result(outcome, self._name)

    async def __anext__(self) -> T:
        self._check_process()
        try:
            # Here, and not in a thread of the loop, of which it has few.
            await until_called(self._arrivals.when_more)
            item = await asyncio.to_thread(self._take)
        except asyncio.CancelledError:
            self.close()
            raise
        if item is _END:
            raise StopAsyncIteration
        return cast(T, item)

    def close(self) -> None:
        """Cancels the task, unless it has ended. Items that have come stay."""
        self._cancel()

    def __del__(self) -> None:
        self.close()

    def __reduce__(self) -> tuple[object, ...]:
        raise TypeError(f"the items of {self._name} come to this process: pass list(...) of them")

    def __repr__(self) -> str:
        return f"<items of {self._name}: {self._arrivals.came} have come>"
