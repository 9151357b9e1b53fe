"""A simulated NVIDIA driver: the functions of ``pynvml`` over GPUs that a file describes.

`Nvml` and the partitioner run on it as they run on the real one. It takes and fills the same C types, raises the same
``pynvml.NVMLError`` subclasses, and refuses what a driver refuses: an occupied placement, too many compute slices,
destroying an instance that is in use, MIG on a GPU that has none. What exists is kept in a file, so that a second
process sees it. UUIDs follow from the node, the GPU and the placement, as they do on hardware.

The rules are those of NVIDIA's MIG user guide and its open kernel modules; the profiles come from `skyinfra.mig`.
"""

# The functions bear NVML's names.
# ruff: noqa: N802

from __future__ import annotations

import ctypes
import uuid
from dataclasses import dataclass
from enum import IntEnum
from pathlib import Path
from typing import Any

import pynvml

from skyinfra import mig
from skyinfra.protocol.nodeconfig import NodeAccelerator
from skyinfra.runner.simulated_state import ComputeState, GpuState, InstanceState, StateFile

_NAMESPACE = uuid.uuid5(uuid.NAMESPACE_DNS, "simulated.skyinfra")
_BYTES_PER_GIB = 2**30
_REFERENCE: Any = type(ctypes.byref(ctypes.c_uint()))
# Compute instance profiles, NVML's enumeration -> compute slices; 7 is the one of the double-memory GPU instance.
_COMPUTE_SLICES = {0: 1, 1: 2, 2: 3, 3: 4, 4: 7, 5: 8, 6: 6, 7: 1}
_DOUBLE_MEMORY_COMPUTE = 7


class _Kind(IntEnum):
    """What a handle points to."""

    GPU = 1
    INSTANCE = 2
    COMPUTE = 3
    DEVICE = 4


@dataclass(frozen=True)
class _Profile:
    """What the driver knows of a GPU instance profile; ``number`` is NVML's enumeration, ``id`` what creates it."""

    name: str
    number: int
    id: int
    compute_slices: int
    size: int
    starts: tuple[int, ...]
    max_count: int


class SimulatedDriver:
    """The driver of a node with the accelerators *accelerator*, in the state that the file *path* keeps.

    *seed* tells nodes apart: it enters every UUID. GPUs whose ``mig_model`` is None answer as GPUs without MIG.
    """

    def __init__(self, accelerator: NodeAccelerator, *, path: Path, seed: str) -> None:
        self._accelerator = accelerator
        self._geometry = mig.geometry(accelerator.mig_model) if accelerator.mig_model else None
        profiles = _known(self._geometry) if self._geometry else []
        self._by_number = {profile.number: profile for profile in profiles}
        self._by_id = {profile.id: profile for profile in profiles}
        self._by_name = {profile.name: profile for profile in profiles}
        self._state = StateFile(path, accelerator.count)
        self._seed = seed
        self._users = 0

    # What only a person at the machine, or its hypervisor, does.

    def hold(self, index: int, *, held: bool = True) -> None:
        """A process opens the GPU *index*, or (``held=False``) closes it."""
        with self._state.change() as gpus:
            gpus[index].held = held

    def pass_through(self, index: int) -> None:
        """The GPU *index* belongs to a virtual machine from now on, whose driver cannot reset it."""
        with self._state.change() as gpus:
            gpus[index].guest = True

    def reset(self, index: int) -> None:
        """Resets the GPU *index* as ``nvidia-smi --gpu-reset`` does: a pending mode becomes active, instances go."""
        with self._state.change() as gpus:
            if gpus[index].held:
                raise pynvml.NVMLError(pynvml.NVML_ERROR_IN_USE)
            gpus[index].current = gpus[index].pending
            gpus[index].instances = []

    def reboot(self) -> None:
        """Reboots the machine: instances go; the mode stays on Ampere only (later GPUs start with MIG off)."""
        stays = self._geometry is not None and not self._geometry.resetless
        with self._state.change() as gpus:
            for gpu in gpus:
                gpu.current = gpu.pending = gpu.pending if stays else 0
                gpu.held = False
                gpu.instances = []

    # NVML: system and devices.

    def nvmlInit(self) -> None:
        self._users += 1

    def nvmlShutdown(self) -> None:
        self._initialized()
        self._users -= 1

    def nvmlDeviceGetCount(self) -> int:
        self._initialized()
        return self._accelerator.count

    def nvmlDeviceGetHandleByIndex(self, index: int) -> Any:
        self._initialized()
        if not 0 <= index < self._accelerator.count:
            raise pynvml.NVMLError(pynvml.NVML_ERROR_INVALID_ARGUMENT)
        return _handle(pynvml.c_nvmlDevice_t, _Kind.GPU, index)

    def nvmlDeviceGetUUID(self, device: Any) -> str:
        kind, gpu, instance_id, compute_id = self._read(device)
        if kind == _Kind.GPU:
            return f"GPU-{uuid.uuid5(_NAMESPACE, f'{self._seed}/{gpu}')}"
        instance = self._instance(self._state.read()[gpu], instance_id)
        place = f"{instance.start}:{instance.size}"
        return f"MIG-{uuid.uuid5(_NAMESPACE, f'{self._seed}/{gpu}/{place}/{instance_id}/{compute_id}')}"

    def nvmlDeviceGetName(self, device: Any) -> str:
        self._read(device)
        return f"NVIDIA {self._accelerator.name} (simulated)"

    def nvmlDeviceGetMemoryInfo(self, device: Any) -> Any:
        self._read(device)
        total = self._total_memory()
        return pynvml.c_nvmlMemory_t(total=total, free=total, used=0)

    def nvmlDeviceGetPciInfo(self, device: Any) -> Any:
        _, gpu, _, _ = self._read(device)
        return pynvml.nvmlPciInfo_t(busId=f"00000000:{gpu + 16:02X}:00.0".encode(), pciDeviceId=0)

    def nvmlDeviceGetComputeRunningProcesses(self, device: Any) -> list[Any]:
        self._read(device)
        return []

    # NVML: MIG mode.

    def nvmlDeviceGetMigMode(self, device: Any) -> list[int]:
        gpu = self._mig_gpu(device, self._state.read())
        return [gpu.current, gpu.pending]

    def nvmlDeviceSetMigMode(self, device: Any, mode: int) -> int:
        with self._state.change() as gpus:
            gpu = self._mig_gpu(device, gpus)
            gpu.pending = mode
            if gpu.current == mode:
                return int(pynvml.NVML_SUCCESS)
            if gpu.held or gpu.instances:
                return int(pynvml.NVML_ERROR_IN_USE)
            if gpu.guest and self._geometry is not None and not self._geometry.resetless:
                return int(pynvml.NVML_ERROR_RESET_REQUIRED)
            gpu.current = mode
            return int(pynvml.NVML_SUCCESS)

    # NVML: GPU instances.

    def nvmlDeviceGetGpuInstanceProfileInfo(self, device: Any, profile: int, version: int = 2) -> Any:
        self._mig_gpu(device, self._state.read())
        if not 0 <= profile < pynvml.NVML_GPU_INSTANCE_PROFILE_COUNT:
            raise pynvml.NVMLError(pynvml.NVML_ERROR_INVALID_ARGUMENT)
        if profile not in self._by_number:
            raise pynvml.NVMLError(pynvml.NVML_ERROR_NOT_SUPPORTED)
        known = self._by_number[profile]
        info = pynvml.c_nvmlGpuInstanceProfileInfo_v2_t() if version == 2 else pynvml.c_nvmlGpuInstanceProfileInfo_t()
        info.id = known.id
        info.sliceCount = known.compute_slices
        info.instanceCount = known.max_count
        info.memorySizeMB = self._total_memory() * known.size // self._units() // 2**20
        if version == 2:
            info.name = f"MIG {known.name}".encode()
        return info

    def nvmlDeviceGetGpuInstancePossiblePlacements(self, device: Any, profile: int, array: Any, count: Any) -> None:
        self._mig_gpu(device, self._state.read())
        known = self._profile(profile)
        starts = known.starts
        if array is not None:
            for i, start in enumerate(starts):
                array[i].start, array[i].size = start, known.size
        _pointed(count).value = len(starts)

    def nvmlDeviceCreateGpuInstanceWithPlacement(self, device: Any, profile: int, placement: Any) -> Any:
        place = _pointed(placement)
        with self._state.change() as gpus:
            gpu = self._mig_on(device, gpus)
            known = self._profile(profile)
            if place.size != known.size or place.start not in known.starts:
                raise pynvml.NVMLError(pynvml.NVML_ERROR_INVALID_ARGUMENT)
            if not self._has_room(gpu, known, place.start):
                raise pynvml.NVMLError(pynvml.NVML_ERROR_INSUFFICIENT_RESOURCES)
            instance = InstanceState(self._instance_id(place.start, known.size), known.name, place.start, known.size)
            gpu.instances.append(instance)
        return _handle(pynvml.c_nvmlGpuInstance_t, _Kind.INSTANCE, self._read(device)[1], instance.id)

    def nvmlDeviceGetGpuInstances(self, device: Any, profile: int, array: Any, count: Any) -> None:
        gpu = self._mig_on(device, self._state.read())
        name = self._profile(profile).name
        found = [instance.id for instance in gpu.instances if instance.profile == name]
        for i, number in enumerate(found):
            array[i] = _handle(pynvml.c_nvmlGpuInstance_t, _Kind.INSTANCE, self._read(device)[1], number)
        _pointed(count).value = len(found)

    def nvmlGpuInstanceGetInfo(self, handle: Any) -> Any:
        gpu, instance = self._instance_of(handle, self._state.read())
        return pynvml.c_nvmlGpuInstanceInfo_t(
            device=_handle(pynvml.c_nvmlDevice_t, _Kind.GPU, gpu),
            id=instance.id,
            profileId=self._by_name[instance.profile].id,
            placement=pynvml.c_nvmlGpuInstancePlacement_t(start=instance.start, size=instance.size),
        )

    def nvmlGpuInstanceDestroy(self, handle: Any) -> None:
        with self._state.change() as gpus:
            gpu, instance = self._instance_of(handle, gpus)
            if instance.compute or gpus[gpu].held:
                raise pynvml.NVMLError(pynvml.NVML_ERROR_IN_USE)
            gpus[gpu].instances.remove(instance)

    # NVML: compute instances.

    def nvmlGpuInstanceGetComputeInstanceProfileInfo(
        self, handle: Any, profile: int, engine: int, version: int = 2
    ) -> Any:
        _, instance = self._instance_of(handle, self._state.read())
        slices = self._compute_slices(instance, profile)
        if engine != pynvml.NVML_COMPUTE_INSTANCE_ENGINE_PROFILE_SHARED or slices is None:
            raise pynvml.NVMLError(pynvml.NVML_ERROR_NOT_SUPPORTED)
        kinds = (pynvml.c_nvmlComputeInstanceProfileInfo_t, pynvml.c_nvmlComputeInstanceProfileInfo_v2_t)
        info = kinds[version - 1]()
        info.id, info.sliceCount = profile, slices
        info.instanceCount = self._by_name[instance.profile].compute_slices // slices
        return info

    def nvmlGpuInstanceCreateComputeInstance(self, handle: Any, profile: int) -> Any:
        with self._state.change() as gpus:
            gpu, instance = self._instance_of(handle, gpus)
            slices = self._compute_slices(instance, profile)
            if slices is None:
                raise pynvml.NVMLError(pynvml.NVML_ERROR_INVALID_ARGUMENT)
            used = sum(compute.slices for compute in instance.compute)
            if used + slices > self._by_name[instance.profile].compute_slices:
                raise pynvml.NVMLError(pynvml.NVML_ERROR_INSUFFICIENT_RESOURCES)
            taken = {compute.id for compute in instance.compute}
            number = next(i for i in range(len(taken) + 1) if i not in taken)
            instance.compute.append(ComputeState(number, slices))
        return _handle(pynvml.c_nvmlComputeInstance_t, _Kind.COMPUTE, gpu, instance.id, number)

    def nvmlGpuInstanceGetComputeInstances(self, handle: Any, profile: int, array: Any, count: Any) -> None:
        gpu, instance = self._instance_of(handle, self._state.read())
        slices = self._compute_slices(instance, profile)
        found = [compute.id for compute in instance.compute if compute.slices == slices]
        for i, number in enumerate(found):
            array[i] = _handle(pynvml.c_nvmlComputeInstance_t, _Kind.COMPUTE, gpu, instance.id, number)
        _pointed(count).value = len(found)

    def nvmlComputeInstanceGetInfo_v2(self, handle: Any) -> Any:
        gpu, instance, compute = self._compute_of(handle, self._state.read())
        return pynvml.c_nvmlComputeInstanceInfo_t(
            device=_handle(pynvml.c_nvmlDevice_t, _Kind.DEVICE, gpu, instance.id, compute.id),
            gpuInstance=_handle(pynvml.c_nvmlGpuInstance_t, _Kind.INSTANCE, gpu, instance.id),
            id=compute.id,
        )

    def nvmlComputeInstanceDestroy(self, handle: Any) -> None:
        with self._state.change() as gpus:
            gpu, instance, compute = self._compute_of(handle, gpus)
            if gpus[gpu].held:
                raise pynvml.NVMLError(pynvml.NVML_ERROR_IN_USE)
            instance.compute.remove(compute)

    # NVML: MIG devices.

    def nvmlDeviceGetMaxMigDeviceCount(self, device: Any) -> int:
        self._mig_gpu(device, self._state.read())
        return (self._geometry.compute_slices if self._geometry else None) or 0

    def nvmlDeviceGetMigDeviceHandleByIndex(self, device: Any, index: int) -> Any:
        gpu = self._mig_on(device, self._state.read())
        devices = [(instance.id, compute.id) for instance in gpu.instances for compute in instance.compute]
        if not 0 <= index < len(devices):
            raise pynvml.NVMLError(pynvml.NVML_ERROR_NOT_FOUND)
        return _handle(pynvml.c_nvmlDevice_t, _Kind.DEVICE, self._read(device)[1], *devices[index])

    # The rules.

    def _initialized(self) -> None:
        if self._users < 1:
            raise pynvml.NVMLError(pynvml.NVML_ERROR_UNINITIALIZED)

    def _read(self, handle: Any) -> tuple[_Kind, int, int, int]:
        self._initialized()
        number = ctypes.cast(handle, ctypes.c_void_p).value or 0
        return _Kind(number >> 48), number >> 32 & 0xFFFF, number >> 16 & 0xFFFF, number & 0xFFFF

    def _total_memory(self) -> int:
        """In bytes. A GPU of 80 GB has nearly 80 GiB."""
        return int((self._accelerator.memory_gb or 0) * _BYTES_PER_GIB)

    def _units(self) -> int:
        return (self._geometry.placement_units if self._geometry else None) or 1

    def _mig_gpu(self, device: Any, gpus: list[GpuState]) -> GpuState:
        _, index, _, _ = self._read(device)
        if self._geometry is None:
            raise pynvml.NVMLError(pynvml.NVML_ERROR_NOT_SUPPORTED)
        return gpus[index]

    def _mig_on(self, device: Any, gpus: list[GpuState]) -> GpuState:
        gpu = self._mig_gpu(device, gpus)
        if not gpu.current:
            raise pynvml.NVMLError(pynvml.NVML_ERROR_NOT_SUPPORTED)
        return gpu

    def _profile(self, profile_id: int) -> _Profile:
        if profile_id not in self._by_id:
            raise pynvml.NVMLError(pynvml.NVML_ERROR_INVALID_ARGUMENT)
        return self._by_id[profile_id]

    def _has_room(self, gpu: GpuState, profile: _Profile, start: int) -> bool:
        same = sum(instance.profile == profile.name for instance in gpu.instances)
        used = sum(self._by_name[instance.profile].compute_slices for instance in gpu.instances)
        slices = (self._geometry.compute_slices if self._geometry else None) or 0
        free = not any(instance.overlaps(start, profile.size) for instance in gpu.instances)
        return free and same < profile.max_count and used + profile.compute_slices <= slices

    def _instance_id(self, start: int, size: int) -> int:
        """As the current driver numbers them: 0 for the whole GPU, 1 and 2 for its halves, and so on."""
        return self._units() // size - 1 + start // size

    def _instance_of(self, handle: Any, gpus: list[GpuState]) -> tuple[int, InstanceState]:
        _, gpu, instance_id, _ = self._read(handle)
        return gpu, self._instance(gpus[gpu], instance_id)

    @staticmethod
    def _instance(gpu: GpuState, instance_id: int) -> InstanceState:
        for instance in gpu.instances:
            if instance.id == instance_id:
                return instance
        raise pynvml.NVMLError(pynvml.NVML_ERROR_INVALID_ARGUMENT)

    def _compute_of(self, handle: Any, gpus: list[GpuState]) -> tuple[int, InstanceState, ComputeState]:
        gpu, instance = self._instance_of(handle, gpus)
        _, _, _, compute_id = self._read(handle)
        for compute in instance.compute:
            if compute.id == compute_id:
                return gpu, instance, compute
        raise pynvml.NVMLError(pynvml.NVML_ERROR_INVALID_ARGUMENT)

    def _compute_slices(self, instance: InstanceState, profile: int) -> int | None:
        """Compute slices of the compute instance profile *profile* in *instance*; None where it has no such."""
        known = self._by_name[instance.profile]
        double = known.number == pynvml.NVML_GPU_INSTANCE_PROFILE_1_SLICE_REV2
        if double != (profile == _DOUBLE_MEMORY_COMPUTE):
            return None
        slices = _COMPUTE_SLICES.get(profile)
        return slices if slices is not None and slices <= known.compute_slices else None


def _known(geometry: mig.Geometry) -> list[_Profile]:
    """The profiles of which everything is known; an id that is not known becomes one that no known id is."""
    return [
        _Profile(
            p.name,
            p.nvml_enum,
            1000 + p.nvml_enum if p.profile_id is None else p.profile_id,
            p.compute_slices,
            p.size,
            p.starts,
            p.max_count,
        )
        for p in geometry.profiles
        if p.nvml_enum is not None and p.size and p.starts and p.max_count
    ]


def _handle(kind: Any, what: _Kind, gpu: int, instance: int = 0, compute: int = 0) -> Any:
    number = what << 48 | gpu << 32 | instance << 16 | compute
    return ctypes.cast(ctypes.c_void_p(number), kind)


def _pointed(reference: Any) -> Any:
    """What *reference* points to. The real library ends the process where it gets a value instead."""
    if not isinstance(reference, _REFERENCE):
        raise pynvml.NVMLError(pynvml.NVML_ERROR_INVALID_ARGUMENT)
    return reference._obj
