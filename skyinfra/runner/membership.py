"""The node's place in its fleet: the head carries the scheduler and the fleet's layout, the other nodes follow it."""

from __future__ import annotations

import asyncio
import functools
import logging
from collections.abc import Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, field

from distributed.core import Status as DaskStatus

from skyinfra import desired
from skyinfra.elastic.size import FleetSize
from skyinfra.engine.credentials import Credentials
from skyinfra.engine.waiting import within
from skyinfra.errors import NotSupported, SkyinfraError
from skyinfra.head import start
from skyinfra.head.execution import Execution
from skyinfra.head.jobs import Jobs
from skyinfra.head.journal import Journal
from skyinfra.head.relay import Relay, Respond
from skyinfra.head.scheduler import FleetScheduler
from skyinfra.head.workload_layouts import WorkloadLayouts
from skyinfra.hours.ledger import Ledger
from skyinfra.node.folder import NodeDirectory
from skyinfra.node.node import Node
from skyinfra.protocol import services
from skyinfra.protocol.fleet import VERSION, FleetLayout
from skyinfra.protocol.manifest import Endpoint
from skyinfra.protocol.readings import MachineRun
from skyinfra.protocol.services import UseOfFleet
from skyinfra.runner import head_connection
from skyinfra.runner.head_connection import HeadConnection
from skyinfra.runner.reports import BootReports
from skyinfra.runner.supervisor import pause

logger = logging.getLogger("skyinfra.runner")

_POLL_S = 0.05
_WHOLE = FleetLayout(VERSION)


@dataclass(eq=False)
class Membership:
    """Ties a node to its fleet.

    changed: is set when the head wants another layout. respond: answers clients. endpoint: the scheduler's, once it has
    answered. obstacle: why it has not.
    """

    directory: NodeDirectory
    changed: asyncio.Event
    respond: Respond
    endpoint: Endpoint | None = None
    obstacle: SkyinfraError | None = None
    _scheduler: FleetScheduler | None = None
    _scheduler_made_from: tuple[Endpoint, str] | None = None
    _jobs: Jobs | None = None
    _ledger: Ledger | None = None
    _runs: Sequence[MachineRun] = ()
    _workload_layouts: WorkloadLayouts | None = None
    _size: FleetSize | None = None
    # What ends with the scheduler.
    _parts: AsyncExitStack = field(default_factory=AsyncExitStack)
    _head_connection: HeadConnection | None = None
    _sha256: str = ""
    # The layout that the node is brought to.
    _layout: FleetLayout = _WHOLE
    # The layout that the head wants, with the hash of the node configuration.
    _heard: tuple[str, FleetLayout | None] = ("", None)

    def layout_for(self, node: Node) -> FleetLayout | None:
        """Returns the layout that the head wants of *node*, or wanted last for the same configuration."""
        self._sha256 = node.sha256
        if (
            self._head_connection is not None
            and self._head_connection.is_to(node)
            and self._head_connection.layout is not None
        ):
            self._heard = node.sha256, self._head_connection.layout
        return self._heard[1] if self._heard[0] == node.sha256 else None

    async def join(self, node: Node) -> Endpoint | None:
        """Returns the scheduler's address, once it answers; None where the desired state changes before."""
        declared = start.parse(node.config.scheduler)
        if node.config.head:
            await self._disconnect()
            self.endpoint = await self._own_scheduler(node, declared)
            if self._workload_layouts is not None:
                model = node.config.accelerator.mig_model if node.config.accelerator is not None else None
                self._workload_layouts.update(node.config.follow, model, self._layout)
            if self._size is not None:
                self._size.update(node.config)
            return self.endpoint
        await self._stop_scheduler()
        connected = await self._connect(node)
        while connected.layout is None and connected.refused is None:
            self.obstacle = connected.obstacle
            if await pause(self.changed, _POLL_S):
                return None
        self.obstacle = None
        self.endpoint = declared
        return declared

    def offer(self, layout: FleetLayout) -> None:
        """Notes that the node is brought to *layout*; on the head, passes it on to the other nodes."""
        self._layout = layout
        if self._scheduler is not None:
            self._scheduler.offer(layout)

    def promise(self, node: Node, slots: Sequence[str], *, drain: str | None = None) -> None:
        """Informs the head of the names of the slots that *node* is to have, and why it is drained, if it is."""
        if self._scheduler is not None:
            self._scheduler.promise(node.name, tuple(slots))
            if drain is not None:
                self._scheduler.leave(node.name, drain)
        elif self._head_connection is not None:
            self._head_connection.promise(slots, drain_reason=drain)

    def report(self, node: Node, not_started: dict[str, str], unwatched: str | None) -> None:
        """Informs the head why slots of *node* do not start, and what is missing there. Is called often."""
        if self._head_connection is not None:
            self._head_connection.report(not_started, unwatched)
        elif self._scheduler is not None:
            self._scheduler.sick.report(node.name, not_started, unwatched)

    async def report_idle(
        self, node: Node, idle_s: float, keep_s: float, begun: bool, stops: str | None
    ) -> UseOfFleet | None:
        """Tells the head for how long *node* knows of no use, see `FleetUse.report`; None where it does not answer."""
        if self._scheduler is not None:
            return self._scheduler.use.report(node.name, idle_s, keep_s, begun, stops, node.config.ends_itself)
        connected = self._head_connection is not None and self._head_connection.layout is not None
        if not connected or not node.config.ends_itself:
            return None  # a head that is not there is asked for a long time, and a node that stays has nothing to hear
        try:
            async with head_connection.connection(node) as scheduler:
                reported = services.use(
                    scheduler, node=node.name, idle_s=idle_s, keep_s=keep_s, begun=begun, stops=stops
                )
                heard = await within(reported, head_connection.ANSWER_S)
        except (OSError, NotSupported):
            return None
        budget_s = heard[3] if len(heard) > 3 else None
        return float(heard[0]), float(heard[1]), bool(heard[2]), None if budget_s is None else float(budget_s)

    async def may_retire(self, node: Node, last: bool) -> bool | None:
        """Returns whether the head lets *node* end, which has no task; None where it does not answer. *last*: whether
        the node ends now if it may."""
        if self._head_connection is None or self._head_connection.layout is None:
            return None
        try:
            async with head_connection.connection(node) as scheduler:
                asked = services.retire(scheduler, node=node.name, last=last)
                return bool(await within(asked, head_connection.ANSWER_S))
        except (OSError, NotSupported):
            return None

    def measured(self, node: Node, runs: Sequence[MachineRun]) -> None:
        """Informs the head of all runs of the machine of *node*, once there is one."""
        self._runs = runs
        if self._head_connection is not None:
            self._head_connection.measured(runs)
        elif self._ledger is not None and node.config.head:
            self._ledger.take(node.name, runs)

    async def may_drain(self, node: Node, why: str) -> bool:
        """Returns whether another node of the fleet has slots in service; False where the head does not answer."""
        if node.config.head:
            return self._scheduler is not None and self._scheduler.leave(node.name, why, if_others=True)
        try:
            async with head_connection.connection(node) as scheduler:
                return await within(
                    services.leave(scheduler, node=node.name, why=why, if_others=True), head_connection.ANSWER_S
                )
        except (OSError, NotSupported):
            return False

    def check(self) -> None:
        """Raises the error of the runner itself that ended its follower or jobs, if any."""
        if self._jobs is not None:
            self._jobs.check()
        if self._workload_layouts is not None:
            self._workload_layouts.check()
        if self._size is not None:
            self._size.check()
        if self._head_connection is not None:
            self._head_connection.check()

    @property
    def alone(self) -> bool:
        """Whether no node needs this one: it is no head, or no worker is registered with its scheduler."""
        return self._scheduler is None or not self._scheduler.workers

    @property
    def refused(self) -> SkyinfraError | None:
        """Why the head's layout is not followed."""
        return self._head_connection.refused if self._head_connection is not None else None

    @property
    def scheduler_ended(self) -> bool:
        """Whether the head's scheduler was shut down, for instance by a client."""
        return self._scheduler is not None and self._scheduler.status in (DaskStatus.closed, DaskStatus.failed)

    async def close(self) -> None:
        """Ends the scheduler, or stops following it."""
        await self._disconnect()
        await self._stop_scheduler()

    async def _own_scheduler(self, node: Node, declared: Endpoint) -> Endpoint:
        made_from = (declared, node.secret)
        if self.scheduler_ended:
            logger.warning("the scheduler ended; starting it again")
        if self._scheduler is None or self._scheduler_made_from != made_from or self.scheduler_ended:
            await self._stop_scheduler()
            security = Credentials.derive(node.secret, role="scheduler", name=node.name).security()
            relay = Relay(node.name, self.respond)
            jobs, ledger = self._jobs or Jobs(Journal(self.directory.jobs)), self._ledger
            if ledger is None:
                ledger = self._ledger = Ledger(self.directory.jobs, lambda: self.directory.lost)
                await asyncio.to_thread(ledger.load)
                ledger.take(node.name, self._runs)
            if self._jobs is None:
                await jobs.load()
                # They outlive a scheduler.
                self._jobs = jobs
            self._scheduler = await start.start(
                declared,
                directory=self.directory,
                security=security,
                layout=self._layout,
                relay=relay,
                jobs=jobs,
                ledger=ledger,
            )
            self._scheduler_made_from = made_from
            self._parts.push_async_callback(self._scheduler.close, reason="skyinfra-runner")
            # A closing scheduler ends its workers, which start anew with the next one, but for those that run a job.
            self._parts.push_async_callback(jobs.stop)
            self._scheduler.records.submitter_of_job = jobs.submitter_of
            ledger.start(self._scheduler.records.drain_uses)
            ledger.on_machine = self._scheduler.sick.suspects.forget
            self._parts.push_async_callback(ledger.stop)
            self._scheduler.sick.on_sick = jobs.tell_sick
            self._scheduler.sick.is_gone = relay.is_gone
            self._scheduler.has_jobs = lambda: jobs.any
            self._scheduler.use.on_stops, self._scheduler.use.spent = jobs.tell_stops, ledger.spent
            client = Credentials.derive(node.secret, role="client", name=node.name).security()
            jobs.start(Execution(self._scheduler, relay, client))
            write = functools.partial(desired.follow, self.directory)
            self._workload_layouts = WorkloadLayouts(self._scheduler, jobs.waiting, write)
            self._parts.push_async_callback(self._workload_layouts.close)
            address = functools.partial(_host_port, self._scheduler)
            self._size = FleetSize(self._scheduler, jobs.waiting, self.directory, address)
            self._parts.push_async_callback(self._size.close)
            if node.config.provider != "local" and not node.config.given:
                # The others have no first boot.
                reports = BootReports(declared, node.secret, self._scheduler.fail)
                self._parts.push_async_callback(reports.close)
                await reports.start()
        self._scheduler.declared_secrets = node.config.secrets
        budget = node.config.budget or node.config.warn_budget
        self._scheduler.use.budget = (node.name, budget) if budget is not None else None
        self._scheduler.use.budget_stops = node.config.budget is not None
        return start.reached_at(self._scheduler)

    async def _stop_scheduler(self) -> None:
        await self._parts.aclose()
        self._scheduler = self._workload_layouts = self._size = None

    async def _connect(self, node: Node) -> HeadConnection:
        if self._head_connection is None or not self._head_connection.is_to(node):
            await self._disconnect()
            self._head_connection = HeadConnection(node, self._hear, self.respond)
            self._head_connection.measured(self._runs)
        return self._head_connection

    async def _disconnect(self) -> None:
        if self._head_connection is not None:
            await self._head_connection.close()
            self._head_connection = None

    def _hear(self, layout: FleetLayout) -> None:
        if self._heard != (self._sha256, layout):
            self._heard = self._sha256, layout
            if layout != self._layout:
                self.changed.set()


def _host_port(scheduler: FleetScheduler) -> str:
    return start.host_port(start.reached_at(scheduler))
