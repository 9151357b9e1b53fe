"""What accelerators a node has, against what its configuration declares."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Device:
    """One accelerator of the node. ``visible`` is the value that confines a process to it."""

    index: int
    visible: str
    uuid: str | None = None
