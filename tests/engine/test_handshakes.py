"""Strangers: what stays open of them, what the fleet notices, what the log says. All over real sockets and TLS."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import resource
import ssl
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable

import pytest
from distributed.comm import connect
from local_fleets.running_node import OTHER_SECRET
from local_fleets.tls_server import HOST, NEVER_S, PATIENCE_S, Fleet, ended, security, serving

from skyinfra.engine import dask_comms, handshakes, settings

# The first bytes of a ClientHello, and no more of it.
HALF = b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03"


def run(test: Callable[[Fleet], Awaitable[None]]) -> None:
    async def whole() -> None:
        async with serving() as fleet:
            await test(fleet)

    asyncio.run(whole())


def limits(monkeypatch: pytest.MonkeyPatch, *, seconds: float = NEVER_S, most: int = 1024) -> None:
    monkeypatch.setattr(handshakes, "SECONDS", seconds)
    monkeypatch.setattr(handshakes, "MOST", most)


@pytest.mark.parametrize("says", [b"", HALF], ids=["silent", "half-open"])
def test_an_unfinished_handshake_ends(says: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    limits(monkeypatch, seconds=0.2)

    async def test(fleet: Fleet) -> None:
        strangers = [await fleet.stranger(says=says) for _ in range(20)]
        assert all([await ended(each) for each in strangers])
        await fleet.asks()

    run(test)


def test_the_handshake_of_dask_ends_too(monkeypatch: pytest.MonkeyPatch) -> None:
    """That with a peer that has the secret, and says nothing after the handshake of TLS."""
    limits(monkeypatch)
    monkeypatch.setattr(dask_comms, "GREETING_S", 0.2)
    context = security().get_connection_args("client")["ssl_context"]

    async def test(fleet: Fleet) -> None:
        assert await ended(await fleet.stranger(tls=context))

    run(test)


def test_the_time_of_this_process_is_not_the_peers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the machine is busy, many of the fleet wait at once, and each would be closed when it is to be served."""
    limits(monkeypatch, seconds=1.0)
    monkeypatch.setattr(handshakes, "_PART_S", 0.1)
    closed: list[None] = []

    async def test() -> None:
        with handshakes.Handshakes().one(HOST, lambda: closed.append(None)):
            time.sleep(1.1)
            for _ in range(5):
                await asyncio.sleep(0)
            assert not closed

    asyncio.run(test())


def test_one_address_has_a_part_of_all(monkeypatch: pytest.MonkeyPatch) -> None:
    limits(monkeypatch, most=40)

    async def test(fleet: Fleet) -> None:
        strangers = [await fleet.stranger(says=HALF) for _ in range(25)]
        # The oldest ones have gone; a client of the same address takes the place of another one.
        for each in strangers[:15]:
            assert await ended(each)
        for _ in range(5):
            await fleet.asks()
        assert await ended(strangers[15])
        other = await fleet.stranger(of="127.0.0.2")
        await fleet.asks()
        for each in (other, *strangers[16:]):
            assert not each[0].at_eof()

    run(test)


def test_all_addresses_together_have_a_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    limits(monkeypatch, most=40)

    async def test(fleet: Fleet) -> None:
        strangers = [await fleet.stranger(of=f"127.0.0.{number}") for number in range(2, 62)]
        for each in strangers[:20]:
            assert await ended(each)
        await fleet.asks()
        assert not strangers[-1][0].at_eof()

    run(test)


def test_connections_of_the_fleet_do_not_count(monkeypatch: pytest.MonkeyPatch) -> None:
    limits(monkeypatch, most=8)
    arguments = security().get_connection_args("client")

    async def test(fleet: Fleet) -> None:
        comms = [await connect(f"tls://{HOST}:{fleet.port}", timeout=PATIENCE_S, **arguments) for _ in range(20)]
        assert await ended((await fleet.stranger(), await fleet.stranger(), await fleet.stranger())[0])
        for comm in comms:
            await comm.write({"op": "identity", "reply": True})
            assert (await comm.read())["type"] == "Server"
            await comm.close()

    run(test)


def test_the_caps_follow_the_limit_of_files() -> None:
    """With 256 files, strangers have 64 of them, those of one address 16; without that, 300 at once left none."""
    program = f"""
import asyncio, resource, sys
sys.path[:0] = {sys.path!r}
from local_fleets.tls_server import NEVER_S, serving
from skyinfra.engine import handshakes
handshakes.SECONDS = NEVER_S
async def whole():
    async with serving() as fleet:
        print(fleet.port, flush=True)
        await asyncio.to_thread(sys.stdin.readline)
resource.setrlimit(resource.RLIMIT_NOFILE, (256, 256))
asyncio.run(whole())
"""
    pipe = subprocess.PIPE
    with subprocess.Popen([sys.executable, "-c", program], stdin=pipe, stdout=pipe, stderr=pipe, text=True) as process:
        assert process.stdout is not None
        fleet = Fleet.__new__(Fleet)
        fleet.port, fleet._strangers = int(process.stdout.readline()), []

        async def test() -> None:
            try:
                strangers = [await fleet.stranger() for _ in range(300)]
                assert await ended(strangers[283])
                await fleet.asks()
                assert not strangers[-1][0].at_eof()
            finally:
                fleet.close()

        asyncio.run(test())
        log = process.communicate("\n")[1]
    assert "Too many open files" not in log


def test_the_log_has_a_line_a_minute(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    limits(monkeypatch, most=40)
    made = handshakes.HANDSHAKES
    monkeypatch.setattr(made, "_silent_until", 0.0)
    monkeypatch.setattr(made, "_unsaid", 0)
    settings.quiet()
    foreign = security(OTHER_SECRET).get_connection_args("client")["ssl_context"]

    async def test(fleet: Fleet) -> None:
        for _ in range(10):
            assert await ended(await fleet.stranger(says=b"GET / HTTP/1.0\r\n\r\n"))
        with contextlib.suppress(ssl.SSLError, ConnectionError):
            assert await ended(await fleet.stranger(tls=foreign))
        for _ in range(30):
            await fleet.stranger()
        await fleet.asks()
        # Half a minute later the rest is told together.
        monkeypatch.setattr(made, "_silent_until", 0.0)
        assert await ended(await fleet.stranger(says=b"hello\n" * 10))

    with caplog.at_level(logging.WARNING):
        run(test)
    lines = [record.getMessage() for record in caplog.records]
    assert len(lines) == 2, lines
    assert "did no handshake of this fleet: 1; the last one was from tls://127.0.0.1:" in lines[0]
    assert "HTTP_REQUEST" in lines[0]
    said = lines[1].partition(": ")[2].partition(";")[0]
    # Nine and one that speak, the foreign one, and of the silent ones those that were too many.
    assert int(said) >= 9 + 1 + 20, lines


def test_the_soft_limit_of_files_is_raised() -> None:
    program = """
import resource
from skyinfra.engine import handshakes
hard = min(4096, resource.getrlimit(resource.RLIMIT_NOFILE)[1])
resource.setrlimit(resource.RLIMIT_NOFILE, (64, hard))
handshakes.allow_files()
assert resource.getrlimit(resource.RLIMIT_NOFILE) == (hard, hard)
"""
    assert resource.getrlimit(resource.RLIMIT_NOFILE)[1] > 64
    subprocess.run([sys.executable, "-c", program], check=True)
