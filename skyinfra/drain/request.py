"""That a node is to be taken out of service, and by whom: ``drain.json`` in its folder.

`skyinfra-runner drain` writes it for a person, `skyinfra-runner interrupt` for a provider that takes the machine back;
`undrain` and a notice that is withdrawn remove it. A running runner follows within a second; one that starts comes up
without slots. What a person asked for holds through reboots; a provider's notice is about the boot in which it came.
"""

from __future__ import annotations

import json
import os
from dataclasses import dataclass
from pathlib import Path

from skyinfra.errors import InvalidNodeConfig
from skyinfra.node.folder import NodeDirectory, writing
from skyinfra.protocol import _schema

VERSION = 1
OPERATOR = "operator"

_BOOT = Path("/proc/sys/kernel/random/boot_id")


@dataclass(frozen=True)
class Drain:
    """The content of ``drain.json``.

    by: `OPERATOR`, or the name of the provider. why: in words. until: Unix time at which tasks that still run are
    ended; None where they may end by themselves. boot: the boot that it is about; None for any. if_others: only where
    another node of the fleet has slots in service, because the provider does not say that it will come to anything.
    """

    version: int
    by: str
    why: str
    until: float | None = None
    boot: str | None = None
    if_others: bool = False

    @property
    def stale(self) -> bool:
        """Whether it is about an earlier boot of this machine."""
        return self.boot is not None and self.boot != this_boot()


def this_boot() -> str | None:
    """Names the boot of this machine; None where the system has no name for it."""
    try:
        return _BOOT.read_text(encoding="utf-8").strip()
    except OSError:
        return None


def write(directory: NodeDirectory, drain: Drain) -> None:
    """Asks for *drain*, in the place of what was asked before. Raises `StateDirectoryError`."""
    directory.write(directory.drain_file, json.dumps(_schema.write(drain)) + "\n")


def clear(directory: NodeDirectory) -> bool:
    """The node may serve; whether it was asked not to. Raises `StateDirectoryError`."""
    there = os.path.lexists(directory.drain_file)
    with writing(directory.drain_file):
        directory.drain_file.unlink(missing_ok=True)
    return there


def find(directory: NodeDirectory) -> Drain | None:
    """What is asked for; None where that is nothing, or is about an earlier boot. Raises `InvalidNodeConfig`."""
    file = directory.drain_file
    if not os.path.lexists(file):
        return None
    value = _schema.load(file, error=InvalidNodeConfig)
    hint = f"This runner reads version {VERSION}; `skyinfra-runner undrain` removes the file."
    _schema.check_version(value, VERSION, path=str(file), error=InvalidNodeConfig, hint=hint)
    drain = _schema.read(Drain, value, path=str(file), error=InvalidNodeConfig)
    return None if drain.stale else drain


def stamp(directory: NodeDirectory) -> tuple[int, int, int] | None:
    """Changes whenever ``drain.json`` does; None while it is not there."""
    try:
        found = directory.drain_file.stat()
    except OSError:
        return None
    return found.st_ino, found.st_mtime_ns, found.st_size
