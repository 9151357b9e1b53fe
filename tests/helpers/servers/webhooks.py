"""A server that takes notifications as Slack does, and others that do not."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any


class WebhookServer:
    """``received``: path and JSON of each request. *answers*: the status codes of requests one after another; the last
    one is that of all later ones. ``open``: requests to a path with ``hang`` wait for it."""

    def __init__(self, *answers: int) -> None:
        self.received: list[tuple[str, dict[str, Any]]] = []
        self.answers = list(answers) or [200]
        self.open = threading.Event()
        self.hanging = 0
        outer = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                assert self.headers["Content-Type"].startswith("application/json")
                if "hang" in self.path:
                    outer.hanging += 1
                    outer.open.wait(60)
                else:
                    outer.received.append((self.path, body))
                code = outer.answers.pop(0) if len(outer.answers) > 1 else outer.answers[0]
                self.send_response(code)
                if 300 <= code < 400:
                    self.send_header("Location", outer.location)
                self.end_headers()
                self.wfile.write(b"ok")

            def do_GET(self) -> None:  # a redirect that was followed
                outer.received.append((self.path, {}))
                self.send_response(200)
                self.end_headers()

            def log_message(self, *_: Any) -> None:
                pass

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.server.daemon_threads = True
        self.location = f"http://localhost:{self.server.server_port}/elsewhere"

    def url(self, path: str) -> str:
        return f"http://127.0.0.1:{self.server.server_port}/{path}"

    def texts(self) -> list[str]:
        return [body["text"] for _, body in self.received]


@contextmanager
def webhook_server(*answers: int) -> Iterator[WebhookServer]:
    made = WebhookServer(*answers)
    thread = threading.Thread(target=made.server.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True)
    thread.start()
    try:
        yield made
    finally:
        made.open.set()
        made.server.shutdown()
        made.server.server_close()
        thread.join()
