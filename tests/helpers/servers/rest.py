"""A server that answers as the API of a provider: paths with JSON, a status, or a function of the request."""

from __future__ import annotations

import contextlib
import json
import threading
import time
import urllib.parse
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any


@dataclass
class Rest:
    """What it answers, and what it was asked. Answers are looked up by the path without its query."""

    answers: dict[str, Any]
    address: str = ""
    asked: list[tuple[str, str, dict[str, str], str]] = field(default_factory=list)

    def queries(self, path: str) -> list[dict[str, list[str]]]:
        """The queries of the questions for *path*."""
        urls = [urllib.parse.urlsplit(url) for _, url, _, _ in self.asked]
        return [urllib.parse.parse_qs(url.query) for url in urls if url.path == path]

    def headers(self, name: str) -> set[str | None]:
        """The values of a header in all questions."""
        return {headers.get(name) for _, _, headers, _ in self.asked}


class Status(Exception):
    """Raised by an answer: an HTTP status with headers."""

    def __init__(self, code: int, **headers: str) -> None:
        self.code, self.headers = code, headers


@contextmanager
def serving(answers: dict[str, Any]) -> Iterator[Rest]:
    """Serves *answers*: JSON values, raw bytes, or functions of ``(headers, query, body)`` that return one."""
    rest = Rest(answers)

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self._answer(b"")

        def do_POST(self) -> None:
            self._answer(self.rfile.read(int(self.headers.get("Content-Length", 0))))

        def do_DELETE(self) -> None:
            self._answer(b"")

        def _answer(self, body: bytes) -> None:
            rest.asked.append((self.command, self.path, dict(self.headers), body.decode()))
            url = urllib.parse.urlsplit(self.path)
            answer = rest.answers.get(url.path, 404)
            try:
                if callable(answer):
                    answer = answer(dict(self.headers), urllib.parse.parse_qs(url.query), body)
                if isinstance(answer, int):
                    raise Status(answer)
            except Status as status:
                self.send_response(status.code)
                for name, value in status.headers.items():
                    self.send_header(name, value)
                self.end_headers()
                return
            self.send_response(200)
            self.end_headers()
            with contextlib.suppress(ConnectionError):  # a client that waits no longer
                self.wfile.write(answer if isinstance(answer, bytes) else json.dumps(answer).encode())

        def log_message(self, *_: Any) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True)
    thread.start()
    rest.address = f"http://127.0.0.1:{server.server_address[1]}"
    try:
        yield rest
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


def slow(seconds: float) -> Callable[..., Any]:
    """An answer that comes after *seconds*."""

    def answer(*_: Any) -> Any:
        time.sleep(seconds)
        return {}

    return answer
