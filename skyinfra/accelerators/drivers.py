"""The driver that an accelerator needs: drivers.json, by architecture, part and CUDA toolkit."""

from __future__ import annotations

import json
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from skyinfra.accelerators import catalog
from skyinfra.accelerators.accelerator import Accelerator
from skyinfra.mig.drivers import required_driver, version

_DATA = Path(__file__).with_name("drivers.json")

# Kinds of a driver: NVIDIA's with the open or the proprietary kernel modules, or with modules that no source names;
# NVIDIA's for virtual GPUs; AMD's; AWS's for Neuron devices; Google's for TPUs; the driver of the host of a container.
OPEN, PROPRIETARY, UNNAMED, GRID, ROCM, NEURON, TPU, HOST = (
    "open",
    "proprietary",
    "unnamed modules",
    "grid",
    "rocm",
    "neuron",
    "tpu",
    "host",
)
_OF_VENDOR = {"amd": (ROCM,), "aws": (NEURON,), "google": (TPU,)}


@dataclass(frozen=True, slots=True)
class Needs:
    """The drivers that serve an accelerator: kinds, and the oldest and newest branch; None where no source says one."""

    kinds: tuple[str, ...]
    least: str | None = None
    last: str | None = None


def needs(accelerator: Accelerator, *, share: float = 1.0) -> Needs:
    """Returns the drivers that serve *accelerator* with its layout. share: of each device that the machine has.

    A share of a GPU is a virtual GPU, which takes NVIDIA's driver for those alone.
    """
    if accelerator.vendor != "nvidia":
        least = _data()["rocm"]["branches"].get(accelerator.architecture) if accelerator.vendor == "amd" else None
        return Needs(_OF_VENDOR.get(accelerator.vendor, ()), least)
    parts: dict[str, str] = _data()["parts"]["least"]
    cuda = str(accelerator.metadata.get("cuda_min", ""))
    known = [_data()["cuda"]["branches"].get(cuda), parts.get(accelerator.name), _of_layout(accelerator)]
    least = max(filter(None, known), key=version, default=None)
    last = _data()["last"]["branches"].get(accelerator.architecture)
    return Needs((GRID,) if share < 1 else _modules(accelerator), least, last)


def _modules(accelerator: Accelerator) -> tuple[str, ...]:
    """Returns the kinds of NVIDIA's driver that serve a whole device."""
    table, architecture = _data()["modules"], accelerator.architecture
    if architecture in table["proprietary_alone"]:
        return (PROPRIETARY, GRID)
    form = accelerator.form_factor
    if not accelerator.custom:
        form = catalog.choose(accelerator.name, accelerator.memory_gb, form).form_factor
    if architecture in table["open_alone"] or form in table["open_alone_forms"]:
        return (OPEN, GRID)
    return (OPEN, PROPRIETARY, UNNAMED, GRID)


def _of_layout(accelerator: Accelerator) -> str | None:
    """Returns the oldest driver that has all profiles of the layout; None without one."""
    if not accelerator.mig or accelerator.partition or accelerator.mig_model is None:
        return None
    geometry = accelerator.mig_geometry()
    found = (required_driver((each.profile for each in layout), geometry) for layout in accelerator.layouts())
    return max(filter(None, found), key=version, default=None)


@cache
def _data() -> dict[str, Any]:
    data: dict[str, Any] = json.loads(_DATA.read_text(encoding="utf-8"))
    return data
