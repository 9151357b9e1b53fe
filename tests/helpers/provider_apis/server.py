"""A server for an API that keeps what it is told to make. The file of a cloud has its paths and its rules."""

from __future__ import annotations

import itertools
import json
import re
import ssl
import threading
import urllib.parse
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

Body = dict[str, Any]
# With headers of its own, where it has some.
Answer = tuple[int, Any] | tuple[int, Any, dict[str, str]]


class Refused(Exception):
    """Raised by an answer: the status and the body of a refusal."""

    def __init__(self, code: int, body: Any) -> None:
        super().__init__(code, body)
        self.code, self.body = code, body


@dataclass
class Request:
    """One question: the parts of its path, its query, its body."""

    parts: tuple[str, ...]
    query: dict[str, str]
    body: Any


@dataclass
class Api:
    """What exists, by kind and id, what is gone, what was asked for, and what of it has no
    answer here. ``environment`` leads the provider here."""

    objects: dict[str, dict[str, Body]] = field(default_factory=dict)
    gone: dict[str, Body] = field(default_factory=dict)
    # Kinds of which a request is taken, and fails afterwards: the code and the message.
    failing: dict[str, tuple[str, str]] = field(default_factory=dict)
    asked: list[tuple[str, str, Any]] = field(default_factory=list)
    unanswered: list[str] = field(default_factory=list)
    numbers: Iterator[int] = field(default_factory=lambda: itertools.count(1))
    lock: threading.RLock = field(default_factory=threading.RLock)
    environment: dict[str, str] = field(default_factory=dict)
    # What goes when something else goes.
    ends_with: Callable[[Api, str], None] = lambda api, key: None

    def kind(self, name: str) -> dict[str, Body]:
        return self.objects.setdefault(name, {})

    def lose(self, kind: str, key: str) -> None:
        """Ends what stands, as somebody else or the cloud does it."""
        with self.lock:
            self.gone[key] = self.kind(kind).pop(key)
            self.ends_with(self, key)

    def number(self) -> int:
        """Returns a number that nothing else has."""
        return next(self.numbers)

    def existing(self) -> dict[str, list[str]]:
        """Returns the ids of what exists, by kind."""
        return {kind: sorted(each) for kind, each in self.objects.items() if each}

    def sent(self, method: str, path: str) -> list[Any]:
        """Returns the bodies of all questions with that method for a path that matches."""
        return [body for how, url, body in self.asked if how == method and re.fullmatch(path, url)]


Handler = Callable[[Api, Request], Answer]
# By method and pattern of the path.
Routes = dict[tuple[str, str], Handler]


def _answer(api: Api, routes: Routes, method: str, url: str, given: bytes) -> Answer:
    parts = urllib.parse.urlsplit(url)
    # A form, with which somebody logs in, is nobody's answer.
    body = json.loads(given) if given[:1] in (b"{", b"[") else None
    with api.lock:
        api.asked.append((method, parts.path, body))
        for (how, pattern), handler in routes.items():
            if how == method and (found := re.fullmatch(pattern, urllib.parse.unquote(parts.path))):
                try:
                    return handler(api, Request(found.groups(), dict(urllib.parse.parse_qsl(parts.query)), body))
                except Refused as refused:
                    return refused.code, refused.body
        # A fault of the file of the cloud, which its test says.
        api.unanswered.append(f"{method} {parts.path}")
    return 400, {"id": "unknown", "code": "unknown", "message": f"no answer for {method} {parts.path}"}


@contextmanager
def serving(
    routes: Routes, *, tls: tuple[Path, Path] | None = None, headers: Mapping[str, str] | None = None
) -> Iterator[tuple[Api, str]]:
    """Serves *routes* on a port of this machine; gives what it keeps, and its address.

    tls: a certificate of the name ``localhost``, and its key. headers: of each answer.
    """
    api = Api()

    class Server(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def _serve(self) -> None:
            given = self.rfile.read(int(self.headers.get("Content-Length") or 0))
            code, body, *own = _answer(api, routes, self.command, self.path, given)
            content = b"" if body is None else json.dumps(body).encode()
            self.send_response(code)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(content)))
            for name, value in {**(headers or {}), **(own[0] if own else {})}.items():
                self.send_header(name, value)
            self.end_headers()
            self.wfile.write(content)

        def log_message(self, *_: Any) -> None:
            pass

    for method in ("GET", "POST", "PUT", "PATCH", "DELETE"):
        setattr(Server, f"do_{method}", Server._serve)
    server = ThreadingHTTPServer(("127.0.0.1", 0), Server)
    server.daemon_threads = True
    scheme, host = ("https", "localhost") if tls else ("http", "127.0.0.1")
    if tls:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(*tls)
        server.socket = context.wrap_socket(server.socket, server_side=True)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True)
    thread.start()
    try:
        yield api, f"{scheme}://{host}:{server.server_address[1]}"
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
