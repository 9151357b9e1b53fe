"""Brings the partitions and workers of a node to what is desired, and disturbs nothing that stays.

The workers of what goes are drained first: they get no new task, what they have not started starts elsewhere, and what
they have started ends. A GPU is partitioned as soon as nothing runs on what goes there; the others do not wait for it.
"""

from __future__ import annotations

import asyncio
import json
import logging
import math
import os
import time
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from skyinfra.drain import request
from skyinfra.drain.request import Drain
from skyinfra.errors import PartitionFailed, SkyinfraError
from skyinfra.gpu.hardware import Hardware
from skyinfra.gpu.record import PATIENCE_S, RecordedHardware
from skyinfra.head import start
from skyinfra.mig import At, Layout
from skyinfra.mig.steps import Partition
from skyinfra.node.folder import NodeDirectory, State
from skyinfra.node.node import Node
from skyinfra.protocol.instance import InstanceInfo
from skyinfra.protocol.manifest import Endpoint
from skyinfra.protocol.nodeconfig import NodeConfig
from skyinfra.runner import slots
from skyinfra.runner.membership import Membership
from skyinfra.runner.supervisor import pause
from skyinfra.runner.workers import Wanted, Workers

logger = logging.getLogger("skyinfra.runner")

_POLL_S = 0.2
# A request that root's part did not notice costs no more than this; systemd refuses five starts within ten seconds.
_REMIND_S = 5.0


@dataclass(eq=False)
class Reconciler:
    """Reconciles one node, again and again.

    partitions: whether it may change the GPUs' layout. superseded: set when something else is desired; a run then ends
    early. phase: the state that the node has come to.
    """

    directory: NodeDirectory
    workers: Workers
    membership: Membership
    superseded: asyncio.Event
    partitions: bool
    phase: State = "starting"
    # The actual layout of each GPU, as it was made last.
    _layouts: tuple[Layout, ...] = ()
    # Of the present run: the running workers that have to end, those of them whose device goes, and the scheduler's
    # address, once it has answered.
    _node: Node = field(init=False)
    _going: set[Wanted] = field(default_factory=set)
    _touched: set[Wanted] = field(default_factory=set)
    _endpoint: Endpoint | None = None
    # Why GPUs do not have their layout, while the others have.
    _failure: PartitionFailed | None = None
    # The last drain, and when what runs then is ended (``time.monotonic``): the clock may jump meanwhile.
    _ends: tuple[Drain, float] | None = None

    async def run(self, node: Node) -> bool:
        """Brings the node to what *node* says; False where something else was desired before that was done.

        A change that is refused leaves in service what is there; one that fails on a GPU is made on the others, and
        the failure is raised after that.
        """
        await self.workers.stop([key for key in self.workers if _is_foreign(key, node)])
        try:
            self._node, self._going, self._touched, self._endpoint = node, set(), set(), None
            self._failure = None
            await self._choose_places()
            return await self._run()
        except SkyinfraError:
            await self.workers.resume(self.workers.draining())
            raise

    async def drain(self, node: Node, drain: Drain) -> bool:
        """Takes every slot of the node out of service; False where something else was desired before that was done.

        The GPUs, and the scheduler of a head, stay as they are.
        """
        began = time.monotonic()
        if self._ends is None or self._ends[0] != drain:
            self._ends = drain, math.inf if drain.until is None else began + drain.until - time.time()
        patience_s = self._ends[1] - began
        self.membership.promise(node, (), drain=drain.why)
        while await self.workers.drain(self.workers, patience_s, since=began, why=drain.why):
            self.phase = "draining"
            if await pause(self.superseded, _POLL_S):
                return False
        # A head that is told to end beside this node may have ended already.
        if drain.by not in request.LAST and await self.membership.join(node) is None:
            return False
        self.membership.promise(node, (), drain=drain.why)
        return True

    async def _run(self) -> bool:
        brought_up: set[Wanted] | None = None
        while True:
            self._going = await self._drain_going()
            if self._going != brought_up:
                self.phase = "partitioning"
                in_the_way = await self._bring_up()
                if in_the_way is None:
                    return False
                if not in_the_way <= self._going:
                    self._going |= in_the_way
                    continue
                brought_up = set(self._going)
            await self.workers.resume(self.workers.draining() - self._going)
            if not self.workers.draining():
                if self._failure is not None:
                    raise self._failure
                return True
            self.phase = "draining"
            if await pause(self.superseded, _POLL_S):
                return False

    async def _drain_going(self) -> set[Wanted]:
        """Does one round of draining; a layout that follows the work ends no task, however long it runs."""
        config = self._node.config
        patient = self._going & self._touched if config.follow is not None else set()
        left = await self.workers.drain(self._going - patient, config.drain_seconds)
        return left | await self.workers.drain(patient, math.inf)

    async def _choose_places(self) -> None:
        """Chooses where the desired partitions are to be among those that stand: slots that have tasks go last."""
        hardware = self._hardware(self._node.config)
        if not self.partitions and not isinstance(hardware, RecordedHardware):
            return
        in_use: dict[int, set[At]] = {}
        for key in await self.workers.busy():
            if key.slot.gpu is not None and key.slot.start is not None:
                in_use.setdefault(key.slot.gpu, set()).add(key.slot.placement.at)
        await asyncio.to_thread(hardware.choose, in_use)

    def _hardware(self, config: NodeConfig) -> Hardware:
        recorded = not self.partitions and RecordedHardware.applies(config, self.directory)
        return (RecordedHardware if recorded else Hardware)(config, self.directory)

    async def _bring_up(self) -> set[Wanted] | None:
        """Partitions the GPUs that are free for it and starts what can start there.

        Gives the running workers that have to end first; None where something else is desired.
        """
        # The GPUs that cannot be partitioned yet.
        held = {key.slot.gpu for key in self._going & self._touched}
        config = self._held_back(self._node.config, held)
        hardware = self._hardware(config)
        devices = await asyncio.to_thread(hardware.devices)
        steps = await asyncio.to_thread(hardware.plan)
        touched = {key for key in self.workers if any(step.ends(key.slot.gpu, key.slot.uuid) for step in steps)}
        self._touched |= touched
        if touched or (held and not self.partitions):
            self._promise(self.workers.slots, without=touched)
            return touched
        self._failure = None
        try:
            partitions = await self._partition(hardware, config)
        except PartitionFailed as error:
            found = await asyncio.to_thread(_without_failed, hardware, config)
            if found is None:
                raise
            partitions, failed = found
            self._failure = error
            held |= failed
            made = self._held_back(config, failed).accelerator
            self._layouts = made.per_gpu if made is not None else ()
        if partitions is None:
            return None
        self.phase = "serving"
        # A booting node waits for its head here, after its GPUs were partitioned.
        endpoint = self._endpoint = self._endpoint or await self.membership.join(self._node)
        if endpoint is None:
            return None
        planned = slots.plan(config, devices, partitions, running=self.workers.slots, held=held)
        return self._start(endpoint, planned)

    async def _partition(self, hardware: Hardware, config: NodeConfig) -> Sequence[Partition] | None:
        """Returns the partitions of the desired layout; None where something else is desired before they are made."""
        if isinstance(hardware, RecordedHardware):
            return await self._made_by_root(hardware)
        if not self.partitions:
            return await asyncio.to_thread(hardware.actual)
        made = await asyncio.to_thread(hardware.partition, _log_event)
        self._layouts = config.accelerator.per_gpu if config.accelerator is not None else ()
        return made

    async def _made_by_root(self, recorded: RecordedHardware) -> tuple[Partition, ...] | None:
        """Returns the partitions, once root has made them; None where something else is desired before that."""
        await asyncio.to_thread(recorded.ask)
        asked = time.monotonic()
        deadline = asked + PATIENCE_S
        while (made := await asyncio.to_thread(recorded.made_by_root)) is None:
            if (now := time.monotonic()) - asked > _REMIND_S:
                recorded.remind()
                asked = now
            if now > deadline:
                raise PartitionFailed(
                    f"root has not partitioned the GPUs within {PATIENCE_S:g} s",
                    field="accelerator.layouts",
                    hint="`journalctl -u skyinfra-partition` says what it does.",
                )
            if await pause(self.superseded, _POLL_S):
                return None
        return made

    def _start(self, endpoint: Endpoint, planned: Sequence[InstanceInfo]) -> set[Wanted]:
        """Starts the workers of the *planned* slots; gives the running workers that have to end first."""
        config = self._node.config
        vendor = config.accelerator.vendor if config.accelerator is not None else None
        same = (vendor, tuple(config.env.items()), config.pip, config.preload, endpoint, self._node.secret)
        wanted = [Wanted(slot, *same) for slot in planned]
        in_the_way = {key for key in self.workers if key not in wanted}
        self._promise(planned, without=in_the_way)
        taken = {slot.slot for slot in self.workers.slots}
        threads = max(1, (os.cpu_count() or 1) // max(1, slots.count(config)))
        for key in wanted:
            if key.slot.slot not in taken:
                self.workers.start(key, threads=threads)
        return in_the_way

    def _promise(self, known: Sequence[InstanceInfo], *, without: Collection[Wanted]) -> None:
        """Tells the head which slots there are to be: those that are *known*, and as many more as the layout has."""
        going = {key.slot.slot for key in (*without, *self._going)}
        kept = [slot.worker for slot in known if slot.slot not in going]
        self.membership.promise(self._node, slots.names(self._node.name, slots.count(self._node.config), kept))

    def _held_back(self, config: NodeConfig, held: Collection[int | None]) -> NodeConfig:
        """*config* with the actual layout on the GPUs *held*. AMD GPUs of a node have one mode: all wait."""
        accelerator = config.accelerator
        if accelerator is None or accelerator.vendor == "amd" or not held or not self._layouts:
            return config
        desired = enumerate(accelerator.per_gpu)
        layouts = tuple(self._layouts[gpu] if gpu in held else each for gpu, each in desired)
        return replace(config, accelerator=replace(accelerator, layouts=layouts if any(layouts) else ()))


def _without_failed(hardware: Hardware, config: NodeConfig) -> tuple[tuple[Partition, ...], set[int | None]] | None:
    """Returns the partitions that can be used, and the GPUs that do not have their layout; None where none has it."""
    accelerator = config.accelerator
    if accelerator is None or accelerator.vendor != "nvidia":
        return None
    try:
        failed: set[int | None] = {step.gpu for step in hardware.plan()}
    except SkyinfraError:
        return None
    partitions = hardware.usable()
    if partitions is None or not failed or len(failed) == accelerator.count:
        return None
    return partitions, failed


def _is_foreign(key: Wanted, node: Node) -> bool:
    """Returns whether *key* belongs to another scheduler: its tasks are lost, so that nothing waits for them."""
    moved = not node.config.head and key.scheduler != start.parse(node.config.scheduler)
    return moved or key.secret != node.secret


def _log_event(event: dict[str, Any]) -> None:
    logger.info("%s", json.dumps({"event": "partition", **event}))
