"""The future of a submitted task."""

from __future__ import annotations

import asyncio
import concurrent.futures
import functools
import os
import threading
import types
from collections.abc import Callable, Generator, Iterable
from dataclasses import replace
from typing import Any, Literal, TypeVar, cast

from skyinfra.engine.waiting import until_called
from skyinfra.errors import FleetError
from skyinfra.protocol.calls import SMALL_OUTCOME, Outcome
from skyinfra.submission.callbacks import CALLBACKS
from skyinfra.submission.items import Arrivals, Items, forked
from skyinfra.tasks import outcomes

T = TypeVar("T")


class _UnreadError(Exception):
    """Stands for an exception that nobody has asked for yet."""


def _end_each(futures: list[Future[Any]], inner: concurrent.futures.Future[Outcome]) -> None:
    while futures:
        futures.pop()._ended(inner)


class Future(concurrent.futures.Future[T]):
    """The result of a task that was submitted. Made by `Pool.submit`. ``key`` is unique: `skyinfra logs --task KEY`.

    It is a `concurrent.futures.Future`: `concurrent.futures.wait`, `as_completed` and `asyncio.wrap_future` take it.
    The first thread that asks for the result unpickles it; from then on it is kept in place of its bytes.
    """

    def __init__(
        self,
        name: str,
        inner: concurrent.futures.Future[Outcome],
        *,
        key: str = "",
        arrivals: Arrivals | None = None,
        notes: tuple[str, ...] = (),
    ) -> None:
        """*arrivals*: of the items of a generator, with the first of which the task counts as done."""
        super().__init__()
        self._name = name
        # Names the task in the whole fleet, as `skyinfra top` and `skyinfra logs --task` do.
        self.key = key
        # Whether it may travel with others in one message.
        self.together = False
        # The task's, until it has ended.
        self._inner: concurrent.futures.Future[Outcome] | None = inner
        self._process = os.getpid()
        self._notes = notes
        self._arrivals = arrivals
        # Of the generator, whose items it has given.
        self._end: Future[Any] | None = None
        # Unpickling may run code that asks for the result again.
        self._reading = threading.RLock()
        self._read = False
        self._given: Outcome | None = None
        self._value: T | None = None
        self._error: BaseException | None = None
        self._trace: types.TracebackType | None = None
        # Until the task is done, so that its callbacks are called whoever keeps this object.
        self._kept: list[Future[T]] = [self]
        if arrivals is not None:
            arrivals.when_first(self._begin)
        inner.add_done_callback(functools.partial(_end_each, self._kept))
        if arrivals is not None:
            inner.add_done_callback(lambda _: arrivals.end())

    def _begin(self) -> None:
        """Gives the items of a generator, of which the first one has come."""
        inner, arrivals = self._inner, self._arrivals
        if inner is None or arrivals is None:
            return
        self._kept.clear()
        self._inner = None
        self._end = Future(self._name, inner, notes=self._notes)
        self._value = cast(T, Items(self._name, arrivals, self._end.result, inner.cancel))
        self._read = True
        self.set_result(cast(T, None))

    def _ended(self, inner: concurrent.futures.Future[Outcome]) -> None:
        """Tells those who wait. It runs in the loop of the connection, where nothing is unpickled."""
        if inner.cancelled():
            super().cancel()
            self.set_running_or_notify_cancel()
        else:
            self._error = inner.exception()
            self._given = inner.result() if self._error is None else None
            if self._given is not None and self._given.items is not None and self._arrivals is not None:
                self._given = None
                self._begin()  # it has none
                return
            if self._given is None or self._given.failure is not None:
                self.set_exception(_UnreadError())
            else:
                self.set_result(cast(T, None))
        self._inner = None

    def result(self, timeout: float | None = None) -> T:
        """Waits for the result; raises what the task raised: ``future.result(60)``.

        timeout: seconds, None for ever. Raises TimeoutError after it; the task runs on. An interrupt of the waiting
        thread (Ctrl-C) cancels the task. Raises ``concurrent.futures.CancelledError`` where it was cancelled, and
        `SlotLost`, `FleetUnreachable` or `TaskAttemptsExceeded`.
        """
        __tracebackhide__ = True  # in notebooks
        error = self.exception(timeout)
        if error is None:
            return cast(T, self._value)
        try:
            raise error.with_traceback(self._trace)
        finally:
            del self, error  # this frame is in the traceback

    def _check_process(self) -> None:
        """Raises `ConnectionForked` where a child of the process that has sent the task would wait for it."""
        if not self.done() and os.getpid() != self._process:
            raise forked(f"the fleet of {self._name}")

    def exception(self, timeout: float | None = None) -> BaseException | None:
        """Waits for the end of the task; returns the exception that `result` would raise, or None."""
        __tracebackhide__ = True
        self._check_process()
        try:
            super().exception(timeout)
        except TimeoutError:
            raise TimeoutError(f"{self._name} has no result after {timeout:g} s, and runs on") from None
        except KeyboardInterrupt as interrupt:
            cancel_all([self], interrupt)
            raise
        with self._reading:
            if not self._read:
                self._take()
        return self._error

    def _get_snapshot(self) -> tuple[bool, bool, T | None, BaseException | None]:
        """Returns whether it is done and cancelled, its result and its exception. `asyncio.wrap_future` reads that from
        Python 3.15 on, where the class above would give what stands for both until they are read."""
        if not self.done():
            return False, False, None, None
        if self.cancelled():
            return True, True, None, None
        error = self.exception()
        return True, False, self._value if error is None else None, error

    def _take(self) -> None:
        """Unpickles what the task gave, and drops its bytes."""
        outcome = self._given
        if outcome is not None:
            self._error = outcomes.exception(outcome, self._name)
            if len(outcome.result or b"") > SMALL_OUTCOME or outcome.buffers:
                self._given = replace(outcome, result=None, buffers=())
            if self._error is None:
                try:
                    self._value = outcomes.result(outcome, self._name)
                except Exception as error:  # noqa: BLE001 - whoever asks is told, who waits in asyncio's loop too
                    self._error = error
        if self._error is not None:
            self._trace = self._error.__traceback__
            for note in self._notes:
                self._error.add_note(note)
        self._read = True

    def result_or_exception(self) -> T | Exception:
        """Waits for the result, or the exception of the task in its place; raises where the fleet cannot be used."""
        error = self.exception()
        if isinstance(error, Exception) and not isinstance(error, FleetError):
            return error
        return self.result()

    def noted(self, note: str) -> None:
        """Adds *note* to the exception that the task may raise. To be called before anybody asks for that."""
        self._notes += (note,)
        if self._end is not None:
            self._end.noted(note)

    def traceback(self, timeout: float | None = None) -> types.TracebackType | None:
        """Waits for the end of the task; returns the traceback of its exception, which begins in the task, or None."""
        return self._trace if self.exception(timeout) is not None else None

    def cancel(self) -> bool:
        """Cancels the task; False where it has ended already.

        A task that runs gets KeyboardInterrupt on its slot; if it has not ended soon, its process is killed.
        """
        inner = self._inner
        return self.cancelled() if inner is None else inner.cancel()

    def outcome(self) -> Outcome | None:
        """Returns the outcome, without the bytes of a large result that was asked for; None where there is none yet, or
        the task was cancelled or its slot was lost."""
        return self._given

    def add_done_callback(self, fn: Callable[[concurrent.futures.Future[T]], object]) -> None:
        """Calls *fn* with this future when the task has ended: at once where it has, else in a thread for callbacks,
        one after the other. They may use the pool."""
        if self.done():
            super().add_done_callback(fn)
        else:
            super().add_done_callback(functools.partial(CALLBACKS.call, fn))

    def when_done(self, callback: Callable[[Future[T]], object]) -> None:
        """Calls *callback* with this future when the task has ended, in the thread of the connection: it must return at
        once, and cannot use the pool."""
        super().add_done_callback(lambda _: callback(self))

    def __await__(self) -> Generator[Any, None, T]:
        """Waits for the result in a coroutine; one that is cancelled cancels the task."""
        self._check_process()
        if not self.done():
            try:
                yield from until_called(lambda called: self.when_done(lambda _: called())).__await__()
            except asyncio.CancelledError:
                self.cancel()
                raise
        if self.cancelled():
            raise asyncio.CancelledError
        return self.result()

    def __reduce__(self) -> tuple[object, ...]:
        raise TypeError(f"the future of {self._name} is of this process: pass future.result(), which waits for it")

    def __repr__(self) -> str:
        state = "cancelled" if self.cancelled() else "done" if self.done() else "waiting"
        return f"<Future {self._name}: {state}>"


def wait(
    futures: Iterable[Future[T]],
    timeout: float | None = None,
    return_when: Literal["ALL_COMPLETED", "FIRST_COMPLETED", "FIRST_EXCEPTION"] = "ALL_COMPLETED",
) -> tuple[set[Future[T]], set[Future[T]]]:
    """Waits for futures, as `concurrent.futures.wait` does: ``done, others = sky.wait(futures, timeout=60)``.

    timeout: seconds, after which it returns; None is for ever. The tasks run on. return_when: the first that has ended,
    or has raised, may be enough. An interrupt of the waiting thread (Ctrl-C) cancels the tasks.
    """
    known = list(futures)
    for position, future in enumerate(cast("list[object]", known)):
        if not isinstance(future, Future):
            kind = type(future).__name__
            raise TypeError(f"sky.wait takes futures, and number {position} is a {kind}: pool.submit(task) gives one")
        future._check_process()
    try:
        return cast(
            "tuple[set[Future[T]], set[Future[T]]]", concurrent.futures.wait(known, timeout, return_when=return_when)
        )
    except KeyboardInterrupt as interrupt:
        cancel_all(known, interrupt)
        raise


def cancel_all(futures: Iterable[Future[Any]], error: BaseException | None) -> None:
    """Cancels the tasks that have not ended. Where *error* is an interrupt (Ctrl-C), it says so in a note."""
    names = [future._name for future in futures if future.cancel()]
    if names and isinstance(error, KeyboardInterrupt):
        error.add_note(f"{names[0]} was cancelled." if len(names) == 1 else f"{len(names)} tasks were cancelled.")
