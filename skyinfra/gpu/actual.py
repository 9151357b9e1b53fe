"""The GPUs of a node whose runner is not root: root partitions them and records their actual layout.

Only root may create partitions, and NVML lists them to root only. So ``skyinfra-runner partition --config`` writes
``partitions.json`` beside the node configuration, and the runner reads it. When the desired layout changes, the runner
drains what goes and then writes ``partition.request``: a systemd path unit starts root's part again, which finds the
desired layout by itself and checks it, see `skyinfra.gpu.desired`.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass

from skyinfra.errors import InvalidNodeConfig, PartitionFailed, SkyinfraError
from skyinfra.gpu import placed
from skyinfra.gpu.hardware import Hardware
from skyinfra.mig import Layout
from skyinfra.mig.steps import Partition, Step, steps_between
from skyinfra.node.folder import NodeDirectory, stamp
from skyinfra.protocol import _schema
from skyinfra.protocol.nodeconfig import NodeConfig

VERSION = 1
# Root may have to stop services, reset GPUs, and wait for processes; its unit has as long.
PATIENCE_S = 480.0
_NOT_ASKED = object()


@dataclass(frozen=True)
class ActualLayout(_schema.Document, error=InvalidNodeConfig, source="partitions.json", version=VERSION):
    """The content of ``partitions.json``. layouts: the desired layout of each GPU. partitions: those that exist.

    error: class name and message of why root failed; partitions are those that exist all the same.
    """

    version: int
    layouts: tuple[Layout, ...]
    partitions: tuple[Partition, ...] = ()
    error: tuple[str, ...] | None = None


def write(
    directory: NodeDirectory,
    config: NodeConfig,
    done: Sequence[Partition] | SkyinfraError,
    *,
    standing: Sequence[Partition] | None = None,
) -> None:
    """Records the partitions that root made for *config*, or why it failed. Raises `StateDirectoryError`.

    *standing*: with an error, the partitions that exist; None where that is not known: then those of before.
    """
    if config.accelerator is None or config.accelerator.vendor != "nvidia":
        return
    layouts = config.accelerator.per_gpu
    if isinstance(done, SkyinfraError):
        before = read(directory) if standing is None else None
        partitions = tuple(before.partitions if before else standing or ())
        actual = ActualLayout(VERSION, layouts, partitions, (type(done).__name__, str(done)))
    else:
        actual = ActualLayout(VERSION, layouts, tuple(done))
    directory.write(directory.record_file, json.dumps(actual.to_json()) + "\n")


def read(directory: NodeDirectory) -> ActualLayout | None:
    """The last record; None where there is none, or it cannot be read."""
    try:
        return ActualLayout.load(directory.record_file)
    except InvalidNodeConfig:
        return None


class RecordedHardware(Hardware):
    """The NVIDIA GPUs of a node, whose layout root records and changes."""

    # The record when root was asked: the answer is another one.
    _asked_after: object = _NOT_ASKED

    @classmethod
    def applies(cls, config: NodeConfig, directory: NodeDirectory) -> bool:
        """Whether root keeps a record on this node."""
        accelerator = config.accelerator
        there = accelerator is not None and accelerator.vendor == "nvidia" and not config.scheduler_only
        return there and directory.record_file.exists()

    def plan(self) -> list[Step]:
        """The steps that root would execute; empty where the actual layout is the desired one."""
        steps: list[Step] = []
        chosen = placed.read(self._gpus, self._directory) if self._gpus is not None else {}
        standing = self.standing()
        for gpu, desired in self._desired.items():
            actual = [partition for partition in standing if partition.gpu == gpu]
            mode = bool(desired) if bool(actual) != bool(desired) else None
            wanted = desired
            if self._gpus is not None and placed.legal(desired, self._gpus):
                wanted = placed.target(desired, chosen.get(gpu), placed.places(actual, gpu, desired), None)
            steps += steps_between(gpu, actual, wanted, mode=mode)
        return steps

    def standing(self) -> tuple[Partition, ...]:
        """The partitions that root has recorded."""
        record = read(self._directory)
        return record.partitions if record else ()

    def ask(self) -> None:
        """Asks root for the desired layout, unless it is the actual one. Raises `StateDirectoryError`."""
        record = self._of_desired()
        if record is None or record.error is not None:
            self._asked_after = stamp(self._directory.record_file)
            self.remind()

    def remind(self) -> None:
        """Asks again: systemd does not notice a request while root's part runs, for another layout perhaps."""
        self._directory.write(self._directory.request_file, "")

    def made_by_root(self) -> tuple[Partition, ...] | None:
        """The partitions that root has made; None while it has not answered. Raises `PartitionFailed`."""
        record = self._of_desired()
        if record is None or stamp(self._directory.record_file) == self._asked_after:
            return None
        if record.error is not None:
            raise PartitionFailed(
                ": ".join(record.error),
                field="accelerator.layouts",
                hint="`journalctl -u skyinfra-partition` has all of it.",
            )
        return record.partitions

    def _of_desired(self) -> ActualLayout | None:
        """The record, where it is of the desired layout."""
        record = read(self._directory)
        return record if record is not None and record.layouts == tuple(self._desired.values()) else None
