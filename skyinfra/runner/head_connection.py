"""The connection of a node to the head: gets the layout of the fleet, tells the slots of the node, takes questions."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, cast

import distributed
from distributed.security import Security

from skyinfra.engine.credentials import Credentials
from skyinfra.engine.waiting import check_task, end_task, within
from skyinfra.errors import CredentialsRefused, InvalidNodeConfig, NodeFailed, NotSupported, SkyinfraError
from skyinfra.head import start
from skyinfra.head.relay import Respond, answered
from skyinfra.node.node import Node
from skyinfra.protocol import services
from skyinfra.protocol.fleet import FleetLayout
from skyinfra.protocol.readings import MachineRun
from skyinfra.protocol.rpc import Peer

logger = logging.getLogger("skyinfra.runner")

# The head answers after that long where nothing has changed: a silent link has been noticed by then.
_WAIT_S = 30.0
ANSWER_S = 15.0
_RETRY_S = 1.0


def worker_security(node: Node) -> Security:
    """Returns the TLS settings with which *node* connects to the head."""
    return Credentials.derive(node.secret, role="worker", name=node.name).security()


def connection(node: Node, head: str | None = None) -> Any:
    """Returns a connection of *node* to the scheduler at *head*, ``HOST:PORT``; by default the configured one."""
    arguments = worker_security(node).get_connection_args("worker")
    address = start.parse(head or node.config.scheduler)
    return distributed.rpc(str(address), connection_args=arguments, timeout=ANSWER_S)


@dataclass(eq=False)
class HeadConnection:
    """Follows the head of *node* until it is closed; what breaks is tried again.

    on_layout: gets the layout that the head wants, at first and whenever it changes. respond: answers what clients ask
    this node. layout: what the head wants, or None while it is not connected. refused: why what the head says cannot be
    read. obstacle: why the head cannot be reached.
    """

    node: Node
    on_layout: Callable[[FleetLayout], None]
    respond: Respond
    layout: FleetLayout | None = None
    refused: InvalidNodeConfig | None = None
    obstacle: SkyinfraError = field(init=False)
    _promised: tuple[str, ...] | None = None
    _drain_reason: str | None = None
    _problems: tuple[dict[str, str], str | None] = field(default_factory=lambda: ({}, None))
    _runs: list[MachineRun] = field(default_factory=list)
    _news: asyncio.Event = field(default_factory=asyncio.Event)
    _closed: bool = False

    def __post_init__(self) -> None:
        head = start.host_port(start.parse(self.node.config.scheduler))
        self.obstacle = NodeFailed(f"the head {head} has not answered yet")
        self._task = asyncio.create_task(self._run(), name=f"follow {head}")

    def is_to(self, node: Node) -> bool:
        """Returns whether the connection is the one that *node* needs."""
        mine = self.node
        return (mine.config.scheduler, mine.secret, mine.name) == (node.config.scheduler, node.secret, node.name)

    def promise(self, slots: Sequence[str], *, drain_reason: str | None = None) -> None:
        """Informs the head of the names of the slots that this node is to have, and why it leaves if it does."""
        self._promised = tuple(slots)
        self._drain_reason = drain_reason
        self._news.set()

    def report(self, not_started: dict[str, str], unwatched: str | None) -> None:
        """Informs the head why slots of this node do not start, by their names, and what is missing here."""
        if (not_started, unwatched) != self._problems:
            self._problems = not_started, unwatched
            self._news.set()

    def measured(self, runs: Sequence[MachineRun]) -> None:
        """Informs the head of all runs of the machine of this node."""
        self._runs = list(runs)
        self._news.set()

    def check(self) -> None:
        """Raises what ended it, which only an error of the runner itself does."""
        check_task(self._task)

    async def close(self) -> None:
        """Ends it."""
        # A group of tasks forgets that it was cancelled where one of them fails in the same moment (Python 3.11).
        self._closed = True
        await end_task(self._task)

    async def _run(self) -> None:
        head, security = start.parse(self.node.config.scheduler), worker_security(self.node)
        while True:
            try:
                await start.check_reachable(head, security=security)
                async with connection(self.node) as scheduler, asyncio.TaskGroup() as group:
                    group.create_task(self._listen(scheduler))
                    group.create_task(self._report(scheduler))
                    group.create_task(self._take_questions(scheduler, group))
            except* (NodeFailed, CredentialsRefused, NotSupported) as failed:
                self.obstacle = cast(SkyinfraError, failed.exceptions[0])
            except* OSError as failed:
                self.obstacle = NodeFailed(f"the connection to the head broke: {failed.exceptions[0]}")
            except* asyncio.CancelledError:
                # Of such a group, which cancels this task too late, in the next round; or by `close`.
                self.obstacle = NodeFailed("the connection to the head broke")
            if self._closed:
                return
            # Another head at its place knows nothing of this node.
            self._news.set()
            self.layout = self.refused = None
            await asyncio.sleep(_RETRY_S)

    async def _listen(self, scheduler: Peer) -> None:
        while True:
            seen = self.layout.digest if self.layout is not None else None
            try:
                layout = await within(services.layout(scheduler, seen=seen, wait_s=_WAIT_S), _WAIT_S + ANSWER_S)
            except InvalidNodeConfig as refused:
                if str(refused) != str(self.refused):
                    logger.error("%s: %s", type(refused).__name__, refused)
                self.refused = refused
                await asyncio.sleep(_WAIT_S)
                continue
            self.refused = None
            if layout.digest != seen:
                self.layout = layout
                self.on_layout(layout)

    async def _take_questions(self, scheduler: Peer, group: asyncio.TaskGroup) -> None:
        while True:
            asked = services.take_questions(scheduler, node=self.node.name, wait_s=_WAIT_S)
            for number, question, arguments in await within(asked, _WAIT_S + ANSWER_S):
                group.create_task(self._answer(scheduler, number, question, arguments))

    async def _answer(self, scheduler: Peer, number: int, question: str, arguments: dict[str, Any]) -> None:
        answer = await answered(self.respond, question, arguments)
        await within(services.answer_question(scheduler, node=self.node.name, number=number, answer=answer), ANSWER_S)

    async def _report(self, scheduler: Peer) -> None:
        while True:
            await self._news.wait()
            self._news.clear()
            if self._promised is not None:
                await within(services.promise(scheduler, node=self.node.name, slots=self._promised), ANSWER_S)
            if self._drain_reason is not None:
                await within(services.leave(scheduler, node=self.node.name, why=self._drain_reason), ANSWER_S)
            with contextlib.suppress(NotSupported):  # a head of an earlier version
                slots, unwatched = self._problems
                reported = services.report(scheduler, node=self.node.name, not_started=slots, unwatched=unwatched)
                await within(reported, ANSWER_S)
                if self._runs:
                    measured = services.machine_runs(scheduler, node=self.node.name, runs=self._runs)
                    await within(measured, ANSWER_S)
