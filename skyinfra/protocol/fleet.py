"""State of the whole fleet at the head: the layout that every node is to have, and the slots that there are to be.

The layout of the head is the layout of the fleet, but for the GPUs of a pool whose layouts follow the work. A client
finds `FleetState` in the scheduler's identity, under `instance.STARTUP_KEY`.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass, field
from typing import Literal

from skyinfra import mig
from skyinfra.errors import InvalidManifest, InvalidNodeConfig, counted
from skyinfra.mig import Follow, Layout, follow
from skyinfra.protocol import _schema
from skyinfra.protocol._schema import Name, SlotName
from skyinfra.protocol.instance import InstanceInfo

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
    ``by_node``: the layouts that the head chose for the GPUs of a node, by its name, as text; an empty one is that of
    ``layouts``.
    """

    version: int
    mig_model: str | None = None
    layouts: tuple[Layout, ...] = ()
    memory_mode: str | None = None
    by_node: dict[str, tuple[str, ...]] = field(default_factory=dict, metadata={"later": True})

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
class LayoutChange:
    """Another layout that the head chose for one GPU: when (seconds since 1970), from which profiles, and why."""

    at: float
    node: Name
    gpu: int
    before: str
    layout: str
    why: str


@dataclass(frozen=True)
class FollowState:
    """The rules and the last changes of layouts that follow the work of a fleet.

    policy: what is declared. model: key of the MIG geometry. gpus: how many follow on each node that is there, by name.
    changes: the last ones that the head chose, the oldest first.
    """

    policy: Follow
    model: str
    gpus: dict[str, int] = field(default_factory=dict)
    changes: tuple[LayoutChange, ...] = ()

    def most(self, *, profile: str | None = None, memory_gb: float | None = None, node: str | None = None) -> int:
        """The number of slots of that profile, or with so much memory at least, that the layouts can give at most."""
        geometry = mig.geometry(self.model)
        fits = {p.name for p in geometry.profiles if profile in (None, p.name) and p.memory_gb >= (memory_gb or 0)}
        found = (follow.profiles(layout, geometry) for layout in self.policy.among)
        each = max(sum(count for name, count in held.items() if name in fits) for held in found)
        return each * sum(count for name, count in self.gpus.items() if node in (None, name))


# Nodes start; the place gives none; all are there that there may be; or machines become no nodes, again and again.
Lack = Literal["", "starting", "refused", "most", "stopped"]


@dataclass(frozen=True)
class SizeState(_schema.Document, error=InvalidManifest, source="head"):
    """The number of nodes of a fleet that follows the work.

    least, most: as declared. nodes: how many are there. wanted: how many the head has asked for. since: when it asked
    for that number (seconds since 1970), and why. problem: why they do not come, or None. slots: of a node that comes.
    lack: why there is no node for work that waits, and said: the same in a sentence, for who waits.
    """

    least: int
    most: int
    nodes: int
    wanted: int
    since: float
    why: str
    problem: str | None = None
    slots: tuple[InstanceInfo, ...] = ()
    lack: Lack = field(default="", metadata={"later": True})
    said: str = field(default="", metadata={"later": True})


@dataclass(frozen=True)
class FleetState(_schema.Document, error=InvalidManifest, source="head", version=STATE_VERSION):
    """The state of a fleet that the head gives to clients, besides the registered slots.

    ``slots``: the names of the slots that each node is to have, by node, for the nodes that have told so.
    ``draining``: the slots that go out of service, with the names of the tasks that still run there. ``failed``: the
    nodes that could not be set up, until they tell the slots that they are to have. ``out_of_service``: the nodes that
    are taken out of service, or were some minutes ago, and why. ``behind``: the nodes that the head cannot connect to:
    their workers have opened the connections that it uses. ``follow``: how the layouts follow the work, where they do.
    ``secrets``: the names of the secrets that the image declares, by the variables of tasks that hold them. ``sick``:
    the slots that take no tasks as they fail them for a reason of their node, or do not start, and that reason.
    ``unwatched``: the nodes where something is missing that starts the runner again, and what. ``ends``: whether nodes
    end themselves at some time; ``stops``: those that do so soon, and when. ``sick_for``: for how many seconds nodes
    with sick slots have had some. ``size``: the number of nodes, where it follows the work. ``idle_s``: for how long
    the head knows of no use of the fleet; None where it does not know that. These seven come beside the others, under
    `instance.SICK_KEY`.
    """

    version: int
    slots: dict[Name, tuple[SlotName, ...]] = field(default_factory=dict)
    draining: dict[SlotName, tuple[str, ...]] = field(default_factory=dict)
    failed: dict[Name, NodeFailure] = field(default_factory=dict)
    out_of_service: dict[Name, str] = field(default_factory=dict, metadata={"before": "leaving"})
    behind: tuple[Name, ...] = ()
    follow: FollowState | None = field(default=None, metadata={"later": True})
    secrets: dict[str, str] = field(default_factory=dict, metadata={"later": True})
    sick: dict[str, str] = field(default_factory=dict, metadata={"later": True})
    unwatched: dict[str, str] = field(default_factory=dict, metadata={"later": True})
    ends: bool = field(default=False, metadata={"later": True})
    stops: dict[str, str] = field(default_factory=dict, metadata={"later": True})
    sick_for: dict[str, float] = field(default_factory=dict, metadata={"later": True})
    size: SizeState | None = field(default=None, metadata={"later": True})
    idle_s: float | None = field(default=None, metadata={"later": True})

    def sick_nodes(self) -> dict[str, str]:
        """Returns why slots of a node are sick, by the node: the reason of the first one, and how many there are."""
        found: dict[str, list[str]] = {}
        for slot in sorted(self.sick):
            found.setdefault(slot.rpartition("/")[0], []).append(self.sick[slot])
        return {node: f"{counted(len(whys), 'slot')}: {whys[0]}" for node, whys in found.items()}
