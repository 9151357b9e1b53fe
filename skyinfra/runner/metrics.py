"""Metrics of this node's slots, read now, and served for Prometheus."""

from __future__ import annotations

import contextlib
import errno
import socket
import sys
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import ClassVar

import pynvml

from skyinfra.errors import AcceleratorMissing, NodeFailed, PortTaken, SkyinfraError
from skyinfra.gpu.hardware import Hardware
from skyinfra.node.node import directory_of
from skyinfra.protocol.nodeconfig import NodeConfig
from skyinfra.protocol.readings import SlotReading
from skyinfra.readings import figures, nvidia, prometheus, vendors

# Vendors whose readings cost next to nothing; for the others a program of theirs is started, which takes seconds.
_CHEAP = ("nvidia", "amd")


def read(config: Path, *, root: Path = Path("/")) -> list[SlotReading]:
    """Returns the reading of each slot that the node *config* has now. Raises `InvalidNodeConfig`.

    A value that cannot be measured is None: where the driver or the vendor's tool does not tell it, on simulated
    accelerators but NVIDIA's, on TPUs and on CPU slots. With the figures of the task on each slot, as the runner
    measured them last. *root*: the parent of sys/.
    """
    measured = figures.published(directory_of(config))
    return [replace(each, **measured.get(each.slot.worker, {})) for each in measure(config, root=root)]


def measure(config: Path, *, cheap: bool = False, root: Path = Path("/")) -> list[SlotReading]:
    """Returns the same without the figures of tasks. *cheap*: without values whose reading takes seconds."""
    directory = directory_of(config)
    status = directory.status()
    slots = status.slots if status is not None and directory.holder() is not None else ()
    node = NodeConfig.load(config)
    vendor = node.accelerator.vendor if node.accelerator is not None else None
    if slots and vendor == "nvidia":
        with contextlib.suppress(AcceleratorMissing, pynvml.NVMLError), Hardware(node, directory).nvml() as nvml:
            return nvidia.of_slots(nvml, slots)
    elif slots and vendor is not None and not node.simulate and (vendor in _CHEAP or not cheap):
        return vendors.read(vendor, slots, root=root)
    return [SlotReading(slot) for slot in slots]


def serve(config: Path, host: str, port: int) -> None:
    """Answers GET /metrics until the process ends. *host* may stand in brackets. Raises `PortTaken`, `NodeFailed`."""

    class Handler(_Handler):
        node = config

    where = host.strip("[]")

    class Server(ThreadingHTTPServer):
        address_family = socket.AF_INET6 if ":" in where else socket.AF_INET

    try:
        server = Server((where, port), Handler)
    except OSError as error:
        raise cannot_listen(f"{host}:{port}", error) from None
    with server:
        print(f"serving http://{host}:{server.server_address[1]}/metrics", file=sys.stderr, flush=True)
        server.serve_forever()


def cannot_listen(listen: str, error: OSError) -> SkyinfraError:
    """Returns the error for an address where nothing can listen."""
    if error.errno == errno.EADDRINUSE:
        return PortTaken(f"another process listens at {listen}", field="--listen", hint="Choose another port.")
    return NodeFailed(f"cannot listen at {listen}: {error.strerror or error}", field="--listen")


class _Handler(BaseHTTPRequestHandler):
    """Answers GET /metrics for *node*, by its configuration file."""

    node: ClassVar[Path]

    def do_GET(self) -> None:
        status, text = 404, "GET /metrics\n"
        if self.path.partition("?")[0] == "/metrics":
            try:
                status, text = 200, prometheus.text(read(self.node))
            except SkyinfraError as error:
                status, text = 500, f"{error}\n"
        body = text.encode()
        self.send_response(status)
        self.send_header("Content-Type", "text/plain; version=0.0.4; charset=utf-8")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *arguments: object) -> None:
        """Each scrape would be a line."""
