"""``skyinfra-runner metrics``: what the node's slots use, for Prometheus."""

from __future__ import annotations

import argparse
import errno
import sys
from functools import partial
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

from skyinfra._errors import InvalidField, NodeFailed, PortTaken, SkyinfraError

_LISTEN = "127.0.0.1:9835"


def add(commands: Any) -> None:
    """Adds the command."""
    text = "serve what the slots use for Prometheus, or print it once"
    parser = commands.add_parser("metrics", help=text, description=text)
    parser.add_argument("--config", type=Path, required=True, metavar="FILE", help="the node configuration, node.json")
    parser.add_argument("--listen", default=_LISTEN, metavar="HOST:PORT", help=f"for GET /metrics ({_LISTEN})")
    parser.add_argument("--once", action="store_true", help="print it, for a textfile collector")
    parser.set_defaults(command=run)


def run(options: argparse.Namespace) -> int:
    """Executes the command; serving ends with a signal. Raises `InvalidField`, `PortTaken`, `NodeFailed`."""
    from skyinfra.runner import metrics

    if options.once:
        sys.stdout.write(metrics.prometheus(metrics.read(options.config)))
        return 0
    host, _, port = options.listen.rpartition(":")
    if not host or not port.isdigit() or int(port) > 65535:
        raise InvalidField("expected HOST:PORT", field="--listen", given=options.listen)
    # Read once, so that a wrong configuration is refused at the start.
    metrics.read(options.config)
    try:
        server = ThreadingHTTPServer((host.strip("[]"), int(port)), partial(_Handler, options.config))
    except OSError as error:
        raise _cannot_listen(options.listen, error) from None
    with server:
        print(f"serving http://{host}:{server.server_address[1]}/metrics", file=sys.stderr, flush=True)
        server.serve_forever()
    return 0


def _cannot_listen(listen: str, error: OSError) -> SkyinfraError:
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
        from skyinfra.runner import metrics

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
