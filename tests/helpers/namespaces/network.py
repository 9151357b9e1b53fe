"""The network of nodes on this machine: a bridge, and for each node a network namespace of its own."""

from __future__ import annotations

import ctypes
import json
import os
import socket
import subprocess
import threading
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

T = TypeVar("T")

# Where every cloud has its metadata service.
METADATA = "169.254.169.254"
_NAMESPACES = Path("/run/netns")
_CLONE_NEWNET = 0x40000000
_FIRST_NODE = 10
_libc = ctypes.CDLL(None, use_errno=True)


class Network:
    """A bridge *name* (15 characters at most, with what is added for each node) with this machine at `address`."""

    def __init__(self, name: str) -> None:
        self.name = name
        # 198.18.0.0/15 is kept for benchmarks of networks: nobody's addresses (RFC 2544).
        self._prefix = _free_prefix(os.getpid())
        self.address = f"{self._prefix}.1"
        self._links: list[Link] = []
        _ip(
            f"link add {name} type bridge",
            f"addr add {self.address}/24 dev {name}",
            f"link set {name} up",
        )

    def link(self) -> Link:
        """Another node's place in it."""
        number = len(self._links)
        link = Link(f"{self.name}n{number}", f"{self._prefix}.{_FIRST_NODE + number}")
        self._links.append(link)
        _ip(
            f"netns add {link.namespace}",
            f"link add {link.namespace} type veth peer name eth0 netns {link.namespace}",
            f"link set {link.namespace} master {self.name} up",
        )
        _ip(
            "link set lo up",
            f"addr add {METADATA}/32 dev lo",
            f"addr add {link.address}/24 dev eth0",
            "link set eth0 up",
            f"route add default via {self.address}",
            namespace=link.namespace,
        )
        return link

    def close(self) -> None:
        """Takes everything down, also where only a part of it is there."""
        for link in self._links:
            link.remove()
        self._links.clear()
        _ip(f"link delete {self.name}", check=False)


@dataclass(frozen=True)
class Link:
    """The network namespace of one node, with its address."""

    namespace: str
    address: str

    def cut(self) -> None:
        """The node reaches nobody and nobody reaches it; its metadata service it still does, as in a cloud."""
        _ip(f"link set {self.namespace} down")

    def mend(self) -> None:
        """As before."""
        _ip(f"link set {self.namespace} up")

    def close_ports(self, *open: int) -> None:
        """Nobody outside can connect to the node but at the ports *open*; it can connect to everybody."""
        accept = f"tcp dport {{ {', '.join(map(str, open))} }} accept; " if open else ""
        rules = f"iif lo accept; {accept}tcp flags & (syn | ack) == syn drop"
        table = f"table ip closed {{ chain input {{ type filter hook input priority 0; {rules}; }}; }}"
        _run(["ip", "netns", "exec", self.namespace, "nft", table])

    def hand_on(self, tap: str) -> None:
        """What comes for the node's address goes to *tap*, behind which a virtual machine is, and no further."""
        _ip(
            "link add br0 type bridge",
            f"addr del {self.address}/24 dev eth0",
            "link set eth0 master br0",
            f"tuntap add {tap} mode tap",
            f"link set {tap} master br0 up",
            "link set br0 up",
            f"route add {self.address}/32 dev br0",
            namespace=self.namespace,
        )

    def listen(self, address: str, port: int) -> socket.socket:
        """A socket that listens at *address* of the node, for a server in this process."""
        return self.inside(lambda: socket.create_server((address, port), backlog=64))

    def remove(self) -> None:
        """Its processes have ended."""
        _ip(f"link delete {self.namespace}", check=False)
        _ip(f"netns delete {self.namespace}", check=False)

    def inside(self, call: Callable[[], T]) -> T:
        """What *call* gives in the namespace: a thread enters it, and a socket stays where it was made."""
        results: list[T] = []
        errors: list[OSError] = []

        def enter() -> None:
            try:
                with (_NAMESPACES / self.namespace).open("rb") as handle:
                    if _libc.setns(handle.fileno(), _CLONE_NEWNET) != 0:
                        raise OSError(ctypes.get_errno(), "setns")
                results.append(call())
            except OSError as error:
                errors.append(error)

        thread = threading.Thread(target=enter)
        thread.start()
        thread.join()
        if errors:
            raise errors[0]
        return results[0]


def sweep(prefix: str, alive: Callable[[str], bool]) -> None:
    """Removes bridges and namespaces of beds that were killed: their names begin with *prefix* and are not *alive*."""
    for namespace in [each.name for each in _NAMESPACES.glob(f"{prefix}*")]:
        if not alive(namespace):
            _ip(f"netns delete {namespace}", check=False)
    links = json.loads(_run(["ip", "-json", "link", "show"]))
    for name in [link["ifname"] for link in links if link["ifname"].startswith(prefix)]:
        if not alive(name):
            _ip(f"link delete {name}", check=False)


def _free_prefix(start: int) -> str:
    addresses = json.loads(_run(["ip", "-json", "addr", "show"]))
    taken = {info["local"] for link in addresses for info in link["addr_info"] if "local" in info}
    for number in range(start, start + 512):
        prefix = f"198.{18 + number // 256 % 2}.{number % 256}"
        if f"{prefix}.1" not in taken:
            return prefix
    raise OSError("every network of 198.18.0.0/15 is taken")


def _ip(*commands: str, namespace: str | None = None, check: bool = True) -> None:
    where = ["-netns", namespace] if namespace else []
    _run(["ip", *where, "-batch", "-"], "\n".join(commands) + "\n", check=check)


def _run(command: list[str], text: str = "", *, check: bool = True) -> str:
    done = subprocess.run(command, input=text, capture_output=True, text=True, check=False)
    if check and done.returncode != 0:
        raise OSError(f"{' '.join(command)}: {done.stderr.strip()}")
    return done.stdout
