"""A simulated NVIDIA driver: the functions of ``pynvml`` over GPUs that a file describes.

`Nvml` and the partitioner run on it as they run on the real one. It takes and fills the same C types, raises the same
``pynvml.NVMLError`` subclasses, and refuses what a driver refuses: an occupied placement, too many compute slices,
destroying an instance that is in use, MIG on a GPU that has none. What exists is kept in a file, so that a second
process sees it. UUIDs follow from the node, the GPU and the placement, as they do on hardware.
"""

# The functions bear NVML's names.
# ruff: noqa: N802

from __future__ import annotations

import os
import re
import uuid
from pathlib import Path
from typing import Any, NamedTuple

import pynvml

from skyinfra import mig
from skyinfra.gpu.simulated.model import (
    ComputeState,
    GpuState,
    Handle,
    HandleKind,
    InstanceState,
    ProcessState,
    SimulatedModel,
    StateFile,
    fill,
    first,
    pointed,
    refuse,
)
from skyinfra.protocol.nodeconfig import NodeAccelerator

# `nvmlSystemGetDriverVersion` returns it: it offers MIG on every GPU of the geometry.
DRIVER_VERSION = "595.58.03"

_NAMESPACE = uuid.uuid5(uuid.NAMESPACE_DNS, "simulated.skyinfra")
_BYTES_PER_GIB = 2**30
_NVIDIA = 0x10DE
_FIRST_BUS = 0x10
_NO_INSTANCE = 0xFFFFFFFF


class SimulatedDriver:
    """The driver of a node with the accelerators *accelerator*, in the state that the file *path* keeps.

    *seed* tells nodes apart: it enters every UUID. GPUs whose ``mig_model`` is None answer as GPUs without MIG.
    """

    def __init__(self, accelerator: NodeAccelerator, *, path: Path, seed: str) -> None:
        self._accelerator = accelerator
        self._mig = SimulatedModel(mig.geometry(accelerator.mig_model)) if accelerator.mig_model else None
        self._state = StateFile(path, accelerator.count)
        self._seed = seed
        self._users = 0

    # For tests and tours: what a person at the machine, or its hypervisor, does.

    def hold(
        self,
        index: int,
        *,
        held: bool = True,
        pid: int | None = None,
        start: int | None = None,
        compute: int = 0,
        used: int = 0,
    ) -> None:
        """The process *pid* (or this one) opens the GPU *index*, or the instance at *start*; ``held=False`` closes it.

        *compute*: where its compute instance starts in that. *used*: bytes of memory that it takes there. Raises
        ValueError where there is no such instance.
        """
        with self._state.change() as gpus:
            there = {(each.start, 0): (each.id, 0) for each in gpus[index].instances}
            there |= {(i.start, c.start): (i.id, c.id) for i in gpus[index].instances for c in i.compute}
            if start is not None and (start, compute) not in there:
                raise ValueError(f"there is no instance at {start}")
            instance, number = (None, 0) if start is None else there[start, compute]
            process = ProcessState(pid or os.getpid(), instance, used, number)
            if held:
                gpus[index].processes.append(process)
            else:
                gpus[index].processes = [each for each in gpus[index].processes if _who(each) != _who(process)]

    def pass_through(self, index: int) -> None:
        """The GPU *index* belongs to a virtual machine from now on, whose driver cannot reset it."""
        with self._state.change() as gpus:
            gpus[index].guest = True

    def reset(self, index: int) -> None:
        """Resets the GPU *index* as ``nvidia-smi --gpu-reset`` does: a pending mode becomes active, instances go."""
        with self._state.change() as gpus:
            refuse(pynvml.NVML_ERROR_IN_USE, gpus[index].processes)
            gpus[index].activate(gpus[index].pending)

    def reboot(self) -> None:
        """Reboots the machine: instances go; the mode stays on Ampere only (later GPUs start with MIG off)."""
        stays = self._mig is not None and not self._mig.geometry.resetless
        with self._state.change() as gpus:
            for gpu in gpus:
                gpu.activate(gpu.pending if stays else 0)
                gpu.processes = []

    # NVML: system and devices.

    def nvmlInit(self) -> None:
        self._users += 1

    def nvmlShutdown(self) -> None:
        self._initialized()
        self._users -= 1

    def nvmlSystemGetDriverVersion(self) -> str:
        self._initialized()
        return DRIVER_VERSION

    def nvmlDeviceGetCount(self) -> int:
        self._initialized()
        return self._accelerator.count

    def nvmlDeviceGetHandleByIndex(self, index: int) -> Any:
        self._initialized()
        refuse(pynvml.NVML_ERROR_INVALID_ARGUMENT, not 0 <= index < self._accelerator.count)
        return Handle(HandleKind.GPU, index).pointer()

    def nvmlDeviceGetHandleByUUID(self, uuid: str) -> Any:
        self._initialized()
        for index, gpu in enumerate(self._state.read()):
            devices = [(instance.id, compute.id) for instance in gpu.instances for compute in instance.compute]
            handles = [Handle(HandleKind.DEVICE, index, gpu.epoch, *each) for each in devices]
            for handle in (Handle(HandleKind.GPU, index), *handles):
                if self.nvmlDeviceGetUUID(handle.pointer()) == uuid:
                    return handle.pointer()
        raise pynvml.NVMLError(pynvml.NVML_ERROR_NOT_FOUND)

    def nvmlDeviceGetHandleByPciBusId(self, address: str) -> Any:
        self._initialized()
        parts = [int(part, 16) for part in re.split("[:.]", address)]
        index = parts[1] - _FIRST_BUS
        there = parts == [0, parts[1], 0, 0] and 0 <= index < self._accelerator.count
        refuse(pynvml.NVML_ERROR_NOT_FOUND, not there)
        return Handle(HandleKind.GPU, index).pointer()

    def nvmlDeviceGetUUID(self, device: Any) -> str:
        found = self._find(device, HandleKind.GPU, HandleKind.DEVICE)
        name = f"{self._seed}/{found.handle.gpu}"
        if found.handle.kind == HandleKind.GPU:
            return f"GPU-{uuid.uuid5(_NAMESPACE, name)}"
        place = f"{found.instance.start}:{found.instance.size}"
        return f"MIG-{uuid.uuid5(_NAMESPACE, f'{name}/{place}/{found.instance.id}/{found.compute.id}')}"

    def nvmlDeviceGetName(self, device: Any) -> str:
        found = self._find(device, HandleKind.GPU, HandleKind.DEVICE)
        name = f"NVIDIA {self._accelerator.name} (simulated)"
        if found.handle.kind == HandleKind.GPU:
            return name
        whole = found.compute.slices == self._model.of(found.instance).compute_slices
        return f"{name} MIG {'' if whole else f'{found.compute.slices}c.'}{found.instance.profile}"

    def nvmlDeviceGetPciInfo(self, device: Any) -> Any:
        bus = _FIRST_BUS + self._find(device, HandleKind.GPU).handle.gpu
        ids = self._mig.geometry.pci_device_ids if self._mig else ()
        number = (int(ids[0], 16) if ids else 0) << 16 | _NVIDIA
        address = f"00000000:{bus:02X}:00.0".encode()
        return pynvml.nvmlPciInfo_t(
            busIdLegacy=address[4:], domain=0, bus=bus, device=0, pciDeviceId=number, busId=address
        )

    def nvmlDeviceGetMemoryInfo(self, device: Any) -> Any:
        found = self._find(device, HandleKind.GPU, HandleKind.DEVICE)
        total = self._total_memory() if found.instance is None else self._memory_of(found.instance.size)
        used = found.gpu.used(None if found.instance is None else found.instance.id)
        return pynvml.c_nvmlMemory_t(total=total, free=total - used, used=used)

    def nvmlDeviceGetComputeRunningProcesses_v3(self, device: Any) -> list[Any]:
        found = self._find(device, HandleKind.GPU, HandleKind.DEVICE)
        if found.handle.kind == HandleKind.GPU:
            return [_running(each) for each in found.gpu.processes]
        here = (found.instance.id, found.compute.id)
        return [_running(each) for each in found.gpu.processes if (each.instance, each.compute) == here]

    # NVML: MIG mode.

    def nvmlDeviceGetMigMode(self, device: Any) -> list[int]:
        gpu = self._mig_gpu(device).gpu
        return [gpu.current, gpu.pending]

    def nvmlDeviceSetMigMode(self, device: Any, mode: int) -> int:
        with self._state.change() as gpus:
            gpu = self._mig_gpu(device, gpus).gpu
            modes = (pynvml.NVML_DEVICE_MIG_DISABLE, pynvml.NVML_DEVICE_MIG_ENABLE)
            refuse(pynvml.NVML_ERROR_INVALID_ARGUMENT, mode not in modes)
            gpu.pending = mode
            if gpu.current != mode:
                if gpu.processes or gpu.instances:
                    return int(pynvml.NVML_ERROR_IN_USE)
                if gpu.guest and not self._model.geometry.resetless:
                    return int(pynvml.NVML_ERROR_RESET_REQUIRED)
                gpu.activate(mode)
            return int(pynvml.NVML_SUCCESS)

    # NVML: GPU instances.

    def nvmlDeviceGetGpuInstanceProfileInfo(self, device: Any, profile: int, version: int = 2) -> Any:
        self._mig_gpu(device)
        refuse(pynvml.NVML_ERROR_INVALID_ARGUMENT, not 0 <= profile < pynvml.NVML_GPU_INSTANCE_PROFILE_COUNT)
        known = self._model.by_number(profile)
        info = pynvml.c_nvmlGpuInstanceProfileInfo_v2_t() if version == 2 else pynvml.c_nvmlGpuInstanceProfileInfo_t()
        info.id = known.profile_id
        info.sliceCount = known.compute_slices
        info.instanceCount = known.max_count
        info.memorySizeMB = self._memory_of(known.size or 0) // 2**20
        if version == 2:
            info.name = f"MIG {known.name}".encode()
        return info

    def nvmlDeviceGetGpuInstancePossiblePlacements(self, device: Any, profile: int, array: Any, count: Any) -> None:
        self._mig_gpu(device)
        known = self._model.by_id(profile)
        fill(array, count, [_placement(start, known.size) for start in known.starts or ()])

    def nvmlDeviceCreateGpuInstanceWithPlacement(self, device: Any, profile: int, placement: Any) -> Any:
        place = pointed(placement)
        with self._state.change() as gpus:
            handle, gpu, *_ = self._mig_gpu(device, gpus, on=True)
            known = self._model.by_id(profile)
            allowed = place.size == known.size and place.start in (known.starts or ())
            refuse(pynvml.NVML_ERROR_INVALID_ARGUMENT, not allowed)
            refuse(pynvml.NVML_ERROR_INSUFFICIENT_RESOURCES, not self._model.has_room(gpu, known, place.start))
            number = self._model.instance_id(place.start, place.size)
            gpu.instances.append(InstanceState(number, known.name, place.start, place.size))
            return Handle(HandleKind.INSTANCE, handle.gpu, gpu.epoch, number).pointer()

    def nvmlDeviceGetGpuInstances(self, device: Any, profile: int, array: Any, count: Any) -> None:
        handle, gpu, *_ = self._mig_gpu(device, on=True)
        name = self._model.by_id(profile).name
        found = [each.id for each in gpu.instances if each.profile == name]
        fill(array, count, [Handle(HandleKind.INSTANCE, handle.gpu, gpu.epoch, id).pointer() for id in found])

    def nvmlGpuInstanceGetInfo(self, instance: Any) -> Any:
        handle, _, existing, _ = self._find(instance, HandleKind.INSTANCE)
        return pynvml.c_nvmlGpuInstanceInfo_t(
            device=Handle(HandleKind.GPU, handle.gpu).pointer(),
            id=existing.id,
            profileId=self._model.of(existing).profile_id,
            placement=_placement(existing.start, existing.size),
        )

    def nvmlGpuInstanceDestroy(self, instance: Any) -> None:
        with self._state.change() as gpus:
            _, gpu, existing, _ = self._find(instance, HandleKind.INSTANCE, gpus=gpus)
            refuse(pynvml.NVML_ERROR_IN_USE, existing.compute or gpu.holds(existing.id))
            gpu.instances.remove(existing)

    # NVML: compute instances.

    def nvmlGpuInstanceGetComputeInstanceProfileInfo(
        self, instance: Any, profile: int, engine: int, version: int = 2
    ) -> Any:
        existing = self._find(instance, HandleKind.INSTANCE).instance
        slices = self._model.compute_slices(existing, profile)
        refuse(pynvml.NVML_ERROR_INVALID_ARGUMENT, engine != pynvml.NVML_COMPUTE_INSTANCE_ENGINE_PROFILE_SHARED)
        kinds = (pynvml.c_nvmlComputeInstanceProfileInfo_t, pynvml.c_nvmlComputeInstanceProfileInfo_v2_t)
        info = kinds[version - 1]()
        info.id, info.sliceCount = profile, slices
        info.instanceCount = self._model.of(existing).compute_slices // slices
        return info

    def nvmlGpuInstanceGetComputeInstancePossiblePlacements(
        self, instance: Any, profile: int, array: Any, count: Any
    ) -> None:
        existing = self._find(instance, HandleKind.INSTANCE).instance
        slices = self._model.compute_slices(existing, profile)
        starts = self._model.compute_starts(existing, slices)
        fill(array, count, [pynvml.c_nvmlComputeInstancePlacement_t(start=start, size=slices) for start in starts])

    def nvmlGpuInstanceCreateComputeInstance(self, instance: Any, profile: int) -> Any:
        return self._create_compute(instance, profile, None)

    def nvmlGpuInstanceCreateComputeInstanceWithPlacement(self, instance: Any, profile: int, placement: Any) -> Any:
        return self._create_compute(instance, profile, pointed(placement))

    def _create_compute(self, instance: Any, profile: int, place: Any) -> Any:
        with self._state.change() as gpus:
            handle, _, existing, _ = self._find(instance, HandleKind.INSTANCE, gpus=gpus)
            slices = self._model.compute_slices(existing, profile)
            if place is not None:
                allowed = place.size == slices and place.start in self._model.compute_starts(existing, slices)
                refuse(pynvml.NVML_ERROR_INVALID_ARGUMENT, not allowed)
            free = self._model.compute_free(existing, slices)
            refuse(pynvml.NVML_ERROR_INSUFFICIENT_RESOURCES, not free if place is None else place.start not in free)
            taken = {compute.id for compute in existing.compute}
            number = next(i for i in range(len(taken) + 1) if i not in taken)
            existing.compute.append(ComputeState(number, slices, free[0] if place is None else place.start))
        return handle._replace(kind=HandleKind.COMPUTE, compute=number).pointer()

    def nvmlGpuInstanceGetComputeInstances(self, instance: Any, profile: int, array: Any, count: Any) -> None:
        handle, _, existing, _ = self._find(instance, HandleKind.INSTANCE)
        slices = self._model.compute_slices(existing, profile)
        found = [compute.id for compute in existing.compute if compute.slices == slices]
        fill(array, count, [handle._replace(kind=HandleKind.COMPUTE, compute=id).pointer() for id in found])

    def nvmlComputeInstanceGetInfo_v2(self, compute: Any) -> Any:
        handle, _, _, existing = self._find(compute, HandleKind.COMPUTE)
        return pynvml.c_nvmlComputeInstanceInfo_t(
            device=handle._replace(kind=HandleKind.DEVICE).pointer(),
            gpuInstance=handle._replace(kind=HandleKind.INSTANCE, compute=0).pointer(),
            id=handle.compute,
            placement=pynvml.c_nvmlComputeInstancePlacement_t(start=existing.start, size=existing.slices),
        )

    def nvmlComputeInstanceDestroy(self, compute: Any) -> None:
        with self._state.change() as gpus:
            _, gpu, instance, existing = self._find(compute, HandleKind.COMPUTE, gpus=gpus)
            refuse(pynvml.NVML_ERROR_IN_USE, gpu.holds(instance.id, existing.id))
            instance.compute.remove(existing)

    # NVML: MIG devices.

    def nvmlDeviceGetMaxMigDeviceCount(self, device: Any) -> int:
        gpu = self._find(device, HandleKind.GPU).gpu
        return (self._mig.geometry.compute_slices or 0) if self._mig and gpu.current else 0

    def nvmlDeviceGetMigDeviceHandleByIndex(self, device: Any, index: int) -> Any:
        handle, gpu, *_ = self._mig_gpu(device, on=True)
        devices = [(instance.id, compute.id) for instance in gpu.instances for compute in instance.compute]
        refuse(pynvml.NVML_ERROR_NOT_FOUND, not 0 <= index < len(devices))
        return Handle(HandleKind.DEVICE, handle.gpu, gpu.epoch, *devices[index]).pointer()

    def nvmlDeviceGetGpuInstanceId(self, device: Any) -> int:
        return self._find(device, HandleKind.DEVICE).handle.instance

    def nvmlDeviceGetComputeInstanceId(self, device: Any) -> int:
        return self._find(device, HandleKind.DEVICE).handle.compute

    # The rules.

    def _initialized(self) -> None:
        refuse(pynvml.NVML_ERROR_UNINITIALIZED, self._users < 1)

    @property
    def _model(self) -> SimulatedModel:
        return first([self._mig] if self._mig else [], pynvml.NVML_ERROR_NOT_SUPPORTED)

    def _total_memory(self) -> int:
        """In bytes. A GPU of 80 GB has nearly 80 GiB."""
        return int((self._accelerator.memory_gb or 0) * _BYTES_PER_GIB)

    def _memory_of(self, size: int) -> int:
        """In bytes, of a GPU instance of that size in placement units."""
        return self._total_memory() * size // self._model.units

    def _find(self, pointer: Any, *kinds: HandleKind, gpus: list[GpuState] | None = None) -> _Found:
        """Returns the object of the handle *pointer*; refused unless it is one of *kinds*, and it exists."""
        self._initialized()
        handle = Handle.read(pointer)
        refuse(pynvml.NVML_ERROR_INVALID_ARGUMENT, handle.kind not in kinds or handle.gpu >= self._accelerator.count)
        gpu = (gpus or self._state.read())[handle.gpu]
        if handle.kind == HandleKind.GPU:
            return _Found(handle, gpu)
        there = gpu.instances if gpu.epoch == handle.epoch else []
        instance = first((i for i in there if i.id == handle.instance), pynvml.NVML_ERROR_INVALID_ARGUMENT)
        if handle.kind == HandleKind.INSTANCE:
            return _Found(handle, gpu, instance)
        compute = first((c for c in instance.compute if c.id == handle.compute), pynvml.NVML_ERROR_INVALID_ARGUMENT)
        return _Found(handle, gpu, instance, compute)

    def _mig_gpu(self, device: Any, gpus: list[GpuState] | None = None, *, on: bool = False) -> _Found:
        """Returns the GPU *device*, which has MIG; *on*: its MIG is on."""
        found = self._find(device, HandleKind.GPU, gpus=gpus)
        refuse(pynvml.NVML_ERROR_NOT_SUPPORTED, self._mig is None or (on and not found.gpu.current))
        return found


class _Found(NamedTuple):
    """The object of a handle: a GPU, an instance of it, a compute instance in that, or the device that this makes."""

    handle: Handle
    gpu: GpuState
    instance: Any = None
    compute: Any = None


def _placement(start: int, size: int | None) -> Any:
    return pynvml.c_nvmlGpuInstancePlacement_t(start=start, size=size)


def _who(process: ProcessState) -> tuple[int | None, ...]:
    return process.pid, process.instance, process.compute


def _running(process: ProcessState) -> Any:
    none = process.instance is None
    where, compute = (_NO_INSTANCE, _NO_INSTANCE) if none else (process.instance, process.compute)
    return pynvml.c_nvmlProcessInfo_v3_t(pid=process.pid, gpuInstanceId=where, computeInstanceId=compute)
