"""The instance: the slot that a task runs on, as the task can ask for it.

The runner describes each slot in the environment variable ``SKYINFRA_SLOT`` of its worker process; ``instance_info``
reads it inside a task. The same description reaches the scheduler with the worker's registration, so that client
and `status` see what the task sees.
"""

from __future__ import annotations

import json
import os
import re
from dataclasses import dataclass, field

from skyinfra.errors import InvalidNodeConfig, NotInTask
from skyinfra.mig import Compute, Placement, gpu_profile
from skyinfra.protocol import _schema
from skyinfra.protocol._schema import Name, SlotName
from skyinfra.protocol.manifest import SlotKind

VARIABLE = "SKYINFRA_SLOT"
# The variables by which a process sees the devices of its slot alone.
DEVICES = frozenset(
    {
        "CUDA_VISIBLE_DEVICES",
        "ROCR_VISIBLE_DEVICES",
        "HIP_VISIBLE_DEVICES",
        "NEURON_RT_VISIBLE_CORES",
        "TPU_VISIBLE_CHIPS",
        "HABANA_VISIBLE_MODULES",
    }
)
# The compute slices of a compute instance, and those of the GPU instance that it shares.
_SHARE = re.compile(r"(\d+)c\.(\d+)g\.", re.ASCII)
# The variable that names the node's writable folder.
NODE_DIRECTORY = "SKYINFRA_NODE_DIR"
# The variable that names the file of the node's configuration.
NODE_CONFIG = "SKYINFRA_NODE_CONFIG"
# The key under which a worker's registration carries the same description.
STARTUP_KEY = "skyinfra"
# And, of a head, those fields of `skyinfra.protocol.fleet.FleetState` that earlier clients do not know and pass over.
SICK_KEY = "skyinfra-sick"
# The Dask resource of a slot that is the memory of its device, in MB: a task gets a slot that has as much, or more.
GPU_MEMORY = "gpu_memory_mb"


@dataclass(frozen=True)
class InstanceInfo(_schema.Document, error=InvalidNodeConfig, source=VARIABLE):
    """The slot a task runs on.

    node: name of the node. worker: index of the slot on its node, from 0. slot: ``NODE/INDEX``, unique in the fleet.
    kind: what the slot is. profile: MIG profile, AMD partition mode, or None. accelerator: catalog name, such as
    ``H100``, or None.
    gpu: index of the accelerator on the node, or None. uuid: of the partition or GPU, or None.
    visible: the variable that confines the worker to its device, as ``(name, value)``, or None.
    fleet: ``STACK/POOL``. memory_gb: of the slot, GB as the profile or the catalog names it, or None.
    head: whether the node carries the scheduler. simulated: whether the accelerator is simulated.
    start, size, units: of a partition, where it stands on its GPU and what the whole GPU has, in the placement units of
    its MIG geometry, or in XCDs on an AMD GPU; None for what is no partition, or where it is not known.
    compute: of a partition that shares its GPU instance (``1c.3g.40gb``), its place in the compute slices of that;
    start, size and memory_gb are those of the GPU instance. shared_by: how many slots had that memory together when
    this one began, this one counted; None for one that has its memory alone.
    """

    node: Name
    worker: int
    slot: SlotName
    kind: SlotKind
    fleet: str
    profile: str | None = None
    accelerator: str | None = None
    gpu: int | None = None
    uuid: str | None = None
    visible: tuple[str, ...] | None = None
    memory_gb: float | None = None
    head: bool = False
    simulated: bool = False
    start: int | None = None
    size: int | None = None
    units: int | None = None
    compute: Compute | None = field(default=None, metadata={"later": True})
    shared_by: int | None = field(default=None, compare=False, metadata={"later": True})

    @property
    def placement(self) -> Placement:
        """The place of a partition on its GPU; its profile and size are empty where they are not known."""
        shares = () if self.compute is None else (self.compute,)
        return Placement(gpu_profile(self.profile or ""), self.start or 0, self.size or 0, compute=shares)

    @property
    def own_memory_gb(self) -> float | None:
        """The memory that a task can count on, in GB: of what slots share, the part of its compute slices."""
        slices = _SHARE.match(self.profile or "")
        if self.memory_gb is None or slices is None:
            return self.memory_gb
        return self.memory_gb * int(slices[1]) / int(slices[2])

    @property
    def accelerators(self) -> tuple[str, ...]:
        """The accelerators this task sees: one, or none on a CPU slot."""
        return (self.accelerator,) if self.accelerator else ()


def instance_info() -> InstanceInfo:
    """Returns the slot this task runs on. Raises `NotInTask` outside of a task."""
    text = os.environ.get(VARIABLE)
    if text is None:
        raise NotInTask(
            "instance_info() tells a task about its slot, and this is not a task",
            hint="Call it inside a function that you ship with `task >> pool`.",
        )
    return InstanceInfo.read(json.loads(text))


def current_accelerator() -> str | None:
    """Name of the accelerator this task runs on, such as ``H100``; None on a CPU slot. Raises `NotInTask`."""
    return instance_info().accelerator
