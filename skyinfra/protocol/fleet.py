"""State of the whole fleet at the head: the layout that every node is to have, and the slots that there are to be.

The layout of the head is the layout of the fleet. A client finds `FleetState` in the scheduler's identity, under
`instance.STARTUP_KEY`.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass, field

from skyinfra.errors import InvalidManifest, InvalidNodeConfig
from skyinfra.mig import Layout
from skyinfra.protocol import _schema

VERSION = 1
# Of what a head and its clients say to one another, names of modules in pickles included. Raise it with either.
STATE_VERSION = 2


@dataclass(frozen=True)
class FleetLayout(
    _schema.Document,
    error=InvalidNodeConfig,
    source="the head's layout",
    version=VERSION,
    hint=f"This runner reads version {VERSION}.",
):
    """The layout of every node of a fleet.

    The fields are those of ``NodeAccelerator``; ``memory_mode`` is None where layouts hold no partition modes.
    """

    version: int
    mig_model: str | None = None
    layouts: tuple[Layout, ...] = ()
    memory_mode: str | None = None

    @property
    def digest(self) -> str:
        """Names this layout: equal for equal layouts."""
        return hashlib.sha256(json.dumps(self.to_json()).encode()).hexdigest()


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
class FleetState(_schema.Document, error=InvalidManifest, source="head", version=STATE_VERSION):
    """The state of a fleet that the head gives to clients, besides the registered slots.

    ``slots``: the names of the slots that each node is to have, by node, for the nodes that have told so.
    ``draining``: the slots that go out of service, with the names of the tasks that still run there.
    ``failed``: the nodes that could not be set up, until they tell the slots that they are to have.
    ``leaving``: the nodes that are taken out of service, or were some minutes ago, and why.
    ``behind``: the nodes that the head cannot connect to: their workers have opened the connections that it uses.
    """

    version: int
    slots: dict[str, tuple[str, ...]] = field(default_factory=dict)
    draining: dict[str, tuple[str, ...]] = field(default_factory=dict)
    failed: dict[str, NodeFailure] = field(default_factory=dict)
    leaving: dict[str, str] = field(default_factory=dict)
    behind: tuple[str, ...] = ()
