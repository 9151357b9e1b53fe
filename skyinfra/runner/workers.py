"""The workers of a node: one for each slot, started, drained and ended."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

from distributed import Nanny

from skyinfra.engine.credentials import Credentials
from skyinfra.errors import is_ours
from skyinfra.head import start as head
from skyinfra.node import device
from skyinfra.node.folder import NodeDirectory
from skyinfra.node.shares import Shares, claim
from skyinfra.protocol.instance import InstanceInfo
from skyinfra.protocol.manifest import Endpoint
from skyinfra.protocol.nodeconfig import Vendor
from skyinfra.runner import slots
from skyinfra.runner.supervisor import SlotSupervisor, Unfinished
from skyinfra.worker import attempts, preload, process

logger = logging.getLogger("skyinfra.runner")

# Between two looks at the GPUs of the slots.
_LOOK_S = 15.0
_CHANGES = "its layout or configuration changes"


@dataclass(frozen=True)
class Wanted:
    """The parameters of a slot's worker; a worker whose `Wanted` stays the same is left alone."""

    slot: InstanceInfo
    vendor: Vendor | None
    env: tuple[tuple[str, str], ...]
    pip: tuple[str, ...]
    preload: tuple[str, ...]
    scheduler: Endpoint
    secret: str = field(repr=False)


class Workers:
    """The workers that run in *directory*, by their `Wanted`, over which it iterates."""

    def __init__(self, directory: NodeDirectory) -> None:
        self._directory = directory
        self._running: dict[Wanted, SlotSupervisor] = {}
        self._shares = Shares()

    def __iter__(self) -> Iterator[Wanted]:
        return iter(tuple(self._running))

    @property
    def slots(self) -> tuple[InstanceInfo, ...]:
        """The slots whose worker runs or starts, by index."""
        return tuple(sorted((key.slot for key in self._running), key=lambda slot: slot.worker))

    @property
    def up(self) -> bool:
        """Whether there are workers, and all of them are registered with the scheduler."""
        return bool(self._running) and all(supervisor.up for supervisor in self._running.values())

    @property
    def problems(self) -> list[str]:
        """Why workers are not up, where that is known."""
        return [f"slot {slot}: {error}" for slot, error in self.not_started.items()]

    @property
    def not_started(self) -> dict[str, str]:
        """Why workers do not start, where that is known, by the names of their slots."""
        return {s.slot.slot: s.error for s in self._running.values() if s.error and not s.up}

    @property
    def waits_for(self) -> tuple[str, ...]:
        """Why drained workers stay, one sentence for each."""
        found = sorted(self._running.values(), key=lambda supervisor: supervisor.slot.worker)
        return tuple(f"slot {each.slot.slot}: {each.unfinished}" for each in found if each.unfinished)

    def draining(self) -> set[Wanted]:
        """Returns the workers that are out of service."""
        return {key for key, supervisor in self._running.items() if supervisor.draining_since is not None}

    def check(self) -> None:
        """Raises the error of the runner itself that ended the supervision of a worker, if any."""
        for supervisor in self._running.values():
            supervisor.check()

    async def watch_devices(self, busy: Callable[[], bool]) -> None:
        """Takes slots out of service whose device fails, though no task has met that yet, until it is cancelled.

        Not while *busy*, when GPUs change and NVML is to be left alone.
        """
        while True:
            await asyncio.sleep(_LOOK_S)
            if busy():
                continue
            failing = await asyncio.to_thread(device.failing, self.slots)
            found = [each for each in tuple(self._running.values()) if each.slot.slot in failing]
            await asyncio.gather(*(each.doubt(failing[each.slot.slot]) for each in found))

    def share_threads(self) -> None:
        """Gives each slot a share of the node's threads from now on, where this process may (`skyinfra.node.shares`).

        Is called before anything is started.
        """
        try:
            self._shares = claim()
        except OSError as error:
            logger.info("the slots have the node's threads between them: %s", error.strerror)

    def _group(self, slot: InstanceInfo) -> Path | None:
        """Divides the threads anew for a worker of *slot* too; its group, where they are divided."""
        try:
            self._shares.divide({slot.worker, *(key.slot.worker for key in self._running)})
        except OSError as error:
            logger.warning("slot %s: no share of the node's threads: %s", slot.slot, error)
            return None
        return self._shares.of(slot.worker)

    def start(self, wanted: Wanted, *, threads: int) -> None:
        """Starts the worker of one slot. *threads*: the number of CPU threads of numerical libraries in it."""
        security = Credentials.derive(wanted.secret, role="worker", name=wanted.slot.node).security()
        confine = slots.environment(wanted.slot, wanted.vendor)
        folder, packages, variables = self._directory.path, self._directory.packages, image_variables(wanted.env)
        env = process.environment(
            wanted.slot, directory=folder, packages=packages, variables=variables, confine=confine, threads=threads
        )
        shared = {name: env[name] for name in (*process.THREAD_VARIABLES, *variables) if name not in confine}
        preload.announce(wanted.preload, packages=packages, env=shared)
        group = self._group(wanted.slot)

        def make() -> Nanny:
            return process.nanny(
                wanted.slot,
                scheduler=str(wanted.scheduler),
                host=head.own_address(wanted.scheduler),
                security=security,
                env=env,
                packages=packages,
                scratch=self._directory.scratch,
                group=group,
            )

        self._running[wanted] = SlotSupervisor(wanted.slot, make)

    def kill_task(self, slot: str, key: str) -> bool:
        """Kills the worker process on *slot* to end its task *key*; another process starts at once.

        Returns False where the task does not run any more. May be called from any thread.
        """
        supervisor = next((each for each in tuple(self._running.values()) if each.slot.slot == slot), None)
        if supervisor is None or not attempts.begun(key, self._directory.path):
            return False
        attempts.forgive(key, self._directory.path)
        supervisor.kill()
        return True

    async def stop(self, keys: Iterable[Wanted]) -> None:
        """Ends these workers and their tasks."""
        keys = tuple(keys)
        # Forgotten only after their end: the next stop continues a cancelled one.
        await asyncio.gather(*(self._running[key].stop() for key in keys if key in self._running))
        for key in keys:
            self._running.pop(key, None)

    async def busy(self, *, kept: bool = True) -> set[Wanted]:
        """Returns the workers that have something to finish. Not *kept*: that run a task."""
        pairs = tuple(self._running.items())
        answers = await asyncio.gather(*(supervisor.busy(kept=kept) for _, supervisor in pairs))
        return {key for (key, _), busy in zip(pairs, answers, strict=True) if busy}

    async def drain(
        self, keys: Iterable[Wanted], patience_s: float, *, since: float | None = None, why: str = _CHANGES
    ) -> set[Wanted]:
        """Does one round of draining: takes *keys* out of service and ends those that have nothing to finish.

        Returns the others. A task that has not finished *patience_s* seconds after the first round, or after *since*
        (``time.monotonic``), ends with its worker: the scheduler starts it on another slot. *why*: for the log.
        """
        keys = tuple(keys)
        # All are out of service before one is ended: what ran there would start again on another of them.
        left = await asyncio.gather(*(self._running[key].drain() for key in keys))
        pairs = zip(keys, left, strict=True)
        await asyncio.gather(*(self._drained(key, rest, patience_s, since, why) for key, rest in pairs))
        return {key for key in keys if key in self._running}

    async def _drained(
        self, key: Wanted, left: Unfinished | None, patience_s: float, start: float | None, why: str
    ) -> None:
        """Ends the worker *key* where nothing is *left* to finish or time is up."""
        supervisor = self._running[key]
        if left is None:
            await self.stop([key])
            logger.info("slot %s: drained and ended", key.slot.slot)
            return
        if left != supervisor.unfinished:
            logger.info("slot %s: %s; waits for %s", key.slot.slot, why, left)
        supervisor.unfinished = left
        since = supervisor.draining_since if start is None else start
        if since is None or time.monotonic() - since <= patience_s:
            return
        logger.warning(
            "slot %s: not finished within %g s and ended: %s; tasks start again on other slots",
            *(key.slot.slot, patience_s, left),
        )
        for task in left.running:
            attempts.forgive(task, self._directory.path)
        supervisor.kill()
        await self.stop([key])

    async def resume(self, keys: Iterable[Wanted]) -> None:
        """Takes drained workers back into service, and forgets those that have ended meanwhile."""
        for key in tuple(keys):
            supervisor = self._running[key]
            if await supervisor.resume():
                logger.info("slot %s: is wanted again", key.slot.slot)
            elif supervisor.ended:
                await self.stop([key])


def image_variables(declared: Iterable[tuple[str, str]]) -> dict[str, str]:
    """Returns the variables of the image for a worker, without those that the runner sets.

    Declarations of versions before were not checked for them.
    """
    return {name: value for name, value in declared if not is_ours(name)}
