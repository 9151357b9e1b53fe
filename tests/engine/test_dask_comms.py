"""Connections: a peer that hangs up before the handshake does not answer; one closed between two reads is closed."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import socket
import ssl
import struct
import threading
import time
from typing import Any

import pytest
from distributed.comm import registry
from distributed.comm.core import CommClosedError, FatalCommClosedError, connect
from distributed.comm.tcp import BaseTCPConnector, TLSConnector
from tornado import iostream
from tornado.iostream import IOStream

from skyinfra.engine import dask_comms
from skyinfra.engine.credentials import Credentials

ROUNDS = 20


class HungUp:
    """Tornado's client where the peer has closed the connection before the handshake begins."""

    async def connect(self, host: str, port: int, *, max_buffer_size: int, ssl_options: Any) -> Any:
        stream = IOStream(socket.create_connection((host, port)))
        stream.close()
        return await stream.start_tls(False, ssl_options)


def test_it_is_a_closed_connection(monkeypatch: pytest.MonkeyPatch) -> None:
    for kind in (BaseTCPConnector, dask_comms._Connector):
        monkeypatch.setattr(kind, "client", HungUp())
    security = Credentials.derive("0123456789abcdef" * 4, role="client", name="test").security()
    with socket.create_server(("127.0.0.1", 0)) as server:
        place = f"127.0.0.1:{server.getsockname()[1]}"

        async def run() -> None:
            arguments = security.get_connection_args("client")
            with pytest.raises(ValueError, match="cannot convert to SSL"):
                await TLSConnector().connect(place, **arguments)
            refused = f"{place} speaks or hangs up before the handshake"
            with pytest.raises(FatalCommClosedError, match=refused):
                await registry.get_backend("tls").get_connector().connect(place, **arguments)
            # An OSError, which whoever waits for the head to come back goes on after.
            with pytest.raises(OSError, match=refused):
                await connect(f"tls://{place}", timeout=5, **arguments)

        asyncio.run(run())


def test_a_connection_that_is_given_up_as_its_handshake_ends_is_closed() -> None:
    """A busy head kept one for a worker that it had asked in vain whether it can be reached, until it collected
    garbage."""
    secret = "0123456789abcdef" * 4
    security = Credentials.derive(secret, role="client", name="test").security()
    context = Credentials.derive(secret, role="worker", name="n1").security().get_listen_args("worker")["ssl_context"]
    begun, ends = threading.Event(), threading.Event()
    read: list[bytes] = []

    def serve() -> None:
        peer, _ = server.accept()
        begun.set()
        ends.wait(60)
        with peer, contextlib.suppress(TimeoutError):
            try:
                with context.wrap_socket(peer, server_side=True) as tls:
                    tls.settimeout(10)
                    read.append(tls.recv(10))
            except ssl.SSLEOFError:  # it was closed before
                read.append(b"")

    async def run() -> None:
        place = f"127.0.0.1:{server.getsockname()[1]}"
        connecting = asyncio.create_task(
            registry.get_backend("tls").get_connector().connect(place, **security.get_connection_args("client"))
        )
        await asyncio.to_thread(begun.wait, 60)
        await asyncio.sleep(0.1)  # its handshake waits for an answer
        ends.set()
        time.sleep(0.5)  # the process is busy, and the answer comes
        # In one round of the loop the answer is read, and then the time is up.
        asyncio.get_running_loop().call_later(0, connecting.cancel)
        with pytest.raises(asyncio.CancelledError):
            await connecting
        del connecting
        await asyncio.to_thread(thread.join, 60)

    gc.disable()
    try:
        with socket.create_server(("127.0.0.1", 0)) as server:
            thread = threading.Thread(target=serve)
            thread.start()
            asyncio.run(run())
    finally:
        gc.enable()
    assert read == [b""]


@pytest.mark.slow
@pytest.mark.parametrize("says", [b"", b"hello\n"], ids=["hangs up", "speaks"])
def test_no_socket_stays_open_where_the_peer_speaks_or_hangs_up(says: bytes) -> None:
    """Whichever comes first, its end or our handshake. Warnings of what stays open are errors."""
    security = Credentials.derive("0123456789abcdef" * 4, role="client", name="test").security()
    with socket.create_server(("127.0.0.1", 0)) as server:

        def serve() -> None:
            for _ in range(ROUNDS):
                peer, _ = server.accept()
                with peer:
                    peer.sendall(says)

        thread = threading.Thread(target=serve)
        thread.start()

        async def run() -> None:
            with pytest.raises(OSError):
                place = f"127.0.0.1:{server.getsockname()[1]}"
                await (
                    registry.get_backend("tls").get_connector().connect(place, **security.get_connection_args("client"))
                )

        for _ in range(ROUNDS):
            asyncio.run(run())
            gc.collect()
        thread.join()


def test_no_socket_stays_open_where_the_peer_is_killed_before_the_handshake(monkeypatch: pytest.MonkeyPatch) -> None:
    """`ssl` up to Python 3.11.7 leaves it open then. Warnings of what stays open are errors."""
    security = Credentials.derive("0123456789abcdef" * 4, role="client", name="test").security()
    with socket.create_server(("127.0.0.1", 0)) as server:

        def reset(*arguments: Any, **keywords: Any) -> Any:
            peer, _ = server.accept()
            peer.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            peer.close()
            return wrap(*arguments, **keywords)

        wrap = iostream.ssl_wrap_socket
        monkeypatch.setattr(iostream, "ssl_wrap_socket", reset)

        async def run() -> None:
            place, arguments = f"127.0.0.1:{server.getsockname()[1]}", security.get_connection_args("client")
            with pytest.raises(ConnectionResetError):
                await registry.get_backend("tls").get_connector().connect(place, **arguments)

        asyncio.run(run())
        gc.collect()


class Plain(dask_comms._Answers):
    """Without TLS."""

    def _read_extra(self) -> None:
        self._extra: dict[str, Any] = {}


def test_a_connection_that_is_closed_between_two_reads_is_a_closed_one() -> None:
    async def run() -> None:
        with socket.create_server(("127.0.0.1", 0)) as server:
            ours = socket.create_connection(server.getsockname())
            theirs, _ = server.accept()
        comm = Plain(IOStream(ours), "tls://here", "tls://there")
        peer = IOStream(theirs)
        # The size of the frames has come; when it is taken, the connection is closed, before they are read.
        await peer.write(struct.pack("Q", 8))
        read = comm.stream.read_bytes

        async def read_and_close(size: int) -> bytes:
            found: bytes = await read(size)
            comm.abort()
            return found

        comm.stream.read_bytes = read_and_close
        with pytest.raises(CommClosedError):
            await comm.read()
        peer.close()

    asyncio.run(run())
