"""Waiting in coroutines, for some time at most; and in threads for coroutines.

Travels to nodes: standard library only.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
from collections.abc import Awaitable
from typing import TypeVar

T = TypeVar("T")

# A thread that waits can be interrupted that often.
_POLL_S = 0.1


async def within(awaitable: Awaitable[T], seconds: float | None) -> T:
    """Returns the result of *awaitable* within *seconds*, None being for ever. Raises TimeoutError.

    `asyncio.wait_for` does the same since Python 3.12. Until then it forgets that it was cancelled where what it waits
    for ends in the same moment, and who ends a loop waits for ever (CPython issue 86296).
    """
    async with asyncio.timeout(seconds):
        return await awaitable


def interruptible(future: concurrent.futures.Future[T]) -> T:
    """Returns the result of *future*. A task whose thread waits here can be stopped, which cancels *future*."""
    try:
        while not concurrent.futures.wait([future], timeout=_POLL_S).done:
            pass
        return future.result()
    finally:
        future.cancel()
