"""The order in which many tasks are sent and their results given out, without any waiting of its own."""

from __future__ import annotations

import types
from collections.abc import Callable, Iterable, Iterator, Sequence, Sized
from contextlib import AbstractContextManager
from typing import Any, Generic, Self, TypeVar

from skyinfra.client import pickling
from skyinfra.client.futures import Future
from skyinfra.client.task import Task

T = TypeVar("T")


class Flow(Generic[T]):
    """Sends *tasks* so that at most ``limit()`` are in flight and twice as many kept. A context manager.

    send: ships a task. when_done: hears of each future that has ended, in any thread; whoever waits for that hands it
    to `take`. ordered: results in the order of the tasks, else in that in which they end. counting: gives what is
    called for each that has ended. Leaving the block cancels what was not given out.
    """

    def __init__(
        self,
        tasks: Iterator[Task[T]],
        *,
        send: Callable[[Task[T]], Future[T]],
        limit: Callable[[], int],
        ordered: bool,
        when_done: Callable[[Future[T]], object],
        counting: AbstractContextManager[Callable[[], None]],
    ) -> None:
        self._tasks = tasks
        self._send = send
        self._limit = limit
        self._ordered = ordered
        self._when_done = when_done
        self._counting = counting
        self._kept: dict[Future[T], None] = {}  # sent and not given out, in the order of sending
        self._ready: list[Future[T]] = []
        self._counted: set[Future[T]] = set()
        self._running = 0
        self._exhausted = False

    @property
    def over(self) -> bool:
        """Whether everything was given out."""
        return self._exhausted and not self._kept

    def advance(self) -> Future[T] | None:
        """Sends what may be sent. The next future whose result is to be given out, which has ended, or None."""
        limit = self._limit()
        while not self._exhausted and self._running < limit and len(self._kept) < 2 * limit:
            task = next(self._tasks, None)
            if task is None:
                self._exhausted = True
                break
            future = self._send(task)
            self._kept[future] = None
            self._running += 1
            future.when_done(self._when_done)
        first = next(iter(self._kept), None) if self._ordered else next(iter(self._ready), None)
        if first is None or not first.done():
            return None
        del self._kept[first]
        if not self._ordered:
            self._ready.remove(first)
        self._count(first)
        return first

    def take(self, ended: Future[T]) -> None:
        """*ended* has ended."""
        self._running -= 1
        self._count(ended)
        if not self._ordered:
            self._ready.append(ended)

    def _count(self, ended: Future[T]) -> None:
        """Once each: what is given out may have ended without anybody having taken it, or may be taken later."""
        if ended in self._counted:
            self._counted.remove(ended)
        else:
            self._counted.add(ended)
            self._advance()

    def __enter__(self) -> Self:
        self._advance = self._counting.__enter__()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: types.TracebackType | None
    ) -> None:
        for future in self._kept:
            future.cancel()
        self._counting.__exit__(kind, error, trace)


def check_map(window: int | None, iterables: Sequence[Iterable[Any]]) -> None:
    """Raises what `Pool.map` raises at once."""
    if window is not None and window < 1:
        raise ValueError(f"window is at least 1, not {window}")
    if not iterables:
        raise TypeError("map() needs at least one iterable")


def tasks_of(function: Any, iterables: Sequence[Iterable[Any]]) -> Iterator[Task[Any]]:
    """A task for each item, or each row of items; they may be infinite."""
    return (pickling.as_task(function, items, {}) for items in zip(*iterables, strict=False))


def total_of(iterables: Sequence[Iterable[Any]]) -> int | None:
    """How many rows *iterables* give, where all of them say so."""
    if all(isinstance(each, Sized) for each in iterables):
        return min(len(each) for each in iterables if isinstance(each, Sized))
    return None
