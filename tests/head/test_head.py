"""Where the scheduler listens, and what it knows of what passes it."""

from __future__ import annotations

import asyncio
import os
import socket
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest
from local_fleets.local_peer import LocalPeer
from local_fleets.running_node import SECRET

from skyinfra import NodeFailed, PortTaken
from skyinfra.blobs import transfer
from skyinfra.blobs.store import digest_of
from skyinfra.blobs.transfer import CHUNK
from skyinfra.engine.credentials import Credentials
from skyinfra.head import start
from skyinfra.node.folder import NodeDirectory
from skyinfra.protocol.fleet import FleetLayout
from skyinfra.protocol.manifest import Endpoint


@pytest.mark.parametrize(
    ("text", "endpoint"), [("10.0.0.1:8786", Endpoint("10.0.0.1", 8786)), ("[fd00::1]:0", Endpoint("fd00::1", 0))]
)
def test_addresses_are_read_as_they_are_written(text: str, endpoint: Endpoint) -> None:
    assert start.parse(f"{text}\n") == endpoint
    assert start.host_port(endpoint) == text


def attempt(endpoint: Endpoint, directory: Path) -> None:
    security = Credentials.derive(SECRET, role="scheduler", name="n1").security()
    asyncio.run(start.start(endpoint, directory=NodeDirectory(directory), security=security, layout=FleetLayout(1)))


def test_a_declared_port_that_is_taken(tmp_path: Path) -> None:
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        port = other.getsockname()[1]
        with pytest.raises(PortTaken, match=f"port {port} of 127.0.0.1") as caught:
            attempt(Endpoint("127.0.0.1", port), tmp_path)
    assert "declare another port" in (caught.value.hint or "")
    assert not (tmp_path / "scheduler").exists()


@pytest.mark.parametrize("address", ["192.0.2.77", "no-such-host.invalid"])
def test_an_address_of_another_machine(tmp_path: Path, address: str) -> None:
    with pytest.raises(NodeFailed, match=f"cannot listen on {address}:8786"):
        attempt(Endpoint(address, 8786), tmp_path)


def test_data_that_passes_the_head_is_a_use_of_its_fleet(tmp_path: Path) -> None:
    async def run() -> None:
        security = Credentials.derive(SECRET, role="scheduler", name="n1").security()
        directory, declared = NodeDirectory(tmp_path), Endpoint("127.0.0.1", 0)
        scheduler = await start.start(declared, directory=directory, security=security, layout=FleetLayout(1))
        # Of another machine: one of the head's takes the files themselves.
        peer = LocalPeer({name: each for name, each in scheduler.handlers.items() if "place" not in name})
        data, now = os.urandom(2 * CHUNK), 1000.0
        scheduler.use._now = lambda: now
        blob = transfer.Blob(digest_of(data), len(data), lambda: transfer.chunked([data]))
        small = transfer.Blob(digest_of(b"x"), 1, lambda: transfer.chunked([b"x"]))

        async def read() -> None:
            assert bytes(await transfer.fetch_bytes(peer, blob.digest, blob.size)) == data

        uses: list[Callable[[], Awaitable[object]]] = [
            lambda: transfer.send(peer, [blob]),
            lambda: transfer.send(peer, [small]),
            read,
        ]
        try:
            for use in uses:
                now += 500.0
                assert scheduler.use.report("n1", 900.0, 0.0)[0] >= 500.0
                await use()
                assert scheduler.use.report("n1", 900.0, 0.0)[0] == 0.0
            # Whether a blob is there is asked for much.
            now += 500.0
            await transfer.send(peer, [blob, small])
            assert scheduler.use.report("n1", 900.0, 0.0)[0] == 500.0
        finally:
            await scheduler.close()

    asyncio.run(run())
