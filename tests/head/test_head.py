"""Where the scheduler listens."""

from __future__ import annotations

import asyncio
import socket
from pathlib import Path

import pytest
from local_fleets.running_node import SECRET

from skyinfra import NodeFailed, PortTaken
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
