"""The fleet page, and the dashboard of the scheduler, at an address of this machine, through the client's connection.

Every account of this machine can connect to a port of its loopback, and so can every web page that a browser here
shows. A request passes that has the cookie of the first visit, with the token; that names this address as its host,
which a page of another site cannot; and that comes from no other page.
"""

from __future__ import annotations

import asyncio
import contextlib
import re
import secrets
import webbrowser
from collections.abc import Callable, Coroutine, Iterator
from dataclasses import dataclass
from functools import cached_property
from http import HTTPStatus
from typing import Any
from urllib.parse import parse_qs, urlsplit

from skyinfra import page
from skyinfra.engine.forwarding import Listener
from skyinfra.engine.loop import LoopThread
from skyinfra.engine.waiting import within
from skyinfra.errors import MissingDependency, SkyinfraError
from skyinfra.protocol import services
from skyinfra.submission.connection import Asker

_WAIT_S = 15.0
_PART = 256 * 1024
# Of the head of a request, and how long it may take.
_LARGEST_HEAD = 64 * 1024
_HEAD_S = 10.0
# How the answer to a request for a websocket begins, after which the browser goes on.
_SWITCHED = b"HTTP/1.1 101 "
# Headers that stay here: those that would keep a connection for another request, and the cookies, which may be those
# of any program of this machine.
_NOT_FORWARDED = {"connection", "keep-alive", "proxy-connection", "upgrade", "cookie", "expect"}
_METHODS = ("GET", "HEAD")
# A target of another form names a host of its own.
_TARGET = re.compile(r"/(?![/\\])[!-~]*")
# Paths of the fleet page, and its answer to one of them with its query.
_OWN = re.compile(rf"{page.PATH}(/|$)")
Own = Callable[[str, dict[str, list[str]]], page.Answer]
_OPEN = "Open the address that skyinfra has shown, with its token; if this is it, load the page again.\n"


@contextlib.contextmanager
def serving(own: Own, port: int) -> Iterator[Dashboard]:
    """Serves the page of a fleet that is not there, at *port* of this machine; 0 is any. Raises `PortTaken`."""
    loop, dashboard = LoopThread(), Dashboard(None, own)
    try:
        loop.run(dashboard.start(port, field="--port"))
        yield dashboard
        loop.run(dashboard.close())
    finally:
        loop.close()


class Dashboard(Listener):
    """Listens on the loopback of this machine for the browser that opens ``url``; one request for a connection.

    own: answers for the fleet page, in another thread; all other pages are those of the scheduler, where there is a
    *connection*.
    """

    longest = _LARGEST_HEAD

    def __init__(self, connection: Asker | None, own: Own) -> None:
        super().__init__()
        self._connection = connection
        self._own = own

    @property
    def url(self) -> str:
        """The address, with the token that admits a browser."""
        return self._admission.url

    def show(self) -> None:
        """Opens it in the browser of whoever runs this, if there is one."""
        webbrowser.open(self._admission.url_once())

    @cached_property
    def _admission(self) -> Admission:
        return Admission(self.port)

    async def take(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Answers a request, or passes it on."""
        try:
            # What ends, is too slow or too large is no request.
            with contextlib.suppress(OSError, EOFError, asyncio.LimitOverrunError, SkyinfraError):
                request = self._admission.admit(await within(reader.readuntil(b"\r\n\r\n"), _HEAD_S))
                if _OWN.match(request.path):
                    writer.write(_answered(await asyncio.to_thread(self._own, request.path, request.query)))
                    await writer.drain()
                elif self._connection is None:
                    raise _refused(HTTPStatus.NOT_FOUND, "The fleet is not there, and so is none of Dask's pages.\n")
                else:
                    await self._pipe(self._connection, request, reader, writer)
        except Refused as refused:
            writer.write(refused.answer)
        finally:
            writer.close()

    async def _opened(self, connection: Asker) -> int:
        """Opens a connection to the scheduler's pages. Raises `Refused` where the head cannot draw them."""
        try:
            return await services.dashboard_open(connection.head)
        except MissingDependency as error:
            raise _refused(HTTPStatus.NOT_IMPLEMENTED, f"{error}\n") from None

    async def _pipe(
        self, connection: Asker, request: Admitted, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        """Sends *request* and copies the answer; for a websocket both ways from then on. Until either side ends."""
        number, head = await self._opened(connection), connection.head
        answer = b""

        async def there() -> None:
            # Another request on the same connection was not admitted: only a websocket goes on.
            while data := await reader.read(_PART):
                upgraded = request.websocket and answer.startswith(_SWITCHED)
                if upgraded and not await services.dashboard_send(head, number=number, data=data):
                    return

        async def back() -> None:
            nonlocal answer
            while (data := await services.dashboard_receive(head, number=number, wait_s=_WAIT_S)) is not None:
                writer.write(data if answer else _unframed(data))
                answer = answer or data
                await writer.drain()

        try:
            if await services.dashboard_send(head, number=number, data=request.head):
                await _until_one_ends(there(), back())
        finally:
            await services.dashboard_close(head, number=number)


def _unframed(data: bytes) -> bytes:
    """Returns the begin of a page of the scheduler with the header that no other page may show it within itself."""
    first, end, rest = data.partition(b"\r\n")
    if not end or data.startswith(_SWITCHED):
        return data
    return first + end + b"Content-Security-Policy: frame-ancestors 'none'\r\n" + rest


async def _until_one_ends(*copying: Coroutine[Any, Any, None]) -> None:
    tasks = [asyncio.ensure_future(each) for each in copying]
    try:
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for each in tasks:
            each.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


# Requests -------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Admitted:
    """A request that may pass, to *path* with *query*.

    head: what is sent in its place. websocket: whether its connection goes on after it.
    """

    head: bytes
    websocket: bool
    path: str
    query: dict[str, list[str]]


class Refused(Exception):
    """A request that may not pass. *answer*: the whole response."""

    def __init__(self, answer: bytes) -> None:
        super().__init__()
        self.answer = answer


class Admission:
    """Admits requests to ``127.0.0.1:port``."""

    def __init__(self, port: int) -> None:
        self._token = secrets.token_urlsafe(32)
        # Cookies are of a host, whatever the port.
        self._cookie = f"skyinfra-{port}={self._token}"
        self._hosts = (f"127.0.0.1:{port}", f"localhost:{port}")
        self._once: set[str] = set()
        self.url = self._address(self._token)

    def url_once(self) -> str:
        """An address that admits the first browser that opens it: other accounts see the arguments of programs."""
        token = secrets.token_urlsafe(32)
        self._once.add(token)
        return self._address(token)

    def _address(self, token: str) -> str:
        return f"http://{self._hosts[0]}{page.PATH}?token={token}"

    def admit(self, data: bytes) -> Admitted:
        """Decides on the head *data* of a request. Raises `Refused`, for the first visit with a redirection."""
        method, target, headers = _parsed(data)
        if method not in _METHODS:
            raise _refused(HTTPStatus.METHOD_NOT_ALLOWED, "The dashboard has pages to read only.\n")
        self._check_source(headers)
        address = urlsplit(target)
        query = parse_qs(address.query)
        if "token" in query:
            self._visit(address.path, query["token"][-1])
        cookies = [part.strip() for name, value in headers if name == "cookie" for part in value.split(";")]
        if not any(_same(cookie, self._cookie) for cookie in cookies):
            raise _refused(HTTPStatus.FORBIDDEN, _OPEN)
        websocket = any(name == "upgrade" and value.lower() == "websocket" for name, value in headers)
        kept = [(name, value) for name, value in headers if name not in _NOT_FORWARDED]
        way = [("connection", "Upgrade"), ("upgrade", "websocket")] if websocket else [("connection", "close")]
        head = _head(f"{method} {target} HTTP/1.1", *kept, *way)
        return Admitted(head, websocket, address.path, query)

    def _check_source(self, headers: list[tuple[str, str]]) -> None:
        hosts = [value for name, value in headers if name == "host"]
        origins = [value for name, value in headers if name == "origin"]
        if len(hosts) != 1 or hosts[0] not in self._hosts:
            raise _refused(HTTPStatus.FORBIDDEN, f"The dashboard is at {' and '.join(self._hosts)} only.\n")
        if any(origin not in [f"http://{host}" for host in self._hosts] for origin in origins):
            raise _refused(HTTPStatus.FORBIDDEN, "The dashboard answers its own pages only.\n")

    def _visit(self, path: str, token: str) -> None:
        if token in self._once:
            self._once.remove(token)
        elif not _same(token, self._token):
            raise _refused(HTTPStatus.FORBIDDEN, _OPEN)
        cookie = f"{self._cookie}; Path=/; HttpOnly; SameSite=Strict"
        raise _refused(HTTPStatus.SEE_OTHER, "", ("Location", path), ("Set-Cookie", cookie))


def _parsed(data: bytes) -> tuple[str, str, list[tuple[str, str]]]:
    """Method, target, and headers with their names in small letters. Raises `Refused`."""
    first, *lines = data.decode("latin-1").removesuffix("\r\n\r\n").split("\r\n")
    method, target, version, *more = [*first.split(" "), "", ""]
    headers = []
    for line in lines:
        name, colon, value = line.partition(":")
        if not colon or not name or any(character.isspace() for character in name) or "\n" in value or "\r" in value:
            raise _refused(HTTPStatus.BAD_REQUEST, "No header of HTTP/1.1.\n")
        headers.append((name.lower(), value.strip()))
    if any(more) or not version.startswith("HTTP/1.") or not _TARGET.fullmatch(target):
        raise _refused(HTTPStatus.BAD_REQUEST, "No request of HTTP/1.1.\n")
    if any(name == "transfer-encoding" or (name == "content-length" and value != "0") for name, value in headers):
        raise _refused(HTTPStatus.BAD_REQUEST, "The dashboard has pages to read only.\n")
    return method, target, headers


def _same(given: str, wanted: str) -> bool:
    return secrets.compare_digest(given.encode("latin-1", "replace"), wanted.encode())


def _refused(status: HTTPStatus, text: str, *headers: tuple[str, str]) -> Refused:
    return Refused(_answered(page.Answer(status, "text/plain; charset=utf-8", text.encode()), *headers))


def _answered(answer: page.Answer, *headers: tuple[str, str]) -> bytes:
    """Returns the whole response."""
    status = HTTPStatus(answer.status)
    always = [
        ("Content-Type", answer.kind),
        ("Content-Length", str(len(answer.body))),
        ("Cache-Control", "no-store"),
        ("Content-Security-Policy", page.POLICY),
        ("X-Content-Type-Options", "nosniff"),
        ("Referrer-Policy", "no-referrer"),
        ("Connection", "close"),
    ]
    return _head(f"HTTP/1.1 {status.value} {status.phrase}", *headers, *always) + answer.body


def _head(first: str, *headers: tuple[str, str]) -> bytes:
    lines = [first, *(f"{name}: {value}" for name, value in headers), "", ""]
    return "\r\n".join(lines).encode("latin-1")
