"""The future of a submitted task."""

from __future__ import annotations

import asyncio
import concurrent.futures
import types
from collections.abc import Callable, Generator, Iterable
from typing import Any, Generic, TypeVar

from skyinfra.protocol.calls import Outcome
from skyinfra.tasks import pickling

T = TypeVar("T")


class Future(Generic[T]):
    """The result of a task that was submitted. Made by `Pool.submit`. ``key`` is unique: `skyinfra logs --task KEY`."""

    def __init__(self, name: str, inner: concurrent.futures.Future[Outcome], *, key: str = "") -> None:
        self._name = name
        # Names the task in the whole fleet, as `skyinfra top` and `skyinfra logs --task` do.
        self.key = key
        self._inner = inner

    def result(self, timeout: float | None = None) -> T:
        """Waits for the result; raises what the task raised: ``future.result(60)``.

        timeout: seconds, None for ever. Raises TimeoutError after it; the task runs on. An interrupt of the waiting
        thread (Ctrl-C) cancels the task. Raises ``concurrent.futures.CancelledError`` where it was cancelled, and
        `SlotLost`, `FleetUnreachable` or `TaskAttemptsExceeded`.
        """
        __tracebackhide__ = True  # in notebooks
        value: T = pickling.result(self._wait(timeout), self._name)
        return value

    def exception(self, timeout: float | None = None) -> BaseException | None:
        """Waits for the end of the task; returns the exception that `result` would raise, or None."""
        try:
            outcome = self._wait(timeout)
        except (concurrent.futures.CancelledError, TimeoutError):
            raise
        except Exception as error:  # noqa: BLE001 - it is returned
            return error
        return pickling.exception(outcome, self._name)

    def traceback(self, timeout: float | None = None) -> types.TracebackType | None:
        """Waits for the end of the task; returns the traceback of its exception, which begins in the task, or None."""
        error = self.exception(timeout)
        return error.__traceback__ if error is not None else None

    def done(self) -> bool:
        """Whether the task has ended: with a result, an exception, or cancelled."""
        return self._inner.done()

    def cancelled(self) -> bool:
        """Whether the task was cancelled."""
        return self._inner.cancelled()

    def cancel(self) -> bool:
        """Cancels the task; False where it has ended already.

        A task that runs gets KeyboardInterrupt on its slot; if it has not ended 5 s later, its process is killed.
        """
        return self._inner.cancel()

    def outcome(self) -> Outcome | None:
        """Returns the outcome; None where there is none yet, or the task was cancelled or its slot was lost."""
        ended = self._inner.done() and not self._inner.cancelled() and self._inner.exception() is None
        return self._inner.result() if ended else None

    def when_done(self, callback: Callable[[Future[T]], object]) -> None:
        """Calls *callback* with this future when the task has ended, in another thread; it must return at once."""
        self._inner.add_done_callback(lambda _: callback(self))

    def __await__(self) -> Generator[Any, None, T]:
        """Waits for the result in a coroutine; one that is cancelled cancels the task."""
        outcome = yield from asyncio.wrap_future(self._inner).__await__()
        return pickling.result(outcome, self._name)  # type: ignore[no-any-return]

    def _wait(self, timeout: float | None) -> Outcome:
        __tracebackhide__ = True
        try:
            return self._inner.result(timeout)
        except TimeoutError:
            if self._inner.done():  # that of the task itself
                raise
            raise TimeoutError(f"{self._name} has no result after {timeout:g} s, and runs on") from None
        except KeyboardInterrupt as interrupt:
            cancel_all([self], interrupt)
            raise

    def __repr__(self) -> str:
        state = "cancelled" if self.cancelled() else "done" if self.done() else "waiting"
        return f"<Future {self._name}: {state}>"


def cancel_all(futures: Iterable[Future[Any]], error: BaseException | None) -> None:
    """Cancels the tasks that have not ended. Where *error* is an interrupt (Ctrl-C), it says so in a note."""
    names = [future._name for future in futures if future.cancel()]
    if names and isinstance(error, KeyboardInterrupt):
        error.add_note(f"{names[0]} was cancelled." if len(names) == 1 else f"{len(names)} tasks were cancelled.")
