"""Waiting in coroutines, for some time at most.

Travels to nodes: standard library only.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable
from typing import TypeVar

T = TypeVar("T")


async def within(awaitable: Awaitable[T], seconds: float | None) -> T:
    """Returns the result of *awaitable* within *seconds*, None being for ever. Raises TimeoutError.

    `asyncio.wait_for` does the same since Python 3.12. Until then it forgets that it was cancelled where what it waits
    for ends in the same moment, and who ends a loop waits for ever (CPython issue 86296).
    """
    async with asyncio.timeout(seconds):
        return await awaitable
