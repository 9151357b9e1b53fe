"""Failures of first boots: the head receives those of other nodes, and a runner reports its own in the same way.

A node whose first boot has failed cannot use the fleet's TLS, which needs a runner. It reports on a port of its own,
next to the scheduler's, see `skyinfra.first_boot.report`.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from skyinfra.engine.handshakes import HANDSHAKES
from skyinfra.engine.waiting import within
from skyinfra.errors import SkyinfraError
from skyinfra.first_boot import report, report_client
from skyinfra.node.node import Node
from skyinfra.protocol.fleet import NodeFailure
from skyinfra.protocol.manifest import Endpoint

logger = logging.getLogger("skyinfra.runner")

_ANSWER_S = 5.0


class BootReports:
    """Receives failures at the port after *scheduler*'s. on_failure: is called with the node's name and failure."""

    def __init__(self, scheduler: Endpoint, secret: str, on_failure: Callable[[str, NodeFailure], None]) -> None:
        self._scheduler = scheduler
        self._key = report.key(secret)
        self._on_failure = on_failure
        self._server: asyncio.Server | None = None

    async def start(self) -> None:
        """Listens. Where it cannot, it logs that; the fleet works without. Nobody knows where a head at any port is."""
        if self._scheduler.port == 0:
            return
        host, port = self._scheduler.address, self._scheduler.port + 1
        try:
            self._server = await asyncio.start_server(self._serve, host, port, limit=report.LARGEST)
        except (OSError, OverflowError) as error:
            logger.warning("port %s is taken, so failed first boots of other nodes are not heard of: %s", port, error)

    async def close(self) -> None:
        """Stops listening."""
        if self._server is not None:
            self._server.close()
            await self._server.wait_closed()
            self._server = None

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        # A peer that hangs up, sends too much, or sends no text is none of the fleet.
        with contextlib.closing(writer), contextlib.suppress(OSError, ValueError):
            # None where the peer has gone already.
            address = writer.get_extra_info("peername") or ("",)
            with HANDSHAKES.one(address[0], writer.close):
                await within(self._hear(reader, writer), _ANSWER_S)

    async def _hear(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonce, line = report.greeting()
        writer.write(line.encode())
        await writer.drain()
        reported = report_client.reported((await reader.readline()).decode(), nonce, self._key)
        if reported is not None:
            self._on_failure(str(reported.get("node")), NodeFailure.of(reported))
            writer.write(b"ok\n")
            await writer.drain()


def send_failure(path: Path, error: SkyinfraError, *, seconds: float) -> None:
    """Reports for *seconds* that the runner of the node *path* ended with *error*, as a failed first boot does."""
    with contextlib.suppress(SkyinfraError):
        node = Node.load(path)
        until = time.monotonic() + seconds
        failure = failure_of(node.config.fleet, node.name, error)
        report.spread(node.config.to_json(), node.secret, failure, lambda: time.monotonic() < until)


def failure_of(fleet: str, node: str, error: SkyinfraError) -> dict[str, Any]:
    """Returns the document that reports *error*, with the fields of a failed first boot."""
    shown = f"{type(error).__name__}: {error.field + ': ' if error.field else ''}{error.message}"
    lines = (error.hint or "").splitlines()[-15:]
    return {"version": 1, "fleet": fleet, "node": node, "step": "runner", "error": shown, "lines": lines}
