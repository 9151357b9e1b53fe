"""What nodes tell the head of where they could not be set up, and telling it.

A node whose first boot has failed has no credentials of the fleet's TLS: it needs a runner for those. It tells the
head on a port of its own, beside the scheduler's, see `skyinfra.first_boot.report`.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Callable
from pathlib import Path

from skyinfra.engine.waiting import within
from skyinfra.errors import SkyinfraError
from skyinfra.first_boot import report
from skyinfra.node.node import Node
from skyinfra.protocol import _schema
from skyinfra.protocol.fleet import NodeFailure
from skyinfra.protocol.manifest import Endpoint

logger = logging.getLogger("skyinfra.runner")

_ANSWER_S = 5.0
# So many nodes may tell at once; the others are turned away, and tell again.
_AT_ONCE = 64


class BootReports:
    """Hears of failures at the port after *scheduler*'s. on_failure: gets the node's name and what it says."""

    def __init__(self, scheduler: Endpoint, secret: str, on_failure: Callable[[str, NodeFailure], None]) -> None:
        self._scheduler = scheduler
        self._key = report.key(secret)
        self._on_failure = on_failure
        self._server: asyncio.Server | None = None
        self._open = 0

    async def start(self) -> None:
        """Listens. Where it cannot, the fleet does without: its log says so."""
        host, port = self._scheduler.address, self._scheduler.port + 1
        try:
            self._server = await asyncio.start_server(self._serve, host, port, limit=report.LARGEST)
        except (OSError, OverflowError) as error:
            logger.warning("port %s is taken, so failed first boots of other nodes are not heard of: %s", port, error)

    async def close(self) -> None:
        """Ends it."""
        if self._server is not None:
            self._server.close()
            await self._server.wait_closed()
            self._server = None

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._open += 1
        try:
            if self._open <= _AT_ONCE:
                # What hangs up, says too much, or is no text is none of ours.
                with contextlib.suppress(OSError, ValueError):
                    await within(self._hear(reader, writer), _ANSWER_S)
        finally:
            self._open -= 1
            writer.close()

    async def _hear(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonce, line = report.greeting()
        writer.write(line.encode())
        await writer.drain()
        told = report.told((await reader.readline()).decode(), nonce, self._key)
        if told is not None:
            self._on_failure(str(told.get("node")), NodeFailure.of(told))
            writer.write(b"ok\n")
            await writer.drain()


def tell(path: Path, error: SkyinfraError, *, seconds: float) -> None:
    """Tells for *seconds* that the runner of the node *path* ended with *error*, as a failed first boot is told."""
    with contextlib.suppress(SkyinfraError):
        node = Node.load(path)
        shown = f"{type(error).__name__}: {error.field + ': ' if error.field else ''}{error.message}"
        failure = {
            "version": 1,
            "fleet": node.config.fleet,
            "node": node.name,
            "step": "runner",
            "error": shown,
            "lines": (error.hint or "").splitlines()[-15:],
        }
        until = time.monotonic() + seconds
        report.spread(_schema.write(node.config), node.secret, failure, lambda: time.monotonic() < until)
