"""The GPUs of a node whose runner is not root: root partitions them and records their actual layout.

Only root may create partitions, and NVML lists them to root only. So ``skyinfra-runner partition --config`` writes
``actual-layout.json`` beside the node configuration, and the runner reads it. When the desired layout changes, the
runner drains what goes and then names a request in its own file: a path unit of systemd starts root's part again, which
finds the desired layout by itself and checks it, see `skyinfra.desired`.
"""

from __future__ import annotations

import json
import secrets
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from skyinfra.desired import file as desired_file
from skyinfra.errors import InvalidNodeConfig, PartitionFailed, SkyinfraError
from skyinfra.gpu import targets
from skyinfra.gpu.hardware import Hardware
from skyinfra.gpu.machine import SystemMachine
from skyinfra.mig import Layout
from skyinfra.mig.steps import Partition, Step, steps_between
from skyinfra.node.folder import NodeDirectory, newer, replace_file
from skyinfra.protocol import _schema
from skyinfra.protocol.nodeconfig import NodeConfig

VERSION = 1
# Of the version before. It counts where root has not written the record anew since.
_BEFORE = "partitions.json"
# Root may have to stop services, reset GPUs, and wait for processes; its unit has as long.
PATIENCE_S = 480.0
_LATER = {"later": True}


@dataclass(frozen=True)
class ActualLayout(_schema.Document, error=InvalidNodeConfig, source="actual-layout.json", version=VERSION):
    """The content of ``actual-layout.json``. layouts: the desired layout of each GPU. partitions: those that exist.

    error: class name and message of why root failed; partitions are those that exist all the same. request: the name of
    the runner's last request by then. boot: the boot of the machine.
    """

    version: int
    layouts: tuple[Layout, ...]
    partitions: tuple[Partition, ...] = ()
    error: tuple[str, ...] | None = None
    request: str = field(default="", metadata=_LATER)
    boot: str = field(default="", metadata=_LATER)


def write(
    directory: NodeDirectory,
    config: NodeConfig,
    done: Sequence[Partition] | SkyinfraError,
    *,
    request: str = "",
    existing: Sequence[Partition] | None = None,
) -> None:
    """Records the partitions that root made for *config*, or why it failed. Raises `StateDirectoryError`.

    *request*: of `Desired`. *existing*: with an error, the partitions that exist; None where that is not known: then
    those of before.
    """
    if config.accelerator is None:
        return
    error = None
    if isinstance(done, SkyinfraError):
        before = read(directory) if existing is None else None
        error = (type(done).__name__, str(done))
        done = before.partitions if before else existing or ()
    if config.accelerator.vendor == "amd":
        done = ()  # everybody may read the modes
    layouts, boot = config.accelerator.per_gpu, SystemMachine().boot_id()
    actual = ActualLayout(VERSION, layouts, tuple(done), error, request, boot)
    replace_file(directory.actual_file, json.dumps(actual.to_json()) + "\n", durable=True)


def read(directory: NodeDirectory) -> ActualLayout | None:
    """Returns the last record; None where there is none, or it cannot be read."""
    try:
        return ActualLayout.load(_file(directory))
    except InvalidNodeConfig:
        return None


def _file(directory: NodeDirectory) -> Path:
    here, before = directory.actual_file, directory.actual_file.with_name(_BEFORE)
    return before if newer(before, here) else here


def asked(directory: NodeDirectory) -> bool:
    """Returns whether root has something to do: it did nothing since this boot, or there was a request after that."""
    record = read(directory)
    if record is None or record.boot != SystemMachine().boot_id():
        return True
    try:
        request = desired_file.read(directory).request
    except InvalidNodeConfig:
        return False
    return bool(request) and request != record.request


class RecordedHardware(Hardware):
    """The GPUs of a node, whose layout root records and changes. AMD's modes are read from the driver."""

    # The name of the request to root; None where there was none.
    _request: str | None = None

    @classmethod
    def applies(cls, config: NodeConfig, directory: NodeDirectory) -> bool:
        """Returns whether root keeps a record on this node."""
        accelerator = config.accelerator
        there = accelerator is not None and accelerator.vendor in ("nvidia", "amd") and not config.scheduler_only
        return there and _file(directory).exists()

    def plan(self) -> list[Step]:
        """Returns the steps that root would execute; empty where the actual layout is the desired one."""
        if self._gpus is None:
            return super().plan()
        steps: list[Step] = []
        selected = targets.read(self._gpus, self._directory)
        existing = self.existing()
        for gpu, desired in self._desired.items():
            actual = [partition for partition in existing if partition.gpu == gpu]
            mode = bool(desired) if bool(actual) != bool(desired) else None
            wanted = desired
            if targets.legal(desired, self._gpus):
                wanted = targets.target(desired, selected.get(gpu), targets.places(actual, gpu, desired), None)
            steps += steps_between(gpu, actual, wanted, mode=mode)
        return steps

    def existing(self) -> tuple[Partition, ...]:
        """Returns the partitions that root has recorded."""
        if self._gpus is None:
            return super().existing()
        record = read(self._directory)
        return record.partitions if record else ()

    def ask(self) -> None:
        """Asks root for the desired layout, unless it is the actual one. Raises `StateDirectoryError`."""
        record = self._of_desired()
        done = not self.plan() if self._gpus is None else record is not None and record.error is None
        if not done:
            self._request = secrets.token_hex(8)
            self.remind()

    def remind(self) -> None:
        """Asks again: systemd does not notice a request while root's part runs, for another layout perhaps."""
        desired_file.update(self._directory, again=True, request=self._request or "")

    def made_by_root(self) -> tuple[Partition, ...] | None:
        """Returns the partitions that root has made; None while it has not answered. Raises `PartitionFailed`."""
        if self._gpus is None and self._request is None:
            return self.actual()
        record = self._of_desired()
        if record is None or self._request not in (None, record.request):
            return None
        if record.error is not None:
            raise PartitionFailed(
                ": ".join(record.error),
                field="accelerator.layouts",
                hint="`journalctl -u skyinfra-partition` has all of it.",
            )
        return record.partitions if self._gpus is not None else self.actual()

    def _of_desired(self) -> ActualLayout | None:
        """Returns the record, where it is of the desired layout."""
        wanted = self._desired.values() if self._accelerator is None else self._accelerator.per_gpu
        record = read(self._directory)
        return record if record is not None and record.layouts == tuple(wanted) else None
