"""The connection of a node to the head: gets the layout of the fleet, tells the slots of the node, takes questions."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import Any

import distributed
from distributed.security import Security

from skyinfra.engine.waiting import within
from skyinfra.errors import InvalidNodeConfig, NotSupported
from skyinfra.head.relay import Respond, answered
from skyinfra.protocol import services
from skyinfra.protocol.fleet import FleetLayout
from skyinfra.protocol.manifest import Endpoint
from skyinfra.protocol.rpc import Peer

# The head answers after that long where nothing has changed: a silent link has been noticed by then.
_WAIT_S = 30.0
_ANSWER_S = 15.0
_RETRY_S = 1.0


async def ask(head: Endpoint, security: Security) -> FleetLayout:
    """The layout that the *head* wants now.

    Raises OSError where it does not answer, `InvalidNodeConfig` where its answer cannot be read.
    """
    async with _rpc(head, security) as scheduler:
        return await within(services.layout(scheduler), _ANSWER_S)


async def may_leave(head: Endpoint, security: Security, name: str, why: str) -> bool:
    """Whether the node *name* may leave: another one has slots in service. Raises OSError where *head* is silent."""
    async with _rpc(head, security) as scheduler:
        return await within(services.leave(scheduler, node=name, why=why, if_others=True), _ANSWER_S)


class Follower:
    """Follows *head* for the node *name* until it is closed; what breaks is tried again.

    layout: what the head wants, or None while it is not connected.

    *on_layout* gets the layout that the head wants, at first and whenever it changes; *on_refusal* gets the reason
    where what the head says cannot be read. *respond* answers what clients ask this node.
    """

    def __init__(
        self,
        head: Endpoint,
        security: Security,
        name: str,
        *,
        on_layout: Callable[[FleetLayout], None],
        on_refusal: Callable[[InvalidNodeConfig], None],
        respond: Respond,
    ) -> None:
        self.layout: FleetLayout | None = None
        self._head = head
        self._security = security
        self._name = name
        self._on_layout = on_layout
        self._on_refusal = on_refusal
        self._respond = respond
        self._promised: tuple[str, ...] | None = None
        self._leaving: str | None = None
        self._news = asyncio.Event()
        self._task = asyncio.create_task(self._run(), name=f"follow {head}")

    def promise(self, slots: Sequence[str], *, leaving: str | None = None) -> None:
        """Informs the head of the names of the slots that this node is to have, and why it leaves if it does."""
        self._promised = tuple(slots)
        self._leaving = leaving
        self._news.set()

    def check(self) -> None:
        """Raises what ended it, which only an error of the runner itself does."""
        if self._task.done():
            self._task.result()

    async def close(self) -> None:
        """Ends it."""
        self._task.cancel()
        await asyncio.gather(self._task, return_exceptions=True)

    async def _run(self) -> None:
        while True:
            try:
                async with _rpc(self._head, self._security) as scheduler, asyncio.TaskGroup() as group:
                    group.create_task(self._listen(scheduler))
                    group.create_task(self._report(scheduler))
                    group.create_task(self._take_questions(scheduler, group))
            except* (OSError, NotSupported):
                # The head is gone, silent, or of another version. Another one at its place knows nothing of this node.
                self._news.set()
            self.layout = None
            await asyncio.sleep(_RETRY_S)

    async def _listen(self, scheduler: Peer) -> None:
        while True:
            seen = self.layout.digest if self.layout is not None else None
            try:
                layout = await within(services.layout(scheduler, seen=seen, wait_s=_WAIT_S), _WAIT_S + _ANSWER_S)
            except InvalidNodeConfig as refused:
                self._on_refusal(refused)
                await asyncio.sleep(_WAIT_S)
                continue
            if layout.digest != seen:
                self.layout = layout
                self._on_layout(layout)

    async def _take_questions(self, scheduler: Peer, group: asyncio.TaskGroup) -> None:
        while True:
            asked = services.take_questions(scheduler, node=self._name, wait_s=_WAIT_S)
            for number, question, arguments in await within(asked, _WAIT_S + _ANSWER_S):
                group.create_task(self._answer(scheduler, number, question, arguments))

    async def _answer(self, scheduler: Peer, number: int, question: str, arguments: dict[str, Any]) -> None:
        answer = await answered(self._respond, question, arguments)
        await within(services.answer_question(scheduler, node=self._name, number=number, answer=answer), _ANSWER_S)

    async def _report(self, scheduler: Peer) -> None:
        while True:
            await self._news.wait()
            self._news.clear()
            if self._promised is not None:
                await within(services.promise(scheduler, node=self._name, slots=self._promised), _ANSWER_S)
            if self._leaving is not None:
                await within(services.leave(scheduler, node=self._name, why=self._leaving), _ANSWER_S)


def _rpc(head: Endpoint, security: Security) -> Any:
    return distributed.rpc(str(head), connection_args=security.get_connection_args("worker"), timeout=_ANSWER_S)
