"""The dashboard of a fleet's scheduler at an address of this machine, through the client's own connection."""

from __future__ import annotations

import asyncio
import contextlib

from skyinfra.client.connection import Asker
from skyinfra.errors import PortTaken, SkyinfraError
from skyinfra.protocol import services

_WAIT_S = 15.0
_PART = 256 * 1024


class Dashboard:
    """Listens on the loopback of this machine; what connects there talks to the dashboard. ``url`` is its address."""

    def __init__(self, connection: Asker) -> None:
        self._connection = connection
        self._server: asyncio.Server | None = None
        self._pipes: set[asyncio.Task[None]] = set()
        self.url = ""

    async def start(self, port: int) -> None:
        """Raises `MissingDependency` where the head cannot draw it, `PortTaken`; 0 is any free port."""
        head = self._connection.head
        await services.dashboard_close(head, number=await services.dashboard_open(head))
        try:
            self._server = await asyncio.start_server(self._serve, "127.0.0.1", port)
        except OSError as error:
            what = f"cannot listen on 127.0.0.1:{port}: {error.strerror}"
            raise PortTaken(what, field="--port", given=port) from None
        self.url = f"http://127.0.0.1:{self._server.sockets[0].getsockname()[1]}/status"

    async def close(self) -> None:
        """Ends it, with all connections."""
        if self._server is not None:
            self._server.close()
            for pipe in tuple(self._pipes):
                pipe.cancel()
            await asyncio.gather(*self._pipes, return_exceptions=True)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        mine = asyncio.current_task()
        assert mine is not None  # noqa: S101 - a coroutine runs in a task
        self._pipes.add(mine)
        try:
            with contextlib.suppress(OSError, SkyinfraError):
                await self._pipe(await services.dashboard_open(self._connection.head), reader, writer)
        finally:
            self._pipes.discard(mine)
            writer.close()

    async def _pipe(self, number: int, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Copies both ways until either side ends."""
        head = self._connection.head

        async def there() -> None:
            while data := await reader.read(_PART):
                if not await services.dashboard_send(head, number=number, data=data):
                    return

        async def back() -> None:
            while (data := await services.dashboard_receive(head, number=number, wait_s=_WAIT_S)) is not None:
                writer.write(data)
                await writer.drain()

        copying = [asyncio.ensure_future(there()), asyncio.ensure_future(back())]
        try:
            await asyncio.wait(copying, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for each in copying:
                each.cancel()
            await asyncio.gather(*copying, return_exceptions=True)
            await services.dashboard_close(head, number=number)
