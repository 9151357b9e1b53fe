"""The actual layouts of the GPUs in this machine, as NVML says: their partitions, profiles and places.

The driver lists the profiles and placements of a GPU whose MIG is on. Where MIG is off, those of its model are used.
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence

import pynvml

from skyinfra import mig
from skyinfra.errors import LayoutError, MigNotSupported, at
from skyinfra.gpu.nvml import Gpu, GpuInstance, Nvml, ProfileInfo, noting
from skyinfra.gpu.transition import asking
from skyinfra.mig.geometry import DeviceGeometry
from skyinfra.mig.steps import Partition
from skyinfra.protocol.nodeconfig import NodeAccelerator

# Boards with one PCI id differ in memory; what the driver counts differs a little from what it is called.
_MEMORY_TOLERANCE = 0.15
UNREADABLE = "NVML does not say what is there"


def existing(nvml: Nvml) -> tuple[Partition, ...]:
    """The partitions that exist on every GPU; those that cannot be used have no UUID. Raises `PartitionFailed`."""
    with asking(UNREADABLE):
        return tuple(part for gpu in nvml.gpus() for each in instances_of(gpu) for part in each.partitions(gpu.index))


def check_driver(nvml: Nvml, accelerator: NodeAccelerator) -> None:
    """Raises `DriverTooOld` where the driver does not offer the layouts of *accelerator*, before anything changes.

    Also `PartitionFailed` where NVML refuses to say which driver it is.
    """
    if accelerator.mig_model not in mig.models() or not any(accelerator.layouts):
        return
    geometry = mig.geometry(accelerator.mig_model)
    with asking(UNREADABLE):
        driver = nvml.driver_version()
    for index, layout in enumerate(accelerator.layouts):
        # The device is asked about profiles that are not known.
        known = [profile.name for profile in geometry.profiles]
        with at(f"accelerator.layouts[{index}]", LayoutError):
            mig.check_driver([p for p in layout if mig.same_profile(p.profile, known, device=True)], geometry, driver)


def actual_of(gpu: Gpu) -> mig.Actual:
    """Returns the partitions of *gpu*."""
    with noting(gpu.index):
        if not gpu.is_partitioned:
            return mig.Actual(None)
        instances = gpu.instances()
    return mig.Actual.of(part for each in instances for part in each.partitions(gpu.index))


def instances_of(gpu: Gpu) -> list[GpuInstance]:
    return gpu.instances() if gpu.is_partitioned else []


def geometry_of(gpu: Gpu) -> mig.Geometry:
    """The profiles and placements of *gpu*: those that the driver lists where MIG is on, else those of its model.

    Where those of the model are not known, the driver is asked also while MIG is off. Raises `MigNotSupported` for a
    GPU without MIG, and where its driver does not answer then.
    """
    mode = gpu.mig_mode()
    if mode is None:
        raise MigNotSupported("this GPU has no MIG", field=f"GPU {gpu.index}", given=gpu.name)
    known = model_of(gpu)
    if mode[0]:
        return _listed(gpu, known)
    if known is None or known.placement_units is None:
        # Not every driver answers now.
        with contextlib.suppress(pynvml.NVMLError):
            if (listed := _listed(gpu, known)).profiles:
                return listed
    if known is None:
        raise MigNotSupported(
            "the profiles of this model are not known, and the driver tells them once MIG is on",
            field=f"GPU {gpu.index}",
            given=f"{gpu.name}, PCI device {gpu.pci_device_id}",
            hint=f"Turn it on with `nvidia-smi -i {gpu.index} -mig 1`, then run this again.",
        )
    return known


def model_of(gpu: Gpu) -> mig.Geometry | None:
    """Returns the known model with this PCI device id and about this memory; of several, that of the nearest."""
    pci_id = gpu.pci_device_id.lower()
    found = [g for g in map(mig.geometry, mig.models()) if pci_id in map(str.lower, g.pci_device_ids)]
    memory = gpu.memory_bytes()
    if memory is None:
        return found[0] if len(found) == 1 else None
    gib = memory / 2**30
    like = [g for g in found if abs((g.memory_gib or gib) - gib) <= _MEMORY_TOLERANCE * gib]
    return min(like, key=lambda g: abs((g.memory_gib or 0) - gib), default=None)


def _listed(gpu: Gpu, known: mig.Geometry | None) -> mig.Geometry:
    """Returns the geometry that the driver lists."""
    profiles = tuple(_profile(info, places) for info in gpu.profiles() if (places := gpu.places(info)))
    return DeviceGeometry(
        model=known.model if known else gpu.name,
        products=(gpu.name,),
        pci_device_ids=(gpu.pci_device_id,),
        architecture=known.architecture if known else "",
        memory_gib=known.memory_gib if known else None,
        memory_slices=known.memory_slices if known else None,
        compute_slices=max((p.compute_slices for p in profiles), default=0),
        placement_units=max((start + (p.size or 0) for p in profiles for start in p.starts or ()), default=0),
        resetless=known.resetless if known else False,
        profiles=profiles,
    )


def _profile(info: ProfileInfo, places: Sequence[tuple[int, int]]) -> mig.Profile:
    return mig.Profile(
        name=info.name,
        compute_slices=info.compute_slices,
        memory_slices=None,
        size=places[0][1],
        memory_gb=int(info.name.partition(".")[2].partition("gb")[0]),
        # Some drivers understate how many of a profile there may be; the places do not.
        max_count=len(places),
        profile_id=info.profile_id,
        starts=tuple(start for start, _ in places),
    )
