"""Bytes of TCP connections through the head: both ways, their ends, what breaks, and what waits in memory."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import Awaitable, Callable
from typing import Any, cast

import pytest

from skyinfra.engine import forwarding
from skyinfra.engine.forwarding import WINDOW, Traffic, carry
from skyinfra.errors import NodeError
from skyinfra.head import tunnel
from skyinfra.head.tunnel import Forwards

PATIENCE_S = 30.0
_CLOSED = object()


class Comm:
    """One side of a connection to the head, which carries messages as Dask's does: whatever is written is taken."""

    def __init__(self) -> None:
        self.come: asyncio.Queue[Any] = asyncio.Queue()
        self.peer: Comm = self
        self.is_closed = False

    async def read(self) -> Any:
        message = await self.come.get()
        if message is _CLOSED or self.is_closed:
            self.come.put_nowait(_CLOSED)
            raise ConnectionError("closed")
        return message

    async def write(self, message: Any) -> None:
        if self.is_closed or self.peer.is_closed:
            raise ConnectionError("closed")
        self.peer.come.put_nowait(message)

    async def close(self) -> None:
        if not self.is_closed:
            self.is_closed = True
            self.peer.come.put_nowait(_CLOSED)
            self.come.put_nowait(_CLOSED)

    def abort(self) -> None:
        if not self.is_closed:
            self.is_closed = True
            self.peer.come.put_nowait(_CLOSED)
            self.come.put_nowait(_CLOSED)


def pair() -> tuple[Comm, Comm]:
    one, other = Comm(), Comm()
    one.peer, other.peer = other, one
    return one, other


Streams = tuple[asyncio.StreamReader, asyncio.StreamWriter]
Serve = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]


@contextlib.asynccontextmanager
async def carried(serve: Serve) -> Any:
    """A program's streams to *serve* by way of two carried ends and the head between them; and the bytes that went."""
    joins = Forwards()
    ours, at_head = pair()
    theirs, at_head_too = pair()
    traffic = Traffic()

    async def client(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(OSError):
            assert await ours.read() == {"answer": True}
            await carry(ours, reader, writer, traffic)

    async with (
        await asyncio.start_server(serve, "127.0.0.1", 0) as there,
        await asyncio.start_server(client, "127.0.0.1", 0) as here,
    ):
        far = await asyncio.open_connection(*there.sockets[0].getsockname())

        async def node() -> None:
            with contextlib.suppress(OSError):
                assert await theirs.read() == {"answer": True}
                await carry(theirs, *far, Traffic())

        running = [
            asyncio.create_task(each)
            for each in (joins.join(cast(Any, at_head), "t"), joins.join(cast(Any, at_head_too), "t"), node())
        ]
        reader, writer = await asyncio.open_connection(*here.sockets[0].getsockname())
        try:
            async with asyncio.timeout(PATIENCE_S):
                yield reader, writer, traffic
                writer.close()
                await asyncio.gather(*running)
        finally:
            writer.close()
            for each in running:
                each.cancel()
            await asyncio.gather(*running, return_exceptions=True)


@contextlib.asynccontextmanager
async def program() -> Any:
    """The streams of a connection whose program says and reads nothing."""
    ours, theirs = socket.socketpair()
    _, silent = await asyncio.open_connection(sock=theirs)
    reader, writer = await asyncio.open_connection(sock=ours)
    try:
        async with asyncio.timeout(PATIENCE_S):
            yield reader, writer
    finally:
        for each in (silent, writer):
            each.transport.abort()
        await asyncio.sleep(0)


def test_each_direction_ends_by_itself() -> None:
    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        # It answers once everything has come, as `sort` does.
        data = await reader.read(-1)
        writer.write(data[::-1] * 3)
        await writer.drain()
        writer.close()

    async def test() -> None:
        async with carried(serve) as (reader, writer, traffic):
            data = bytes(range(256)) * 4000 * 5
            writer.write(data)
            writer.write_eof()
            assert await reader.read(-1) == data[::-1] * 3
            assert (traffic.sent, traffic.received) == (len(data), 3 * len(data))

    asyncio.run(test())


def test_the_first_to_end_may_be_the_server() -> None:
    heard: list[bytes] = []

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b"hello")
        writer.write_eof()
        heard.append(await reader.read(-1))
        writer.close()

    async def test() -> None:
        async with carried(serve) as (reader, writer, _):
            assert await reader.read(-1) == b"hello"
            writer.write(b"x" * 10**6)
            await writer.drain()
            writer.write_eof()
        assert heard == [b"x" * 10**6]

    asyncio.run(test())


def test_who_reads_nothing_stops_the_other_side_and_not_its_own() -> None:
    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        async def fill() -> None:
            with contextlib.suppress(OSError):
                while True:
                    writer.write(b"x" * 65536)
                    await writer.drain()

        filling = asyncio.create_task(fill())
        try:
            while await reader.read(65536):
                pass
        finally:
            filling.cancel()
            writer.transport.abort()

    async def test() -> None:
        async with carried(serve) as (_, writer, traffic):
            # What this program sends goes on, though it reads nothing of what comes.
            for _ in range(200):
                writer.write(b"y" * 65536)
                await writer.drain()
            while traffic.sent < 200 * 65536:
                await asyncio.sleep(0.01)
            stopped = -1
            while stopped != traffic.received:
                stopped = traffic.received
                await asyncio.sleep(0.3)
            # The kernel's buffers of the last piece, and no more.
            assert traffic.received < 50 * 2**20
            writer.transport.abort()

    asyncio.run(test())


def test_no_more_is_on_its_way_than_the_window() -> None:
    async def test() -> None:
        ours, theirs = pair()
        reader = asyncio.StreamReader(limit=2**30)
        reader.feed_data(b"x" * 10 * WINDOW)
        async with program() as (_, writer):
            running = asyncio.create_task(carry(cast(Any, ours), reader, writer, Traffic()))
            sent, messages = 0, 0
            while sent < WINDOW:
                sent += len((await theirs.read())["data"])
                messages += 1
            await asyncio.sleep(0.1)
            assert theirs.come.empty() and sent < WINDOW + 2**20
            await theirs.write({"taken": sent})
            assert (await theirs.read())["data"]
            theirs.abort()
            with pytest.raises(OSError):
                await running

    asyncio.run(test())


@pytest.mark.parametrize("end", ["the other end", "the program"])
def test_what_breaks_is_no_end(end: str) -> None:
    """A download that was cut short must not look whole."""

    async def test() -> None:
        ours, theirs = pair()
        broken = asyncio.Event()

        async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            with pytest.raises(OSError):
                await carry(cast(Any, ours), reader, writer, Traffic())
            broken.set()

        async with await asyncio.start_server(serve, "127.0.0.1", 0) as server, asyncio.timeout(PATIENCE_S):
            reader, writer = await asyncio.open_connection(*server.sockets[0].getsockname())
            await theirs.write({"data": b"half"})
            assert await reader.readexactly(4) == b"half"
            assert await theirs.read() == {"taken": 4}
            if end == "the program":
                forwarding.reset(writer)
                with pytest.raises(OSError):
                    await theirs.read()
            else:
                theirs.abort()
                with pytest.raises(ConnectionResetError):
                    await reader.read(1)
                writer.close()
            await broken.wait()

    asyncio.run(test())


@pytest.mark.parametrize(
    "message",
    [None, [], {}, {"data": 2**40}, {"data": "text"}, {"data": b""}, {"taken": "1"}, {"end": 1.5}, b"data"],
    ids=str,
)
def test_what_is_no_message_of_it_breaks_it(message: object) -> None:
    async def test() -> None:
        ours, theirs = pair()
        async with program() as (reader, writer):
            await theirs.write(message)
            with pytest.raises(ConnectionAbortedError, match="protocol"):
                await carry(cast(Any, ours), reader, writer, Traffic())

    asyncio.run(test())


def test_a_peer_that_sends_more_than_was_agreed_is_left() -> None:
    async def test() -> None:
        ours, theirs = pair()
        async with program() as (reader, writer):
            running = asyncio.create_task(carry(cast(Any, ours), reader, writer, Traffic()))
            with contextlib.suppress(OSError):
                while not ours.is_closed:
                    for _ in range(4):
                        await theirs.write({"data": b"x" * (WINDOW // 2)})
                    await asyncio.sleep(0)
            with pytest.raises(ConnectionAbortedError, match="protocol"):
                await running

    asyncio.run(test())


def test_nothing_listens_there() -> None:
    async def test() -> None:
        async with await asyncio.start_server(lambda *_: None, "127.0.0.1", 0) as server:
            port = server.sockets[0].getsockname()[1]
        for wrong in (port, 0, 65536, -1, "x"):
            with pytest.raises(NodeError, match=f"nothing listens at port {wrong} of its loopback"):
                await forwarding._local(cast(int, wrong))

    asyncio.run(test())


def test_a_server_may_listen_at_the_other_loopback() -> None:
    async def test() -> None:
        try:
            server = await asyncio.start_server(lambda _, writer: writer.close(), "::1", 0)
        except OSError:
            pytest.skip("this machine has no IPv6")
        async with server:
            reader, writer = await forwarding._local(server.sockets[0].getsockname()[1])
            assert await reader.read() == b""
            writer.close()

    asyncio.run(test())


# At the head ----------------------------------------------------------------------------------------------------------


def test_a_connection_that_nobody_joins_is_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tunnel, "JOIN_S", 0.05)

    async def test() -> None:
        joins = Forwards()
        alone, at_head = pair()
        await joins.join(cast(Any, at_head), "t")
        with pytest.raises(OSError):
            await alone.read()
        assert not joins._waiting and not joins._there
        # One that comes later waits for another one in its turn.
        late, at_head = pair()
        await joins.join(cast(Any, at_head), "t")
        with pytest.raises(OSError):
            await late.read()

    asyncio.run(test())


def test_the_head_has_a_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tunnel, "_MOST_FORWARDED", 1)

    async def test() -> None:
        joins = Forwards()
        one, at_head = pair()
        waiting = asyncio.create_task(joins.join(cast(Any, at_head), "t"))
        await asyncio.sleep(0)
        refused, at_head = pair()
        await joins.join(cast(Any, at_head), "other")
        assert "forwards 1 connections already" in (await refused.read())["error"]["message"]
        # The other half of one that is counted comes in.
        half, at_head = pair()
        both = asyncio.create_task(joins.join(cast(Any, at_head), "t"))
        assert [await each.read() for each in (one, half)] == [{"answer": True}] * 2
        await half.write({"data": b"x"})
        assert await one.read() == {"data": b"x"}
        one.abort()
        await asyncio.gather(waiting, both)
        assert half.peer.is_closed and joins._there == 0

    asyncio.run(test())
