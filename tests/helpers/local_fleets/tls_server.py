"""A server of Dask with the TLS of a fleet, and strangers that connect to it."""

from __future__ import annotations

import asyncio
import contextlib
import ssl
from collections.abc import AsyncIterator

from distributed import Security
from distributed.comm import connect
from distributed.core import Server

from skyinfra.engine.credentials import Credentials

SECRET = "0123456789abcdef" * 4
# Longer than any test: what is closed then was not closed by the time that has passed.
NEVER_S = 10_000.0
PATIENCE_S = 30.0
HOST = "127.0.0.1"

Stream = tuple[asyncio.StreamReader, asyncio.StreamWriter]


def security(secret: str = SECRET) -> Security:
    return Credentials.derive(secret, role="client", name="test").security()


class Fleet:
    """A server of Dask with the fleet's TLS."""

    def __init__(self, server: Server) -> None:
        self.port = int(server.address.rpartition(":")[2])
        self._strangers: list[Stream] = []

    async def stranger(self, *, says: bytes = b"", of: str = HOST, tls: ssl.SSLContext | None = None) -> Stream:
        """A connection from the address *of* that says no more than *says*."""
        name = "fleet" if tls is not None else None
        stream = await asyncio.open_connection(HOST, self.port, local_addr=(of, 0), ssl=tls, server_hostname=name)
        self._strangers.append(stream)
        stream[1].write(says)
        await stream[1].drain()
        return stream

    async def asks(self) -> None:
        """A client of the fleet connects anew, and is answered."""
        arguments = security().get_connection_args("client")
        comm = await connect(f"tls://{HOST}:{self.port}", timeout=PATIENCE_S, **arguments)
        await comm.write({"op": "identity", "reply": True})
        assert (await comm.read())["type"] == "Server"
        await comm.close()

    def close(self) -> None:
        for _, writer in self._strangers:
            writer.close()


async def ended(stream: Stream) -> bool:
    """Whether the server closes the connection."""
    with contextlib.suppress(ConnectionError, ssl.SSLError):
        async with asyncio.timeout(PATIENCE_S):
            while await stream[0].read(2**16):
                pass
    return True


@contextlib.asynccontextmanager
async def serving() -> AsyncIterator[Fleet]:
    server = Server({})
    await server.listen(f"tls://{HOST}:0", **security().get_listen_args("scheduler"))
    fleet = Fleet(server)
    try:
        yield fleet
    finally:
        fleet.close()
        await server.close()
