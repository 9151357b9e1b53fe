"""Whether the node is to be drained now, and telling its tasks."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field

from skyinfra.drain import request
from skyinfra.drain.preemption import NoticeHandler
from skyinfra.drain.request import Drain
from skyinfra.errors import InvalidNodeConfig, StateDirectoryError
from skyinfra.node.folder import NodeDirectory, stamp
from skyinfra.node.node import Node
from skyinfra.protocol.interruption import Interruption

logger = logging.getLogger("skyinfra.runner")

# A node that stays because no other one has slots asks again: its replacement may have come.
_ASK_AGAIN_S = 15.0


@dataclass(eq=False)
class DrainWatch:
    """Watches ``drain.json`` of *directory*, and the notices that become one; sets *changed* when the request changes.

    may_drain: whether the fleet can do without a node. drain: the request that holds now; None while the node serves.
    """

    directory: NodeDirectory
    may_drain: Callable[[Node, str], Awaitable[bool]]
    changed: asyncio.Event
    drain: Drain | None = None
    _stamp: tuple[int, int, int] | None = None
    # The request with `if_others` that the head has granted.
    _granted: Drain | None = None
    _asking: asyncio.Task[None] | None = None
    _notices: NoticeHandler = field(init=False)
    _unhandled: str = ""

    def __post_init__(self) -> None:
        self._notices = NoticeHandler(self.directory)

    def watch(self) -> None:
        """Notices a changed request and informs tasks at once, even while the runner is busy."""
        self._handle_notice()
        if stamp(self.directory.drain_file) != self._stamp:
            drain = self._read()
            if drain is None or not drain.if_others:
                self._inform_tasks(drain)
            self.changed.set()
        elif self.drain is not None and self.drain.over:
            self.changed.set()
        if self._asking is not None and self._asking.done():
            self._asking.result()

    async def wanted(self, node: Node) -> Drain | None:
        """Returns the request that *node* has to follow now."""
        self.close()
        self._handle_notice()
        drain = self._read()
        undecided = drain is not None and drain.if_others and drain not in (self.drain, self._granted)
        if drain is not None and undecided and not await self.may_drain(node, drain.why):
            logger.info("%s; no other node has slots, so this one stays in service", drain.why)
            self._asking = asyncio.create_task(self._ask_again(node, drain), name="may drain")
            drain = None
        if drain != self.drain:
            logger.info("%s", f"leaves the fleet: {drain.why}" if drain is not None else "serves the fleet again")
        self._inform_tasks(drain)
        self.drain = drain
        return drain

    def close(self) -> None:
        """Stops asking the head."""
        if self._asking is not None:
            self._asking.cancel()
            self._asking = None

    async def _ask_again(self, node: Node, drain: Drain) -> None:
        granted = False
        while not granted:
            await asyncio.sleep(_ASK_AGAIN_S)
            granted = await self.may_drain(node, drain.why)
        self._granted = drain
        self.changed.set()

    def _handle_notice(self) -> None:
        try:
            self._notices.poll()
            self._unhandled = ""
        except StateDirectoryError as error:
            if str(error) != self._unhandled:
                logger.error("a preemption notice cannot be handled: %s", error)
            self._unhandled = str(error)

    def _read(self) -> Drain | None:
        self._stamp = stamp(self.directory.drain_file)
        try:
            return request.find(self.directory)
        except InvalidNodeConfig as refused:
            logger.error("%s: %s", type(refused).__name__, refused)
            return None

    def _inform_tasks(self, drain: Drain | None) -> None:
        file = self.directory.interrupted_file
        if drain is None:
            file.unlink(missing_ok=True)
            return
        if drain == self.drain and file.exists():
            return
        try:
            self.directory.write(file, Interruption.now(drain.why, drain.until).dumps())
        except StateDirectoryError as error:
            # The node is drained all the same; its tasks end without notice.
            logger.warning("%s", error)
