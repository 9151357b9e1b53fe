"""The NVIDIA GPUs and MIG devices that a batch system or a cluster gave this node, which takes them as they are.

Slurm and NVIDIA's device plugin name them in the environment. Where they do not, as with CDI, the driver shows no
others.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

import pynvml

from skyinfra.errors import AcceleratorMissing
from skyinfra.gpu import inventory
from skyinfra.gpu.inventory import Device
from skyinfra.gpu.nvml import Gpu, Nvml
from skyinfra.mig import same_profile
from skyinfra.protocol.nodeconfig import NodeAccelerator

_VARIABLES = ("CUDA_VISIBLE_DEVICES", "NVIDIA_VISIBLE_DEVICES")
# Values that name no device.
_NO_NAMES = ("", "all", "void")
_NONE = ("none", "nodevfiles")


def find(nvml: Nvml, accelerator: NodeAccelerator, environment: Mapping[str, str]) -> tuple[Device, ...]:
    """The devices, in their order. Raises `AcceleratorMissing` where they are not those that *accelerator* declares."""
    try:
        gpus = nvml.gpus()
        shown = [device for gpu in gpus for device in _devices(gpu)]
    except pynvml.NVMLError as error:
        raise inventory.no_driver(error) from error
    # As the layout spells them: other drivers may name the memory of a profile otherwise.
    declared = {part.profile for layout in accelerator.per_gpu for part in layout}
    devices = [
        replace(each, profile=each.profile and (same_profile(each.profile, declared) or each.profile))
        for each in _named(shown, environment)
    ]
    for index in sorted({each.index for each in devices}):
        if not inventory.same_model(accelerator.name, gpus[index].name):
            raise inventory.other_model(accelerator, f"GPU {index}, {gpus[index].name}")
    _check(accelerator, devices)
    return tuple(devices)


def _devices(gpu: Gpu) -> Iterator[Device]:
    parts = gpu.mig_devices()
    for part in parts:
        yield Device(gpu.index, part.uuid, part.uuid, part.profile)
    if not parts:
        yield Device(gpu.index, gpu.uuid, gpu.uuid)


def _named(shown: Sequence[Device], environment: Mapping[str, str]) -> list[Device]:
    """Those of *shown* that *environment* names. Raises `AcceleratorMissing`."""
    for variable in _VARIABLES:
        value = environment.get(variable, "").strip()
        if value.lower() in _NONE:
            return []
        if value.lower() not in _NO_NAMES:
            return [_one(shown, name.strip(), variable) for name in value.split(",") if name.strip()]
    return list(shown)


def _one(shown: Sequence[Device], name: str, variable: str) -> Device:
    """The device *name*: its number, or its UUID or the beginning of that."""
    found = [each for each in shown if (each.uuid or "").startswith(name)]
    if name.isdigit():
        found = [each for each in shown if each.index == int(name)]
    if len(found) != 1:
        there = ", ".join(each.uuid or "" for each in shown) or "none"
        raise AcceleratorMissing(
            f"{variable} names {name}, of which the driver shows {len(found)}",
            field="accelerator",
            hint=f"It shows {there}. MIG devices are named by their UUIDs.",
        )
    return found[0]


def _check(accelerator: NodeAccelerator, devices: Sequence[Device]) -> None:
    """Raises `AcceleratorMissing` unless *devices* are as many of each profile as declared, and whole GPUs else."""
    declared = Counter(part.profile for layout in accelerator.per_gpu for part in layout)
    declared.update({"": sum(not layout for layout in accelerator.per_gpu)})
    given = Counter(each.profile or "" for each in devices)
    if +declared != +given:
        raise AcceleratorMissing(
            f"declared {_spelled(declared, accelerator)}, and this node was given {_spelled(given, accelerator)}",
            field="accelerator",
            hint="Ask the cluster for what is declared, or declare what it gives: nothing is partitioned here.",
        )


def _spelled(counts: Counter[str], accelerator: NodeAccelerator) -> str:
    found = (f"{count} x {accelerator.name} {profile}".rstrip() for profile, count in sorted(counts.items()) if count)
    return ", ".join(found) or "none"
