"""A thread with an event loop of its own, in which everything of Dask happens."""

from __future__ import annotations

import asyncio
import concurrent.futures
import threading
from collections.abc import Coroutine
from typing import Any, TypeVar

from skyinfra.engine import settings
from skyinfra.errors import FleetError

T = TypeVar("T")

_THREAD = "skyinfra-client"


class LoopThread:
    """Runs coroutines in a daemon thread. `close` cancels what still runs and ends the thread."""

    def __init__(self) -> None:
        settings.quiet_client(_THREAD)
        self._ready = threading.Event()
        self._thread = threading.Thread(target=lambda: asyncio.run(self._main()), name=_THREAD, daemon=True)
        self._thread.start()
        self._ready.wait()

    async def _main(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._end = asyncio.Event()
        self._ready.set()
        await self._end.wait()

    def start(self, coroutine: Coroutine[Any, Any, T]) -> concurrent.futures.Future[T]:
        """Starts *coroutine*; cancelling the future cancels it."""
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop)

    def run(self, coroutine: Coroutine[Any, Any, T]) -> T:
        """Runs *coroutine* and waits for it; an interrupt of the waiting thread cancels it.

        Raises `FleetError` in the thread itself, which would wait for ever.
        """
        if threading.current_thread() is self._thread:
            coroutine.close()
            raise FleetError(
                "this callback runs in the thread of the connection, and waits for what that thread is to do",
                hint="Hand it over to another thread, for instance through a queue.",
            )
        future = self.start(coroutine)
        try:
            return future.result()
        finally:
            future.cancel()

    def close(self) -> None:
        """Ends the thread. May be called again."""
        if self._thread.is_alive():
            self._loop.call_soon_threadsafe(self._end.set)
            self._thread.join()
