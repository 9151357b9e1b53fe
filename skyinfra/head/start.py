"""The fleet's scheduler, on the head; and finding out, on every node, whether it answers."""

from __future__ import annotations

import errno
import random
import socket
import ssl

from distributed.comm import connect
from distributed.security import Security
from distributed.utils import get_ip

from skyinfra.blobs import store
from skyinfra.blobs.store import BlobStore
from skyinfra.errors import CredentialsRefused, NodeError, NodeFailed, PortTaken
from skyinfra.head.blobs import HeadBlobs
from skyinfra.head.jobs import Jobs
from skyinfra.head.relay import Relay
from skyinfra.head.scheduler import FleetScheduler
from skyinfra.hours.ledger import Ledger
from skyinfra.node.folder import NodeDirectory
from skyinfra.protocol.fleet import FleetLayout
from skyinfra.protocol.manifest import Endpoint

_CONNECT_S = 3
# The kernel gives these to no outgoing connection, which might have the port of a head that starts again: see
# net.ipv4.ip_local_port_range, 32768 on Linux unless changed, 49152 on macOS.
_PORTS = range(16384, 32768)
_TRIES = 100


def parse(text: str) -> Endpoint:
    """``HOST:PORT`` as an `Endpoint`; an IPv6 host may stand in brackets."""
    host, _, port = text.strip().rpartition(":")
    return Endpoint(address=host.strip("[]"), port=int(port))


def host_port(endpoint: Endpoint) -> str:
    """Returns the inverse of `parse`."""
    return str(endpoint).removeprefix("tls://")


async def start(
    declared: Endpoint,
    *,
    directory: NodeDirectory,
    security: Security,
    layout: FleetLayout,
    relay: Relay | None = None,
    jobs: Jobs | None = None,
    ledger: Ledger | None = None,
) -> FleetScheduler:
    """Returns a running scheduler at *declared*; for port 0 at the port that it had before, else at a free one.

    *layout*: that of the fleet. *relay*, *jobs*, *ledger*: answer their calls of `skyinfra.protocol.services`. Writes
    ``scheduler`` in *directory*. Raises `PortTaken`, or `NodeFailed` where the address is not this node's.
    """
    kept = declared.port == 0 and directory.scheduler_file.exists()
    port = parse(directory.scheduler_file.read_text(encoding="utf-8")).port if kept else declared.port
    endpoint = Endpoint(declared.address, port or free_port(declared.address))
    blobs = HeadBlobs(BlobStore(directory.path / store.FOLDER))
    handlers = dict(blobs.handlers)
    for part in (relay, jobs, ledger):
        handlers |= part.handlers if part is not None else {}
    choose = f"remove {directory.scheduler_file} to have another one selected" if kept else "declare another port"
    try:
        _check_free(endpoint)
        scheduler: FleetScheduler = await FleetScheduler(
            layout=layout,
            handlers=handlers,
            secrets=jobs.secrets if jobs is not None else None,
            claim=jobs.claim if jobs is not None else None,
            host=_bracketed(endpoint.address),
            port=endpoint.port,
            security=security,
            dashboard=False,
            dashboard_address="127.0.0.1:0",
        )
    except OSError as error:
        raise _cannot_listen(endpoint, error, choose) from error
    blobs.note = scheduler.use.note
    directory.write(directory.scheduler_file, host_port(reached_at(scheduler)) + "\n", durable=True)
    return scheduler


def reached_at(scheduler: FleetScheduler) -> Endpoint:
    """Returns the address of *scheduler* for other processes: its host as bound, or this node's own for a wildcard."""
    found = parse(scheduler.address.removeprefix("tls://"))
    bound = parse(scheduler.listener.listen_address.removeprefix("tls://"))
    # Where Dask finds no address of IPv6 for a wildcard of it, it gives one of IPv4, at which nothing listens.
    mixed = ":" in bound.address and ":" not in found.address
    return Endpoint("::1", found.port) if mixed else found


def own_address(scheduler: Endpoint) -> str:
    """The address of this node on the way to *scheduler*, as Dask takes it. Raises OSError where there is no way."""
    if ":" not in scheduler.address:
        return str(get_ip(scheduler.address, scheduler.port))
    # Of which not every version of Dask finds one.
    with socket.socket(socket.AF_INET6, socket.SOCK_DGRAM) as probe:
        probe.connect((scheduler.address, scheduler.port))
        return _bracketed(str(probe.getsockname()[0]))


async def check_reachable(scheduler: Endpoint, *, security: Security) -> None:
    """Raises `NodeFailed` where *scheduler* does not answer, `CredentialsRefused` where it is of another fleet."""
    try:
        comm = await connect(str(scheduler), timeout=_CONNECT_S, **security.get_connection_args("worker"))
    except OSError as error:
        reason = innermost(error)
        if isinstance(reason, ssl.SSLError):
            raise CredentialsRefused(
                f"the head {host_port(scheduler)} and this node have different fleet secrets",
                field="secret_file",
                hint="Apply the stack again, so that every node is configured with the same secret.",
            ) from error
        raise NodeFailed(
            f"the head {host_port(scheduler)} does not answer: {reason}",
            field="scheduler",
            hint="This node still tries. The head may still boot; if it has, its firewall may refuse this node.",
        ) from error
    await comm.close()


def innermost(error: BaseException) -> BaseException:
    """Returns the first error, which Dask wraps several times."""
    while error.__cause__ is not None:
        error = error.__cause__
    return error


def _bracketed(address: str) -> str:
    return f"[{address}]" if ":" in address else address


def free_port(address: str) -> int:
    """Returns a port of *address*, one of this machine, that a server may keep: it finds it free at each later start.

    0, any at all, where none of many is free.
    """
    for port in random.SystemRandom().sample(_PORTS, _TRIES):
        try:
            _check_free(Endpoint(address, port))
        except OSError:
            continue
        return port
    return 0


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
