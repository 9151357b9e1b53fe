"""Keeps one slot's worker alive: makes a Nanny, and another one whenever that one ends."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
import time
from collections.abc import Callable

from distributed import Nanny
from distributed.core import Status

from skyinfra.protocol.instance import InstanceInfo
from skyinfra.runner import head

logger = logging.getLogger("skyinfra.runner")

_POLL_S = 0.2
# A Nanny whose worker process is gone that long has failed to start another (it only logs that).
_GIVE_UP_S = 30.0
_BACKOFF_S = (0.2, 0.5, 1.0, 2.0, 5.0)
# A worker is asked to end; after 80 % of this it is killed.
_CLOSE_S = 2.0


class SlotSupervisor:
    """The worker of *slot*. *make* gives a Nanny that is not started.

    ``up``: whether the worker is registered with the scheduler. ``error``: why it is not, as far as that is known.
    """

    def __init__(self, slot: InstanceInfo, make: Callable[[], Nanny]) -> None:
        self.slot = slot
        self.error: str | None = None
        self._make = make
        self._nanny: Nanny | None = None
        self._pid: int | None = None
        self._stopping = asyncio.Event()
        self._task = asyncio.create_task(self._run(), name=f"slot {slot.slot}")

    @property
    def up(self) -> bool:
        """Whether the worker process runs and is registered with the scheduler."""
        nanny = self._nanny
        # A Nanny is running only after its worker has reported that the scheduler accepted it.
        return nanny is not None and nanny.status == Status.running and _serving(nanny)

    async def stop(self) -> None:
        """Ends the worker and everything that its tasks started. A running task has 1.6 s to end by itself."""
        self._stopping.set()
        await self._task

    def check(self) -> None:
        """Raises what ended the supervision, which only an error of the runner itself does."""
        if self._task.done():
            self._task.result()

    async def _run(self) -> None:
        attempts = 0
        while not self._stopping.is_set():
            started = time.monotonic()
            await self._one_nanny()
            attempts = 1 if time.monotonic() - started > _GIVE_UP_S else attempts + 1
            await pause(self._stopping, _BACKOFF_S[min(attempts, len(_BACKOFF_S)) - 1])

    async def _one_nanny(self) -> None:
        """Runs one Nanny until it ends or `stop` is called; returns when nothing of it is left."""
        try:
            nanny = self._make()
        except OSError as error:
            self._failed(error)
            return
        self._nanny = nanny
        starting = asyncio.ensure_future(nanny)
        stopping = asyncio.create_task(self._stopping.wait())
        try:
            await asyncio.wait({starting, stopping}, return_when=asyncio.FIRST_COMPLETED)
            if starting.done():
                await self._started(nanny, starting.exception())
        finally:
            stopping.cancel()
            await self._end(nanny, starting)
            self._nanny = None

    async def _started(self, nanny: Nanny, error: BaseException | None) -> None:
        if error is not None:
            self._failed(error)
            return
        self.error = None
        logger.info("slot %s: ready, process %s", self.slot.slot, nanny.pid)
        await self._until_it_ends(nanny)

    def _failed(self, error: BaseException) -> None:
        reason = head.innermost(error)
        self.error = f"{type(reason).__name__}: {reason}"
        logger.warning("slot %s: the worker did not start: %s", self.slot.slot, self.error)

    async def _until_it_ends(self, nanny: Nanny) -> None:
        gone_since: float | None = None
        while nanny.status == Status.running and not self._stopping.is_set():
            self._sweep(nanny.pid)
            if _serving(nanny):
                gone_since = None
            elif gone_since is None:
                gone_since = time.monotonic()
            elif time.monotonic() - gone_since > _GIVE_UP_S:
                self.error = "the worker process ended and could not be started again"
                logger.warning("slot %s: %s", self.slot.slot, self.error)
                return
            await pause(self._stopping, _POLL_S)

    def _sweep(self, pid: int | None) -> None:
        """Kills what the tasks of a worker that is gone have left; *pid* is that of the worker now."""
        if pid == self._pid:
            return
        if self._pid is not None:
            # The worker leads a process group, see SlotWorker.
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._pid, signal.SIGKILL)
        self._pid = pid

    async def _end(self, nanny: Nanny, starting: asyncio.Future[Nanny]) -> None:
        while not starting.done():
            # A worker that has not reported yet reads no stop message; a Nanny without one waits for the network.
            if nanny.process is None:
                starting.cancel()
            elif nanny.process.pid is not None:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(nanny.process.pid, signal.SIGKILL)
            await asyncio.wait({starting}, timeout=_POLL_S)
        self._sweep(nanny.pid)
        try:
            await nanny.close(timeout=_CLOSE_S, reason="skyinfra-runner stops the slot")
        except TimeoutError:
            logger.warning("slot %s: the worker process cannot be killed", self.slot.slot)
        self._sweep(None)


def _serving(nanny: Nanny) -> bool:
    return nanny.process is not None and nanny.process.status == Status.running


async def pause(event: asyncio.Event, seconds: float) -> None:
    """Waits for *event*, at most that long."""
    try:
        await asyncio.wait_for(event.wait(), seconds)
    except TimeoutError:
        return
