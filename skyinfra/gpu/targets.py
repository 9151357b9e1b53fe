"""The target layout of each GPU: its desired profiles, in the places that disturb least what stands.

A change of the layout destroys as few partitions as any placement of the desired profiles allows, in-use ones last. The
runner chooses the places when another layout is desired, because it knows which slots have tasks, and keeps them, see
`DesiredFile.places`: whoever partitions then, it or root, takes them, also after a reboot. They count only where they
hold the desired profiles, in places that the GPU allows.
"""

from __future__ import annotations

import contextlib
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import replace

import pynvml

from skyinfra import mig
from skyinfra.desired import check_places
from skyinfra.desired import file as desired_file
from skyinfra.errors import (
    AcceleratorMissing,
    InvalidField,
    InvalidNodeConfig,
    LayoutError,
    UnknownProfile,
    at,
    counted,
)
from skyinfra.gpu.actual import UNREADABLE, geometry_of, instances_of, model_of
from skyinfra.gpu.nvml import Gpu, GpuInstance, Nvml, noting
from skyinfra.gpu.partitioner import DesiredLayouts
from skyinfra.gpu.transition import asking
from skyinfra.mig import At, Geometry, Layout, Placement
from skyinfra.mig.placement import insisted
from skyinfra.mig.steps import Partition
from skyinfra.node.folder import NodeDirectory
from skyinfra.protocol.nodeconfig import NodeAccelerator


def read(accelerator: NodeAccelerator, directory: NodeDirectory) -> dict[int, Layout]:
    """The places that were chosen for the desired profiles of *accelerator*, by GPU; nothing for GPUs without."""
    try:
        layouts = desired_file.read(directory).places
        for index, layout in enumerate(layouts):
            check_places(layout, accelerator, f"places[{index}]")
    except InvalidNodeConfig:
        return {}
    pairs = enumerate(zip(accelerator.per_gpu, layouts, strict=False))
    return {index: _flagged(layout, desired) for index, (desired, layout) in pairs if mig.carries(layout, desired)}


def choose(
    accelerator: NodeAccelerator,
    directory: NodeDirectory,
    existing: Sequence[Partition],
    in_use: Mapping[int, Collection[At]],
) -> None:
    """Chooses the places of the desired profiles among the *existing* partitions, and keeps them.

    *in_use*: `Placement.at` of the partitions whose slots have tasks, by GPU. Raises `StateDirectoryError`.
    """
    before = read(accelerator, directory)
    model = accelerator.mig_model
    geometry = mig.geometry(model) if model is not None and model in mig.models() else None
    layouts = tuple(
        mig.rearranged(before.get(gpu, desired), places(existing, gpu, desired), geometry, in_use=in_use.get(gpu, ()))
        if legal(desired, accelerator)
        else ()
        for gpu, desired in enumerate(accelerator.per_gpu)
    )
    if layouts != tuple(before.get(gpu) for gpu in range(accelerator.count)):
        desired_file.update(directory, places=layouts)


def legal(desired: Layout, accelerator: NodeAccelerator) -> bool:
    """Returns whether the GPU may have the *desired* partitions there; what it may not is for it to refuse."""
    try:
        check_places(desired, accelerator, "")
    except InvalidNodeConfig:
        return False
    return True


def target(
    desired: Layout,
    selected: Layout | None,
    existing: Collection[Placement],
    geometry: Geometry | None,
    in_use: Collection[At] = (),
) -> Layout:
    """Returns the layout that one GPU is to have: the *existing* one where it has the desired profiles.

    Else it is the *selected* one, or that which disturbs the existing partitions least.
    """
    if selected is None or mig.carries(existing, desired):
        return mig.rearranged(desired, existing, geometry, in_use=in_use)
    return selected


def places(partitions: Sequence[Partition], gpu: int, desired: Layout) -> Layout:
    """The usable *partitions* of one GPU; a desired profile has its declared name, whatever the driver calls it."""
    return mig.Actual.of(each for each in partitions if each.gpu == gpu).named(desired)


def _flagged(layout: Layout, desired: Layout) -> Layout:
    """*layout*, with those fixed that are fixed in *desired*."""
    kept = insisted(desired)
    return tuple(replace(each, fixed=(each.kind, each.start, each.size) in kept) for each in layout)


def _indices(text: str, count: int) -> tuple[int, ...]:
    """Returns the GPUs that *text* names, of *count*: ``all``, or indices such as ``0,3``. Raises `InvalidField`."""
    if text.strip().lower() == "all":
        return tuple(range(count))
    try:
        indices = sorted({int(part) for part in text.split(",")})
    except ValueError:
        raise InvalidField(
            "all, or indices of GPUs", field="--gpu", given=text, hint="Write it like 0 or 0,3."
        ) from None
    for index in indices:
        if not 0 <= index < count:
            hint = f"They are 0 to {count - 1}." if count else "nvidia-smi -L lists those that the driver sees."
            raise InvalidField(f"this node has {counted(count, 'GPU')}", field="--gpu", given=index, hint=hint)
    return tuple(indices)


def given(nvml: Nvml, layout: str, gpus: str) -> DesiredLayouts:
    """Returns the desired layouts of ``--layout`` and ``--gpu``: *layout* on each of the GPUs, ``off`` for MIG off.

    Raises `InvalidField`, `LayoutError` and its kinds, `AcceleratorMissing`, `PartitionFailed`.
    """
    with asking(UNREADABLE):
        present = nvml.gpus()
        if not present:
            raise AcceleratorMissing(
                "the driver sees no GPU", field="accelerator", hint="`dmesg | grep NVRM` says why."
            )
        driver = nvml.driver_version()
        resolved = {index: _resolved(present[index], layout, driver) for index in _indices(gpus, len(present))}
    return arranged(nvml, resolved, {})


def arranged(nvml: Nvml, desired: DesiredLayouts, selected: DesiredLayouts) -> DesiredLayouts:
    """Returns the *desired* layouts in the places that disturb least what stands, see `target`.

    *selected*: the places that were chosen before. Raises `PartitionFailed` where NVML does not list the GPUs; one for
    which it refuses to answer keeps its desired layout, and fails when it is partitioned.
    """
    with asking(UNREADABLE):
        present = {gpu.index: gpu for gpu in nvml.gpus()}
    arranged = dict(desired)
    for index in present.keys() & desired.keys():
        with contextlib.suppress(pynvml.NVMLError):
            arranged[index] = _arranged(present[index], desired[index], selected.get(index))
    return arranged


def _resolved(gpu: Gpu, layout: str, driver: str) -> mig.Layout:
    if mig.is_off(layout):
        return ()
    with noting(gpu.index):
        geometry = geometry_of(gpu)
    known = model_of(gpu)
    with at(f"GPU {gpu.index} ({gpu.name})", LayoutError):
        (resolved,) = mig.resolve(layout, geometry, 1)
        if known is not None:
            # The oldest driver of the model does not count: this driver lists the GPU's profiles. Nothing is refused
            # where the version or a profile is not known.
            with contextlib.suppress(InvalidField, UnknownProfile):
                mig.check_driver(resolved, replace(known, min_driver=None), driver)
    return resolved


def _arranged(gpu: Gpu, desired: mig.Layout, selected: mig.Layout | None) -> mig.Layout:
    instances = instances_of(gpu)
    there = [part for each in instances for part in each.partitions(gpu.index)]
    found = places(there, gpu.index, desired)
    if not found or not desired or mig.carries(found, desired) or selected is not None:
        return target(desired, selected, found, None)
    in_use = {at for each in instances for at in _in_use(gpu, each)}
    return target(desired, None, found, geometry_of(gpu), in_use)


def _in_use(gpu: Gpu, instance: GpuInstance) -> Iterator[mig.At]:
    """Yields `Placement.at` of what has processes on *instance*."""
    if instance.uuid is not None or not instance.compute:
        if gpu.processes_on(instance):
            yield instance.start
        return
    yield from ((instance.start, each.start) for each in instance.compute if gpu.processes_in(each))
