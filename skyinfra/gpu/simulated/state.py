"""What the simulated driver remembers: a file that every process of the node shares, under a lock."""

from __future__ import annotations

import contextlib
import dataclasses
import fcntl
import json
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from skyinfra.node.folder import appending, replace_file, writing


@dataclass
class ComputeState:
    """One compute instance."""

    id: int
    slices: int


@dataclass
class InstanceState:
    """One GPU instance, at ``start`` for ``size`` memory slices."""

    id: int
    profile: str
    start: int
    size: int
    compute: list[ComputeState] = field(default_factory=list)

    def overlaps(self, start: int, size: int) -> bool:
        """Whether a memory slice of ``start`` to ``start + size`` is its own."""
        return self.start < start + size and start < self.start + self.size


@dataclass
class ProcessState:
    """A process on a GPU: on the instance ``instance``, or, where that is None, on the whole GPU."""

    pid: int
    instance: int | None = None


@dataclass
class GpuState:
    """One GPU: its MIG mode (0 or 1) now and after a reset, its instances, and the processes on it.

    guest: it is passed through to a virtual machine, whose driver cannot reset it.
    epoch: how often the mode has changed or the GPU was reset, which voids the handles of what stood there.
    """

    current: int = 0
    pending: int = 0
    guest: bool = False
    epoch: int = 0
    instances: list[InstanceState] = field(default_factory=list)
    processes: list[ProcessState] = field(default_factory=list)

    def holds(self, instance: int) -> bool:
        """Whether a process is on that instance, or on the whole GPU."""
        return any(process.instance in (None, instance) for process in self.processes)

    def activate(self, mode: int) -> None:
        """Sets the mode as a reset does: whatever stood there is gone."""
        self.current = self.pending = mode
        self.instances = []
        self.epoch = (self.epoch + 1) % 2**16


class StateFile:
    """The states of *count* GPUs in the file *path*; a new file says that MIG is off everywhere."""

    def __init__(self, path: Path, count: int) -> None:
        self._path = path
        self._count = count

    def read(self) -> list[GpuState]:
        """The state of each GPU now."""
        with self._locked():
            return self._load()

    @contextlib.contextmanager
    def change(self) -> Iterator[list[GpuState]]:
        """The states, for changing; nothing is kept of a change whose body raises."""
        with self._locked():
            gpus = self._load()
            yield gpus
            self._store(gpus)

    @contextlib.contextmanager
    def _locked(self) -> Iterator[None]:
        lock = self._path.with_suffix(".lock")
        with writing(lock):
            stream = appending(lock)
        with stream:
            fcntl.flock(stream.fileno(), fcntl.LOCK_EX)
            yield

    def _load(self) -> list[GpuState]:
        gpus: list[GpuState] = []
        if self._path.exists():
            document = json.loads(self._path.read_text(encoding="utf-8"))
            gpus = [_gpu(value) for value in document["gpus"][: self._count]]
        return gpus + [GpuState() for _ in range(self._count - len(gpus))]

    def _store(self, gpus: list[GpuState]) -> None:
        text = json.dumps({"version": 1, "gpus": [dataclasses.asdict(gpu) for gpu in gpus]}, indent=1) + "\n"
        replace_file(self._path, text)


def _gpu(value: dict[str, object]) -> GpuState:
    # Written by an older version, it lacks some fields and has one that is no longer.
    known = {each.name for each in dataclasses.fields(GpuState)}
    gpu = GpuState(**{name: given for name, given in value.items() if name in known})  # type: ignore[arg-type]
    gpu.processes = [ProcessState(**process) for process in gpu.processes]  # type: ignore[arg-type]
    gpu.instances = [InstanceState(**instance) for instance in gpu.instances]  # type: ignore[arg-type]
    for instance in gpu.instances:
        instance.compute = [ComputeState(**compute) for compute in instance.compute]  # type: ignore[arg-type]
    return gpu
