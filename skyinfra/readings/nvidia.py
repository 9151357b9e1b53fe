"""Readings of NVIDIA slots from NVML: utilization, memory, temperature, power, energy and activity.

NVML refuses `nvmlDeviceGetUtilizationRates` on MIG devices and on their GPU. GPM measures them, on Hopper and later,
see `skyinfra.readings.gpm`.
"""

from __future__ import annotations

import contextlib
import re
import socket
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pynvml

from skyinfra.gpu.nvml import Gpu, MigDevice, Nvml
from skyinfra.protocol.instance import InstanceInfo
from skyinfra.protocol.readings import SlotReading
from skyinfra.readings import gpm

# The compute slices of a profile: those of the compute instance where that is smaller than its GPU instance.
_SLICES = re.compile(r"(?:(\d+)c\.)?(\d+)g\.")


def of_slots(nvml: Nvml, slots: Sequence[InstanceInfo]) -> list[SlotReading]:
    """Returns the readings of *slots*, which stand on the GPUs of *nvml*, in their order. Raises NVMLError."""
    driver = nvml.driver_version()
    gpus = {gpu.index: (gpu, _of_gpu(gpu, driver)) for gpu in nvml.gpus()}
    readings: dict[str, SlotReading] = {}
    parts: dict[str, tuple[Gpu, int | None]] = {}
    for slot in slots:
        gpu, shared = gpus.get(slot.gpu, (None, {})) if slot.gpu is not None else (None, {})
        device = nvml.mig_device(slot.uuid) if slot.kind == "partition" and slot.uuid else None
        readings[slot.slot] = _reading(slot, gpu, device, shared)
        if gpu is not None and slot.kind == "gpu":
            parts[slot.slot] = gpu, None
        elif gpu is not None and device is not None and device.instance is not None:
            parts[slot.slot] = gpu, device.instance
    for name, measured in gpm.activity(parts).items():
        before = readings[name]
        busy = measured.get("sm") if before.utilization is None else before.utilization
        readings[name] = replace(before, activity=measured, utilization=busy)
    return list(readings.values())


def _of_gpu(gpu: Gpu, driver: str) -> dict[str, Any]:
    """Returns the fields that are the same for every slot of *gpu*. The labels are those of NVIDIA's DCGM exporter."""
    power = gpu.ask("nvmlDeviceGetPowerUsage")
    labels = {
        "gpu": str(gpu.index),
        "UUID": gpu.uuid,
        "pci_bus_id": gpu.long_bus_id,
        "device": f"nvidia{gpu.minor}",
        "modelName": gpu.name,
        "Hostname": socket.gethostname(),
        "DCGM_FI_DRIVER_VERSION": driver,
    }
    watts = power / 1000 if power is not None else None
    return {"temperature": gpu.temperature(), "power": watts, "energy": gpu.energy(), "labels": labels}


def _reading(slot: InstanceInfo, gpu: Gpu | None, device: MigDevice | None, shared: dict[str, Any]) -> SlotReading:
    if gpu is None:
        return SlotReading(slot)
    if slot.kind == "gpu":
        rates = gpu.ask("nvmlDeviceGetUtilizationRates")
        made = SlotReading(slot, utilization=float(rates.gpu) if rates is not None else None, share=1.0, **shared)
        memory = gpu.ask("nvmlDeviceGetMemoryInfo")
    else:
        made = _of_partition(SlotReading(slot, **shared), gpu, device)
        memory = device.memory() if device is not None else None
    if memory is None:
        return made
    return replace(made, memory_used=int(memory.used), memory_total=int(memory.total))


def _of_partition(reading: SlotReading, gpu: Gpu, device: MigDevice | None) -> SlotReading:
    if device is None:
        return reading
    profile = reading.slot.profile or device.profile
    part = {"GPU_I_PROFILE": profile} | ({} if device.instance is None else {"GPU_I_ID": str(device.instance)})
    return replace(reading, share=_share(gpu, profile), labels=reading.labels | part)


def _share(gpu: Gpu, profile: str) -> float | None:
    """The compute slices of *profile* over those of the largest profile of *gpu*; None where one is not known."""
    form = _SLICES.match(profile)
    most = 0
    with contextlib.suppress(pynvml.NVMLError):  # drivers before R510 need root for the names of profiles
        most = max((each.compute_slices for each in gpu.profiles()), default=0)
    return int(form[1] or form[2]) / most if form and most else None
