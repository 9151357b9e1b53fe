"""The node configuration: one JSON file with the desired state of a node, for its runner.

The compiler writes it, Terraform fills the placeholders, cloud-init (or the local module) puts it on the node.
It never holds the fleet secret: ``secret_file`` names the file that does.
"""

from __future__ import annotations

import json
import math
from dataclasses import dataclass, field
from typing import Literal

from skyinfra.errors import InvalidNodeConfig, counted
from skyinfra.mig import Follow, Layout
from skyinfra.protocol import _schema
from skyinfra.protocol.packages import PackageSource

VERSION = 1

# Terraform replaces these in the user data; see the modules' `user_data_head` and `user_data_worker`.
HEAD_PLACEHOLDER = "@SKYINFRA_HEAD@"
NODE_PLACEHOLDER = "@SKYINFRA_NODE@"
SECRET_PLACEHOLDER = "@SKYINFRA_SECRET@"  # noqa: S105 - what stands in its place
RUNNER_PLACEHOLDER = "@SKYINFRA_RUNNER@"
BUCKET_PLACEHOLDER = "@SKYINFRA_BUCKET@"
VOLUME_PLACEHOLDER = "@SKYINFRA_VOLUME@"
VOLUMES_PLACEHOLDER = "@SKYINFRA_VOLUMES@"
PLACEHOLDERS = (
    HEAD_PLACEHOLDER,
    NODE_PLACEHOLDER,
    SECRET_PLACEHOLDER,
    RUNNER_PLACEHOLDER,
    BUCKET_PLACEHOLDER,
    VOLUME_PLACEHOLDER,
    VOLUMES_PLACEHOLDER,
)

# For how long the setup of a node is no idleness.
SETUP_S = 86_400.0
# How long a node lives that never heard what is left of its budget: none is less than the price of an hour.
UNHEARD_S = 3600.0

# Fields that versions before did not know.
_LATER = {"later": True}

Vendor = Literal["nvidia", "amd", "aws", "google", "intel", "custom"]


@dataclass(frozen=True)
class NodeAccelerator:
    """The accelerators the node is to have: ``count`` devices of ``memory_gb`` GB (decimal, nominal) each.

    ``layouts`` holds one layout per GPU index, with profiles that are resolved on the device by name; empty means whole
    GPUs, with MIG mode off. For AMD GPUs the profile is the partition mode of the GPU, start and size are in XCDs.
    ``mig_model`` is the key of the MIG geometry, such as ``h100_80gb``; None where the GPU has none. ``memory_mode`` is
    that of the AMD GPUs, such as ``NPS4``, where layouts are given.
    """

    name: str
    vendor: Vendor
    count: int
    memory_gb: float | None = None
    mig_model: str | None = None
    layouts: tuple[Layout, ...] = ()
    memory_mode: str | None = None

    @property
    def per_gpu(self) -> tuple[Layout, ...]:
        """One layout for each GPU, empty for a GPU that is not partitioned."""
        return self.layouts or ((),) * self.count


@dataclass(frozen=True)
class NodeBudget:
    """The USD that the fleet may cost before its nodes end themselves, and the prices of an hour: of the head, of each
    other node, and of all nodes together."""

    usd: float
    head: float
    node: float
    pool: float

    @property
    def seconds(self) -> float:
        """For how long all nodes may run."""
        return self.usd / self.pool * 3600

    def __str__(self) -> str:
        return f"${self.usd:,.2f}"


@dataclass(frozen=True)
class NodeConfig(
    _schema.Document,
    error=InvalidNodeConfig,
    source="node.json",
    version=VERSION,
    hint=f"This runner reads version {VERSION}.",
):
    """The desired state of one node.

    ``node`` is its name, unique in the fleet. ``scheduler`` is ``HOST:PORT`` of the head as this node reaches it; on
    the head it is where the scheduler listens, port 0 meaning any free one, kept once chosen. ``cpu_slots`` is the
    number of CPU workers of a pool without accelerators. ``scheduler_only``: this head is a machine besides the nodes;
    ``accelerator`` is what they have, whose layout it hands on. ``simulate`` gives the node simulated accelerators.
    ``pip`` and ``run`` are installed and executed before the first slot starts; ``env`` is set for every worker.
    ``drain_seconds`` is for how long a task may go on on a slot that a changed configuration takes away.
    ``secret_file`` is relative to the folder of the configuration file. ``folder`` belongs to the runner's user, where
    the configuration and its folder are root's; None: it is the folder of the configuration. ``packages``: where
    ``pip`` gets them from, None where nothing is declared of that. ``preload``: the modules that are imported once for
    all slots, before their processes are forked. ``given``: a batch system or cluster gave this node its accelerators:
    the runner takes those, and partitions none. ``grace_seconds``: for how long tasks may go on after the runner was
    told to end (SIGTERM); 0: it ends at once. ``slice_hosts``: of how many hosts the TPU slice is that this node is a
    host of, with one slot for all chips of the node; 0: there is a slot for each accelerator. ``follow``: the layouts
    among which those of the GPUs follow the work; ``accelerator.layouts`` are then those that a node begins with.
    ``secrets``: the names of the secrets that tasks get from their clients, by the variables that hold them.
    ``idle_seconds``: after how long without use the node ends itself; ``lifetime_seconds``: after how long in any case;
    0: never. ``budget``: they end once it is spent. ``node_idle_seconds``: after how long without a task of its own
    this node ends itself, if the head lets it go. ``min_nodes``, ``max_nodes``: on the head of a fleet whose number of
    nodes follows the work, the least and the most; 0 most: the number is fixed. ``warn_budget``: the
    head tells of it.
    """

    version: int
    stack: str
    pool: str
    node: str
    provider: str
    head: bool
    scheduler: str
    accelerator: NodeAccelerator | None = None
    cpu_slots: int = 0
    scheduler_only: bool = False
    simulate: bool = False
    env: dict[str, str] = field(default_factory=dict)
    pip: tuple[str, ...] = ()
    run: tuple[str, ...] = ()
    drain_seconds: float = 600.0
    secret_file: str = "secret"  # noqa: S105 - the name of a file
    packages: PackageSource | None = None
    preload: tuple[str, ...] = ()
    folder: str | None = field(default=None, metadata=_LATER)
    given: bool = field(default=False, metadata=_LATER)
    grace_seconds: float = field(default=0.0, metadata=_LATER)
    slice_hosts: int = field(default=0, metadata=_LATER)
    follow: Follow | None = field(default=None, metadata=_LATER)
    secrets: dict[str, str] = field(default_factory=dict, metadata=_LATER)
    idle_seconds: float = field(default=0.0, metadata=_LATER)
    lifetime_seconds: float = field(default=0.0, metadata=_LATER)
    budget: NodeBudget | None = field(default=None, metadata=_LATER)
    node_idle_seconds: float = field(default=0.0, metadata=_LATER)
    min_nodes: int = field(default=0, metadata=_LATER)
    max_nodes: int = field(default=0, metadata=_LATER)
    warn_budget: NodeBudget | None = field(default=None, metadata=_LATER)

    @property
    def fleet(self) -> str:
        """``STACK/POOL``."""
        return f"{self.stack}/{self.pool}"

    @property
    def ends_itself(self) -> bool:
        """Whether the node ends by itself at some time."""
        return bool(self.idle_seconds or self.lifetime_seconds or self.node_idle_seconds or self.budget)

    def _check(self, source: str) -> None:
        refuse, accelerator = self._refuse, self.accelerator
        if accelerator is None:
            refuse(self.cpu_slots < 1, "a node without accelerators needs at least one CPU slot", f"{source}.cpu_slots")
        refuse(self.scheduler_only and not self.head, "only the head is without slots", f"{source}.scheduler_only")
        if accelerator is not None:
            count, layouts, path = accelerator.count, accelerator.layouts, f"{source}.accelerator"
            refuse(count < 1, "must be at least 1", f"{path}.count", count)
            hint = f"This node has {counted(count, 'accelerator')}."
            wrong = len(accelerator.per_gpu) != count
            refuse(wrong, "one layout per accelerator is needed", f"{path}.layouts", len(layouts), hint)
            modes = ", ".join(sorted({partition.profile for layout in layouts for partition in layout}))
            wrong = accelerator.vendor == "amd" and "," in modes
            refuse(wrong, "AMD GPUs of one node have one partition mode", f"{path}.layouts", modes)
        host, _, port = self.scheduler.rpartition(":")
        refuse(not host or not port.isdigit(), "expected HOST:PORT", f"{source}.scheduler", self.scheduler)
        for name in ("drain_seconds", "grace_seconds", "idle_seconds", "lifetime_seconds", "node_idle_seconds"):
            seconds = getattr(self, name)
            refuse(not 0 <= seconds < math.inf, "must be at least 0", f"{source}.{name}", seconds)
        for part in ("budget", "warn_budget"):
            for name, usd in (vars(getattr(self, part)) if getattr(self, part) else {}).items():
                refuse(not 0 < usd < math.inf, "must be more than 0", f"{source}.{part}.{name}", usd)
        wrong = self.slice_hosts != 0 and (self.slice_hosts < 2 or accelerator is None or any(accelerator.per_gpu))
        refuse(wrong, "a slice of several hosts has chips without a layout", f"{source}.slice_hosts", self.slice_hosts)
        wrong = self.max_nodes != 0 and not (self.scheduler_only and 0 <= self.min_nodes <= self.max_nodes)
        refuse(wrong, "the number of nodes of a head without slots", f"{source}.max_nodes", self.max_nodes)
        wrong = self.folder is not None and not self.folder.startswith("/")
        refuse(wrong, "expected an absolute path", f"{source}.folder", self.folder)

    def dumps(self) -> str:
        """One line of JSON, the same bytes for the same configuration."""
        return json.dumps(self.to_json(), separators=(",", ":"), ensure_ascii=True)
