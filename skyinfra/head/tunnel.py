"""Tunnels from clients: to the dashboard of the scheduler, which nothing else can connect to, and to ports of nodes.

Dask's dashboard starts with the first call of a client, and ends when no client has used it for a while. Each
connection of a browser is one here. Connections to ports of nodes are those of `skyinfra.engine.forwarding`.
"""

from __future__ import annotations

import asyncio
import contextlib
import importlib.util
import itertools
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from distributed import Scheduler
from distributed.comm import Comm
from distributed.core import Status

from skyinfra.engine.dask_scheduler import Pages
from skyinfra.engine.forwarding import JOIN_S
from skyinfra.engine.waiting import within
from skyinfra.errors import MissingDependency, NotSupported, SkyinfraError
from skyinfra.protocol import rpc, services

_PART = 256 * 1024
# A browser has some connections; a program that opens more has gone wrong.
_MOST = 64
# A client asks for more all the time; one that has not asked for that long is gone. So is the last one.
_GONE_S = 60.0
_LOOK_S = 15.0
_LONGEST_WAIT_S = 20.0
# Connections to ports of nodes; of each, `forwarding.WINDOW` bytes may wait here both ways.
_MOST_FORWARDED = 256
# For the last messages to a peer that takes none.
_CLOSE_S = 10.0


@dataclass
class _Line:
    reader: asyncio.StreamReader
    writer: asyncio.StreamWriter
    used: float


class Tunnel:
    """Connections of clients to the dashboard of *scheduler*."""

    def __init__(self, scheduler: Scheduler) -> None:
        self._scheduler = scheduler
        self._lines: dict[int, _Line] = {}
        self._numbers = itertools.count(1)
        self._pages: Pages | None = None
        self._used_at = 0.0
        self.handlers = rpc.handlers(
            services.dashboard_open.by(self.open),
            services.dashboard_receive.by(self.receive),
            services.dashboard_send.by(self.send),
            services.dashboard_close.by(self.close),
        )

    async def open(self) -> int:
        """Opens a connection; its number. Raises `MissingDependency`, `NotSupported`."""
        pages = self._begun()
        self._close_unused()
        if len(self._lines) >= _MOST:
            raise NotSupported(f"the dashboard has {_MOST} connections already", hint="Close other windows of it.")
        reader, writer = await pages.connect()
        number = next(self._numbers)
        self._lines[number] = _Line(reader, writer, time.monotonic())
        return number

    async def receive(self, number: int, wait_s: float) -> bytes | None:
        """Returns the bytes of the connection *number*: none after *wait_s* seconds; None where it has ended."""
        line = self._used(number)
        if line is None:
            return None
        try:
            data = await within(line.reader.read(_PART), min(wait_s, _LONGEST_WAIT_S))
        except TimeoutError:
            return b""
        except OSError:
            data = b""
        if not data:
            self.close(number)
        return data or None

    async def send(self, number: int, data: bytes) -> bool:
        """Sends *data* on the connection *number*; False where it has ended."""
        line = self._used(number)
        if line is None:
            return False
        try:
            line.writer.write(data)
            await line.writer.drain()
        except OSError:
            self.close(number)
            return False
        return True

    def close(self, number: int) -> None:
        """Closes the connection *number*."""
        line = self._lines.pop(number, None)
        if line is not None:
            line.writer.close()

    def _used(self, number: int) -> _Line | None:
        line = self._lines.get(number)
        if line is not None:
            line.used = self._used_at = time.monotonic()
        return line

    def _close_unused(self) -> None:
        for number, line in tuple(self._lines.items()):
            if time.monotonic() - line.used > _GONE_S:
                self.close(number)

    def _look(self) -> None:
        """Ends the dashboard that nobody uses."""
        self._close_unused()
        if self._lines or time.monotonic() - self._used_at <= _GONE_S:
            asyncio.get_running_loop().call_later(_LOOK_S, self._look)
        elif self._pages is not None:
            self._pages.close()
            self._pages = None

    def _begun(self) -> Pages:
        """Returns the dashboard, which begins here where nobody has used it."""
        self._used_at = time.monotonic()
        if self._pages is not None:
            return self._pages
        if importlib.util.find_spec("bokeh") is None:
            raise MissingDependency(
                "the head of the fleet has no bokeh, which draws the dashboard",
                hint='Install it beside the runner: pip install "skyinfra[dashboard]" where the fleet is local, '
                'sky.Image(runner="skyinfra[dashboard]==VERSION") elsewhere.',
            )
        self._pages = Pages(self._scheduler)
        asyncio.get_running_loop().call_later(_LOOK_S, self._look)
        return self._pages


@dataclass(eq=False)
class _Meeting:
    """A connection that waits for the other one with its ticket. over: once both have ended."""

    other: asyncio.Future[Comm] = field(default_factory=lambda: asyncio.get_running_loop().create_future())
    over: asyncio.Event = field(default_factory=asyncio.Event)


class Forwards:
    """Joins the connections of clients and nodes that have the same ticket; see `skyinfra.engine.forwarding`.

    *on_data*: is called for what either says.
    """

    def __init__(self, on_data: Callable[[], object] = lambda: None) -> None:
        self._on_data = on_data
        self._waiting: dict[str, _Meeting] = {}
        self._there = 0

    async def join(self, comm: Comm, ticket: str) -> Status:
        """Answers a peer that has opened *comm* for one connection: returns once that has ended."""
        meeting = self._waiting.pop(ticket, None)
        if meeting is not None and not meeting.other.done():
            meeting.other.set_result(comm)
            await meeting.over.wait()
        elif self._there >= _MOST_FORWARDED:
            refused = NotSupported(
                f"the head forwards {_MOST_FORWARDED} connections already", hint="Close some of them."
            )
            await comm.write(await rpc.answered(_raised(refused)))
        else:
            await self._wait(comm, ticket)
        await _closed(comm)
        return Status.dont_reply

    async def _wait(self, comm: Comm, ticket: str) -> None:
        meeting = self._waiting[ticket] = _Meeting()
        self._there += 1
        try:
            with contextlib.suppress(TimeoutError):
                await _pass_on(self._on_data, comm, await within(meeting.other, JOIN_S))
        finally:
            self._there -= 1
            if self._waiting.get(ticket) is meeting:
                del self._waiting[ticket]
            meeting.over.set()


async def _pass_on(on_data: Callable[[], object], *comms: Comm) -> None:
    """Passes the messages of two connections on to each other, until one is closed; closes both."""
    first, second = comms
    with contextlib.suppress(OSError):
        for comm in comms:
            await comm.write(await rpc.answered(_joined()))
        copying = [asyncio.ensure_future(_copy(*pair, on_data)) for pair in ((first, second), (second, first))]
        try:
            await asyncio.wait(copying, return_when=asyncio.FIRST_COMPLETED)
            # Not by cancelling: a connection loses what it has not sent then.
            await asyncio.gather(*map(_closed, comms))
        finally:
            for each in copying:
                each.cancel()
            await asyncio.gather(*copying, return_exceptions=True)


async def _copy(source: Comm, target: Comm, on_data: Callable[[], object]) -> None:
    with contextlib.suppress(OSError, SkyinfraError):
        while True:
            await target.write(await source.read())
            on_data()


async def _closed(comm: Comm) -> None:
    """Closes *comm* once what was written has been sent."""
    try:
        await within(comm.close(), _CLOSE_S)
    except (OSError, TimeoutError):
        comm.abort()


async def _joined() -> bool:
    return True


async def _raised(error: SkyinfraError) -> Any:
    raise error
