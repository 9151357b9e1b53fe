"""The request to drain a node: ``drain.json`` in its folder.

`skyinfra-runner drain` writes it for a person, the runner for a preemption notice (`skyinfra.drain.preemption`);
`undrain` and a withdrawn notice remove it. A running runner follows within a second; a runner that starts has no slots.
A person's request holds through reboots; that of a notice ends with the boot in which the notice came, those of an
upgrade and of a runner that was told to end with that runner.
"""

from __future__ import annotations

import contextlib
import json
import os
import time
from dataclasses import dataclass
from pathlib import Path

from skyinfra.errors import InvalidNodeConfig
from skyinfra.node.folder import NodeDirectory, writing
from skyinfra.protocol._schema import Document

VERSION = 1
OPERATOR = "operator"
UPGRADE = "upgrade"
ENDING = "ending"
IDLE = "idle"
LIFETIME = "lifetime"
# Those after which the node ends.
LAST = (ENDING, IDLE, LIFETIME)
# An upgrade that was abandoned keeps a node out of service for no longer, after its tasks' time.
_ABANDONED_S = 600.0

_BOOT = Path("/proc/sys/kernel/random/boot_id")


@dataclass(frozen=True)
class Drain(
    Document,
    error=InvalidNodeConfig,
    source="drain.json",
    version=VERSION,
    hint=f"This runner reads version {VERSION}; `skyinfra-runner undrain` removes the file.",
):
    """The content of ``drain.json``.

    by: `OPERATOR`, `UPGRADE`, one of `LAST`, or the name of the provider. why: for people. until: Unix time at which
    running tasks are ended; None where they may end by themselves. boot: in which it holds; None for every boot.
    if_others: drain only where another node of the fleet has slots in service, because the preemption is not certain.
    """

    version: int
    by: str
    why: str
    until: float | None = None
    boot: str | None = None
    if_others: bool = False

    @property
    def over(self) -> bool:
        """Whether it holds no longer: it is of an earlier boot, or of an upgrade that somebody abandoned."""
        if self.by == UPGRADE and self.until is not None and time.time() > self.until + _ABANDONED_S:
            return True
        return self.boot not in (None, this_boot())


def this_boot() -> str | None:
    """Returns the id of this machine's boot; None where the system has none."""
    try:
        return _BOOT.read_text(encoding="utf-8").strip()
    except OSError:
        return None


def write(directory: NodeDirectory, drain: Drain) -> None:
    """Requests *drain*, in place of an earlier request. Raises `StateDirectoryError`."""
    directory.write(directory.drain_file, json.dumps(drain.to_json()) + "\n", durable=drain.boot is None)


def clear(directory: NodeDirectory) -> bool:
    """Removes the request; returns whether there was one. Raises `StateDirectoryError`."""
    there = os.path.lexists(directory.drain_file)
    with writing(directory.drain_file):
        directory.drain_file.unlink(missing_ok=True)
    return there


def find(directory: NodeDirectory) -> Drain | None:
    """Returns the request; None where there is none, or it is over. Raises `InvalidNodeConfig`."""
    if not os.path.lexists(directory.drain_file):
        return None
    drain = Drain.load(directory.drain_file)
    return None if drain.over else drain


def end_of(directory: NodeDirectory, *by: str) -> None:
    """Removes the request of one of *by*."""
    with contextlib.suppress(InvalidNodeConfig):
        found = find(directory)
        if found is not None and found.by in by:
            clear(directory)
