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


@pytest.fixture
def without_way(ipv6: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a machine without a way to the Internet by IPv6, whose name has an address of IPv4 alone."""
    monkeypatch.setattr("distributed.comm.utils.get_ipv6", lambda: "127.0.0.1", raising=False)
    monkeypatch.setattr("distributed.comm.utils.get_ip", lambda *_: "127.0.0.1")


def test_a_head_at_all_addresses_of_ipv6_answers_there(tmp_path: Path, without_way: None) -> None:
    async def run() -> None:
        security = Credentials.derive(SECRET, role="scheduler", name="n1").security()
        directory = NodeDirectory(tmp_path)
        scheduler = await start.start(Endpoint("::", 0), directory=directory, security=security, layout=FleetLayout(1))
        try:
            reached = start.reached_at(scheduler)
            assert ":" in reached.address and start.own_address(reached) == f"[{reached.address}]"
            assert start.parse(directory.scheduler_file.read_text()) == reached
            for address in ("::1", reached.address):
                await start.check_reachable(Endpoint(address, reached.port), security=security)
        finally:
            await scheduler.close()

    asyncio.run(run())


def test_an_own_address_is_of_the_kind_of_the_heads(ipv6: None, monkeypatch: pytest.MonkeyPatch) -> None:
    # Dask knows that of IPv4 alone in versions before 2026.
    monkeypatch.setattr("skyinfra.head.start.get_ip", lambda *_: "127.0.0.1")
    assert start.own_address(Endpoint("::1", 8786)) == "[::1]"
    assert start.own_address(Endpoint("127.0.0.1", 8786)) == "127.0.0.1"


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
