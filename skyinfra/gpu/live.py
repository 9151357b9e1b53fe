"""Layouts of the GPUs in this machine: desired ones read from text and from others' files, actual ones written for
others.

They are written as mig-parted's YAML, as Slurm's `gres.conf`, and for NVIDIA's device plugin for Kubernetes.

The driver lists the profiles and placements of a GPU whose MIG is on. Where MIG is off, those of its model are used.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import pynvml

from skyinfra import mig
from skyinfra.errors import (
    AcceleratorMissing,
    InvalidField,
    InvalidLayout,
    LayoutError,
    MigNotSupported,
    PartitionFailed,
    UnknownProfile,
    counted,
)
from skyinfra.gpu import machine, placed
from skyinfra.gpu.nvml import Gpu, GpuInstance, MigDevice, Nvml, ProfileInfo, noting
from skyinfra.gpu.partitioner import DesiredLayouts
from skyinfra.gpu.transition import asking
from skyinfra.mig.steps import Partition
from skyinfra.protocol.nodeconfig import NodeAccelerator

OFF = "off"
_LABEL = "current"
# What a configuration gives to a GPU that it does not name.
_UNNAMED = "unnamed"
_UNREADABLE = "NVML does not say what is there"


def choose(text: str, count: int) -> tuple[int, ...]:
    """The GPUs that *text* names, of *count*: ``all``, or indices such as ``0,3``. Raises `InvalidField`."""
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


def desired(nvml: Nvml, layout: str, gpus: str) -> DesiredLayouts:
    """The desired layouts of ``--layout`` and ``--gpu``: *layout* on each of the GPUs, ``off`` for MIG off.

    Raises `InvalidField`, `LayoutError` and its kinds, `AcceleratorMissing`, `PartitionFailed`.
    """
    with asking(_UNREADABLE):
        present = nvml.gpus()
        if not present:
            raise AcceleratorMissing(
                "the driver sees no GPU", field="accelerator", hint="`dmesg | grep NVRM` says why."
            )
        driver = nvml.driver_version()
        resolved = {index: _resolved(present[index], layout, driver) for index in choose(gpus, len(present))}
    return arranged(nvml, resolved, {})


def arranged(nvml: Nvml, desired: DesiredLayouts, chosen: DesiredLayouts) -> DesiredLayouts:
    """The *desired* layouts in the places that disturb least what stands, see `placed.target`.

    *chosen*: the places that were chosen before. Raises `PartitionFailed` where NVML does not list the GPUs; one for
    which it refuses to answer keeps its desired layout, and fails when it is partitioned.
    """
    with asking(_UNREADABLE):
        present = {gpu.index: gpu for gpu in nvml.gpus()}
    arranged = dict(desired)
    for index in present.keys() & desired.keys():
        with contextlib.suppress(pynvml.NVMLError):
            arranged[index] = _arranged(present[index], desired[index], chosen.get(index))
    return arranged


def standing(nvml: Nvml) -> tuple[Partition, ...]:
    """The partitions that exist on every GPU; those that cannot be used have no UUID. Raises `PartitionFailed`."""
    with asking(_UNREADABLE):
        return tuple(
            partition
            for gpu in nvml.gpus()
            for each in _instances(gpu)
            for partition in each.partitions(gpu.index, each.profile.name)
        )


def check_driver(nvml: Nvml, accelerator: NodeAccelerator) -> None:
    """Raises `DriverTooOld` where the driver does not offer the layouts of *accelerator*, before anything changes.

    Also `PartitionFailed` where NVML refuses to say which driver it is.
    """
    if accelerator.mig_model not in mig.models() or not any(accelerator.layouts):
        return
    geometry = mig.geometry(accelerator.mig_model)
    with asking(_UNREADABLE):
        driver = nvml.driver_version()
    for index, layout in enumerate(accelerator.layouts):
        # The device is asked about profiles that are not known.
        known = [profile.name for profile in geometry.profiles]
        try:
            mig.check_driver([p for p in layout if mig.same_profile(p.profile, known)], geometry, driver)
        except LayoutError as error:
            error.at(f"accelerator.layouts[{index}]")
            raise


def export(nvml: Nvml) -> tuple[str, tuple[str, ...]]:
    """The actual layouts as mig-parted's YAML, with warnings about what it cannot hold. Raises `PartitionFailed`.

    GPUs without MIG are left out; indices are those of the node.
    """
    entries, warnings = _parted(nvml)
    return mig.parted_text({_LABEL: entries}), warnings


def mig_manager(nvml: Nvml) -> tuple[str, tuple[str, ...]]:
    """The same as a configuration for NVIDIA's mig-manager, with what makes it keep that. Raises `PartitionFailed`."""
    entries, warnings = _parted(nvml)
    return mig.manager_text(entries), warnings


def _parted(nvml: Nvml) -> tuple[tuple[mig.PartedEntry, ...], tuple[str, ...]]:
    entries: list[mig.PartedEntry] = []
    warnings: list[str] = []
    with asking(_UNREADABLE):
        gpus = nvml.gpus()
        for members in _by_model(gpus):
            found = {gpu.index: _actual(gpu, warnings) for gpu in members}
            example = next((gpu for gpu in members if found[gpu.index] is not None), None)
            if example is None:
                entries.append(mig.PartedEntry((), None if len(found) == len(gpus) else tuple(found), False, None))
                continue
            written, lost = mig.parted_from_layouts(found, geometry_of(example), len(gpus))
            entries += written
            warnings += map(str, lost)
    return tuple(entries), tuple(warnings)


def _by_model(gpus: Sequence[Gpu]) -> list[list[Gpu]]:
    """The GPUs with MIG, those of one model together."""
    models: dict[tuple[str, str], list[Gpu]] = {}
    for gpu in gpus:
        if gpu.mig_mode() is not None:
            models.setdefault((gpu.name, gpu.pci_device_id), []).append(gpu)
    return list(models.values())


def declaration(nvml: Nvml) -> tuple[str, tuple[str, ...]]:
    """The declaration that keeps every GPU as it stands, for ``mig=``, and warnings. Raises `PartitionFailed`.

    A GPU without MIG is ``off``. Where no GPU has partitions there is nothing to declare.
    """
    warnings: list[str] = []
    with asking(_UNREADABLE):
        found = {gpu.index: _actual(gpu, warnings) for gpu in nvml.gpus()}
    return _declared({index: _placed(layout) for index, layout in found.items()}, warnings)


def configured(nvml: Nvml, wanted: mig.Selected) -> tuple[str, tuple[str, ...]]:
    """The declaration of what a configuration of mig-parted gives to the GPUs of this machine, and warnings.

    A GPU that it does not name stays as it stands. Raises `InvalidField` where the file cannot be read, `LayoutError`
    and its kinds with the path of what is wrong in it, and `PartitionFailed`.
    """
    warnings: list[str] = []
    texts: dict[int, str | None] = {}
    for index, (standing, given) in _given(nvml, wanted, warnings).items():
        texts[index] = _placed(standing) if given is _UNNAMED else given
    return _declared(texts, warnings)


def keeps(nvml: Nvml, wanted: mig.Selected) -> bool:
    """Whether that configuration of mig-parted leaves every GPU as it stands. Raises as `configured` does."""
    found = _given(nvml, wanted, []).values()
    return all(given in (_UNNAMED, standing if standing is None else _names(standing)) for standing, given in found)


def _given(nvml: Nvml, wanted: mig.Selected, warnings: list[str]) -> dict[int, tuple[mig.Layout | None, str | None]]:
    """The actual layout of each GPU, and the profiles that the configuration gives it.

    Profiles: None is MIG off, "" MIG without partitions, `_UNNAMED` a GPU that it does not name.
    """
    entries = read_config(wanted)
    with asking(_UNREADABLE):
        gpus = nvml.gpus()
        found: dict[int, tuple[mig.Layout | None, str | None]] = {
            gpu.index: (_actual(gpu, warnings), _UNNAMED) for gpu in gpus
        }
        for members in _by_model(gpus):
            with noting(members[0].index):
                geometry = geometry_of(members[0])
            try:
                layouts, lost = mig.layouts_from_parted(entries, geometry, len(gpus))
            except LayoutError as error:
                error.at(f"{wanted.file}: mig-configs.{wanted.label}")
                raise
            here = {gpu.index for gpu in members}
            warnings += [str(each) for each in lost if each.field in {f"GPU {index}" for index in here}]
            for index in sorted(here & layouts.keys()):
                layout = layouts[index]
                found[index] = found[index][0], None if layout is None else _names(layout)
    return found


def _placed(layout: mig.Layout | None) -> str | None:
    """The layout with its places; None is MIG off, "" MIG without partitions."""
    return None if layout is None else mig.placed_text(layout) if layout else ""


def _names(layout: mig.Layout) -> str:
    """The profiles of a layout, the largest first; "" without any."""
    names = sorted((place.profile for place in layout), key=lambda name: (-int(name.partition("g")[0]), name))
    return mig.text(names) if names else ""


def read_config(wanted: mig.Selected) -> tuple[mig.PartedEntry, ...]:
    """The entries of that configuration. Raises `InvalidField` for its file, `InvalidLayout` for what stands there."""
    from dask import config  # no node has another reader of YAML

    try:
        with Path(wanted.file).open("rb"):
            (document,) = config.collect_yaml([wanted.file])
    except OSError as error:
        raise InvalidField(f"cannot be read: {error.strerror}", field=wanted.file) from None
    except ValueError:  # also where it is empty
        raise InvalidField("holds no mapping in YAML", field=wanted.file) from None
    try:
        return mig.choose_config(mig.read_parted(document), wanted.label)
    except InvalidLayout as error:
        error.at(wanted.file)
        raise


def _declared(texts: Mapping[int, str | None], warnings: list[str]) -> tuple[str, tuple[str, ...]]:
    """The value of ``mig=`` for GPUs with these layouts: None is MIG off, "" MIG without partitions."""
    empty = [index for index, each in texts.items() if each is not None and not each]
    warnings += [f"GPU {index}: MIG without partitions cannot be declared" for index in empty]
    layouts = [each or OFF for each in texts.values()]
    if all(each == OFF for each in layouts):
        return "None\n", tuple(warnings)
    if len(layouts) == 1:
        return f'"{layouts[0]}"\n', tuple(warnings)
    return f"sky.mig.per_gpu({', '.join(json.dumps(each) for each in layouts)})\n", tuple(warnings)


def gres(nvml: Nvml, *, root: Path = Path("/")) -> tuple[str, tuple[str, ...]]:
    """The lines of `gres.conf` for what stands, and warnings. *root*: the parent of proc/.

    Raises `PartitionFailed`, also where the driver has no capability files for a partition.
    """
    devices: list[mig.GresDevice] = []
    warnings: list[str] = []
    with asking(_UNREADABLE):
        for gpu in nvml.gpus():
            with noting(gpu.index):
                if not _is_partitioned(gpu):
                    files = (f"/dev/nvidia{gpu.minor}",)
                    devices.append(mig.GresDevice(mig.gres_type(gpu.name), files, gpu.uuid))
                    continue
                found = gpu.mig_devices()
                devices += [mig.GresDevice(each.profile, _files(gpu, each, root), each.uuid) for each in found]
                if not found:
                    warnings.append(f"GPU {gpu.index}: MIG without partitions: Slurm can give it to nobody")
    return mig.gres_actual(devices), tuple(warnings)


def device_plugin(nvml: Nvml) -> tuple[str, tuple[str, ...]]:
    """The configuration of the device plugin for what stands, and warnings. Raises `PartitionFailed`."""
    gpus: list[list[str] | None] = []
    with asking(_UNREADABLE):
        for gpu in nvml.gpus():
            with noting(gpu.index):
                gpus.append([each.profile for each in gpu.mig_devices()] if _is_partitioned(gpu) else None)
    return mig.device_plugin(gpus), ()


def _resolved(gpu: Gpu, layout: str, driver: str) -> mig.Layout:
    if layout.strip().lower() == OFF:
        return ()
    with noting(gpu.index):
        geometry = geometry_of(gpu)
    known = _known(gpu)
    try:
        (resolved,) = mig.resolve(layout, geometry, 1)
        if known is not None:
            # The oldest driver of the model does not count: this driver lists the GPU's profiles. Nothing is refused
            # where the version or a profile is not known.
            with contextlib.suppress(InvalidField, UnknownProfile):
                mig.check_driver(resolved, replace(known, min_driver=None), driver)
    except LayoutError as error:
        error.at(f"GPU {gpu.index} ({gpu.name})")
        raise
    return resolved


def _instances(gpu: Gpu) -> list[GpuInstance]:
    mode = gpu.mig_mode()
    return gpu.instances() if mode is not None and mode[0] else []


def _arranged(gpu: Gpu, desired: mig.Layout, chosen: mig.Layout | None) -> mig.Layout:
    instances = _instances(gpu)
    there = [part for each in instances for part in each.partitions(gpu.index, each.profile.name)]
    found = placed.places(there, gpu.index, desired)
    if not found or not desired or mig.carries(found, desired) or chosen is not None:
        return placed.target(desired, chosen, found, None)
    in_use = {at for each in instances for at in _in_use(gpu, each)}
    return placed.target(desired, None, found, geometry_of(gpu), in_use)


def _in_use(gpu: Gpu, instance: GpuInstance) -> Iterator[mig.At]:
    """Yields `Placement.at` of what has processes on *instance*."""
    if instance.uuid is not None or not instance.compute:
        if gpu.processes_on(instance):
            yield instance.start
        return
    yield from ((instance.start, each.start) for each in instance.compute if gpu.processes_in(each))


def geometry_of(gpu: Gpu) -> mig.Geometry:
    """The profiles and placements of *gpu*: those that the driver lists where MIG is on, else those of its model.

    Raises `MigNotSupported` for a GPU without MIG, or of an unknown model while its MIG is off.
    """
    mode = gpu.mig_mode()
    if mode is None:
        raise MigNotSupported("this GPU has no MIG", field=f"GPU {gpu.index}", given=gpu.name)
    known = _known(gpu)
    if mode[0]:
        return _listed(gpu, known)
    if known is None:
        raise MigNotSupported(
            "the profiles of this model are not known, and the driver tells them once MIG is on",
            field=f"GPU {gpu.index}",
            given=f"{gpu.name}, PCI device {gpu.pci_device_id}",
            hint=f"Turn it on with `nvidia-smi -i {gpu.index} -mig 1`, then run this again.",
        )
    return known


def _known(gpu: Gpu) -> mig.Geometry | None:
    """The known model with this PCI device id; of several with one id, that of the nearest memory."""
    pci_id = gpu.pci_device_id.lower()
    found = [g for g in map(mig.geometry, mig.models()) if pci_id in map(str.lower, g.pci_device_ids)]
    memory = gpu.memory_bytes()
    if memory is None:
        return found[0] if len(found) == 1 else None
    return min(found, key=lambda g: abs((g.memory_gib or 0) - memory / 2**30), default=None)


def _listed(gpu: Gpu, known: mig.Geometry | None) -> mig.Geometry:
    """The geometry that the driver lists."""
    profiles = tuple(_profile(info, places) for info in gpu.profiles() if (places := gpu.places(info)))
    return mig.Geometry(
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


def _actual(gpu: Gpu, warnings: list[str]) -> mig.Layout | None:
    """The actual layout of *gpu*; None is MIG off."""
    with noting(gpu.index):
        mode = gpu.mig_mode()
        if mode is None or not mode[0]:
            return None
        instances = gpu.instances()
    for each in instances:
        if not each.compute:
            warnings.append(f"GPU {gpu.index}: {each} has no compute instance: nothing can use it")
    return tuple(mig.Placement(each.profile.name, each.start, each.size, compute=each.shares) for each in instances)


def _is_partitioned(gpu: Gpu) -> bool:
    mode = gpu.mig_mode()
    return mode is not None and mode[0]


def _files(gpu: Gpu, device: MigDevice, root: Path) -> tuple[str, ...]:
    where = f"GPU {gpu.index}, {device.profile}"
    if device.instance is None or device.compute_instance is None:
        raise PartitionFailed("NVML does not say which instances it is", field=where)
    try:
        return machine.partition_files(gpu.minor, device.instance, device.compute_instance, root)
    except OSError as error:
        raise PartitionFailed(
            f"the driver lists no capability files for it: {error}",
            field=where,
            hint="They are in /proc/driver/nvidia/capabilities; run this on the node itself, not in a container.",
        ) from None
