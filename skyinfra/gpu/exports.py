"""Writes the partitions of the GPUs in this machine for others: as mig-parted's YAML, for NVIDIA's mig-manager, as
Slurm's `gres.conf`, for NVIDIA's device plugin for Kubernetes, and as a declaration.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TypeAlias

from skyinfra import mig
from skyinfra.errors import InvalidField, InvalidLayout, LayoutError, PartitionFailed, at
from skyinfra.gpu import machine
from skyinfra.gpu.actual import UNREADABLE, actual_of, geometry_of
from skyinfra.gpu.nvml import Gpu, MigDevice, Nvml, noting
from skyinfra.gpu.transition import asking
from skyinfra.mig.layout import OFF

_LABEL = "current"
# Layouts by the index of the GPU, each with its geometry; None is MIG off.
_Given: TypeAlias = dict[int, tuple[mig.Layout | None, mig.Geometry]]


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
    with asking(UNREADABLE):
        gpus = nvml.gpus()
        for members in _by_model(gpus):
            found = _actual(members, warnings)
            example = next((gpu for gpu in members if found[gpu.index].layout is not None), None)
            if example is None:
                entries.append(mig.PartedEntry((), None if len(found) == len(gpus) else tuple(found), False, None))
                continue
            layouts = {index: each.layout for index, each in found.items()}
            written, lost = mig.parted_from_layouts(layouts, geometry_of(example), len(gpus))
            entries += written
            warnings += map(str, lost)
    return tuple(entries), tuple(warnings)


def _actual(gpus: Sequence[Gpu], warnings: list[str]) -> dict[int, mig.Actual]:
    """Returns the partitions of each GPU, by its index; adds a warning about each instance that nothing can use."""
    found = {gpu.index: actual_of(gpu) for gpu in gpus}
    for index, actual in found.items():
        warnings += [f"GPU {index}: {each} has no compute instance: nothing can use it" for each in actual.unused]
    return found


def _by_model(gpus: Sequence[Gpu]) -> list[list[Gpu]]:
    """Returns the GPUs with MIG, those of one model and board together."""
    models: dict[tuple[str, ...], list[Gpu]] = {}
    for gpu in gpus:
        if gpu.mig_mode() is not None:
            models.setdefault((gpu.name, *gpu.pci_ids), []).append(gpu)
    return list(models.values())


def declaration(nvml: Nvml) -> tuple[str, tuple[str, ...]]:
    """Returns the declaration that keeps every GPU as it stands, for ``mig=``, and warnings. Raises `PartitionFailed`.

    A GPU without MIG is ``off``. Where no GPU has partitions there is nothing to declare.
    """
    warnings: list[str] = []
    with asking(UNREADABLE):
        found = _actual(nvml.gpus(), warnings)
    return _declared({index: _placed(each) for index, each in found.items()}, warnings)


def configured(nvml: Nvml, wanted: mig.Selected) -> tuple[str, tuple[str, ...]]:
    """Returns the declaration of what a configuration of mig-parted gives to the GPUs of this machine, and warnings.

    A GPU that it does not name stays as it stands. Raises `InvalidField` where the file cannot be read, `LayoutError`
    and its kinds with the path of what is wrong in it, and `PartitionFailed`.
    """
    warnings: list[str] = []
    actual, given = _compared(nvml, wanted, warnings)
    texts = {index: _placed(each) for index, each in actual.items()}
    for index, (layout, geometry) in given.items():
        texts[index] = None if layout is None else mig.declared_text(layout, geometry)
    return _declared(texts, warnings)


def keeps(nvml: Nvml, wanted: mig.Selected) -> bool:
    """Returns whether that configuration of mig-parted leaves every GPU as it stands. Raises as `configured` does."""
    actual, given = _compared(nvml, wanted, [])
    return all(actual[index].has(layout) for index, (layout, _) in given.items())


def _compared(nvml: Nvml, wanted: mig.Selected, warnings: list[str]) -> tuple[dict[int, mig.Actual], _Given]:
    """Returns the partitions of each GPU, and those that the configuration gives to the GPUs that it names."""
    entries = read_config(wanted)
    given: _Given = {}
    with asking(UNREADABLE):
        gpus = nvml.gpus()
        actual = _actual(gpus, warnings)
        for members in _by_model(gpus):
            with noting(members[0].index):
                geometry = geometry_of(members[0])
            with at(f"{wanted.file}: mig-configs.{wanted.label}", LayoutError):
                layouts, lost = mig.layouts_from_parted(entries, geometry, len(gpus), board=members[0].pci_ids)
            here = {gpu.index for gpu in members}
            warnings += [str(each) for each in lost if each.gpu is None or each.gpu in here]
            given |= {index: (layouts[index], geometry) for index in sorted(here & layouts.keys())}
    return actual, given


def _placed(actual: mig.Actual) -> str | None:
    """Returns its layout with places; None is MIG off, "" MIG without partitions."""
    return None if actual.layout is None else mig.placed_text(actual.layout)


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
    with at(wanted.file, InvalidLayout):
        return mig.choose_config(mig.read_parted(document), wanted.label)


def _declared(texts: Mapping[int, str | None], warnings: list[str]) -> tuple[str, tuple[str, ...]]:
    """Returns the value of ``mig=`` for GPUs with these layouts: None is MIG off, "" MIG without partitions."""
    empty = [index for index, each in texts.items() if each is not None and not each]
    warnings += [f"GPU {index}: MIG without partitions cannot be declared" for index in empty]
    layouts = [each or OFF for each in texts.values()]
    if all(each == OFF for each in layouts):
        return "None\n", tuple(warnings)
    if len(layouts) == 1:
        return f'"{layouts[0]}"\n', tuple(warnings)
    return f"sky.mig.per_gpu({', '.join(json.dumps(each) for each in layouts)})\n", tuple(warnings)


def gres(nvml: Nvml, *, root: Path = Path("/")) -> tuple[str, tuple[str, ...]]:
    """Returns the lines of `gres.conf` for what stands, and warnings. *root*: the parent of proc/.

    Raises `PartitionFailed`, also where the driver has no capability files for a partition.
    """
    devices: list[mig.GresDevice] = []
    warnings: list[str] = []
    with asking(UNREADABLE):
        for gpu in nvml.gpus():
            with noting(gpu.index):
                if not gpu.is_partitioned:
                    files = (f"/dev/nvidia{gpu.minor}",)
                    devices.append(mig.GresDevice(mig.gres_type(gpu.name), files, gpu.uuid))
                    continue
                found = gpu.mig_devices()
                devices += [mig.GresDevice(each.profile, _files(gpu, each, root), each.uuid) for each in found]
                if not found:
                    warnings.append(f"GPU {gpu.index}: MIG without partitions: Slurm can give it to nobody")
    return mig.gres_actual(devices), tuple(warnings)


def device_plugin(nvml: Nvml) -> tuple[str, tuple[str, ...]]:
    """Returns the configuration of the device plugin for what stands, and warnings. Raises `PartitionFailed`."""
    gpus: list[list[str] | None] = []
    with asking(UNREADABLE):
        for gpu in nvml.gpus():
            with noting(gpu.index):
                gpus.append([each.profile for each in gpu.mig_devices()] if gpu.is_partitioned else None)
    return mig.device_plugin(gpus), ()


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
