"""What the head knows of the whole fleet: the layout that every node is to have, and which slots there are to be.

The layout of the head is the layout of the fleet. The head's scheduler answers three calls of the other nodes' runners:
`LAYOUT_CALL` gives them the layout, `SLOTS_CALL` takes the names of the slots that they are to have, `LEAVE_CALL` that
they leave. A client finds `FleetState` in the scheduler's identity, under `instance.STARTUP_KEY`.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass, field

from skyinfra.errors import InvalidManifest, InvalidNodeConfig
from skyinfra.mig import Layout
from skyinfra.protocol import _schema

VERSION = 1

LAYOUT_CALL = "skyinfra_layout"
SLOTS_CALL = "skyinfra_slots"
LEAVE_CALL = "skyinfra_leave"
# A client's: the tasks that run, by slot, each as (key, name, seconds).
RUNNING_CALL = "skyinfra_running"


@dataclass(frozen=True)
class FleetLayout:
    """The layout of every node of a fleet.

    ``layouts`` holds one layout per GPU index, as ``NodeAccelerator.layouts`` does; empty means whole GPUs.
    ``mig_model`` is the key of the GPU's MIG geometry, such as ``h100_80gb``; None where the GPU has none.
    ``memory_mode`` is that of AMD GPUs whose layouts hold partition modes, as in ``NodeAccelerator``; None elsewhere.
    """

    version: int
    mig_model: str | None = None
    layouts: tuple[Layout, ...] = ()
    memory_mode: str | None = None

    @property
    def digest(self) -> str:
        """Names this layout: equal for equal layouts."""
        return hashlib.sha256(json.dumps(self.to_json()).encode()).hexdigest()

    @classmethod
    def read(cls, value: object, *, source: str) -> FleetLayout:
        """A layout from parsed JSON. Raises `InvalidNodeConfig` with the path of the field."""
        hint = f"This runner reads version {VERSION}."
        _schema.check_version(value, VERSION, path=source, error=InvalidNodeConfig, hint=hint)
        return _schema.read(cls, value, path=source, error=InvalidNodeConfig)

    def to_json(self) -> dict[str, object]:
        """Plain JSON values."""
        return _schema.write(self)


@dataclass(frozen=True)
class NodeFailure:
    """Why a node was not set up: the step of its first boot, what is wrong, and the end of what it printed.

    Where the runner could not start, the step is ``runner``.
    """

    step: str
    error: str
    lines: tuple[str, ...] = ()

    @classmethod
    def of(cls, report: dict[str, object]) -> NodeFailure:
        """From a node's *report*, see `skyinfra.first_boot.report`; missing parts are empty."""
        lines = report.get("lines")
        shown = tuple(str(line) for line in lines) if isinstance(lines, list) else ()
        return cls(str(report.get("step", "")), str(report.get("error", "")), shown)


@dataclass(frozen=True)
class FleetState:
    """What the head tells clients, beside which slots are registered.

    ``slots``: the names of the slots that each node is to have, by node, for the nodes that have said so.
    ``draining``: the slots that are going, with the names of the tasks that still run there.
    ``failed``: the nodes that have said that they could not be set up, until they say which slots they are to have.
    ``leaving``: the nodes that are taken out of service, or were some minutes ago, and why.
    """

    version: int
    slots: dict[str, tuple[str, ...]] = field(default_factory=dict)
    draining: dict[str, tuple[str, ...]] = field(default_factory=dict)
    failed: dict[str, NodeFailure] = field(default_factory=dict)
    leaving: dict[str, str] = field(default_factory=dict)

    @classmethod
    def read(cls, value: object, *, source: str = "head") -> FleetState:
        """The inverse of `to_json`. Raises `InvalidManifest`."""
        hint = f"This skyinfra reads version {VERSION}: use the skyinfra that deployed the fleet."
        _schema.check_version(value, VERSION, path=source, error=InvalidManifest, hint=hint)
        return _schema.read(cls, value, path=source, error=InvalidManifest)

    def to_json(self) -> dict[str, object]:
        """Plain JSON values."""
        return _schema.write(self)
