"""NVML, typed: the part of it that an inventory and a MIG life cycle need.

``Nvml`` uses a module *api* with pynvml's functions: ``pynvml`` itself on a real node, `SimulatedDriver` on a
simulated one. It takes care of what pynvml leaves to its caller:

- a placement must go by reference: by value the process dies with a segmentation fault
- functions that fill an array trust its size: it is sized for any GPU, because some drivers understate their counts
- a MIG mode that was accepted but is not active is reported by a value, not raised
- older drivers lack the versioned profile query, and with it the profile's name
- a change of the MIG mode may unbind the GPU and void every handle: `Gpu.set_mig_mode` takes a new one for its GPU by
  the PCI address, which stays; what was read before (`GpuInstance`) is not to be kept
"""

from __future__ import annotations

import contextlib
import ctypes
import math
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import pynvml

from skyinfra.mig import Compute
from skyinfra.mig.steps import Partition

# No GPU carries more instances than this of a profile, nor an instance more compute instances.
_MAX_INSTANCES = 32
_ABSENT = (pynvml.NVML_ERROR_NOT_SUPPORTED, pynvml.NVML_ERROR_INVALID_ARGUMENT)
_MIB = 2**20
_UNSUPPORTED = (
    pynvml.NVML_ERROR_NOT_SUPPORTED,
    pynvml.NVML_ERROR_FUNCTION_NOT_FOUND,
    pynvml.NVML_ERROR_NO_PERMISSION,
    pynvml.NVML_ERROR_INVALID_ARGUMENT,
    pynvml.NVML_ERROR_NO_DATA,
    pynvml.NVML_ERROR_ARGUMENT_VERSION_MISMATCH,
)

# code -> name as nvml.h has it, such as 23 -> "INSUFFICIENT_RESOURCES"
ERROR_NAMES: dict[int, str] = {
    value: name.removeprefix("NVML_ERROR_") for name, value in vars(pynvml).items() if name.startswith("NVML_ERROR_")
}


def error_name(code: int) -> str:
    """Returns the name of an NVML error code with its number: ``IN_USE (19)``."""
    return f"{ERROR_NAMES.get(code, 'error')} ({code})"


def error_text(error: pynvml.NVMLError) -> str:
    """The name of an NVML error, with the GPU that it is of where that was noted: ``GPU_IS_LOST (15) of GPU 3``."""
    return " ".join([error_name(error.value), *getattr(error, "__notes__", ())])


def asked(api: Any, function: str, *arguments: Any, absent: Collection[int] = _UNSUPPORTED) -> Any:
    """The answer of NVML's *function*; None where it refuses with one of *absent*: where it does not support it."""
    call = getattr(api, function, None)
    if call is None:  # the simulated driver has what a partitioner needs
        return None
    try:
        return call(*arguments)
    except pynvml.NVMLError as error:
        if error.value in absent:
            return None
        raise


@contextlib.contextmanager
def noting(index: int) -> Iterator[None]:
    """Notes on an NVML error that it is of the GPU *index*, for `error_text`."""
    try:
        yield
    except pynvml.NVMLError as error:
        error.add_note(f"of GPU {index}")
        raise


@dataclass(frozen=True)
class ProfileInfo:
    """A GPU instance profile as this device has it. ``name`` is without the driver's ``MIG`` in front."""

    name: str
    profile_id: int
    compute_slices: int


@dataclass(frozen=True)
class ComputeInstance:
    """A compute instance. ``device`` is the handle of the MIG device it makes, ``uuid`` that device's UUID.

    ``start``: where it stands in the compute slices of its GPU instance, in which ``id`` tells it from others.
    """

    handle: Any
    compute_slices: int
    uuid: str
    device: Any
    start: int = 0
    id: int = 0


@dataclass(frozen=True)
class GpuInstance:
    """A GPU instance that exists: its id on the GPU, its place in memory slices, and the compute instances in it."""

    handle: Any
    id: int
    profile: ProfileInfo
    start: int
    size: int
    compute: tuple[ComputeInstance, ...]

    def __str__(self) -> str:
        return f"{self.profile.name} at {self.start}:{self.size}"

    @property
    def uuid(self) -> str | None:
        """UUID of its MIG device; None unless one compute instance fills the GPU instance."""
        whole = len(self.compute) == 1 and self.compute[0].compute_slices == self.profile.compute_slices
        return self.compute[0].uuid if whole else None

    @property
    def shares(self) -> tuple[Compute, ...]:
        """The places of the compute instances that share it, by start; none where one fills it, or it has none."""
        places = [] if self.uuid is not None else [Compute(each.start, each.compute_slices) for each in self.compute]
        return tuple(sorted(places, key=lambda each: each.start))

    def partitions(self, gpu: int, name: str = "") -> list[Partition]:
        """The partitions that it is, with the profile *name*, if not its own; one without UUID is of use to nobody."""
        where, name = (self.start, self.size), name or self.profile.name
        if self.uuid is not None or not self.compute:
            return [Partition(gpu, name, *where, self.uuid or "")]
        uuids = {each.start: each.uuid for each in self.compute}
        return [Partition(gpu, f"{one.size}c.{name}", *where, uuids[one.start], compute=one) for one in self.shares]


class MigDevice:
    """A MIG device. ``instance`` and ``compute_instance``: ids of its instances; None where nobody says them."""

    def __init__(self, api: Any, handle: Any) -> None:
        self._api = api
        self._handle = handle
        self.instance: int | None = asked(api, "nvmlDeviceGetGpuInstanceId", handle)
        self.compute_instance: int | None = asked(api, "nvmlDeviceGetComputeInstanceId", handle)

    @property
    def uuid(self) -> str:
        """Its UUID, ``MIG-...``."""
        return str(self._api.nvmlDeviceGetUUID(self._handle))

    @property
    def profile(self) -> str:
        """The name of its profile, with which its own name ends."""
        return str(self._api.nvmlDeviceGetName(self._handle)).rpartition("MIG ")[2]

    def memory(self) -> Any:
        """Returns its memory, with ``total`` and ``used`` in bytes; None where the driver does not say it."""
        return asked(self._api, "nvmlDeviceGetMemoryInfo", self._handle)


class Nvml:
    """NVML between `open` and `close`. Everything but `close` raises ``pynvml.NVMLError``."""

    def __init__(self, api: Any = pynvml) -> None:
        self.api = api

    def open(self) -> None:
        """Initializes the library."""
        self.api.nvmlInit()

    def close(self) -> None:
        """Shuts it down. A refusal is suppressed: it would hide an exception of the caller's block."""
        with contextlib.suppress(pynvml.NVMLError):
            self.api.nvmlShutdown()

    def driver_version(self) -> str:
        """Returns the version of the driver, such as ``570.133.20``."""
        return str(self.api.nvmlSystemGetDriverVersion())

    def cuda_version(self) -> tuple[int, int] | None:
        """Returns the newest CUDA that the driver serves, such as (12, 8); None where it does not say."""
        number = asked(self.api, "nvmlSystemGetCudaDriverVersion_v2")
        return None if number is None else (number // 1000, number % 1000 // 10)

    def mig_device(self, uuid: str) -> MigDevice | None:
        """Returns the MIG device *uuid*; None where it does not stand any more."""
        gone = (*_UNSUPPORTED, pynvml.NVML_ERROR_NOT_FOUND)
        handle = asked(self.api, "nvmlDeviceGetHandleByUUID", uuid, absent=gone)
        return None if handle is None else MigDevice(self.api, handle)

    def gpus(self) -> list[Gpu]:
        """Returns the GPUs by index. An error tells which one it is of (`error_text`)."""
        found = []
        for index in range(self.api.nvmlDeviceGetCount()):
            with noting(index):
                found.append(Gpu(self.api, index))
        return found


class Gpu:
    """One GPU. See `Nvml` for what its methods raise. api: the module with the functions of NVML."""

    def __init__(self, api: Any, index: int) -> None:
        self.api = api
        self._handle = api.nvmlDeviceGetHandleByIndex(index)
        self.index = index
        # Asked once: the answer changes with the MIG mode only.
        self._profiles: list[ProfileInfo] | None = None
        self._in_profile: dict[int, list[tuple[int, int]]] = {}
        self.uuid = str(api.nvmlDeviceGetUUID(self._handle))
        self.name = str(api.nvmlDeviceGetName(self._handle))

    @property
    def long_bus_id(self) -> str:
        """Its PCI address as NVML writes it: ``00000000:1B:00.0``."""
        return str(self._pci.busId)

    @property
    def minor(self) -> int:
        """The number of its device file, ``/dev/nvidiaN``, and of its folder in /proc; its index where nobody says."""
        number = self.ask("nvmlDeviceGetMinorNumber")
        return self.index if number is None else int(number)

    @property
    def bus_id(self) -> str:
        """Its PCI address as /sys has it: ``0000:1b:00.0``, where NVML writes eight digits for the domain."""
        pci = self._pci
        return f"{pci.domain:04x}:{pci.bus:02x}:{pci.device:02x}.0"

    @property
    def pci_device_id(self) -> str:
        """Its PCI device id as `skyinfra.mig.Geometry` has it: ``0x20B0``, without the vendor's."""
        return f"0x{self._pci.pciDeviceId >> 16:04X}"

    @property
    def pci_ids(self) -> tuple[str, str]:
        """Its PCI ids of device and subsystem, with those of the vendors: ``0x233010DE`` and ``0x16C110DE``."""
        return f"0x{self._pci.pciDeviceId:08X}", f"0x{self._pci.pciSubSystemId:08X}"

    def memory_bytes(self) -> int | None:
        """Returns all of its memory, as the driver counts it; None while MIG is on for everybody but root."""
        memory = self.ask("nvmlDeviceGetMemoryInfo", absent=[pynvml.NVML_ERROR_NO_PERMISSION])
        return None if memory is None else int(memory.total)

    def mig_mode(self) -> tuple[bool, bool] | None:
        """Returns whether MIG is on now, and whether it will be after a reset; None on a GPU that has no MIG."""
        modes = self.ask("nvmlDeviceGetMigMode", absent=[pynvml.NVML_ERROR_NOT_SUPPORTED])
        return None if modes is None else (bool(modes[0]), bool(modes[1]))

    @property
    def is_partitioned(self) -> bool:
        """Whether MIG is on now."""
        return (self.mig_mode() or (False,))[0]

    def set_mig_mode(self, on: bool) -> int:
        """Asks for MIG on or off. Returns an NVML code: 0 where it is active now, else why it is pending."""
        self._profiles = None
        self._in_profile = {}
        mode = pynvml.NVML_DEVICE_MIG_ENABLE if on else pynvml.NVML_DEVICE_MIG_DISABLE
        address = self.bus_id
        status = int(self.api.nvmlDeviceSetMigMode(self._handle, mode))
        if status == pynvml.NVML_SUCCESS:
            self._handle = self.api.nvmlDeviceGetHandleByPciBusId(address)
        return status

    def profiles(self) -> list[ProfileInfo]:
        """The GPU instance profiles of this device; none without MIG, and with some drivers (535) while MIG is off."""
        if self._profiles is None:
            found = (self._profile(number) for number in range(pynvml.NVML_GPU_INSTANCE_PROFILE_COUNT))
            self._profiles = [profile for profile in found if profile is not None]
        return list(self._profiles)

    def places(self, profile: ProfileInfo) -> list[tuple[int, int]]:
        """The places (start, size) of an instance of *profile* on this device. Some drivers need MIG on for it."""
        function = self.api.nvmlDeviceGetGpuInstancePossiblePlacements
        found = self._filled(pynvml.c_nvmlGpuInstancePlacement_t, function, self._handle, profile.profile_id)
        return [(int(place.start), int(place.size)) for place in found]

    def instances(self) -> list[GpuInstance]:
        """Returns the GPU instances that exist, by start. MIG must be on, and the driver tells them to root only."""
        found = []
        function = self.api.nvmlDeviceGetGpuInstances
        for profile in self.profiles():
            for handle in self._filled(pynvml.c_nvmlGpuInstance_t, function, self._handle, profile.profile_id):
                info = self.api.nvmlGpuInstanceGetInfo(handle)
                start, size = int(info.placement.start), int(info.placement.size)
                compute = tuple(self._compute_instances(handle, profile))
                found.append(GpuInstance(handle, int(info.id), profile, start, size, compute))
        return sorted(found, key=lambda instance: instance.start)

    def mig_devices(self) -> list[MigDevice]:
        """Returns the MIG devices that this process may use, whoever made them; none while MIG is off."""
        found = []
        for index in range(self.ask("nvmlDeviceGetMaxMigDeviceCount") or 0):
            handle = self.ask("nvmlDeviceGetMigDeviceHandleByIndex", index, absent=[pynvml.NVML_ERROR_NOT_FOUND])
            if handle is not None:
                found.append(MigDevice(self.api, handle))
        return found

    def create(self, profile: ProfileInfo, *, start: int, size: int) -> Any:
        """Creates a GPU instance at this place, without compute instances; returns its handle."""
        placement = pynvml.c_nvmlGpuInstancePlacement_t(start=start, size=size)
        return self.api.nvmlDeviceCreateGpuInstanceWithPlacement(
            self._handle, profile.profile_id, ctypes.byref(placement)
        )

    def fill(self, handle: Any, profile: ProfileInfo) -> ComputeInstance:
        """Creates the one compute instance that fills the GPU instance *handle* of *profile*."""
        for number, slices in self._compute_profiles(handle, profile):
            if slices == profile.compute_slices:
                created = self.api.nvmlGpuInstanceCreateComputeInstance(handle, number)
                return self._compute_instance(created, slices)
        raise pynvml.NVMLError(pynvml.NVML_ERROR_NOT_FOUND)

    def share(self, handle: Any, profile: ProfileInfo, *, start: int, size: int) -> ComputeInstance:
        """Creates one of the compute instances that share the GPU instance *handle* of *profile*, at this place."""
        for number, slices in self._compute_profiles(handle, profile):
            if slices == size:
                placement = pynvml.c_nvmlComputeInstancePlacement_t(start=start, size=size)
                function = self.api.nvmlGpuInstanceCreateComputeInstanceWithPlacement
                return self._compute_instance(function(handle, number, ctypes.byref(placement)), slices)
        raise pynvml.NVMLError(pynvml.NVML_ERROR_NOT_FOUND)

    def destroy_compute(self, compute: ComputeInstance) -> None:
        """Destroys one compute instance."""
        self.api.nvmlComputeInstanceDestroy(compute.handle)

    def empty(self, instance: GpuInstance) -> None:
        """Destroys the compute instances of *instance*."""
        for compute in instance.compute:
            self.destroy_compute(compute)

    def destroy(self, instance: GpuInstance) -> None:
        """Destroys *instance*, which must be empty."""
        self.api.nvmlGpuInstanceDestroy(instance.handle)

    def processes(self) -> tuple[int, ...]:
        """The ids of the processes on this GPU, on whatever partition; sorted. While MIG is on, for root only."""
        return self._processes(self._handle)

    def processes_on(self, instance: GpuInstance) -> tuple[int, ...]:
        """Returns the ids of the processes on the MIG devices of *instance*; sorted."""
        return tuple(sorted({pid for compute in instance.compute for pid in self.processes_in(compute)}))

    def processes_in(self, compute: ComputeInstance) -> tuple[int, ...]:
        """Returns the ids of the processes on the MIG device of *compute*; sorted."""
        return self._processes(compute.device)

    def ask(self, function: str, *arguments: Any, absent: Collection[int] = _UNSUPPORTED) -> Any:
        """Returns the answer of NVML's *function* for this GPU; None as for `asked`."""
        return asked(self.api, function, self._handle, *arguments, absent=absent)

    def temperature(self) -> int | None:
        """In degrees Celsius; None where the driver does not say it."""
        asks = (self.ask(f"nvmlDeviceGetTemperature{v}", pynvml.NVML_TEMPERATURE_GPU) for v in ("V", ""))
        return next((int(now) for now in asks if now is not None), None)

    def energy(self) -> float | None:
        """Joules since the driver was loaded; None where it does not say it, as before Volta."""
        millijoules = self.ask("nvmlDeviceGetTotalEnergyConsumption")
        return None if millijoules is None else millijoules / 1000

    def fabric_state(self) -> int | None:
        """Its state in the fabric of NVSwitch, as NVML counts (3: completed); None where the driver does not say it."""
        info = pynvml.c_nvmlGpuFabricInfoV_t()
        # The structure has to say its version; pynvml leaves that to its caller.
        info.version = pynvml.nvmlGpuFabricInfo_v2
        given = self.ask("nvmlDeviceGetGpuFabricInfoV", ctypes.byref(info))
        return None if given is None else int(info.state)

    @cached_property
    def _pci(self) -> Any:
        return self.api.nvmlDeviceGetPciInfo(self._handle)

    def _processes(self, device: Any) -> tuple[int, ...]:
        found = [*self._running("Compute", device), *self._running("Graphics", device)]
        return tuple(sorted({int(process.pid) for process in found}))

    def _running(self, kind: str, device: Any) -> list[Any]:
        """Returns the processes of one kind. Drivers before R510 have only the second version of the query."""
        # A GPU without graphics, or the host of virtual GPUs, whose processes are not its own.
        none = pynvml.NVML_ERROR_NOT_SUPPORTED
        function = f"nvmlDeviceGet{kind}RunningProcesses"
        found = asked(self.api, f"{function}_v3", device, absent=[none, pynvml.NVML_ERROR_FUNCTION_NOT_FOUND])
        return list((asked(self.api, f"{function}_v2", device, absent=[none]) or ()) if found is None else found)

    def _profile(self, number: int) -> ProfileInfo | None:
        info = self._versioned(self.api.nvmlDeviceGetGpuInstanceProfileInfo, self._handle, number)
        if info is None:
            return None
        name = getattr(info, "name", "") or self._name_of(number, info)
        return ProfileInfo(str(name).removeprefix("MIG "), int(info.id), int(info.sliceCount))

    def _name_of(self, number: int, info: Any) -> str:
        """The name as NVIDIA builds it, for drivers that give none: memory in eighths of the GPU's whole GiB."""
        total = self.memory_bytes()
        if total is None:
            raise pynvml.NVMLError(pynvml.NVML_ERROR_NO_PERMISSION)
        eighths = math.ceil(info.memorySizeMB * _MIB / total * 8)
        # Halves go up: 22.5 GB are called 23. Python's round() takes the even one.
        memory = math.floor(eighths / 8 * math.ceil(total / 2**30) + 0.5)
        media = number in (pynvml.NVML_GPU_INSTANCE_PROFILE_1_SLICE_REV1, pynvml.NVML_GPU_INSTANCE_PROFILE_2_SLICE_REV1)
        return f"{info.sliceCount}g.{memory}gb{'+me' if media else ''}"

    def _compute_instances(self, handle: Any, profile: ProfileInfo) -> Iterator[ComputeInstance]:
        for number, slices in self._compute_profiles(handle, profile):
            function = self.api.nvmlGpuInstanceGetComputeInstances
            for compute in self._filled(pynvml.c_nvmlComputeInstance_t, function, handle, number):
                yield self._compute_instance(compute, slices)

    def _compute_instance(self, handle: Any, compute_slices: int) -> ComputeInstance:
        info = self.api.nvmlComputeInstanceGetInfo_v2(handle)
        uuid = str(self.api.nvmlDeviceGetUUID(info.device))
        return ComputeInstance(handle, compute_slices, uuid, info.device, int(info.placement.start), int(info.id))

    def _compute_profiles(self, handle: Any, profile: ProfileInfo) -> list[tuple[int, int]]:
        """Id and compute slices of the compute instance profiles in a GPU instance of *profile*."""
        if profile.profile_id not in self._in_profile:
            function = self.api.nvmlGpuInstanceGetComputeInstanceProfileInfo
            numbers = range(pynvml.NVML_COMPUTE_INSTANCE_PROFILE_COUNT)
            shared = pynvml.NVML_COMPUTE_INSTANCE_ENGINE_PROFILE_SHARED
            found = (self._versioned(function, handle, number, shared) for number in numbers)
            self._in_profile[profile.profile_id] = [(int(i.id), int(i.sliceCount)) for i in found if i is not None]
        return self._in_profile[profile.profile_id]

    @classmethod
    def _versioned(cls, function: Any, *arguments: Any, version: int = 2) -> Any:
        """Asks for version 2, then 1; None where the device has no such profile."""
        try:
            return function(*arguments, version=version)
        except pynvml.NVMLError as error:
            if error.value in _ABSENT:
                return None
            if version == 2 and error.value == pynvml.NVML_ERROR_FUNCTION_NOT_FOUND:
                return cls._versioned(function, *arguments, version=1)
            raise

    @staticmethod
    def _filled(kind: Any, function: Any, *arguments: Any) -> list[Any]:
        """Returns the array of *kind* that *function* fills. The count is an output only."""
        array = (kind * _MAX_INSTANCES)()
        count = ctypes.c_uint(_MAX_INSTANCES)
        function(*arguments, array, ctypes.byref(count))
        return [array[i] for i in range(count.value)]
