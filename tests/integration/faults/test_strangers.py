"""Who has no certificate of the fleet gets no answer from any port of a node, and runs nothing there."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import ssl
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import distributed
import pytest
from distributed.protocol.pickle import dumps
from namespaces.fleet import LAYOUT, OTHER_SECRET, PORT, SECRET, Fleet, Node

from skyinfra.engine.credentials import Credentials

# The fixture that all share is made once: the tests run in one process.
pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("faults-tasks")]

HTTP = b"GET %s HTTP/1.1\r\nHost: node\r\nConnection: close\r\n\r\n"
PATHS = (b"/", b"/health", b"/metrics", b"/json/identity.json", b"/info/main/workers.html", b"/status")
# What a stranger says first. A frame of Dask is its length, the number of its parts, and they.
WORDS = {
    "nothing": b"",
    "zeros": bytes(64),
    "ones": b"\xff" * 100_000,
    "a frame": (b"%s" % (9).to_bytes(8, "little")) + (1).to_bytes(8, "little") + b"\x80",
    "HTTP": HTTP % b"/",
    "HTTP, a page": HTTP % b"/info/main/workers.html",
    "SSH": b"SSH-2.0-OpenSSH_9.2\r\n",
}
SILENCE_S = 1.0
CONNECT_S = 3.0
# TLS has records for alerts, and one may say why the connection ends (RFC 8446, 5.1).
ALERT = 0x15


def outside(node: Node) -> list[tuple[str, int]]:
    """Where others reach *node*."""
    return [(address, port) for address, port in node.listens() if not address.startswith("127.") and address != "::1"]


def test_every_port_of_the_fleet_is_one_of_ours(fleet: Fleet) -> None:
    for node in fleet.nodes:
        # A worker and its Nanny for each slot, and the scheduler.
        assert len(outside(node)) == 2 * len(LAYOUT) + (node is fleet.head)
        assert {address for address, _ in outside(node)} == {node.link.address}


def test_what_is_no_tls_is_not_answered(fleet: Fleet) -> None:
    places = [place for node in fleet.nodes for place in outside(node)]
    with ThreadPoolExecutor(len(places)) as threads:
        for what, said in WORDS.items():
            for place, heard in zip(
                places, threads.map(lambda place, said=said: talk(place, said), places), strict=True
            ):
                assert heard == b"" or heard[0] == ALERT, f"{what} at {place}: {heard[:200]!r}"
    fleet.settled()


def talk(place: tuple[str, int], said: bytes) -> bytes:
    """What is answered to *said*."""
    with socket.create_connection(place, timeout=CONNECT_S) as line:
        return converse(line, said)


def converse(line: socket.socket, said: bytes) -> bytes:
    heard = b""
    with contextlib.suppress(TimeoutError, ConnectionError):
        line.sendall(said)
        line.settimeout(SILENCE_S)
        while part := line.recv(65536):
            heard += part
    return heard


def test_pages_are_served_to_nobody(fleet: Fleet) -> None:
    for node in fleet.nodes:
        inside = [place for place in node.listens() if place[0].startswith("127.")]
        assert inside, "Dask serves pages on the loopback interface alone"
        for place in inside:
            with pytest.raises(ConnectionRefusedError):
                socket.create_connection((node.link.address, place[1]), timeout=CONNECT_S)
            for path in PATHS:
                heard = node.link.inside(lambda place=place, path=path: talk(place, HTTP % path))
                assert heard.startswith(b"HTTP/1.1 404 "), f"{path!r} at {place}: {heard[:200]!r}"
                assert node.link.address.encode() not in heard


# With the words of Dask ----------------------------------------------------------------------------------------------


def unverified(folder: Path, secret: str | None) -> ssl.SSLContext:
    """A client that trusts everybody, with a certificate of the fleet that has *secret*, or with none."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE
    if secret is not None:
        credentials = Credentials.derive(secret, role="client", name="stranger")
        file = folder / f"{secret[:8]}.pem"
        file.write_text(credentials.certificate + credentials.key)
        context.load_cert_chain(file)
    return context


async def touch(place: tuple[str, int], marker: Path, context: ssl.SSLContext | None) -> None:
    """Has whoever listens at *place* make the file *marker*. Raises OSError where it does not."""
    function = dumps(touches(str(marker)))
    scheme = "tcp" if context is None else "tls"
    arguments = {} if context is None else {"ssl_context": context}
    address = f"{scheme}://{place[0]}:{place[1]}"
    async with distributed.rpc(address, connection_args=arguments, timeout=CONNECT_S) as line:
        call = line.run_function if place[1] == PORT else line.run
        await asyncio.wait_for(call(function=function), 2 * CONNECT_S)


def touches(marker: str) -> Callable[[], None]:
    return lambda: __import__("pathlib").Path(marker).touch()


def test_who_has_no_certificate_of_the_fleet_runs_nothing(fleet: Fleet, tmp_path: Path) -> None:
    places = [place for node in fleet.nodes for place in outside(node)]

    def attempt(name: str, context: ssl.SSLContext | None) -> list[BaseException | None]:
        markers = [tmp_path / f"{name}-{address}-{port}" for address, port in places]

        async def all_of_them() -> list[BaseException | None]:
            calls = [touch(place, marker, context) for place, marker in zip(places, markers, strict=True)]
            return await asyncio.gather(*calls, return_exceptions=True)

        found = asyncio.run(all_of_them())
        assert [marker.exists() for marker in markers] == [error is None for error in found]
        return found

    # The same words do work with the right certificate, but on the head's scheduler, which runs nothing for anybody.
    for place, error in zip(places, attempt("friend", unverified(tmp_path, SECRET)), strict=True):
        if place[1] == PORT:
            assert isinstance(error, ValueError) and "disallowed" in str(error)
        else:
            assert error is None, f"{place}: {error!r}"
    for name, context in {
        "plain": None,
        "nobody": unverified(tmp_path, None),
        "other": unverified(tmp_path, OTHER_SECRET),
    }.items():
        for place, error in zip(places, attempt(name, context), strict=True):
            assert isinstance(error, OSError), f"{name} at {place}: {error!r}"
    fleet.settled()
