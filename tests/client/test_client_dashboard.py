"""The address of the dashboard on the user's machine: who gets through to the head, and who does not."""

from __future__ import annotations

import asyncio
import contextlib
import re
from collections.abc import Awaitable, Callable
from types import SimpleNamespace
from typing import Any, cast

import pytest
from front_ends.recorded_pages import PAGE, SWITCHED, Head, RecordedPages

from skyinfra import page
from skyinfra.client.dashboard import Dashboard
from skyinfra.head.tunnel import Tunnel
from skyinfra.submission.connection import Connection

PATIENCE_S = 30.0


class Desk:
    """A dashboard at this machine's loopback, whose pages write down what they hear."""

    def __init__(self, dashboard: Dashboard, pages: RecordedPages) -> None:
        self.dashboard = dashboard
        self.heard = pages.heard
        match = re.fullmatch(r"http://(127\.0\.0\.1:(\d+))(/fleet\?token=([\w-]{40,}))", dashboard.url)
        assert match, dashboard.url
        self.host, port, self.first, self.token = match.groups()
        self.port = int(port)

    async def connect(self, data: bytes) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        reader, writer = await asyncio.open_connection("127.0.0.1", self.port)
        writer.write(data)
        return reader, writer

    async def get(self, target: str = "/status", *headers: str, method: str = "GET", host: str | None = None) -> str:
        """The answer to one request."""
        sent = self.head(target, *headers, method=method, host=host)
        reader, writer = await self.connect(sent)
        with contextlib.closing(writer):
            async with asyncio.timeout(PATIENCE_S):
                return (await reader.read()).decode()

    def head(self, target: str, *headers: str, method: str = "GET", host: str | None = None) -> bytes:
        lines = [f"{method} {target} HTTP/1.1", f"Host: {host or self.host}", *headers, "", ""]
        return "\r\n".join(lines).encode()

    async def cookie(self) -> str:
        """The header that a browser has after its first visit."""
        answer = await self.get(self.first)
        assert answer.startswith("HTTP/1.1 303 ")
        assert "\r\nLocation: /fleet\r\n" in answer
        match = re.search(r"\r\nSet-Cookie: ([\w=-]+); Path=/; HttpOnly; SameSite=Strict\r\n", answer)
        assert match, answer
        return f"Cookie: {match[1]}"


def own(path: str, query: dict[str, list[str]]) -> page.Answer:
    return page.Answer(200, "text/plain", f"own {path} {sorted(query.items())}".encode())


def run(test: Callable[[Desk], Awaitable[None]], *, answer: bytes = PAGE) -> None:
    async def whole() -> None:
        tunnel, pages = Tunnel(cast(Any, None)), RecordedPages(answer)
        tunnel._pages = cast(Any, pages)
        dashboard = Dashboard(cast(Connection, SimpleNamespace(head=Head(tunnel.handlers))), own)
        await dashboard.start(0, field="--port")
        try:
            await test(Desk(dashboard, pages))
        finally:
            await dashboard.close()
            await pages.end()

    asyncio.run(whole())


def refused(answer: str, status: int = 403) -> bool:
    assert answer.startswith(f"HTTP/1.1 {status} "), answer
    assert "Connection: close" in answer
    return True


def test_the_address_with_the_token_admits_a_browser() -> None:
    async def test(desk: Desk) -> None:
        assert refused(await desk.get())
        assert refused(await desk.get("/status?token="))
        assert refused(await desk.get(f"/status?token={desk.token[:-1]}"))
        cookie = await desk.cookie()
        assert desk.heard == []
        assert (await desk.get("/status", cookie)).endswith("\r\n\r\npages")
        assert (await desk.get("/static/a.js?v=1", "Cookie: other=a b", cookie.replace(": ", ": x=1; "))).endswith(
            "pages"
        )
        assert [each.partition(b"\r\n")[0] for each in desk.heard] == [
            b"GET /status HTTP/1.1",
            b"GET /static/a.js?v=1 HTTP/1.1",
        ]

    run(test)


def test_the_fleet_page_is_for_who_is_admitted_and_never_asks_the_scheduler_s_pages() -> None:
    async def test(desk: Desk) -> None:
        assert refused(await desk.get("/fleet"))
        assert refused(await desk.get("/fleet/state"))
        cookie = await desk.cookie()
        assert refused(await desk.get("/fleet/state", cookie, "Origin: http://evil.example"))
        answer = await desk.get("/fleet/log?node=n1&task=a%20b", cookie)
        assert answer.startswith("HTTP/1.1 200 OK\r\n")
        assert answer.endswith("\r\n\r\nown /fleet/log [('node', ['n1']), ('task', ['a b'])]")
        assert f"\r\nContent-Security-Policy: {page.POLICY}\r\n" in answer
        assert desk.heard == []
        assert (await desk.get("/fleets", cookie)).endswith("pages")

    run(test)


def test_no_page_is_shown_within_another() -> None:
    """Every port of this machine is of the same site as far as cookies go: another page here could ask for a click."""
    header = "\r\nContent-Security-Policy: "

    async def test(desk: Desk) -> None:
        cookie = await desk.cookie()
        for target in ("/fleet", "/status", "/static/a.js", "/nothing"):
            for headers in ((cookie,), ()):
                head = (await desk.get(target, *headers)).partition("\r\n\r\n")[0]
                assert head.count(header) == 1, head
                assert "frame-ancestors 'none'" in head.partition(header)[2].partition("\r\n")[0]

    run(test)


def test_the_address_that_a_browser_is_given_admits_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """Other accounts see the arguments that a program is started with, for as long as it runs."""
    opened: list[str] = []
    monkeypatch.setattr("webbrowser.open", opened.append)

    async def test(desk: Desk) -> None:
        desk.dashboard.show()
        [url] = opened
        assert desk.token not in url
        once = url.removeprefix(f"http://{desk.host}")
        assert refused(await desk.get(once, host="evil.example"))
        assert (await desk.get(once)).startswith("HTTP/1.1 303 ")
        assert refused(await desk.get(once))
        await desk.cookie()

    run(test)


def test_who_asks_for_nothing_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("skyinfra.client.dashboard._HEAD_S", 0.05)

    async def test(desk: Desk) -> None:
        for said in (b"", b"GET /status HTTP/1.1\r\n"):
            reader, writer = await desk.connect(said)
            with contextlib.closing(writer):
                async with asyncio.timeout(PATIENCE_S):
                    assert await reader.read() == b""

    run(test)


def test_a_request_without_an_end_is_no_request() -> None:
    async def test(desk: Desk) -> None:
        reader, writer = await desk.connect(desk.head("/status")[:-2] + b"X: " + b"x" * 2**18)
        with contextlib.closing(writer), contextlib.suppress(ConnectionError):
            async with asyncio.timeout(PATIENCE_S):
                assert await reader.read() == b""
        assert desk.heard == []

    run(test)


def test_what_belongs_to_this_machine_stays_here() -> None:
    """Neither the token nor what other programs keep in the browser for this host reaches the fleet."""

    async def test(desk: Desk) -> None:
        cookie = await desk.cookie()
        await desk.get("/status", cookie + "; jupyter=secret", "Accept: text/html")
        assert len(desk.heard) == 1
        assert desk.token.encode() not in desk.heard[0]
        assert b"secret" not in desk.heard[0]
        assert b"\r\naccept: text/html\r\n" in desk.heard[0]

    run(test)


def test_the_cookie_of_another_dashboard_is_none() -> None:
    async def test(desk: Desk) -> None:
        cookie = await desk.cookie()
        name, _, token = cookie.removeprefix("Cookie: ").partition("=")
        assert refused(await desk.get("/status", f"Cookie: {name}1={token}"))
        assert refused(await desk.get("/status", f"Cookie: {name}={token[::-1]}"))
        assert desk.heard == []

    run(test)


UPGRADE = ("Upgrade: websocket", "Connection: Upgrade", "Sec-WebSocket-Key: a", "Sec-WebSocket-Version: 13")


def test_a_foreign_host_or_origin_is_refused_even_with_the_cookie() -> None:
    async def test(desk: Desk) -> None:
        cookie = await desk.cookie()
        foreign = ("evil.example", f"evil.example:{desk.port}", "127.0.0.1", f"127.0.0.1:{desk.port + 1}", "127.0.0.2")
        for host in foreign:
            assert refused(await desk.get("/status", cookie, host=host))
            assert refused(await desk.get(desk.first, host=host))
            for more in ((), UPGRADE):
                assert refused(await desk.get("/status/ws", cookie, f"Origin: http://{host}", *more))
        for origin in ("null", f"https://{desk.host}", f"http://{desk.host}.evil.example", ""):
            assert refused(await desk.get("/status/ws", cookie, f"Origin: {origin}", *UPGRADE))
        assert refused(await desk.get("/status", cookie, f"Host: {desk.host}", host="evil.example"))
        assert desk.heard == []
        for host in (desk.host, f"localhost:{desk.port}"):
            assert (await desk.get("/status", cookie, f"Origin: http://{host}", host=host)).endswith("pages")

    run(test)


async def unframed(reader: asyncio.StreamReader) -> bytes:
    """An answer without the header that is added, see `test_no_page_is_shown_within_another`."""
    head = await reader.readuntil(b"\r\n\r\n")
    body = await reader.readexactly(int(re.search(rb"Content-Length: (\d+)", head)[1]))  # type: ignore[index]
    return head.replace(b"Content-Security-Policy: frame-ancestors 'none'\r\n", b"") + body


def test_only_one_request_of_a_connection_passes() -> None:
    """Even where the head keeps the connection for more."""
    answer = b"HTTP/1.1 200 OK\r\nContent-Length: 5\r\n\r\npages"

    async def test(desk: Desk) -> None:
        allowed = desk.head("/status", await desk.cookie(), "Connection: keep-alive")
        reader, writer = await desk.connect(allowed + desk.head("/second", "X: pipelined"))
        with contextlib.closing(writer):
            assert await unframed(reader) == answer
            writer.write(desk.head("/third"))
            writer.write_eof()
            assert await reader.read() == b""
        assert len(desk.heard) == 1
        assert b"second" not in desk.heard[0]
        assert b"\r\nconnection: close\r\n" in desk.heard[0]
        assert b"keep-alive" not in desk.heard[0]

    run(test, answer=answer)


def test_a_websocket_passes_both_ways() -> None:
    async def test(desk: Desk) -> None:
        origin = f"Origin: http://{desk.host}"
        assert refused(await desk.get("/status/ws", origin, *UPGRADE))
        reader, writer = await desk.connect(desk.head("/status/ws", await desk.cookie(), origin, *UPGRADE))
        with contextlib.closing(writer):
            assert await reader.readexactly(len(SWITCHED)) == SWITCHED
            for frame in (b"\x81\x05hello", b"\x81\x05again"):
                writer.write(frame)
                assert await reader.readexactly(len(frame)) == frame
        assert b"\r\nconnection: Upgrade\r\nupgrade: websocket\r\n" in desk.heard[0]
        assert b"\r\nSec-WebSocket-Key: a\r\n".lower() in desk.heard[0]

    run(test, answer=SWITCHED)


def test_nothing_follows_a_websocket_that_the_head_refuses() -> None:
    """It keeps the connection for another request, which nobody has looked at."""
    answer = b"HTTP/1.1 403 Forbidden\r\nContent-Length: 0\r\n\r\n"

    async def test(desk: Desk) -> None:
        reader, writer = await desk.connect(desk.head("/status/ws", await desk.cookie(), *UPGRADE))
        with contextlib.closing(writer):
            assert await unframed(reader) == answer
            writer.write(desk.head("/status"))
            await writer.drain()
            writer.write_eof()
            assert await reader.read() == b""
        assert len(desk.heard) == 1

    run(test, answer=answer)


@pytest.mark.parametrize(
    ("sent", "status"),
    [
        ("POST /status HTTP/1.1", 405),
        ("CONNECT evil.example:443 HTTP/1.1", 400),
        ("GET http://evil.example/ HTTP/1.1", 400),
        ("GET //evil.example/ HTTP/1.1", 400),
        ("GET /\\evil.example/ HTTP/1.1", 400),
        ("GET /\t/evil.example/ HTTP/1.1", 400),
        ("GET /status", 400),
        ("GET /status HTTP/1.1 HTTP/1.1", 400),
        ("GET /status HTTP/2", 400),
        ("GET /status\nX: HTTP/1.1", 400),
        ("GET /status HTTP/1.1\r\nTransfer-Encoding: chunked", 400),
        ("GET /status HTTP/1.1\r\nContent-Length: 5", 400),
        ("GET /status HTTP/1.1\r\nX: a\r\n folded", 400),
        ("GET /status HTTP/1.1\r\nX: a\nHost: b", 400),
        ("GET /status HTTP/1.1\r\nX : a", 400),
        ("\x16\x03\x01", 400),
    ],
)
def test_what_is_no_request_for_a_page_is_refused(sent: str, status: int) -> None:
    async def test(desk: Desk) -> None:
        first, _, rest = sent.partition("\r\n")
        lines = [first, f"Host: {desk.host}", await desk.cookie(), *([rest] if rest else []), "", ""]
        reader, writer = await desk.connect("\r\n".join(lines).encode())
        with contextlib.closing(writer):
            assert refused((await reader.read()).decode(), status)
        assert desk.heard == []

    run(test)
