"""The fleet's scheduler, on the head; and finding out, on every node, whether it answers."""

from __future__ import annotations

import errno
import logging
import socket
import ssl
from pathlib import Path

import dask
from distributed.comm import connect
from distributed.security import Security
from distributed.utils import get_ip, get_mp_context

from skyinfra._errors import CredentialsRefused, NodeError, NodeFailed, PortTaken, SkyinfraError
from skyinfra.protocol import blobs
from skyinfra.protocol.blobs import BlobStore
from skyinfra.protocol.fleet import FleetLayout
from skyinfra.protocol.manifest import Endpoint
from skyinfra.runner.blobs import HeadBlobs
from skyinfra.runner.desk import Desk
from skyinfra.runner.jobs import Jobs
from skyinfra.runner.scheduler import FleetScheduler
from skyinfra.runner.state import NodeDirectory

_CONNECT_S = 3

# Dask's defaults lose tasks or trust the network; each of these was measured.
_CONFIG = {
    # A lost node makes its tasks hop over its dying workers, and each hop counts as a failure of the task.
    "distributed.scheduler.allowed-failures": 60,
    # A silent link is noticed after 12 s instead of 28-60 s.
    "distributed.comm.timeouts.tcp": "15s",
    # Shorter, and a task that holds the GIL is started again for ever.
    "distributed.scheduler.worker-ttl": "5 minutes",
    # Scheduler and workers serve unauthenticated HTTP pages otherwise.
    "distributed.scheduler.http.routes": [],
    "distributed.worker.http.routes": [],
    # Tasks may start processes of their own, which children of daemonic processes may not.
    "distributed.worker.daemon": False,
    # A worker is forked from a process that has Dask loaded: 0.1 s instead of 0.6 s of CPU for each slot.
    "distributed.worker.multiprocessing-method": "forkserver",
    # For a dashboard, which there is none of: 50 wake-ups a second of every slot that waits for a task.
    "distributed.worker.profile.enabled": False,
    "distributed.admin.tick.interval": "500ms",
    "distributed.admin.system-monitor.interval": "2s",
    # Every process would keep NVML open, which holds the GPUs, and not start where users are told less than root.
    "distributed.diagnostics.nvml": False,
    # Of every connection, head and workers would keep the last thousand messages of up to 1 MB, for debugging.
    "distributed.admin.low-level-log-length": 0,
    # Returns the memory that a task gave back to the system; has to be set before a process starts.
    "distributed.nanny.pre-spawn-environ": {"MALLOC_TRIM_THRESHOLD_": 65536},
    # Calls of jobs; the warning is about Dask's own collections.
    "distributed.admin.large-graph-warning-threshold": "1 PiB",
}


def configure(*, scratch: Path) -> None:
    """Sets Dask up in this process and the workers that it will start. *scratch*: where it keeps temporary files."""
    quiet()
    dask.config.set(_CONFIG)
    dask.config.set({"temporary-directory": str(scratch)})
    # Dask would load numpy and pandas there, before the worker's own import path and variables are set.
    get_mp_context().set_forkserver_preload(["skyinfra.runner.worker", "skyinfra.runner.preloaded"])


def quiet() -> None:
    """Leaves Dask's warnings in the log: what it says about every connection would bury the node's own lines."""
    logging.getLogger("distributed").setLevel(logging.WARNING)
    logging.getLogger("distributed.comm.tcp").addFilter(_says_something)


def _says_something(record: logging.LogRecord) -> bool:
    """Not so that a peer left during the handshake: a worker that ends does that when it was about to report."""
    message = record.getMessage()
    return "TLS handshake failed" not in message or "UNEXPECTED_EOF" not in message


def parse(text: str) -> Endpoint:
    """``HOST:PORT`` as an `Endpoint`; an IPv6 host may stand in brackets."""
    host, _, port = text.strip().rpartition(":")
    return Endpoint(address=host.strip("[]"), port=int(port))


def host_port(endpoint: Endpoint) -> str:
    """The inverse of `parse`."""
    return str(endpoint).removeprefix("tls://")


async def start(
    declared: Endpoint,
    *,
    directory: NodeDirectory,
    security: Security,
    layout: FleetLayout,
    desk: Desk | None = None,
    jobs: Jobs | None = None,
) -> FleetScheduler:
    """A running scheduler at *declared*; for port 0 at the port that it had before, if it had one, else at any.

    *layout*: what it hands on; *desk*: through which clients ask nodes; *jobs*: those that it takes from them. Writes
    ``scheduler`` in *directory*. Raises `PortTaken`, or `NodeFailed` where the address is not this node's.
    """
    kept = declared.port == 0 and directory.scheduler_file.exists()
    port = parse(directory.scheduler_file.read_text(encoding="utf-8")).port if kept else declared.port
    endpoint = Endpoint(declared.address, port)
    choose = f"remove {directory.scheduler_file} to have another chosen" if kept else "declare another port"
    try:
        _check_free(endpoint)
        scheduler: FleetScheduler = await FleetScheduler(
            layout=layout,
            desk=desk,
            blobs=HeadBlobs(BlobStore(directory.path / blobs.FOLDER)),
            jobs=jobs,
            host=_bracketed(endpoint.address),
            port=endpoint.port,
            security=security,
            dashboard=False,
            dashboard_address="127.0.0.1:0",
        )
    except OSError as error:
        raise _cannot_listen(endpoint, error, choose) from error
    directory.write(directory.scheduler_file, host_port(reached_at(scheduler)) + "\n")
    return scheduler


def reached_at(scheduler: FleetScheduler) -> Endpoint:
    """The address of *scheduler* for other processes: its host as bound, or this node's own for a wildcard."""
    return parse(scheduler.address.removeprefix("tls://"))


def own_address(scheduler: Endpoint) -> str:
    """The address of this node on the way to *scheduler*, as Dask takes it. Raises OSError where there is no way."""
    return _bracketed(str(get_ip(scheduler.address, scheduler.port)))


async def check_reachable(scheduler: Endpoint, *, security: Security) -> None:
    """Raises `NodeFailed` where *scheduler* does not answer, `CredentialsRefused` where it is of another fleet."""
    try:
        comm = await connect(str(scheduler), timeout=_CONNECT_S, **security.get_connection_args("worker"))
    except OSError as error:
        raise _unreachable(scheduler, innermost(error)) from error
    await comm.close()


def innermost(error: BaseException) -> BaseException:
    """What happened first: Dask wraps it several times."""
    while error.__cause__ is not None:
        error = error.__cause__
    return error


def _unreachable(scheduler: Endpoint, reason: BaseException) -> SkyinfraError:
    if isinstance(reason, ssl.SSLError):
        return CredentialsRefused(
            f"the head {host_port(scheduler)} and this node have different fleet secrets",
            field="secret_file",
            hint="Apply the stack again, so that every node is configured with the same secret.",
        )
    return NodeFailed(
        f"the head {host_port(scheduler)} does not answer: {reason}",
        field="scheduler",
        hint="This node goes on trying. The head may still boot; if it has, its firewall may refuse this node.",
    )


def _bracketed(address: str) -> str:
    return f"[{address}]" if ":" in address else address


def _check_free(endpoint: Endpoint) -> None:
    """A socket of our own on the port shows what stands there before Dask builds a scheduler around it."""
    family, kind, protocol, _, address = socket.getaddrinfo(endpoint.address, endpoint.port, type=socket.SOCK_STREAM)[0]
    with socket.socket(family, kind, protocol) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        probe.bind(address)


def _cannot_listen(endpoint: Endpoint, error: OSError, choose: str) -> NodeError:
    if error.errno == errno.EADDRINUSE:
        return PortTaken(
            f"another process listens on port {endpoint.port} of {endpoint.address}",
            field="scheduler",
            hint=f"End it (`ss -ltnp sport = :{endpoint.port}` shows which), or {choose}.",
        )
    return NodeFailed(
        f"cannot listen on {host_port(endpoint)}: {error.strerror or error}",
        field="scheduler",
        hint="On the head, `scheduler` names an address of this machine.",
    )
