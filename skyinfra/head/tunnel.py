"""Tunnel from clients to the dashboard of the scheduler, which nothing else can connect to.

Dask's dashboard starts with the first call of a client, and ends when no client has used it for a while. Each
connection of a browser is one here.
"""

from __future__ import annotations

import asyncio
import importlib.util
import itertools
import time
from dataclasses import dataclass

from distributed import Scheduler

from skyinfra.engine.dask_private import Pages
from skyinfra.engine.waiting import within
from skyinfra.errors import MissingDependency, NotSupported
from skyinfra.protocol import rpc, services

_PART = 256 * 1024
# A browser has some connections; a program that opens more has gone wrong.
_MOST = 64
# A client asks for more all the time; one that has not asked for that long is gone. So is the last one.
_GONE_S = 60.0
_LOOK_S = 15.0
_LONGEST_WAIT_S = 20.0


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
        """The dashboard, which begins here where nobody has used it."""
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
