"""The way of ``ssh`` to a node: by itself, through the head, or by what the cloud has for it."""

from __future__ import annotations

import contextlib
import re
import shlex
import socket
import subprocess
import sys
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from dataclasses import replace as replace_fields

from skyinfra.protocol.manifest import Login, Manifest, ManifestNode

PORT = 22
_PROBE_S = 3.0
_PROBES = 32
_STDIO = ("--listen-on-stdin", "--verbosity=warning")


@dataclass(frozen=True)
class Way:
    """The address of a node for ``ssh``, how to log in, and the program through which it connects, if not by itself."""

    address: str
    login: Login
    proxy: tuple[str, ...] = ()


def ssh_line(manifest: Manifest, node: ManifestNode, command: Sequence[str], *, user: str | None) -> list[str] | None:
    """Returns the ``ssh`` command, through the head where only the head can be reached; None where nothing leads there.

    user: None or empty is whom ``ssh`` takes. On AWS Session Manager needs no SSH server: see `session_line`.
    """
    way = _open_way(manifest, node, user)
    if way is None and manifest.provider != "aws":
        way = _by_the_cloud(manifest, node, user)
    if way is None:
        return None
    at = f"{way.login.user}@" if way.login.user else ""
    remote = [shlex.join(command)] if command else []
    alone = ["-o", "RemoteCommand=none"] if command and _has_command(f"{at}{way.address}") else []
    terminal = ["-t"] if command and sys.stdin.isatty() else []
    proxy = ["-o", f"ProxyCommand={shlex.join(way.proxy)}"] if way.proxy else []
    # Behind the dashes is neither an option, and ssh takes no dashes out of the command there.
    return ["ssh", *alone, *terminal, *way.login.options, *proxy, "--", f"{at}{way.address}", *remote]


def _has_command(host: str) -> bool:
    """Returns whether the configuration of ssh has a command for *host*, such as `tmux attach`: it refuses another one.

    One before 7.6 knows no such option.
    """
    with contextlib.suppress(OSError, subprocess.SubprocessError):
        found = subprocess.run(["ssh", "-G", "--", host], capture_output=True, text=True, timeout=5, check=False)
        return any(line.startswith("remotecommand ") for line in found.stdout.splitlines())
    return False


def _open_way(manifest: Manifest, node: ManifestNode, user: str | None) -> Way | None:
    known = node.ssh or Login()
    user = user or known.user
    # A host may have another port, or a name that the configuration of ssh alone knows.
    if node.ssh is not None or _answers(node.public_address or node.address):
        return Way(node.public_address or node.address, replace_fields(known, user=user))
    head = head_of(manifest)
    if node != head and head.public_address and _answers(head.public_address):
        return Way(node.address, Login(user, via=f"{user}@{head.public_address}" if user else head.public_address))
    return None


def ways(manifest: Manifest, user: str | None) -> dict[str, Way | None]:
    """Returns how ``ssh`` reaches each node; None for one that it does not."""

    def way(node: ManifestNode) -> Way | None:
        return _open_way(manifest, node, user) or _by_the_cloud(manifest, node, user)

    # Each waits for an answer.
    with ThreadPoolExecutor(_PROBES) as threads:
        return dict(zip((node.name for node in manifest.nodes), threads.map(way, manifest.nodes), strict=True))


def _by_the_cloud(manifest: Manifest, node: ManifestNode, user: str | None) -> Way | None:
    """Returns the way to a node without an open port: through what leads to its head, where something does."""
    via, login = manifest.via, Login(user)
    if via is not None and via.kind == "ssh":
        return Way(node.address, Login(user, via=f"{via.target}:{via.port}" if via.port else via.target))
    if via is not None and via.kind == "iap":
        place = [
            *([f"--zone={node.zone}"] if node.zone else []),
            *([f"--project={via.project}"] if via.project else []),
        ]
        # The target is the instance of the head: the name of its node, and the suffix that all of the fleet have.
        name = f"{node.name}{via.target.partition(head_of(manifest).name)[2]}"
        return Way(name, login, ("gcloud", "compute", "start-iap-tunnel", name, "%p", *_STDIO, *place))
    line = session_line(manifest, node, ())
    if line is None:
        return None
    return Way(node.id, login, (*line, "--document-name", "AWS-StartSSHSession", "--parameters", "portNumber=%p"))


def session_line(manifest: Manifest, node: ManifestNode, command: Sequence[str]) -> list[str] | None:
    """Returns the ``aws ssm start-session`` command; None for another provider."""
    if manifest.provider != "aws" or not node.id:
        return None
    # A zone begins with its region: us-east-1a, us-west-2-lax-1a, us-east-1-wl1-bos-wlz-1.
    found = re.match(r"[a-z]+(-[a-z]+)+-\d+", node.zone or "")
    region = [f"--region={found[0]}"] if found else []
    remote = (
        ["--document-name", "AWS-StartInteractiveCommand", "--parameters", f"command={shlex.join(command)}"]
        if command
        else []
    )
    return ["aws", "ssm", "start-session", f"--target={node.id}", *region, *remote]


def head_of(manifest: Manifest) -> ManifestNode:
    return next((node for node in manifest.nodes if node.head), manifest.nodes[0])


def _answers(address: str) -> bool:
    try:
        socket.create_connection((address, PORT), timeout=_PROBE_S).close()
    except OSError:
        return False
    return True
