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
from typing import Any

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
    pointed,
    refuse,
    required,
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

    def hold(self, index: int, *, held: bool = True, pid: int | None = None, start: int | None = None) -> None:
        """The process *pid* (or this one) opens the GPU *index*, or the instance at *start*; ``held=False`` closes it.

        Raises ValueError where there is no instance at *start*.
        """
        with self._state.change() as gpus:
            process = ProcessState(pid or os.getpid(), None if start is None else _instance_at(gpus[index], start).id)
            if held:
                gpus[index].processes.append(process)
            else:
                gpus[index].processes = [other for other in gpus[index].processes if other != process]

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

    def nvmlDeviceGetHandleByPciBusId(self, address: str) -> Any:
        self._initialized()
        parts = [int(part, 16) for part in re.split("[:.]", address)]
        index = parts[1] - _FIRST_BUS
        if parts != [0, _FIRST_BUS + index, 0, 0] or not 0 <= index < self._accelerator.count:
            raise pynvml.NVMLError(pynvml.NVML_ERROR_NOT_FOUND)
        return Handle(HandleKind.GPU, index).pointer()

    def nvmlDeviceGetUUID(self, device: Any) -> str:
        handle = self._read(device, HandleKind.GPU, HandleKind.DEVICE)
        name = f"{self._seed}/{handle.gpu}"
        if handle.kind == HandleKind.GPU:
            return f"GPU-{uuid.uuid5(_NAMESPACE, name)}"
        _, instance, compute = self._compute_of(handle, self._state.read())
        place = f"{instance.start}:{instance.size}"
        return f"MIG-{uuid.uuid5(_NAMESPACE, f'{name}/{place}/{instance.id}/{compute.id}')}"

    def nvmlDeviceGetName(self, device: Any) -> str:
        handle = self._read(device, HandleKind.GPU, HandleKind.DEVICE)
        name = f"NVIDIA {self._accelerator.name} (simulated)"
        if handle.kind == HandleKind.GPU:
            return name
        return f"{name} MIG {self._compute_of(handle, self._state.read())[1].profile}"

    def nvmlDeviceGetPciInfo(self, device: Any) -> Any:
        index = self._read(device, HandleKind.GPU).gpu
        bus = _FIRST_BUS + index
        ids = self._mig.geometry.pci_device_ids if self._mig else ()
        number = (int(ids[0], 16) if ids else 0) << 16 | _NVIDIA
        address = f"00000000:{bus:02X}:00.0".encode()
        return pynvml.nvmlPciInfo_t(
            busIdLegacy=address[4:], domain=0, bus=bus, device=0, pciDeviceId=number, busId=address
        )

    def nvmlDeviceGetMemoryInfo(self, device: Any) -> Any:
        self._read(device, HandleKind.GPU)
        total = self._total_memory()
        return pynvml.c_nvmlMemory_t(total=total, free=total, used=0)

    def nvmlDeviceGetComputeRunningProcesses_v3(self, device: Any) -> list[Any]:
        handle = self._read(device, HandleKind.GPU, HandleKind.DEVICE)
        gpus = self._state.read()
        processes = gpus[handle.gpu].processes
        if handle.kind == HandleKind.DEVICE:
            _, instance, _ = self._compute_of(handle, gpus)
            processes = [process for process in processes if process.instance == instance.id]
        return [_running(process) for process in processes]

    def nvmlDeviceGetGraphicsRunningProcesses_v3(self, device: Any) -> list[Any]:
        self._read(device, HandleKind.GPU, HandleKind.DEVICE)
        return []

    # NVML: MIG mode.

    def nvmlDeviceGetMigMode(self, device: Any) -> list[int]:
        gpu = self._mig_gpu(device, self._state.read())
        return [gpu.current, gpu.pending]

    def nvmlDeviceSetMigMode(self, device: Any, mode: int) -> int:
        with self._state.change() as gpus:
            gpu = self._mig_gpu(device, gpus)
            if mode not in (pynvml.NVML_DEVICE_MIG_DISABLE, pynvml.NVML_DEVICE_MIG_ENABLE):
                raise pynvml.NVMLError(pynvml.NVML_ERROR_INVALID_ARGUMENT)
            gpu.pending = mode
            if gpu.current == mode:
                return int(pynvml.NVML_SUCCESS)
            if gpu.processes or gpu.instances:
                return int(pynvml.NVML_ERROR_IN_USE)
            if gpu.guest and not self._model.geometry.resetless:
                return int(pynvml.NVML_ERROR_RESET_REQUIRED)
            gpu.activate(mode)
            return int(pynvml.NVML_SUCCESS)

    # NVML: GPU instances.

    def nvmlDeviceGetGpuInstanceProfileInfo(self, device: Any, profile: int, version: int = 2) -> Any:
        self._mig_gpu(device, self._state.read())
        refuse(pynvml.NVML_ERROR_INVALID_ARGUMENT, not 0 <= profile < pynvml.NVML_GPU_INSTANCE_PROFILE_COUNT)
        known = self._model.by_number(profile)
        info = pynvml.c_nvmlGpuInstanceProfileInfo_v2_t() if version == 2 else pynvml.c_nvmlGpuInstanceProfileInfo_t()
        info.id = known.profile_id
        info.sliceCount = known.compute_slices
        info.instanceCount = known.max_count
        info.memorySizeMB = self._total_memory() * (known.size or 0) // self._model.units // 2**20
        if version == 2:
            info.name = f"MIG {known.name}".encode()
        return info

    def nvmlDeviceGetGpuInstancePossiblePlacements(self, device: Any, profile: int, array: Any, count: Any) -> None:
        self._mig_gpu(device, self._state.read())
        known = self._model.by_id(profile)
        if array is not None:
            for i, start in enumerate(known.starts or ()):
                array[i].start, array[i].size = start, known.size
        pointed(count).value = len(known.starts or ())

    def nvmlDeviceCreateGpuInstanceWithPlacement(self, device: Any, profile: int, placement: Any) -> Any:
        place = pointed(placement)
        index = self._read(device, HandleKind.GPU).gpu
        with self._state.change() as gpus:
            gpu = self._mig_on(device, gpus)
            known = self._model.by_id(profile)
            allowed = place.size == known.size and place.start in (known.starts or ())
            refuse(pynvml.NVML_ERROR_INVALID_ARGUMENT, not allowed)
            refuse(pynvml.NVML_ERROR_INSUFFICIENT_RESOURCES, not self._model.has_room(gpu, known, place.start))
            number = self._model.instance_id(place.start, place.size)
            gpu.instances.append(InstanceState(number, known.name, place.start, place.size))
            return Handle(HandleKind.INSTANCE, index, gpu.epoch, number).pointer()

    def nvmlDeviceGetGpuInstances(self, device: Any, profile: int, array: Any, count: Any) -> None:
        index = self._read(device, HandleKind.GPU).gpu
        gpu = self._mig_on(device, self._state.read())
        name = self._model.by_id(profile).name
        found = [instance.id for instance in gpu.instances if instance.profile == name]
        for i, number in enumerate(found):
            array[i] = Handle(HandleKind.INSTANCE, index, gpu.epoch, number).pointer()
        pointed(count).value = len(found)

    def nvmlGpuInstanceGetInfo(self, instance: Any) -> Any:
        handle = self._read(instance, HandleKind.INSTANCE)
        _, existing = self._instance_of(handle, self._state.read())
        return pynvml.c_nvmlGpuInstanceInfo_t(
            device=Handle(HandleKind.GPU, handle.gpu).pointer(),
            id=existing.id,
            profileId=self._model.of(existing).profile_id,
            placement=pynvml.c_nvmlGpuInstancePlacement_t(start=existing.start, size=existing.size),
        )

    def nvmlGpuInstanceDestroy(self, instance: Any) -> None:
        with self._state.change() as gpus:
            gpu, existing = self._instance_of(self._read(instance, HandleKind.INSTANCE), gpus)
            refuse(pynvml.NVML_ERROR_IN_USE, existing.compute or gpu.holds(existing.id))
            gpu.instances.remove(existing)

    # NVML: compute instances.

    def nvmlGpuInstanceGetComputeInstanceProfileInfo(
        self, instance: Any, profile: int, engine: int, version: int = 2
    ) -> Any:
        _, existing = self._instance_of(self._read(instance, HandleKind.INSTANCE), self._state.read())
        slices = self._model.compute_slices(existing, profile)
        refuse(pynvml.NVML_ERROR_INVALID_ARGUMENT, engine != pynvml.NVML_COMPUTE_INSTANCE_ENGINE_PROFILE_SHARED)
        kinds = (pynvml.c_nvmlComputeInstanceProfileInfo_t, pynvml.c_nvmlComputeInstanceProfileInfo_v2_t)
        info = kinds[version - 1]()
        info.id, info.sliceCount = profile, slices
        info.instanceCount = self._model.of(existing).compute_slices // slices
        return info

    def nvmlGpuInstanceCreateComputeInstance(self, instance: Any, profile: int) -> Any:
        handle = self._read(instance, HandleKind.INSTANCE)
        with self._state.change() as gpus:
            _, existing = self._instance_of(handle, gpus)
            slices = self._model.compute_slices(existing, profile)
            used = sum(compute.slices for compute in existing.compute)
            refuse(pynvml.NVML_ERROR_INSUFFICIENT_RESOURCES, used + slices > self._model.of(existing).compute_slices)
            taken = {compute.id for compute in existing.compute}
            number = next(i for i in range(len(taken) + 1) if i not in taken)
            existing.compute.append(ComputeState(number, slices))
        return handle._replace(kind=HandleKind.COMPUTE, compute=number).pointer()

    def nvmlGpuInstanceGetComputeInstances(self, instance: Any, profile: int, array: Any, count: Any) -> None:
        handle = self._read(instance, HandleKind.INSTANCE)
        _, existing = self._instance_of(handle, self._state.read())
        slices = self._model.compute_slices(existing, profile)
        found = [compute.id for compute in existing.compute if compute.slices == slices]
        for i, number in enumerate(found):
            array[i] = handle._replace(kind=HandleKind.COMPUTE, compute=number).pointer()
        pointed(count).value = len(found)

    def nvmlComputeInstanceGetInfo_v2(self, compute: Any) -> Any:
        handle = self._read(compute, HandleKind.COMPUTE)
        _, _, existing = self._compute_of(handle, self._state.read())
        return pynvml.c_nvmlComputeInstanceInfo_t(
            device=handle._replace(kind=HandleKind.DEVICE).pointer(),
            gpuInstance=handle._replace(kind=HandleKind.INSTANCE, compute=0).pointer(),
            id=existing.id,
        )

    def nvmlComputeInstanceDestroy(self, compute: Any) -> None:
        with self._state.change() as gpus:
            gpu, instance, existing = self._compute_of(self._read(compute, HandleKind.COMPUTE), gpus)
            refuse(pynvml.NVML_ERROR_IN_USE, gpu.holds(instance.id))
            instance.compute.remove(existing)

    # NVML: MIG devices.

    def nvmlDeviceGetMaxMigDeviceCount(self, device: Any) -> int:
        gpu = self._state.read()[self._read(device, HandleKind.GPU).gpu]
        return (self._mig.geometry.compute_slices or 0) if self._mig and gpu.current else 0

    def nvmlDeviceGetMigDeviceHandleByIndex(self, device: Any, index: int) -> Any:
        gpu = self._mig_on(device, self._state.read())
        devices = [(instance.id, compute.id) for instance in gpu.instances for compute in instance.compute]
        refuse(pynvml.NVML_ERROR_NOT_FOUND, not 0 <= index < len(devices))
        handle = Handle(HandleKind.DEVICE, self._read(device, HandleKind.GPU).gpu, gpu.epoch, *devices[index])
        return handle.pointer()

    # The rules.

    def _initialized(self) -> None:
        refuse(pynvml.NVML_ERROR_UNINITIALIZED, self._users < 1)

    def _read(self, pointer: Any, *kinds: HandleKind) -> Handle:
        """The handle that *pointer* is; refused unless it is one of *kinds*."""
        self._initialized()
        handle = Handle.read(pointer)
        refuse(pynvml.NVML_ERROR_INVALID_ARGUMENT, handle.kind not in kinds or handle.gpu >= self._accelerator.count)
        return handle

    @property
    def _model(self) -> SimulatedModel:
        return required(self._mig, pynvml.NVML_ERROR_NOT_SUPPORTED)

    def _total_memory(self) -> int:
        """In bytes. A GPU of 80 GB has nearly 80 GiB."""
        return int((self._accelerator.memory_gb or 0) * _BYTES_PER_GIB)

    def _mig_gpu(self, device: Any, gpus: list[GpuState]) -> GpuState:
        index = self._read(device, HandleKind.GPU).gpu
        refuse(pynvml.NVML_ERROR_NOT_SUPPORTED, self._mig is None)
        return gpus[index]

    def _mig_on(self, device: Any, gpus: list[GpuState]) -> GpuState:
        gpu = self._mig_gpu(device, gpus)
        refuse(pynvml.NVML_ERROR_NOT_SUPPORTED, not gpu.current)
        return gpu

    @staticmethod
    def _instance_of(handle: Handle, gpus: list[GpuState]) -> tuple[GpuState, InstanceState]:
        gpu = gpus[handle.gpu]
        for instance in gpu.instances:
            if (gpu.epoch, instance.id) == (handle.epoch, handle.instance):
                return gpu, instance
        raise pynvml.NVMLError(pynvml.NVML_ERROR_INVALID_ARGUMENT)

    @classmethod
    def _compute_of(cls, handle: Handle, gpus: list[GpuState]) -> tuple[GpuState, InstanceState, ComputeState]:
        gpu, instance = cls._instance_of(handle, gpus)
        for compute in instance.compute:
            if compute.id == handle.compute:
                return gpu, instance, compute
        raise pynvml.NVMLError(pynvml.NVML_ERROR_INVALID_ARGUMENT)


def _instance_at(gpu: GpuState, start: int) -> InstanceState:
    for instance in gpu.instances:
        if instance.start == start:
            return instance
    raise ValueError(f"no instance stands at {start}")


def _running(process: ProcessState) -> Any:
    where = _NO_INSTANCE if process.instance is None else process.instance
    compute = _NO_INSTANCE if process.instance is None else 0
    return pynvml.c_nvmlProcessInfo_v3_t(pid=process.pid, gpuInstanceId=where, computeInstanceId=compute)
