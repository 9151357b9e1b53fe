"""Readings of a slot at one moment, as `skyinfra top` and Prometheus show them, what a task has used in all, the
records of tasks that ended, and the hours of a fleet."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from skyinfra.errors import InvalidManifest
from skyinfra.protocol import _schema
from skyinfra.protocol._schema import Name, SlotName
from skyinfra.protocol.instance import InstanceInfo

HOURS_VERSION = 1


@dataclass(frozen=True)
class Figures(_schema.Document, error=InvalidManifest, source="figures"):
    """The use that a task made of the device of its slot, from a reading every two seconds or so.

    samples: the number of readings; what happened between them is not known. seconds: between the first and the last.
    memory_peak: the most bytes of the device that were in use in any of them, with what the process of the slot keeps
    from tasks before. energy: joules of the slot between the first and the last, see `SlotReading.slot_energy`.
    activity: the mean of each measure of `SlotReading.activity`, in percent. None: the device does not tell it.
    """

    samples: int
    seconds: float = 0.0
    memory_peak: int | None = None
    energy: float | None = None
    activity: dict[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class TaskRecord(_schema.Document, error=InvalidManifest, source="record"):
    """A task that ended, as the head remembers it.

    key: unique. submitted, started, ended: UNIX seconds by the clock of the head. profile, memory_gb: what it asked
    for; None and 0 for neither. A task that was bound to a slot or node, such as a rank of a gang, asks for the profile
    of the slot that it ran on. slot: ``NODE/INDEX``, with its own profile and memory in GB; None for none. figures:
    its use of the device, as its node remembers; None where it was not measured: it took less than two seconds or so,
    or the device tells nothing.
    """

    key: str
    submitted: float
    started: float
    ended: float
    slot: str
    profile: str | None = None
    memory_gb: float = 0.0
    slot_profile: str | None = None
    slot_memory_gb: float | None = None
    figures: Figures | None = None


@dataclass(frozen=True)
class Progress(_schema.Document, error=InvalidManifest, source="progress"):
    """The progress of a running task, as it reported it last by `sky.progress`.

    done: of *total* steps; None where that number is not known.
    """

    done: float
    total: float | None = None
    note: str = ""


@dataclass(frozen=True)
class SlotReport(_schema.Document, error=InvalidManifest, source="report"):
    """A part of each heartbeat of a worker, under `REPORT`.

    ended: the number of tasks that ended in its process. progress: of the task that runs; None where it reports none.
    """

    ended: int
    progress: Progress | None = None


# The metric of Dask's worker that is its `SlotReport`.
REPORT = "skyinfra-report"


@dataclass(frozen=True)
class FleetWork(_schema.Document, error=InvalidManifest, source="work"):
    """The work of a fleet, as its head counts it.

    seconds: since the head began. waiting: tasks that clients have sent and no slot has begun; what they hold back the
    head does not know. period: seconds. waited, ended: how many tasks waited at the end of each period of the last
    hour, and ended within it, the oldest first; None in ``ended`` where a worker of an earlier version did not count.
    progress: of the tasks that report it, by slot.
    """

    seconds: float
    waiting: int
    period: float
    waited: tuple[int, ...] = ()
    ended: tuple[int | None, ...] = ()
    progress: dict[SlotName, Progress] = field(default_factory=dict)


@dataclass(frozen=True)
class SlotReading(_schema.Document, error=InvalidManifest, source="metrics"):
    """Utilization of *slot*. None stands for a value that its device, or the driver, does not tell.

    utilization: percent of the time that something ran on it; of a MIG partition, percent of its multiprocessors that
    were busy, by NVIDIA's GPM, which Hopper and later have; of NeuronCores, their mean. memory_used, memory_total:
    bytes of its device. NVIDIA measures memory and activity by GPU instance: slots whose compute instances share one
    (``slot.compute``) all have those of the whole of it.
    temperature (degrees Celsius), power (watts) and energy (joules since its driver was loaded) are those of the whole
    accelerator that it stands on. share: the slot's part of that accelerator, from 0 to 1: the compute slices of the
    partition over those of the GPU, 3/7 for a 3g of an H100.
    activity: percent of what its units could do, by unit: of NVIDIA, by GPM, ``sm``, ``occupancy``, ``tensor``,
    ``dram`` and more, see `skyinfra.readings.gpm`. labels: by which the vendor's exporter for Prometheus names the
    device.
    task: the key of the task on it, and figures: what that has used so far; None where no task was measured.
    """

    slot: InstanceInfo
    utilization: float | None = None
    memory_used: int | None = None
    memory_total: int | None = None
    temperature: int | None = None
    power: float | None = None
    energy: float | None = None
    share: float | None = None
    activity: dict[str, float] = field(default_factory=dict)
    labels: dict[str, str] = field(default_factory=dict)
    task: str | None = None
    figures: Figures | None = None

    @property
    def slot_energy(self) -> float | None:
        """Joules of the slot: its `share` of the accelerator's counter, busy or not.

        No driver measures the energy of a partition. The share follows from its size alone: what idle neighbours and
        unpartitioned slices draw is divided the same way as what work draws, so that the slots of a GPU add up to no
        more than its counter, and a busy slot beside idle ones gets less than it drew.
        """
        return None if self.energy is None or self.share is None else self.energy * self.share


@dataclass(frozen=True)
class MachineRun(_schema.Document, error=InvalidManifest, source="hours"):
    """The time for which the machine of a node ran without being stopped; a reboot ends no run.

    machine: an id of the machine, which another one under the name of the node does not have. began: UNIX seconds, by
    the clock as it is set now. seconds: by a clock that nobody sets.
    """

    node: Name
    machine: str
    began: float
    seconds: float

    @property
    def ended(self) -> float:
        """When it was measured last, in UNIX seconds."""
        return self.began + self.seconds


@dataclass(frozen=True)
class SlotUse(_schema.Document, error=InvalidManifest, source="hours"):
    """The time for which tasks of one name and submitter had slots on one day.

    day: of UTC, such as ``2026-11-26``. submitter: ``USER@HOST``; empty where the client does not say it. kind, name: a
    job by its own name, or tasks by that of their function. slot_seconds: of all slots together. node_seconds: the same
    in parts of nodes: of a slot that is a quarter of its node, a quarter.
    """

    day: str
    submitter: str
    kind: Literal["job", "task"]
    name: str
    slot_seconds: float
    node_seconds: float


@dataclass(frozen=True)
class FleetHours(_schema.Document, error=InvalidManifest, source="hours", version=HOURS_VERSION):
    """The hours of a fleet as its head knows them.

    ledger: an id of the head's file, which is another one where a head began without it. at: when this was said, in
    UNIX seconds. runs: of all machines that there were. uses: of their slots.
    """

    version: int
    ledger: str
    at: float
    runs: tuple[MachineRun, ...] = ()
    uses: tuple[SlotUse, ...] = ()
