"""The service of one node: the scheduler on the head, a worker per slot everywhere.

It is level-triggered: `Service` compares what runs with what the configuration wants and touches only the difference,
at the start, on SIGHUP, and when something ended by itself.
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
import signal
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from distributed import Nanny, Scheduler
from distributed.core import Status as DaskStatus
from distributed.security import Security

from skyinfra._errors import CredentialsRefused, NodeFailed, SkyinfraError, StateDirectoryError
from skyinfra.protocol.credentials import Credentials
from skyinfra.protocol.instance import InstanceInfo
from skyinfra.protocol.manifest import Endpoint
from skyinfra.runner import head, slots, worker
from skyinfra.runner.hardware import Hardware
from skyinfra.runner.node import Node
from skyinfra.runner.partitioner import Step
from skyinfra.runner.prepare import prepare
from skyinfra.runner.state import NodeDirectory, State, Status
from skyinfra.runner.supervisor import SlotSupervisor, pause

logger = logging.getLogger("skyinfra.runner")

_POLL_S = 0.2
_RETRY_S = 1.0


@dataclass(frozen=True)
class _Wanted:
    """What a slot's worker is started from; a slot whose `_Wanted` stays the same is left alone."""

    slot: InstanceInfo
    env: tuple[tuple[str, str], ...]
    pip: tuple[str, ...]
    scheduler: Endpoint
    secret: str = field(repr=False)


class Service:
    """Serves the node that the file *path* describes. *partitions*: whether it may change the GPUs' layout."""

    def __init__(self, path: Path, directory: NodeDirectory, *, partitions: bool) -> None:
        self._path = path
        self._directory = directory
        self._partitions = partitions
        self._node: Node | None = None
        self._stop = asyncio.Event()
        self._reload = asyncio.Event()
        self._scheduler: Scheduler | None = None
        self._scheduler_made_from: tuple[Endpoint, str] | None = None
        self._endpoint: Endpoint | None = None
        self._running: dict[_Wanted, SlotSupervisor] = {}
        self._phase: State = "starting"
        self._error: SkyinfraError | None = None
        self._obstacle: tuple[str, str] | None = None
        self._generation = 0
        self._threads = 1
        self._published: Status | None = None
        self._unwritten: Status | None = None
        self._was_ready = False

    async def run(self) -> None:
        """Serves until SIGTERM or SIGINT. Raises what stands in the way of the first start.

        Also ends, with a `NodeFailed`, when the node's directory is removed: nobody could find this runner any more.
        """
        self._handle_signals()
        head.configure(scratch=self._directory.scratch)
        applying = asyncio.create_task(self._apply())
        try:
            while not self._stop.is_set():
                if self._directory.lost:
                    raise NodeFailed("the node's directory was removed", field=str(self._directory.path))
                if applying.done():
                    self._take_result(applying)
                    if self._reload.is_set() or self._scheduler_ended():
                        self._reload.clear()
                        applying = asyncio.create_task(self._apply())
                for supervisor in self._running.values():
                    supervisor.check()
                self._publish()
                await pause(self._stop, _POLL_S)
        finally:
            await self._end(applying)

    def _handle_signals(self) -> None:
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self._stop.set)
        loop.add_signal_handler(signal.SIGHUP, self._reload.set)

    def _take_result(self, applying: asyncio.Task[None]) -> None:
        """What an `_apply` ended with: the first one must succeed, a later one may leave the node as it was."""
        error = applying.exception()
        if error is None or error is self._error:
            return
        if not isinstance(error, SkyinfraError) or self._generation == 0:
            raise error
        logger.error("%s: %s", type(error).__name__, error)
        self._error = error
        self._generation += 1

    def _scheduler_ended(self) -> bool:
        ended = self._scheduler is not None and self._scheduler.status in (DaskStatus.closed, DaskStatus.failed)
        if ended:
            logger.warning("the scheduler ended; starting it again")
        return ended

    async def _apply(self) -> None:
        """Brings the node to what its configuration says now."""
        node = await asyncio.to_thread(Node.load, self._path)
        self._node, self._error, self._obstacle = node, None, None
        self._phase = "starting"
        await prepare(node.config, self._directory)
        self._phase = "partitioning"
        wanted_slots = await self._slots(node)
        self._threads = max(1, (os.cpu_count() or 1) // len(wanted_slots))
        self._phase = "serving"
        endpoint = await self._head(node)
        if endpoint is None:
            return
        wanted = [
            _Wanted(slot, tuple(node.config.env.items()), node.config.pip, endpoint, node.secret)
            for slot in wanted_slots
        ]
        await self._stop_slots([key for key in self._running if key not in wanted])
        for key in wanted:
            if key not in self._running:
                self._running[key] = self._start_slot(node, key)
        self._generation += 1

    async def _slots(self, node: Node) -> tuple[InstanceInfo, ...]:
        """The slots that the node is to have, after its accelerators were brought to the wanted layout."""
        hardware = Hardware(node.config, self._directory)
        devices = await asyncio.to_thread(hardware.devices)
        if self._partitions:
            steps = await asyncio.to_thread(hardware.plan)
            await self._stop_slots([key for key in self._running if _is_touched(key.slot, steps)])
            partitions = await asyncio.to_thread(hardware.partition, _log_event)
        else:
            partitions = await asyncio.to_thread(hardware.standing)
        running = [key.slot for key in self._running]
        return slots.plan(node.config, devices, partitions, running=running)

    async def _head(self, node: Node) -> Endpoint | None:
        """The scheduler's address, once it answers; None where a new configuration came before that."""
        declared = head.parse(node.config.scheduler)
        if node.config.head:
            return await self._own_scheduler(node, declared)
        await self._stop_scheduler()
        security = Credentials.derive(node.secret, role="worker", name=node.name).security()
        self._obstacle = ("NodeFailed", f"the head {head.host_port(declared)} has not answered yet")
        while not self._reload.is_set():
            try:
                await head.check_reachable(declared, security=security)
            except (NodeFailed, CredentialsRefused) as error:
                self._obstacle = (type(error).__name__, str(error))
                await pause(self._reload, _RETRY_S)
            else:
                self._obstacle = None
                self._endpoint = declared
                return declared
        return None

    async def _own_scheduler(self, node: Node, declared: Endpoint) -> Endpoint:
        made_from = (declared, node.secret)
        if self._scheduler is None or self._scheduler_made_from != made_from or self._scheduler_ended():
            await self._stop_scheduler()
            security = Credentials.derive(node.secret, role="scheduler", name=node.name).security()
            self._scheduler = await head.start(declared, directory=self._directory, security=security)
            self._scheduler_made_from = made_from
        self._endpoint = head.reached_at(self._scheduler)
        return self._endpoint

    async def _stop_scheduler(self) -> None:
        if self._scheduler is not None:
            # A closing scheduler ends its workers; they are to start anew against the next one.
            await self._stop_slots(list(self._running))
            await self._scheduler.close(reason="skyinfra-runner")
            self._scheduler = None

    def _start_slot(self, node: Node, wanted: _Wanted) -> SlotSupervisor:
        security = Credentials.derive(wanted.secret, role="worker", name=node.name).security()

        def make() -> Nanny:
            return self._nanny(node, wanted, security)

        return SlotSupervisor(wanted.slot, make)

    def _nanny(self, node: Node, wanted: _Wanted, security: Security) -> Nanny:
        accelerator = node.config.accelerator
        confine = slots.environment(wanted.slot, accelerator.vendor if accelerator else None)
        directory = self._directory
        env = worker.environment(
            wanted.slot,
            directory=directory.path,
            packages=directory.packages,
            variables=dict(wanted.env),
            confine=confine,
            threads=self._threads,
        )
        return worker.nanny(
            wanted.slot,
            scheduler=str(wanted.scheduler),
            host=head.own_address(wanted.scheduler),
            security=security,
            env=env,
            packages=directory.packages,
            scratch=directory.scratch,
        )

    async def _stop_slots(self, keys: Sequence[_Wanted]) -> None:
        await asyncio.gather(*(self._running.pop(key).stop() for key in keys))

    async def _end(self, applying: asyncio.Task[None]) -> None:
        applying.cancel()
        await asyncio.wait({applying})
        if not applying.cancelled() and (error := applying.exception()) is not None:
            unknown = NodeFailed(f"{type(error).__name__}: {error}")
            self._error = error if isinstance(error, SkyinfraError) else unknown
        await self._stop_slots(list(self._running))
        await self._stop_scheduler()
        self._phase = "failed" if self._error else "stopped"
        self._publish()

    def _publish(self) -> None:
        """Writes ``status.json`` where it would say something new."""
        status = self._status()
        if status is None or status == self._published or self._directory.lost:
            return
        try:
            self._directory.write(self._directory.status_file, status.dumps())
        except StateDirectoryError as error:
            if not self._was_ready:
                raise
            # Tasks go on; what reads the status sees the old one until there is space again.
            if status != self._unwritten:
                logger.warning("%s", error)
            self._unwritten = status
            return
        self._published = status
        self._was_ready = self._was_ready or status.state == "ready"

    def _status(self) -> Status | None:
        if self._node is None:
            return None
        up = bool(self._running) and all(supervisor.up for supervisor in self._running.values())
        state: State = "ready" if self._phase == "serving" and up else self._phase
        error = self._obstacle
        if self._error is not None:
            state, error = "failed", (type(self._error).__name__, str(self._error))
        elif state == "serving" and error is None:
            broken = [f"slot {s.slot.slot}: {s.error}" for s in self._running.values() if s.error and not s.up]
            error = ("NodeFailed", "; ".join(broken)) if broken else None
        ended = state == "stopped"
        return Status(
            fleet=self._node.config.fleet,
            node=self._node.name,
            state=state,
            config_sha256=self._node.sha256,
            pid=None if ended else os.getpid(),
            scheduler=head.host_port(self._endpoint) if self._endpoint else None,
            simulated=self._node.config.simulate,
            error=error,
            slots=tuple(sorted((key.slot for key in self._running), key=lambda slot: slot.worker)),
            generation=self._generation,
        )


def _is_touched(slot: InstanceInfo, steps: Sequence[Step]) -> bool:
    """Whether the device of *slot* goes, or its GPU changes its MIG mode, which nothing on it survives."""
    goes = slot.uuid is not None and slot.uuid in {step.uuid for step in steps if step.action == "destroy"}
    return goes or slot.gpu in {step.gpu for step in steps if step.action == "mode"}


def _log_event(event: dict[str, Any]) -> None:
    logger.info("%s", json.dumps({"event": "partition", **event}))
