"""What is private to Dask: one file uses it; and a peer that hangs up before the handshake does not answer."""

from __future__ import annotations

import ast
import asyncio
import gc
import socket
import struct
import threading
from pathlib import Path
from typing import Any

import pytest
from distributed.comm import registry
from distributed.comm.core import CommClosedError, FatalCommClosedError, connect
from distributed.comm.tcp import BaseTCPConnector, TLSConnector
from tornado.iostream import IOStream

from skyinfra.engine import dask_private
from skyinfra.engine.credentials import Credentials
from skyinfra.head.scheduler import FleetScheduler
from skyinfra.worker.process import SlotWorker

ROUNDS = 20


class HungUp:
    """Tornado's client where the peer has closed the connection before the handshake begins."""

    async def connect(self, host: str, port: int, *, max_buffer_size: int, ssl_options: Any) -> Any:
        stream = IOStream(socket.create_connection((host, port)))
        stream.close()
        return await stream.start_tls(False, ssl_options)


def test_it_is_a_closed_connection(monkeypatch: pytest.MonkeyPatch) -> None:
    for kind in (BaseTCPConnector, dask_private._Connector):
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


# Attributes that are no public part of Dask, and modules that hold none.
PRIVATE = {
    "_broker",
    "_create_taskstate_from_graph",
    "_send_to_scheduler",
    "all_running_tasks",
    "batched_send",
    "handle_stimulus",
    "recent_message_log",
    "scheduler_comm",
}
MODULES = ("dask._", "distributed.comm.tcp", "distributed.protocol", "distributed.spans", "distributed.worker_state")


def test_no_other_file_uses_what_is_private_to_dask() -> None:
    package = Path(dask_private.__file__).parents[1]
    for path in package.rglob("*.py"):
        if path == Path(dask_private.__file__):
            continue
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Attribute):
                assert node.attr not in PRIVATE, f"{path}:{node.lineno}"
            elif isinstance(node, ast.ImportFrom):
                assert not str(node.module).startswith(MODULES), f"{path}:{node.lineno}"


class Plain(dask_private._Answers):
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


@pytest.mark.parametrize(
    ("ours", "meant"),
    [
        (
            FleetScheduler,
            {
                "close",
                "handle_stream",
                "handle_worker",
                "identity",
                "listen",
                "log_worker_event",
                "remove_client",
                "remove_worker",
            },
        ),
        (SlotWorker, {"close", "execute", "get_startup_information", "heartbeat", "start_unsafe"}),
    ],
)
def test_what_is_ours_hides_nothing_of_dask_by_accident(ours: type, meant: set[str]) -> None:
    """A method `report` of the scheduler once took the place of Dask's, which cut clients off that cancelled a task."""
    base = ours.__bases__[0]
    hidden = {name for name in vars(ours) if not name.startswith("_") and hasattr(base, name)}
    assert hidden == meant
