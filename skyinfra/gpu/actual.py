"""The GPUs of a node whose runner is not root: root partitions them, and writes down what it did.

Only root may make partitions, and NVML tells only root which there are. So ``skyinfra-runner partition --config``
leaves ``partitions.json`` beside the node configuration, and the runner reads it. When another layout is wanted, the
runner drains what goes and then writes ``partition.request``: a systemd path unit starts root's part again, which
finds the wanted layout by itself.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass

from skyinfra.errors import InvalidNodeConfig, PartitionFailed, SkyinfraError
from skyinfra.gpu.hardware import Hardware
from skyinfra.gpu.inventory import Device
from skyinfra.gpu.partitioner import Wanted, wanted_of
from skyinfra.gpu.target import Partition, Step
from skyinfra.node.folder import NodeDirectory
from skyinfra.protocol import _schema
from skyinfra.protocol.nodeconfig import NodeAccelerator, NodeConfig, PlacedPartition

VERSION = 1
# Root may have to stop services, reset GPUs, and wait for what is in use; its unit has as long.
PATIENCE_S = 480.0


@dataclass(frozen=True)
class Record:
    """What root did. layouts: what it was to make, one for each GPU. partitions: what stands.

    error: class name and message of why it could not; partitions is then what stood before.
    """

    version: int
    layouts: tuple[tuple[PlacedPartition, ...], ...]
    partitions: tuple[Partition, ...] = ()
    error: tuple[str, ...] | None = None


def layouts_of(accelerator: NodeAccelerator) -> tuple[tuple[PlacedPartition, ...], ...]:
    """One layout for each GPU, () where MIG is to be off."""
    wanted = wanted_of(accelerator)
    return tuple(tuple(wanted[gpu]) for gpu in sorted(wanted))


def write(directory: NodeDirectory, config: NodeConfig, done: Sequence[Partition] | SkyinfraError) -> None:
    """Writes down what root did for *config*: the partitions, or why there are none. Raises `StateDirectoryError`."""
    if config.accelerator is None or config.accelerator.vendor != "nvidia":
        return
    before = read(directory)
    failed = isinstance(done, SkyinfraError)
    record = Record(
        version=VERSION,
        layouts=layouts_of(config.accelerator),
        partitions=(before.partitions if before else ()) if isinstance(done, SkyinfraError) else tuple(done),
        error=(type(done).__name__, str(done)) if failed else None,
    )
    directory.write(directory.record_file, json.dumps(_schema.write(record)) + "\n")


def read(directory: NodeDirectory) -> Record | None:
    """What was written last; None where nothing was, or it cannot be read."""
    try:
        value = _schema.load(directory.record_file, error=InvalidNodeConfig)
        record = _schema.read(Record, value, path=str(directory.record_file), error=InvalidNodeConfig)
    except InvalidNodeConfig:
        return None
    return record if record.version == VERSION else None


class Recorded:
    """The accelerators of *config* as `Hardware` has them, as far as root has written them down."""

    def __init__(self, config: NodeConfig, directory: NodeDirectory) -> None:
        self._hardware = Hardware(config, directory)
        self._directory = directory
        self._accelerator = config.accelerator
        # What the record was when root was asked: an answer is another one.
        self._asked_after: tuple[int, int] | None = None

    @classmethod
    def applies(cls, config: NodeConfig, directory: NodeDirectory) -> bool:
        """Whether root keeps a record on this node."""
        accelerator = config.accelerator
        there = accelerator is not None and accelerator.vendor == "nvidia" and not config.scheduler_only
        return there and directory.record_file.exists()

    def devices(self) -> tuple[Device, ...]:
        """The accelerators by index."""
        return self._hardware.devices()

    def plan(self) -> list[Step]:
        """What root would do; empty where what stands is wanted."""
        record, wanted = read(self._directory), self._wanted()
        stands = record.partitions if record is not None else ()
        return [step for gpu in sorted(wanted) for step in _steps(gpu, stands, wanted[gpu])]

    def ask(self) -> None:
        """Asks root for the wanted layout, unless it stands. Raises `StateDirectoryError`."""
        record = self._of_wanted()
        if record is None or record.error is not None:
            self._asked_after = _stamp(self._directory)
            self.remind()

    def remind(self) -> None:
        """Asks again: systemd does not notice a request while root's part runs, for another layout perhaps."""
        self._directory.write(self._directory.request_file, "")

    def standing(self) -> tuple[Partition, ...] | None:
        """The partitions, where root has made them; None while it has not answered. Raises `PartitionFailed`."""
        record = self._of_wanted()
        if record is None or (self._asked_after is not None and _stamp(self._directory) == self._asked_after):
            return None
        if record.error is not None:
            raise PartitionFailed(
                ": ".join(record.error),
                field="accelerator.layouts",
                hint="`journalctl -u skyinfra-partition` has all of it.",
            )
        return record.partitions

    def _of_wanted(self) -> Record | None:
        """The record, where it is of the wanted layout."""
        record = read(self._directory)
        accelerator = self._accelerator
        if record is None or accelerator is None or record.layouts != layouts_of(accelerator):
            return None
        return record

    def _wanted(self) -> Wanted:
        return wanted_of(self._accelerator) if self._accelerator is not None else {}


def _stamp(directory: NodeDirectory) -> tuple[int, int]:
    """Another one for every record; (0, 0) where there is none."""
    try:
        found = directory.record_file.stat()
    except OSError:
        return 0, 0
    return found.st_ino, found.st_mtime_ns


def _steps(gpu: int, stands: Sequence[Partition], wanted: Sequence[PlacedPartition]) -> list[Step]:
    have = {(p.profile, p.start, p.size): p for p in stands if p.gpu == gpu}
    want = {(p.profile, p.start, p.size): p for p in wanted}
    steps = [
        Step(gpu, "destroy", None, p.profile, p.start, p.size, p.uuid) for key, p in have.items() if key not in want
    ]
    if bool(have) != bool(want):
        steps.append(Step(gpu, "mode", on=bool(want)))
    return steps + [Step(gpu, "create", None, p.profile, p.start, p.size) for key, p in want.items() if key not in have]
