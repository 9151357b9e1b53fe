"""What the node's slots use, over HTTP."""

from __future__ import annotations

import errno
import sys
from functools import partial
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

from skyinfra.errors import NodeFailed, PortTaken, SkyinfraError
from skyinfra.runner import metrics


def serve(config: Path, host: str, port: int) -> None:
    """Answers GET /metrics until the process ends. *host* may stand in brackets. Raises `PortTaken`, `NodeFailed`."""
    try:
        server = ThreadingHTTPServer((host.strip("[]"), port), partial(_Handler, config))
    except OSError as error:
        raise cannot_listen(f"{host}:{port}", error) from None
    with server:
        print(f"serving http://{host}:{server.server_address[1]}/metrics", file=sys.stderr, flush=True)
        server.serve_forever()


def cannot_listen(listen: str, error: OSError) -> SkyinfraError:
    """What is told where nothing can listen at *listen*."""
    if error.errno == errno.EADDRINUSE:
        return PortTaken(f"another process listens at {listen}", field="--listen", hint="Choose another port.")
    return NodeFailed(f"cannot listen at {listen}: {error.strerror or error}", field="--listen")


class _Handler(BaseHTTPRequestHandler):
    """Answers GET /metrics for the node whose configuration is the file *config*."""

    def __init__(self, config: Path, *arguments: Any) -> None:
        self._config = config
        super().__init__(*arguments)

    def do_GET(self) -> None:
        """Answers."""
        if self.path.partition("?")[0] != "/metrics":
            self._answer(404, "GET /metrics\n")
            return
        try:
            text = metrics.prometheus(metrics.read(self._config))
        except SkyinfraError as error:
            self._answer(500, f"{error}\n")
            return
        self._answer(200, text)

    def _answer(self, status: int, text: str) -> None:
        body = text.encode()
        self.send_response(status)
        self.send_header("Content-Type", "text/plain; version=0.0.4; charset=utf-8")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *arguments: object) -> None:
        """Each scrape would be a line."""
