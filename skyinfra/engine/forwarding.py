"""TCP connections that go through the head: from a port of a client's machine to a port of a node's loopback.

Client and node each make a connection to the head for one of them, with the same ticket, and the head passes on what
either says: ``{"data": bytes}``, ``{"taken": n}`` once as many bytes have left the other side, ``{"end": True}`` where
no more bytes come, and ``{"ended": True}`` once that has left the other side too. Dask's connections take all that is
written into memory; no more than `WINDOW` bytes are on their way.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
import struct
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from threading import Lock
from typing import Any

from distributed.security import Security

from skyinfra.engine import dask_comms
from skyinfra.engine.loop import LoopThread
from skyinfra.engine.waiting import within
from skyinfra.errors import NodeError, PortTaken, SkyinfraError
from skyinfra.protocol import rpc

# The message with which a connection to the head begins.
OPERATION = "skyinfra_forward"
HERE = "127.0.0.1"
WINDOW = 2 * 2**20
# For the other side to join.
JOIN_S = 30.0
_PART = 128 * 1024
_CONNECT_S = 10.0
# A server may listen at either.
_LOOPBACK = (HERE, "::1")


async def connect(head: str, security: Security) -> Any:
    """Returns a new connection to *head*, on which messages are data. Raises OSError."""
    return await dask_comms.data_connection(head, security, timeout=_CONNECT_S)


async def join(comm: Any, ticket: str) -> None:
    """Joins *comm* with the connection that has the same *ticket*. Raises `NotSupported`, OSError."""
    await comm.write({"op": OPERATION, "ticket": ticket})
    rpc.opened(await within(comm.read(), JOIN_S + _CONNECT_S), OPERATION)


@dataclass
class Traffic:
    """Bytes that were read here and sent, and bytes that were received and written here."""

    sent: int = 0
    received: int = 0


class _Carried:
    """One connection: *reader* and *writer* here, the other end behind *comm*."""

    def __init__(self, comm: Any, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, traffic: Traffic) -> None:
        self._comm, self._reader, self._writer, self._traffic = comm, reader, writer, traffic
        self._coming: asyncio.Queue[bytes] = asyncio.Queue()
        # Bytes that went and are not known to have left the other side; bytes that came and have not left this one.
        self._on_their_way = self._held = 0
        self._room = asyncio.Event()
        self._all_went = asyncio.Event()
        self._all_came = False

    async def run(self) -> None:
        receiving: asyncio.Future[None] = asyncio.create_task(self._receive())
        copying: asyncio.Future[Any] = asyncio.gather(self._send(), self._deliver(), self._all_went.wait())
        try:
            await asyncio.wait((receiving, copying), return_when=asyncio.FIRST_COMPLETED)
            if receiving.done():
                receiving.result()
            await copying
            # What was said last is still on its way: closing waits for it.
            await self._comm.close()
        finally:
            self._comm.abort()
            receiving.cancel()
            copying.cancel()
            await asyncio.gather(receiving, copying, return_exceptions=True)

    async def _send(self) -> None:
        while data := await self._reader.read(_PART):
            while self._on_their_way >= WINDOW:
                self._room.clear()
                await self._room.wait()
            self._on_their_way += len(data)
            await self._comm.write({"data": data})
            self._traffic.sent += len(data)
        await self._comm.write({"end": True})

    async def _receive(self) -> None:
        """Returns where the other end has closed after everything came and went; raises OSError where it broke."""
        try:
            while True:
                self._take(await self._comm.read())
        except OSError:
            if not (self._all_went.is_set() and self._all_came):
                raise

    def _take(self, message: object) -> None:
        match message:
            case {"taken": int(taken)}:
                self._on_their_way -= taken
                self._room.set()
            case {"ended": True}:
                self._all_went.set()
            case {"end": True}:
                self._coming.put_nowait(b"")
            case {"data": bytes(data)} if data and self._held < WINDOW:
                self._held += len(data)
                self._coming.put_nowait(data)
            case _:
                raise ConnectionAbortedError("the other end does not keep to the protocol")

    async def _deliver(self) -> None:
        while data := await self._coming.get():
            self._writer.write(data)
            await self._writer.drain()
            self._held -= len(data)
            self._traffic.received += len(data)
            await self._comm.write({"taken": len(data)})
        if self._writer.can_write_eof():
            self._writer.write_eof()
        await self._comm.write({"ended": True})
        self._all_came = True


async def carry(comm: Any, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, traffic: Traffic) -> None:
    """Copies both ways until each has ended, and closes both sides.

    Where one side breaks, the other is reset, so that nobody takes it for the end. Raises OSError, `UnsafeAnswer`.
    """
    try:
        await _Carried(comm, reader, writer, traffic).run()
    except BaseException:
        reset(writer)
        raise
    writer.close()


def reset(writer: asyncio.StreamWriter) -> None:
    """Closes a connection as a broken one."""
    with contextlib.suppress(OSError):
        writer.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    writer.transport.abort()


# At the client --------------------------------------------------------------------------------------------------------


class Listener(ABC):
    """A port of this machine's loopback, at which each connection is served in a task of its own. port: once it is."""

    # Of a line that is read.
    longest = _PART

    def __init__(self) -> None:
        self.port = 0
        self._server: asyncio.Server | None = None
        self._running: set[asyncio.Task[None]] = set()

    async def start(self, port: int, *, field: str, hint: str | None = None) -> None:
        """Listens at *port*, 0 being any. Raises `PortTaken`, for the option *field*."""
        try:
            self._server = await asyncio.start_server(self._serve, HERE, port, limit=self.longest, start_serving=False)
        except OSError as error:
            what = f"cannot listen on {HERE}:{port}: {error.strerror}"
            raise PortTaken(what, field=field, given=port, hint=hint) from None
        self.port = self._server.sockets[0].getsockname()[1]
        await self._server.start_serving()

    async def close(self) -> None:
        """Ends it, with all connections."""
        if self._server is not None:
            self._server.close()
            for each in tuple(self._running):
                each.cancel()
            await asyncio.gather(*self._running, return_exceptions=True)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        mine = asyncio.current_task()
        assert mine is not None  # noqa: S101 - a coroutine runs in a task
        self._running.add(mine)
        # asyncio reports a cancelled one as an error; only `close` cancels.
        with contextlib.suppress(asyncio.CancelledError):
            try:
                await self.take(reader, writer)
            finally:
                self._running.discard(mine)
        if not writer.is_closing():
            reset(writer)

    @abstractmethod
    async def take(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Serves one connection."""


class Forward(Listener):
    """A port of this machine's loopback that leads to a port of a node. Every account of this machine can use it.

    traffic: the bytes that went to the node and came from it. connections: how many were accepted; broken: how many of
    these did not end by themselves.
    """

    def __init__(self, way: Callable[[], Awaitable[Any]], on_failure: Callable[[Exception], object]) -> None:
        """*way*: makes a joined connection to the head. *on_failure*: gets the error where there is none."""
        super().__init__()
        self.traffic = Traffic()
        self.connections = 0
        self.broken = 0
        self._way = way
        self._on_failure = on_failure

    async def take(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Leads a connection to the node."""
        self.connections += 1
        try:
            comm = await self._way()
        except (OSError, SkyinfraError) as error:
            self.broken += 1
            self._on_failure(error)
            return
        try:
            await carry(comm, reader, writer, self.traffic)
        except (OSError, SkyinfraError):
            self.broken += 1


# At the node ----------------------------------------------------------------------------------------------------------


class Ends:
    """The ends of connections at ports of this machine's loopback. *head*: the address of the head, and the settings
    with which it is connected to."""

    def __init__(self, head: Callable[[], tuple[str, Security]]) -> None:
        self._head = head
        self._lock = Lock()
        self._loop: LoopThread | None = None
        self._running: set[asyncio.Task[None]] = set()

    def open(self, port: int, ticket: str) -> None:
        """Connects to *port*, and in the background to the head with *ticket*. Raises `NodeError`."""
        with self._lock:
            self._loop = self._loop or LoopThread()
        self._loop.run(self._open(port, ticket))

    async def _open(self, port: int, ticket: str) -> None:
        reader, writer = await _local(port)
        carrying = asyncio.create_task(self._carry(ticket, reader, writer))
        self._running.add(carrying)
        carrying.add_done_callback(self._running.discard)

    async def _carry(self, ticket: str, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        # The client hears of it by its own connection.
        with contextlib.suppress(OSError, SkyinfraError):
            try:
                comm = await connect(*self._head())
                try:
                    await join(comm, ticket)
                except BaseException:
                    comm.abort()
                    raise
            except BaseException:
                reset(writer)
                raise
            await carry(comm, reader, writer, Traffic())


async def _local(port: int) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    """Connects to *port* of this machine's loopback. Raises `NodeError` where nothing listens there."""
    if isinstance(port, int) and 0 < port < 2**16:
        for address in _LOOPBACK:
            with contextlib.suppress(OSError, TimeoutError):
                return await within(asyncio.open_connection(address, port, limit=_PART), _CONNECT_S)
    raise NodeError(
        f"nothing listens at port {port} of its loopback",
        hint="Start the server on it, or name the port at which it listens: at 127.0.0.1 or ::1, or at all addresses.",
    )
