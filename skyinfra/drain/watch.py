"""Whether the node is to leave its fleet, and what its tasks are told of that."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable

from skyinfra.drain import request
from skyinfra.drain.request import Drain
from skyinfra.errors import InvalidNodeConfig, StateDirectoryError
from skyinfra.node.folder import NodeDirectory
from skyinfra.node.node import Node
from skyinfra.protocol.interruption import Interruption

logger = logging.getLogger("skyinfra.runner")

# A node that stays because no other one has slots asks again: its replacement may have come.
_ASK_AGAIN_S = 15.0


class DrainWatch:
    """Watches ``drain.json`` of *directory*. *changed* is set when what it asks for changes.

    drain: what counts now; None while the node is to serve.
    """

    def __init__(
        self, directory: NodeDirectory, may_leave: Callable[[Node, str], Awaitable[bool]], *, changed: asyncio.Event
    ) -> None:
        self.drain: Drain | None = None
        self._directory = directory
        self._may_leave = may_leave
        self._changed = changed
        self._stamp: tuple[int, int, int] | None = None
        # May be followed though it says `if_others`.
        self._granted: Drain | None = None
        self._asking: asyncio.Task[None] | None = None

    def watch(self) -> None:
        """Notices that another thing is asked for. Tasks hear of it at once, whatever the runner is at."""
        stamp = request.stamp(self._directory)
        if stamp != self._stamp:
            self._stamp = stamp
            asked = self._read()
            if asked is None or not asked.if_others:
                self._tell(asked)
            self._changed.set()
        if self._asking is not None and self._asking.done():
            self._asking.result()

    async def wanted(self, node: Node) -> Drain | None:
        """What *node* is to follow now."""
        self.close()
        self._stamp = request.stamp(self._directory)
        asked = self._read()
        undecided = asked is not None and asked.if_others and asked not in (self.drain, self._granted)
        if asked is not None and undecided and not await self._may_leave(node, asked.why):
            logger.info("%s; no other node has slots, so this one stays in service", asked.why)
            self._asking = asyncio.create_task(self._ask_again(node, asked), name="may leave")
            asked = None
        if asked != self.drain:
            logger.info("%s", f"leaves the fleet: {asked.why}" if asked is not None else "serves the fleet again")
        self._tell(asked)
        self.drain = asked
        return asked

    def close(self) -> None:
        """Asks no more."""
        if self._asking is not None:
            self._asking.cancel()
            self._asking = None

    async def _ask_again(self, node: Node, asked: Drain) -> None:
        await asyncio.sleep(_ASK_AGAIN_S)
        while not await self._may_leave(node, asked.why):
            await asyncio.sleep(_ASK_AGAIN_S)
        self._granted = asked
        self._changed.set()

    def _read(self) -> Drain | None:
        try:
            return request.find(self._directory)
        except InvalidNodeConfig as refused:
            logger.error("%s: %s", type(refused).__name__, refused)
            return None

    def _tell(self, asked: Drain | None) -> None:
        """Lets the tasks know; what they were told already is not written again."""
        file = self._directory.interrupted_file
        if asked is None:
            file.unlink(missing_ok=True)
            return
        text = Interruption(asked.why, asked.until).dumps()
        try:
            if not file.exists() or file.read_text(encoding="utf-8") != text:
                self._directory.write(file, text)
        except StateDirectoryError as error:
            # The node is drained all the same; its tasks are ended without a word.
            logger.warning("%s", error)
