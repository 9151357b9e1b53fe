"""The accelerators of a node, compared with those that its configuration declares.

NVIDIA GPUs are listed by NVML, the others by the device files of their drivers.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import re
import shutil
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path

import pynvml

from skyinfra.errors import AcceleratorMissing
from skyinfra.first_boot.programs import NVML
from skyinfra.gpu.nvml import Gpu, Nvml, error_text
from skyinfra.mig import parts, same_profile
from skyinfra.protocol.nodeconfig import NodeAccelerator, Vendor

_LIBRARY = "libnvidia-ml.so.1"
# Names of cards for consumers by their PCI id; made by tools/build_pci_ids.py.
_PCI_IDS = Path(__file__).with_name("pci_ids.json")
# Words behind the name of a card that make it another one, where its id is not known.
_VARIANTS = frozenset({"ti", "super", "laptop", "mobile", "d", "ada"})
# A GPU's memory is within this of its nominal size: 80 GB are 81,559 MiB on one driver and 85.0e9 bytes on another.
_MEMORY_TOLERANCE = 0.15
_BYTES_PER_GB = 10**9
# Where the driver does not tell: Trainium1 and Inferentia2 have two NeuronCores a chip.
_NEURON_CORES = 2
# Trainium2 and later have eight, of which two make one logical core unless the variable or the file says otherwise (AWS
# Neuron documentation, "Logical NeuronCore configuration" and "EKS prerequisites").
_NEURON_PAIRED = 8
_NEURON_LOGICAL = "NEURON_LOGICAL_NC_CONFIG"
_NEURON_CONFIG = "opt/aws/neuron/logical_nc_config"
# Folders of vendors' tools that are seldom on PATH.
_TOOLS = ("/opt/rocm/bin", "/opt/aws/neuron/bin")

# What to do where NVML refuses, by its code.
_TO_DO = {
    pynvml.NVML_ERROR_NO_PERMISSION: "The user of the runner needs to read and write /dev/nvidia*.",
    pynvml.NVML_ERROR_DRIVER_NOT_LOADED: "`modprobe nvidia` loads it; `dmesg | grep NVRM` says why it was not.",
    pynvml.NVML_ERROR_LIB_RM_VERSION_MISMATCH: "Reboot the node: the old one is still loaded.",
}
# In these, the devices that a node was given are named.
_VARIABLES = ("CUDA_VISIBLE_DEVICES", "NVIDIA_VISIBLE_DEVICES")
# Values of them that name no device.
_NO_NAMES = ("", "all", "void")
_NONE = ("none", "nodevfiles")


@dataclass(frozen=True)
class Device:
    """One accelerator of the node. ``visible`` is the value that confines a process to it.

    ``profile``: of a MIG device that the node was given; ``index`` is then that of its GPU.
    """

    index: int
    visible: str
    uuid: str | None = None
    profile: str | None = None


def nvidia(nvml: Nvml, accelerator: NodeAccelerator) -> tuple[Device, ...]:
    """The GPUs of the node. Raises `AcceleratorMissing` where they are not those that *accelerator* declares."""
    try:
        gpus = nvml.gpus()
        memory = [gpu.memory_bytes() for gpu in gpus]
    except pynvml.NVMLError as error:
        raise no_driver(error) from error
    found = counted([gpu.name for gpu in gpus])
    check_count(accelerator, len(gpus), found)
    nominal = (accelerator.memory_gb or 0) * _BYTES_PER_GB
    for gpu, total in zip(gpus, memory, strict=True):
        if not is_model(accelerator.name, gpu):
            raise other_model(accelerator, f"{found}: GPU {gpu.index} is another model")
        if nominal and total is not None and abs(total - nominal) > _MEMORY_TOLERANCE * nominal:
            wrong = f"GPU {gpu.index} has {total / _BYTES_PER_GB:.0f} GB of memory instead of {accelerator.memory_gb:g}"
            raise other_model(accelerator, f"{found}: {wrong}")
    return tuple(Device(gpu.index, gpu.uuid, gpu.uuid) for gpu in gpus)


def given(nvml: Nvml, accelerator: NodeAccelerator, environment: Mapping[str, str]) -> tuple[Device, ...]:
    """The NVIDIA GPUs and MIG devices that a batch system or a cluster gave this node, which takes them as they are.

    Slurm and NVIDIA's device plugin name them in the environment, in their order; where they do not, as with CDI, the
    driver shows no others. Raises `AcceleratorMissing` where they are not those that *accelerator* declares.
    """
    try:
        gpus = nvml.gpus()
        shown = [device for gpu in gpus for device in _devices(gpu)]
    except pynvml.NVMLError as error:
        raise no_driver(error) from error
    # As the layout spells them: other drivers may name the memory of a profile otherwise.
    declared = {part.name for layout in accelerator.per_gpu for part in parts(layout)}
    devices = [
        replace(each, profile=each.profile and (same_profile(each.profile, declared, device=True) or each.profile))
        for each in _named(shown, environment)
    ]
    for index in sorted({each.index for each in devices}):
        if not is_model(accelerator.name, gpus[index]):
            raise other_model(accelerator, f"GPU {index}, {gpus[index].name}")
    _check_given(accelerator, devices)
    return tuple(devices)


def _devices(gpu: Gpu) -> Iterator[Device]:
    parts = gpu.mig_devices()
    for part in parts:
        yield Device(gpu.index, part.uuid, part.uuid, part.profile)
    if not parts:
        yield Device(gpu.index, gpu.uuid, gpu.uuid)


def _named(shown: Sequence[Device], environment: Mapping[str, str]) -> list[Device]:
    """Returns the devices of *shown* that *environment* names. Raises `AcceleratorMissing`."""
    for variable in _VARIABLES:
        value = environment.get(variable, "").strip()
        if value.lower() in _NONE:
            return []
        if value.lower() not in _NO_NAMES:
            return [_one(shown, name.strip(), variable) for name in value.split(",") if name.strip()]
    return list(shown)


def _one(shown: Sequence[Device], name: str, variable: str) -> Device:
    """Returns the device *name*: its number, or its UUID or the beginning of that."""
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


def _check_given(accelerator: NodeAccelerator, devices: Sequence[Device]) -> None:
    """Raises `AcceleratorMissing` unless *devices* are as many of each profile as declared, and whole GPUs else."""
    declared = Counter(part.name for layout in accelerator.per_gpu for part in parts(layout))
    declared.update({"": sum(not layout for layout in accelerator.per_gpu)})
    found = Counter(each.profile or "" for each in devices)
    if +declared != +found:
        raise AcceleratorMissing(
            f"declared {_spelled(declared, accelerator)}, and this node was given {_spelled(found, accelerator)}",
            field="accelerator",
            hint="Ask the cluster for what is declared, or declare what it gives: nothing is partitioned here.",
        )


def _spelled(counts: Counter[str], accelerator: NodeAccelerator) -> str:
    found = (f"{count} x {accelerator.name} {profile}".rstrip() for profile, count in sorted(counts.items()) if count)
    return ", ".join(found) or "none"


def no_driver(error: pynvml.NVMLError) -> AcceleratorMissing:
    """Returns the exception for NVML that cannot be initialized or does not answer."""
    if error.value == pynvml.NVML_ERROR_LIBRARY_NOT_FOUND and (why := unloadable()):
        return AcceleratorMissing(
            f"{_LIBRARY} is there and cannot be loaded: {why}",
            field="accelerator",
            hint="Install the NVIDIA driver again, for the architecture of this machine and as a whole.",
        )
    message = f"NVML answers {error_text(error)}"
    hint = "`nvidia-smi -q` and the kernel log say what is wrong; a GPU that fell off the bus needs a reboot."
    if error.value == pynvml.NVML_ERROR_LIBRARY_NOT_FOUND:
        message, hint = f"no NVIDIA driver: {_LIBRARY} not found", "Install it, or choose an image that has it."
    elif error.value in _TO_DO:
        # Root, as whom the first boot asks, is never refused.
        what = NVML.get(error.value, "refuses this user")
        message, hint = f"NVIDIA driver {what} ({message})", _TO_DO[error.value]
    return AcceleratorMissing(message, field="accelerator", hint=hint)


def unloadable() -> str | None:
    """Returns why the system cannot load NVIDIA's library, though it has it; None where it has none, or loads it."""
    try:
        ctypes.CDLL(_LIBRARY)
    except OSError as error:
        # dlopen(3) names the file that is missing first: this one, or one that it needs.
        absent = str(error).startswith(f"{_LIBRARY}: cannot open shared object file: No such file")
        return None if absent else str(error)
    return None


def by_device_files(
    accelerator: NodeAccelerator, *, root: Path = Path("/"), env: Mapping[str, str] | None = None
) -> tuple[Device, ...]:
    """Returns the accelerators, by device files below *root*. *env*: the declared variables of the tasks.

    Raises `AcceleratorMissing` unless as many as declared exist.
    """
    if accelerator.vendor not in _FILES:
        return simulated(accelerator)
    files, driver = device_files(accelerator.vendor, root)
    found = ", ".join(str(file) for file in files) or "none"
    check_count(accelerator, len(files), found, hint=f"Their files come with {driver}.")
    if accelerator.vendor == "intel":
        return tuple(Device(index, _module_id(file, root) or str(index)) for index, file in enumerate(files))
    return simulated(accelerator, _neuron_cores(root, env or {}))


def find_tool(name: str) -> str | None:
    """Returns the path of a vendor's program, on PATH or where the vendor puts it; None where it is not installed."""
    return shutil.which(name) or shutil.which(name, path=os.pathsep.join(_TOOLS))


def number_of(file: Path) -> float | None:
    """Returns the number in a file of a driver; None where there is none, or the driver does not tell."""
    try:
        return float(file.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None


def _neuron_cores(root: Path, env: Mapping[str, str]) -> int:
    """Returns the number of logical cores of one Neuron device, which is what NEURON_RT_VISIBLE_CORES counts."""
    device = root / "sys/class/neuron_device/neuron0"
    # Before version 2.28 of the driver only root may read core_count; everybody sees the folders.
    cores = len([*device.glob("neuron_core[0-9]*")]) or int(number_of(device / "core_count") or _NEURON_CORES)
    said = f"{_NEURON_LOGICAL}={env[_NEURON_LOGICAL]}" if _NEURON_LOGICAL in env else ""
    with contextlib.suppress(OSError):
        said = said or (root / _NEURON_CONFIG).read_text(encoding="utf-8")
    number = re.search(rf"{_NEURON_LOGICAL}=([1-9]\d*)", said)
    return max(1, cores // (int(number[1]) if number else 2 if cores >= _NEURON_PAIRED else 1))


def _module_id(file: Path, root: Path) -> str | None:
    """Returns the number of a Gaudi card for HABANA_VISIBLE_MODULES: its place on the board, not that of its file."""
    number = number_of(root / "sys/class/accel" / file.name / "device/module_id")
    return None if number is None else f"{number:.0f}"


def device_files(vendor: Vendor, root: Path = Path("/")) -> tuple[list[Path], str]:
    """The device files of the accelerators of *vendor*, and their driver; none of NVIDIA's and of custom ones."""
    patterns, driver = _FILES.get(vendor, ({}, ""))
    # Graphics cards of any vendor make renderD*; AMD's compute driver makes kfd.
    if vendor == "amd" and not (root / "dev/kfd").exists():
        return [], driver
    found = (_numbered(root / folder, pattern) for folder, pattern in patterns.items())
    return next(filter(None, found), []), driver


def simulated(accelerator: NodeAccelerator, neuron_cores: int = _NEURON_CORES) -> tuple[Device, ...]:
    """Devices that are only numbers: simulated ones, and custom ones, which no driver lists."""
    numbers = range(accelerator.count)
    if accelerator.vendor != "aws":
        return tuple(Device(i, str(i)) for i in numbers)
    # The Neuron runtime counts the cores over all devices.
    return tuple(Device(i, f"{i * neuron_cores}-{(i + 1) * neuron_cores - 1}") for i in numbers)


def check_count(accelerator: NodeAccelerator, count: int, found: str, hint: str | None = None) -> None:
    """Raises `AcceleratorMissing` where *count* is not the declared number. *found*: the devices, as text."""
    if count != accelerator.count:
        raise AcceleratorMissing(
            f"declared {accelerator.count} x {accelerator.name}, found {count}: {found}",
            field="accelerator.count",
            hint=hint or "The machine type may be another than declared, or a GPU has failed: `dmesg | grep NVRM`.",
        )


def other_model(accelerator: NodeAccelerator, found: str) -> AcceleratorMissing:
    """Returns the error for a node whose GPUs are another model than declared. *found*: the GPUs, as text."""
    return AcceleratorMissing(
        f"declared {accelerator.count} x {accelerator.name}, found {found}",
        field="accelerator.name",
        hint="The machine type is another than declared: correct the declaration or the machine type.",
    )


def is_model(declared: str, gpu: Gpu) -> bool:
    """Returns whether *gpu* is the *declared* model: by its PCI id, where the id says which variant of a card it is."""
    known = _names_by_id().get(gpu.pci_device_id[2:].upper())
    if known is not None:
        return _joined(known) == _joined(_without_memory(declared))
    return same_model(declared, gpu.name)


def same_model(declared: str, reported: str) -> bool:
    """Returns whether a GPU that calls itself *reported* (``NVIDIA A100-SXM4-80GB``) is the *declared* one (``A100``).

    The declared name is some whole words of the other, so that ``L4`` is not an ``L40S``, and no variant follows it, so
    that ``RTX 4070`` is not an ``RTX 4070 Ti``; memory is not compared.
    """
    name, words = _joined(_without_memory(declared)), _words(reported)
    runs = ((i, j) for i in range(len(words)) for j in range(i + 1, len(words) + 1))
    return any("".join(words[i:j]) == name and not _VARIANTS & set(words[j : j + 1]) for i, j in runs)


@cache
def _names_by_id() -> dict[str, str]:
    names: dict[str, str] = json.loads(_PCI_IDS.read_text(encoding="utf-8"))["names"]
    return names


def _without_memory(name: str) -> str:
    return re.sub(r"[-_ ]?\d+GB$", "", name, flags=re.IGNORECASE)


def _joined(name: str) -> str:
    return "".join(_words(name))


def _words(name: str) -> list[str]:
    return re.findall(r"[a-z0-9]+", name.lower())


def counted(names: Sequence[str]) -> str:
    """Returns each name with how often it is there; ``none`` without any."""
    return ", ".join(f"{names.count(name)} x {name}" for name in dict.fromkeys(names)) or "none"


def _numbered(folder: Path, pattern: str) -> list[Path]:
    """Returns the files of *folder* whose whole name matches, by the number in it."""
    if not folder.is_dir():
        return []
    matches = [(int(match.group(1)), file) for file in folder.iterdir() if (match := re.fullmatch(pattern, file.name))]
    return [file for _, file in sorted(matches)]


# The device files of each vendor, as patterns of names in a folder of which the first that has any counts, and their
# driver.
_FILES: dict[str, tuple[dict[str, str], str]] = {
    "amd": ({"dev/dri": r"renderD(\d+)"}, "the amdgpu driver (/dev/kfd and /dev/dri/renderD*)"),
    "aws": ({"dev": r"neuron(\d+)"}, "the aws-neuronx driver (/dev/neuron*)"),
    "google": ({"dev": r"accel(\d+)", "dev/vfio": r"(\d+)"}, "the TPU runtime image (/dev/accel* or /dev/vfio/*)"),
    "intel": ({"dev/accel": r"accel(\d+)", "dev": r"hl(\d+)"}, "the habanalabs driver (/dev/accel/accel* or /dev/hl*)"),
}
