"""Keeps one slot's worker alive: starts a Nanny, and another one whenever it ends."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from distributed import Nanny
from distributed.core import Status, rpc

from skyinfra.engine.waiting import within
from skyinfra.head import start
from skyinfra.node import processes
from skyinfra.protocol import services
from skyinfra.protocol.instance import NODE_DIRECTORY, VARIABLE, InstanceInfo

logger = logging.getLogger("skyinfra.runner")

_POLL_S = 0.2
# A Nanny without a worker process for that long has failed to start another one, which it only logs.
_GIVE_UP_S = 30.0
_BACKOFF_S = (0.2, 0.5, 1.0, 2.0, 5.0)
# A worker is asked to end; after 80 % of this it is killed.
_CLOSE_S = 2.0
# A worker whose task holds the GIL does not answer; it is asked again.
_ANSWER_S = 5.0


@dataclass(frozen=True)
class Unfinished:
    """Why a drained worker stays: ``running``, the keys of its tasks; ``kept``, the number of results to be fetched;
    ``silent``: it does not answer."""

    running: tuple[str, ...] = ()
    kept: int = 0
    silent: bool = False

    def __str__(self) -> str:
        if self.silent:
            return "its worker does not answer"
        parts = [f"task {key.rpartition('-')[0]}" for key in self.running]
        if self.kept:
            parts.append("1 result to be fetched" if self.kept == 1 else f"{self.kept} results to be fetched")
        return ", ".join(parts)


class SlotSupervisor:
    """Supervises the worker of *slot*. *make* returns a Nanny that is not started.

    ``error``: why the worker is not up, where that is known. ``draining_since``: when draining began
    (``time.monotonic``), or None. ``unfinished``: what it waits for then.
    """

    def __init__(self, slot: InstanceInfo, make: Callable[[], Nanny]) -> None:
        self.slot = slot
        self.error: str | None = None
        self.draining_since: float | None = None
        self.unfinished: Unfinished | None = None
        self._make = make
        self._nanny: Nanny | None = None
        self._pid: int | None = None
        self._line: rpc | None = None
        self._stopping = asyncio.Event()
        self._task = asyncio.create_task(self._run(), name=f"slot {slot.slot}")

    @property
    def up(self) -> bool:
        """Whether the worker process runs and is registered with the scheduler."""
        return self._serving() is not None

    @property
    def ended(self) -> bool:
        """Whether there is no worker any more, and none will start."""
        return self._task.done()

    async def stop(self) -> None:
        """Ends the worker and everything that its tasks started. A running task has 1.6 s to end by itself."""
        self._stopping.set()
        # The task itself is not awaited: the caller may be cancelled, and the worker has to end all the same.
        await asyncio.wait({self._task})
        self._task.result()

    def kill(self) -> None:
        """Kills the worker process and what its tasks started. Its Nanny starts another one, unless it is drained."""
        if self._pid is not None:
            below = processes.descendants(self._pid)
            # The worker leads a process group, see SlotWorker.
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._pid, signal.SIGKILL)
            for each in below:
                each.kill()

    async def drain(self) -> Unfinished | None:
        """Takes the worker out of service; returns what it has to finish, or None.

        Is called again until nothing is left, see `SlotWorker.drain`. A worker that ends meanwhile is not started
        again; one that is not up is ended.
        """
        if self.draining_since is None:
            self.draining_since = time.monotonic()
        nanny = self._serving()
        if nanny is None:
            await self.stop()
            return None
        if nanny.status == Status.running:
            nanny.close_gracefully(reason="skyinfra-runner drains the slot")
        try:
            answer = await self._call_drain(nanny, on=True)
        except OSError:
            return None if self.ended else Unfinished(silent=True)
        left = Unfinished(tuple(answer["running"]), answer["kept"])
        return left if left != Unfinished() else None

    async def busy(self, *, kept: bool = True) -> bool:
        """Whether a task runs on the slot, or its results are still to be fetched; also where it does not answer.

        Not *kept*: results that are still to be fetched do not count.
        """
        nanny = self._serving()
        if nanny is None:
            return False
        try:
            answer = await self._call_drain(nanny, on=self.draining_since is not None)
        except OSError:
            return True
        return bool(answer["running"] or (kept and answer["kept"]))

    async def resume(self) -> bool:
        """Takes a drained worker back into service; returns whether it is. Where it has `ended`, it cannot be."""
        nanny = self._serving()
        if nanny is None:
            await self.stop()
            return False
        try:
            await self._call_drain(nanny, on=False)
        except OSError:
            return False
        if not self.up:
            return False
        nanny.status = Status.running
        self.draining_since = self.unfinished = None
        return True

    async def doubt(self, why: str) -> None:
        """Takes the worker out of service, as its device fails, until it finds that this works."""
        nanny = self._serving()
        if nanny is not None:
            with contextlib.suppress(OSError):
                await within(services.doubt(await self._connection(nanny), why=why), _ANSWER_S)

    async def _call_drain(self, nanny: Nanny, *, on: bool) -> dict[str, Any]:
        return await within(services.drain(await self._connection(nanny), on=on), _ANSWER_S)

    async def _connection(self, nanny: Nanny) -> rpc:
        """Returns the connection to the worker, whose process may be another one than before, with another address."""
        before = self._line
        if before is None or before.address != nanny.worker_address:
            # Not the Nanny's own connections: when the worker dies, it would close them under this call and log that.
            arguments = nanny.security.get_connection_args("worker")
            self._line = rpc(nanny.worker_address, connection_args=arguments, timeout=_ANSWER_S)
            if before is not None:
                await before.close_rpc()
        return self._line

    def check(self) -> None:
        """Raises the error of the runner itself that ended the supervision, if any."""
        if self._task.done():
            self._task.result()

    async def _run(self) -> None:
        attempts = 0
        while not self._stopping.is_set():
            started = time.monotonic()
            await self._one_nanny()
            if self.draining_since is not None:
                return
            attempts = 1 if time.monotonic() - started > _GIVE_UP_S else attempts + 1
            await pause(self._stopping, _BACKOFF_S[min(attempts, len(_BACKOFF_S)) - 1])

    async def _one_nanny(self) -> None:
        """Runs one Nanny until it ends or `stop` is called, and cleans up after it."""
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
                if (refused := starting.exception()) is not None:
                    self._failed(refused)
                else:
                    self.error = None
                    logger.info("slot %s: ready, process %s", self.slot.slot, nanny.pid)
                    await self._until_it_ends(nanny)
        finally:
            stopping.cancel()
            await self._end(nanny, starting)
            self._nanny = None

    def _failed(self, error: BaseException) -> None:
        reason = start.innermost(error)
        self.error = f"{type(reason).__name__}: {reason}"
        logger.warning("slot %s: the worker did not start: %s", self.slot.slot, self.error)

    async def _until_it_ends(self, nanny: Nanny) -> None:
        seen = time.monotonic()
        while self._keeps(nanny) and not self._stopping.is_set():
            self._sweep(nanny)
            if _has_worker(nanny):
                seen = time.monotonic()
            elif time.monotonic() - seen > _GIVE_UP_S:
                self.error = "the worker process ended and could not be started again"
                logger.warning("slot %s: %s", self.slot.slot, self.error)
                return
            await pause(self._stopping, _POLL_S)

    def _serving(self) -> Nanny | None:
        """Returns the Nanny where its worker is registered with the scheduler."""
        nanny = self._nanny
        return nanny if nanny is not None and self._keeps(nanny) and _has_worker(nanny) else None

    def _keeps(self, nanny: Nanny) -> bool:
        """Returns whether *nanny* has had a worker and does not end it."""
        # A Nanny is running only after its worker has reported that the scheduler accepted it. While it is closing
        # gracefully, as `drain` makes it, it does not start a worker anew.
        draining = nanny.status == Status.closing_gracefully and self.draining_since is not None
        return draining or bool(nanny.status == Status.running)

    def _sweep(self, nanny: Nanny) -> None:
        """Kills what the tasks of an ended worker left, also in sessions of their own."""
        pid = nanny.pid
        if pid == self._pid:
            return
        self.kill()
        if self._pid is not None:
            left = processes.marked({name: nanny.env[name] for name in (VARIABLE, NODE_DIRECTORY)})
            # The next worker may have begun a task.
            begun = {each.id for each in processes.descendants(pid)} if pid is not None else set()
            for each in left:
                if each.id not in begun:
                    each.kill()
        self._pid = pid

    async def _end(self, nanny: Nanny, starting: asyncio.Future[Nanny]) -> None:
        if self._line is not None:
            await self._line.close_rpc()
            self._line = None
        while not starting.done():
            # A worker that has not reported yet reads no stop message; a Nanny without one waits for the network.
            if nanny.process is None:
                starting.cancel()
            elif nanny.process.pid is not None:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(nanny.process.pid, signal.SIGKILL)
            await asyncio.wait({starting}, timeout=_POLL_S)
        self._sweep(nanny)
        try:
            await nanny.close(timeout=_CLOSE_S, reason="skyinfra-runner stops the slot")
        except TimeoutError:
            logger.warning("slot %s: the worker process cannot be killed", self.slot.slot)
        self._sweep(nanny)


def _has_worker(nanny: Nanny) -> bool:
    return nanny.process is not None and nanny.process.status == Status.running


async def pause(event: asyncio.Event, seconds: float) -> bool:
    """Waits for *event*, at most that long; returns whether it is set."""
    with contextlib.suppress(TimeoutError):
        await within(event.wait(), seconds)
    return event.is_set()
