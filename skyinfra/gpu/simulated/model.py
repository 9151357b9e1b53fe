"""The GPUs of the simulated driver: its handles, the rules of one GPU model, and the state of each GPU in a file.

The rules are those of NVIDIA's MIG user guide and its open kernel modules; the profiles come from `skyinfra.mig`. Every
process of the node shares the file and changes it under a lock. Handles are opaque to their holder, as NVML's are.
"""

from __future__ import annotations

import contextlib
import ctypes
import dataclasses
import fcntl
import json
import struct
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from enum import IntEnum
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import pynvml

from skyinfra import mig
from skyinfra.mig.grid import Grid
from skyinfra.node.folder import appending, replace_file, writing

T = TypeVar("T")

# A handle in eight bytes: kind, gpu, epoch, instance and compute.
_HANDLE = struct.Struct(">BBHHH")
_REFERENCE: Any = type(ctypes.byref(ctypes.c_uint()))
# That of the double-memory GPU instance.
_DOUBLE_MEMORY = pynvml.NVML_COMPUTE_INSTANCE_PROFILE_1_SLICE_REV1
# Compute instance profiles, NVML's enumeration -> compute slices.
_COMPUTE_SLICES = {getattr(pynvml, f"NVML_COMPUTE_INSTANCE_PROFILE_{n}_SLICE"): n for n in (1, 2, 3, 4, 7)}
_COMPUTE_SLICES[_DOUBLE_MEMORY] = 1
# `nvidia-smi mig -lcip` lists none of three slices on a GPU instance of four.
_NOT_DIVIDED = {(3, 4)}
_NEVER = 100


class HandleKind(IntEnum):
    """The objects of NVML that have handles."""

    GPU = 1
    INSTANCE = 2
    COMPUTE = 3
    DEVICE = 4


# The others are devices.
_TYPES = {HandleKind.INSTANCE: pynvml.c_nvmlGpuInstance_t, HandleKind.COMPUTE: pynvml.c_nvmlComputeInstance_t}


class Handle(NamedTuple):
    """The content of a handle. ``epoch`` is that of its GPU when it was given out; a handle to a GPU has none."""

    kind: HandleKind
    gpu: int
    epoch: int = 0
    instance: int = 0
    compute: int = 0

    def pointer(self) -> Any:
        """Returns the handle as the caller gets it."""
        number = int.from_bytes(_HANDLE.pack(*self), "big")
        return ctypes.cast(ctypes.c_void_p(number), _TYPES.get(self.kind, pynvml.c_nvmlDevice_t))

    @classmethod
    def read(cls, pointer: Any) -> Handle:
        """Returns the content of the caller's handle. Raises ``NVMLError_InvalidArgument`` where it is no handle."""
        number = ctypes.cast(pointer, ctypes.c_void_p).value or 0
        kind, *fields = _HANDLE.unpack(number.to_bytes(8, "big"))
        refuse(pynvml.NVML_ERROR_INVALID_ARGUMENT, kind not in list(HandleKind))
        return cls(HandleKind(kind), *fields)


def refuse(error: int, condition: object) -> None:
    """Raises the NVML *error* where *condition* is true."""
    if condition:
        raise pynvml.NVMLError(error)


def first(values: Iterable[T], error: int) -> T:
    """Returns the first of *values*; raises the NVML *error* where there is none."""
    for value in values:
        return value
    raise pynvml.NVMLError(error)


def fill(array: Any, count: Any, values: Sequence[Any]) -> None:
    """Fills the caller's *array*, unless it is None, and *count* as NVML does."""
    for index, value in enumerate(values if array is not None else ()):
        array[index] = value
    pointed(count).value = len(values)


def pointed(reference: Any) -> Any:
    """The object that *reference* points to. The real library ends the process where it gets a value instead."""
    refuse(pynvml.NVML_ERROR_INVALID_ARGUMENT, not isinstance(reference, _REFERENCE))
    return reference._obj


@dataclass
class ComputeState:
    """One compute instance, at ``start`` in the compute slices of its GPU instance."""

    id: int
    slices: int
    start: int = 0


@dataclass
class InstanceState:
    """One GPU instance, at ``start`` for ``size`` memory slices."""

    id: int
    profile: str
    start: int
    size: int
    compute: list[ComputeState] = field(default_factory=list)


@dataclass
class ProcessState:
    """A process on a GPU: on the instance ``instance``, or, where that is None, on the whole GPU. used: bytes.

    compute: the compute instance, where several share the instance.
    """

    pid: int
    instance: int | None = None
    used: int = 0
    compute: int = 0


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

    def holds(self, instance: int, compute: int | None = None) -> bool:
        """Returns whether a process is on that instance (on *compute* of it, if given), or on the whole GPU."""
        on = [process for process in self.processes if process.instance in (None, instance)]
        return any(process.instance is None or compute in (None, process.compute) for process in on)

    def used(self, instance: int | None) -> int:
        """Bytes that the processes on that instance use; of all of them where it is None."""
        return sum(process.used for process in self.processes if instance in (None, process.instance))

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
        """Returns the state of each GPU now."""
        gpus: list[GpuState] = []
        if self._path.exists():
            document = json.loads(self._path.read_text(encoding="utf-8"))
            gpus = [_gpu(value) for value in document["gpus"][: self._count]]
        return gpus + [GpuState() for _ in range(self._count - len(gpus))]

    @contextlib.contextmanager
    def change(self) -> Iterator[list[GpuState]]:
        """The states, for changing; nothing is kept of a change whose body raises."""
        lock = self._path.with_suffix(".lock")
        with writing(lock):
            stream = appending(lock)
        with stream:
            fcntl.flock(stream.fileno(), fcntl.LOCK_EX)
            gpus = self.read()
            yield gpus
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


class SimulatedModel:
    """A GPU model as its driver has it: the profiles of *geometry* of which everything is known, and their rules."""

    def __init__(self, geometry: mig.Geometry) -> None:
        # An unknown id becomes one that no known id is.
        profiles = (
            dataclasses.replace(p, profile_id=1000 + p.nvml_enum if p.profile_id is None else p.profile_id)
            for p in geometry.profiles
            if p.nvml_enum is not None and p.size and p.starts and p.max_count
        )
        self.geometry = dataclasses.replace(geometry, profiles=tuple(profiles))
        self.units = geometry.placement_units or 1

    def by_number(self, number: int) -> mig.Profile:
        """Returns the profile of NVML's enumeration; refused where this GPU does not have it."""
        return first((p for p in self.geometry.profiles if p.nvml_enum == number), pynvml.NVML_ERROR_NOT_SUPPORTED)

    def by_id(self, profile_id: int) -> mig.Profile:
        """Returns the profile that *profile_id* creates; refused where this GPU does not have it."""
        found = (p for p in self.geometry.profiles if p.profile_id == profile_id)
        return first(found, pynvml.NVML_ERROR_INVALID_ARGUMENT)

    def of(self, instance: InstanceState) -> mig.Profile:
        """Returns the profile of an instance that exists."""
        return next(p for p in self.geometry.profiles if p.name == instance.profile)

    def has_room(self, gpu: GpuState, profile: mig.Profile, start: int) -> bool:
        """Returns whether one more instance of *profile* can stand at *start*."""
        return Grid(self.geometry, [(self.of(each), each.start) for each in gpu.instances]).allows(profile, start)

    def instance_id(self, start: int, size: int) -> int:
        """Returns the number that the current driver gives: 0 for the whole GPU, 1 and 2 for its halves, and so on."""
        return self.units // size - 1 + start // size

    def compute_starts(self, instance: InstanceState, slices: int) -> list[int]:
        """The compute slices at which a compute instance of so many *slices* may start in *instance*, free or not."""
        return list(self.of(instance).compute_starts(slices))

    def compute_free(self, instance: InstanceState, slices: int) -> list[int]:
        """Returns the starts among `compute_starts` where it is free."""
        taken = {at for each in instance.compute for at in range(each.start, each.start + each.slices)}
        starts = self.compute_starts(instance, slices)
        return [start for start in starts if taken.isdisjoint(range(start, start + slices))]

    def compute_slices(self, instance: InstanceState, number: int) -> int:
        """Compute slices of the compute instance profile *number* in *instance*; refused where it has none."""
        refuse(pynvml.NVML_ERROR_INVALID_ARGUMENT, not 0 <= number < pynvml.NVML_COMPUTE_INSTANCE_PROFILE_COUNT)
        profile = self.of(instance)
        double = profile.nvml_enum == pynvml.NVML_GPU_INSTANCE_PROFILE_1_SLICE_REV2
        slices = _COMPUTE_SLICES.get(number, _NEVER)
        differs = double != (number == _DOUBLE_MEMORY) or (slices, profile.compute_slices) in _NOT_DIVIDED
        refuse(pynvml.NVML_ERROR_NOT_SUPPORTED, differs or slices > profile.compute_slices)
        return slices
