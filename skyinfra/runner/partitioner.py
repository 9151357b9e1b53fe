"""Brings the GPUs of a node to the layout that its configuration declares."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Partition:
    """One MIG device that exists: its GPU, profile, place in memory slices, and UUID (``MIG-...``)."""

    gpu: int
    profile: str
    start: int
    size: int
    uuid: str
