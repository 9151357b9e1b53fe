"""Waiting in coroutines, for some time at most; and in threads for coroutines."""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
from collections.abc import Awaitable, Callable
from typing import TypeVar

T = TypeVar("T")

# Who waits for a change through the network is answered after that long at the latest.
LONGEST_WAIT_S = 60.0


async def within(awaitable: Awaitable[T], seconds: float | None) -> T:
    """Returns the result of *awaitable* within *seconds*, None being for ever. Raises TimeoutError.

    `asyncio.wait_for` does the same since Python 3.12. Until then it forgets that it was cancelled where what it waits
    for ends in the same moment, and who ends a loop waits for ever (CPython issue 86296).
    """
    async with asyncio.timeout(seconds):
        return await awaitable


def check_task(task: asyncio.Task[None] | None) -> None:
    """Raises the error that *task* has ended with, if any."""
    if task is not None and task.done() and not task.cancelled():
        task.result()


async def end_task(task: asyncio.Task[None] | None) -> None:
    """Cancels *task* and waits for its end, however it ends."""
    if task is not None:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


class Changes:
    """Wakes the coroutines that wait for a change."""

    def __init__(self) -> None:
        self._next = asyncio.Event()

    def notify(self) -> None:
        """Wakes those that wait now."""
        self._next.set()
        self._next = asyncio.Event()

    async def until(self, holds: Callable[[], bool], wait_s: float) -> None:
        """Waits until *holds* after a change, for *wait_s* or `LONGEST_WAIT_S` at most."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(min(wait_s, LONGEST_WAIT_S)):
                while not holds():
                    await self._next.wait()


async def until_called(register: Callable[[Callable[[], object]], object]) -> None:
    """Waits until the function that *register* is given has been called, in whichever thread."""
    loop = asyncio.get_running_loop()
    over = loop.create_future()

    def wake() -> None:
        if not over.done():
            over.set_result(None)

    def called() -> None:
        with contextlib.suppress(RuntimeError):  # that loop is closed
            loop.call_soon_threadsafe(wake)

    register(called)
    await over


def interruptible(future: concurrent.futures.Future[T]) -> T:
    """Returns the result of *future*. An interrupt of the thread that waits here cancels *future*."""
    try:
        return future.result()
    finally:
        future.cancel()
