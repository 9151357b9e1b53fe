"""``skyinfra-runner metrics``: what the node's slots use, for Prometheus."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

from skyinfra.errors import InvalidField

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
    from skyinfra.runner import metrics_http

    metrics_http.serve(options.config, host, int(port))
    return 0
