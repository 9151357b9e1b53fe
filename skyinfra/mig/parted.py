"""NVIDIA mig-parted's configurations, version v1: read from a parsed document, written as text, and as layouts.

    version: v1
    mig-configs:
      LABEL:
        - device-filter: "0x233010DE"       # one, or a list; left out: every GPU
          devices: all                      # or a list of indices
          mig-enabled: true
          mig-devices: {"3g.40gb": 2}       # needed where MIG is enabled

The document is strict, as in mig-parted: an unknown field is an error. It names profiles, not where they stand, and
compute instances ("1c.3g.40gb": 3), not which of them share a GPU instance: mig-parted fills one after the other, as a
declaration does.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from skyinfra.errors import InvalidLayout, LayoutError, at, did_you_mean
from skyinfra.mig.geometry import Geometry, is_profile_name
from skyinfra.mig.grid import Layout, parts
from skyinfra.mig.layout import text, wanted
from skyinfra.mig.layouts import layouts, multisets
from skyinfra.mig.placement import resolve

_FILTER = re.compile(r"0x(?P<device>[0-9a-f]{4})[0-9a-f]{4}(?P<subsystem>:0x[0-9a-f]{8})?", re.I | re.A)
_FIELDS = {"device-filter", "devices", "mig-enabled", "mig-devices"}
# Text that needs no quotes in any version of YAML.
_PLAIN = re.compile(r"(?!(?:y|n|yes|no|on|off|true|false|null)\Z)[a-z][a-z0-9._-]*", re.I | re.A)


@dataclass(frozen=True, slots=True)
class PartedEntry:
    """One entry of a configuration, about some GPUs.

    device_filter: PCI ids as written; () is every GPU. devices: indices; None is "all".
    mig_devices: profiles and counts; None where the field is left out.
    single_filter: the filter was written as text, not as a list.
    """

    device_filter: tuple[str, ...]
    devices: tuple[int, ...] | None
    mig_enabled: bool
    mig_devices: tuple[tuple[str, int], ...] | None
    single_filter: bool = True


@dataclass(frozen=True, slots=True)
class PartedWarning:
    """Something that mig-parted's format or skyinfra cannot express. field: the path, or the GPU, with its index."""

    field: str
    message: str
    gpu: int | None = None

    def __str__(self) -> str:
        return f"{self.field}: {self.message}"


# The layout of each GPU by its index: () is MIG without partitions, None is MIG off. Other GPUs stay as they are.
GpuLayouts = dict[int, Layout | None]
Configs = dict[str, tuple[PartedEntry, ...]]


def read_parted(document: object) -> Configs:
    """Returns the configurations of a parsed document, by label.

    Raises InvalidLayout with the path of what is unknown, missing or of the wrong kind.
    """
    top = _mapping(document, "", {"version", "mig-configs"})
    if top.get("version") != "v1":
        raise InvalidLayout("the version is v1", field="version", given=top.get("version"))
    configs = top.get("mig-configs")
    if not isinstance(configs, Mapping):
        raise InvalidLayout("a mapping of labels to lists", field="mig-configs", given=configs)
    found: Configs = {}
    for label, entries in configs.items():
        path = f"mig-configs.{label}"
        if not isinstance(label, str):
            raise InvalidLayout("a label is text", field=path, given=label)
        if not isinstance(entries, list):
            raise InvalidLayout("a list of entries", field=path, given=entries)
        found[label] = tuple(_entry(entry, f"{path}[{index}]") for index, entry in enumerate(entries))
    return found


def choose_config(configs: Configs, label: str) -> tuple[PartedEntry, ...]:
    """Returns the configuration of that name. Raises InvalidLayout with the nearest labels."""
    if label not in configs:
        hint = did_you_mean(label, configs) or f"Labels: {', '.join(configs) or 'none'}."
        raise InvalidLayout("no configuration of that label", given=label, hint=hint)
    return configs[label]


def parted_document(configs: Configs) -> dict[str, Any]:
    """Returns the document that read_parted() reads to the same."""
    return {
        "version": "v1",
        "mig-configs": {label: [_fields(entry) for entry in entries] for label, entries in configs.items()},
    }


def parted_text(configs: Configs) -> str:
    """Returns the document as YAML. The same configurations give the same bytes."""
    lines = ["version: v1", "mig-configs:" if configs else "mig-configs: {}"]
    for label, entries in configs.items():
        lines.append(f"  {_scalar(label)}:" if entries else f"  {_scalar(label)}: []")
        for entry in entries:
            written = [line for key, value in _fields(entry).items() for line in _lines(key, value)]
            lines += [("    - " if index == 0 else "      ") + line for index, line in enumerate(written)]
    return "\n".join(lines) + "\n"


def layouts_from_parted(
    entries: Sequence[PartedEntry], geometry: Geometry, gpus: int, *, board: tuple[str, str] | None = None
) -> tuple[GpuLayouts, tuple[PartedWarning, ...]]:
    """Returns the layouts that a configuration gives to a node with *gpus* GPUs of one model.

    board: the PCI ids of device and subsystem of the very GPUs, as filters have them; without it an entry counts that
    is for any board of the model.
    Raises InvalidLayout for an index that the node does not have, and two entries that disagree on a GPU; what placing
    a layout raises; each with the index of the entry.
    """
    found: GpuLayouts = {}
    warnings = []
    for index, entry in enumerate(entries):
        if not _applies(entry, geometry, board, f"[{index}].device-filter"):
            continue
        if board is None and any(":" in text for text in entry.device_filter):
            warnings.append(PartedWarning(f"[{index}].device-filter", "the subsystem is not compared: no GPU is asked"))
        layout = _layout(entry, geometry, f"[{index}].mig-devices")
        for gpu in range(gpus) if entry.devices is None else entry.devices:
            if gpu >= gpus:
                raise InvalidLayout(f"the node has {gpus} GPUs", field=f"[{index}].devices", given=gpu)
            if gpu in found and found[gpu] != layout:
                raise InvalidLayout("another entry says otherwise", field=f"[{index}].devices", given=gpu)
            found[gpu] = layout
    for gpu in range(gpus):
        if gpu not in found:
            warnings.append(PartedWarning(f"GPU {gpu}", "no entry names it: it stays as it is", gpu))
    return dict(sorted(found.items())), tuple(warnings)


def parted_from_layouts(
    found: GpuLayouts, geometry: Geometry, gpus: int
) -> tuple[tuple[PartedEntry, ...], tuple[PartedWarning, ...]]:
    """Returns the entries of these layouts for a node with *gpus* GPUs, one for each different set of profiles.

    A warning names each GPU whose profiles have several placements: the entry cannot express which is meant.
    """
    groups: dict[tuple[tuple[str, int], ...] | None, list[int]] = {}
    warnings = []
    for gpu, layout in sorted(found.items()):
        counts = None if layout is None else counted(layout, geometry)
        groups.setdefault(counts, []).append(gpu)
        if layout and _placements(layout, geometry) > 1:
            warnings.append(PartedWarning(f"GPU {gpu}", _LOST, gpu))
        if layout and not _shares_as_written(layout, geometry):
            warnings.append(PartedWarning(f"GPU {gpu}", _LOST_SHARES, gpu))
    entries = tuple(
        PartedEntry((), None if len(members) == gpus else tuple(members), counts is not None, counts)
        for counts, members in groups.items()
    )
    return entries, tuple(warnings)


_LOST = "mig-parted's format has no placements: the driver chooses one of several for these profiles"


_LOST_SHARES = "mig-parted's format does not say which compute instances share a GPU instance; these would share others"


def counted(layout: Layout, geometry: Geometry) -> tuple[tuple[str, int], ...]:
    """The partitions by name with their number, largest profiles first, and compute instances behind whole ones."""
    (names,) = multisets([layout], geometry)
    order = {name: index for index, name in enumerate(dict.fromkeys(names))}
    ordered = sorted(parts(layout), key=lambda each: (order[each.profile], [-size for size in each.kind[1]]))
    return tuple(Counter(each.name for each in ordered).items())


def declared_text(layout: Layout, geometry: Geometry) -> str:
    """Returns the layout as declared, without places: ``3g.40gb+1c.2g.20gb*2``; empty without partitions."""
    return text(dict(counted(layout, geometry))) if layout else ""


def _shares_as_written(layout: Layout, geometry: Geometry) -> bool:
    """Returns whether the compute instances of *layout* share GPU instances as when their names are declared."""
    mine = Counter((geometry.profile(each.profile).name, each.kind[1]) for each in layout if each.compute)
    if not mine:
        return True
    try:
        shared = wanted([each.name for each in parts(layout)], geometry).shared
    except LayoutError:
        return False
    return mine == Counter((profile.name, group) for profile, groups in shared.items() for group in groups)


def _placements(layout: Layout, geometry: Geometry) -> int:
    """Returns the number of layouts with the same profiles."""
    (names,) = multisets([layout], geometry)
    return sum(multisets([each], geometry)[0] == names for each in layouts(geometry, names))


def _mapping(value: object, path: str, known: set[str]) -> Mapping[str, Any]:
    if not isinstance(value, Mapping):
        raise InvalidLayout(
            "a mapping", field=path or None, given=value, hint=f"Its fields: {', '.join(sorted(known))}."
        )
    for key in value:
        if key not in known:
            field = f"{path}.{key}" if path else str(key)
            hint = did_you_mean(str(key), known) or f"Fields: {', '.join(sorted(known))}."
            raise InvalidLayout("an unknown field", field=field, hint=hint)
    return value


def _entry(value: object, path: str) -> PartedEntry:
    fields = _mapping(value, path, _FIELDS)
    enabled = fields.get("mig-enabled")
    if not isinstance(enabled, bool):
        raise InvalidLayout("true or false", field=f"{path}.mig-enabled", given=enabled)
    written = fields.get("device-filter")
    if enabled and fields.get("mig-devices") is None:
        raise InvalidLayout("needed where MIG is enabled", field=f"{path}.mig-devices", hint="{} is no partition.")
    return PartedEntry(
        device_filter=_filter(written, f"{path}.device-filter") if "device-filter" in fields else (),
        devices=_devices(fields.get("devices"), f"{path}.devices"),
        mig_enabled=enabled,
        mig_devices=_counts(fields["mig-devices"], f"{path}.mig-devices") if "mig-devices" in fields else None,
        single_filter=not isinstance(written, list),
    )


def _filter(value: object, path: str) -> tuple[str, ...]:
    texts = value if isinstance(value, list) else [value]
    for each in texts or [value]:
        if not isinstance(each, str) or not _FILTER.fullmatch(each):
            hint = 'Write it like "0x233010DE", in quotes, or "0x233010DE:0x16C110DE" with the subsystem; or a list.'
            raise InvalidLayout("not the PCI id of a GPU", field=path, given=each, hint=hint)
    return tuple(texts)


def _devices(value: object, path: str) -> tuple[int, ...] | None:
    if value == "all":
        return None
    whole = isinstance(value, list) and all(isinstance(i, int) and not isinstance(i, bool) and i >= 0 for i in value)
    if not isinstance(value, list) or not whole:
        raise InvalidLayout("all, or a list of indices", field=path, given=value, hint="One GPU is [0].")
    return tuple(value)


def _counts(value: object, path: str) -> tuple[tuple[str, int], ...]:
    if not isinstance(value, Mapping):
        raise InvalidLayout("a mapping of profiles to counts", field=path, given=value)
    for name, count in value.items():
        if not isinstance(name, str) or not is_profile_name(name):
            raise InvalidLayout("not the name of a profile", field=path, given=name)
        if isinstance(count, bool) or not isinstance(count, int) or count < 0:
            raise InvalidLayout("the count is a whole number from 0", field=f"{path}.{name}", given=count)
    return tuple(value.items())


def _applies(entry: PartedEntry, geometry: Geometry, board: tuple[str, str] | None, path: str) -> bool:
    if not entry.device_filter:
        return True
    if board is not None:
        device, subsystem = (each.lower() for each in board)
        return not {device, f"{device}:{subsystem}"}.isdisjoint(text.lower() for text in entry.device_filter)
    if not geometry.pci_device_ids:
        raise InvalidLayout(f"the PCI ids of {geometry.model} are not known", field=path)
    wanted = {text[2:6].lower() for text in entry.device_filter}
    return not wanted.isdisjoint(known[2:].lower() for known in geometry.pci_device_ids)


def _layout(entry: PartedEntry, geometry: Geometry, path: str) -> Layout | None:
    counts = {name: count for name, count in entry.mig_devices or () if count}
    if not entry.mig_enabled:
        if counts:
            raise InvalidLayout("partitions where MIG is off", field=path)
        return None
    with at(path, LayoutError):
        return resolve(counts, geometry, 1)[0] if counts else ()


def _fields(entry: PartedEntry) -> dict[str, Any]:
    fields: dict[str, Any] = {}
    if entry.device_filter:
        single = entry.single_filter and len(entry.device_filter) == 1
        fields["device-filter"] = entry.device_filter[0] if single else list(entry.device_filter)
    fields["devices"] = "all" if entry.devices is None else list(entry.devices)
    fields["mig-enabled"] = entry.mig_enabled
    if entry.mig_devices is not None:
        fields["mig-devices"] = dict(entry.mig_devices)
    return fields


def _lines(key: str, value: str | bool | list[str | int] | dict[str, int]) -> list[str]:
    """One field of an entry as YAML."""
    if isinstance(value, dict) and value:
        return [f"{key}:", *(f"  {_quoted(name)}: {count}" for name, count in value.items())]
    # Flow style is JSON, which holds PCI ids, indices and booleans as they are.
    return [f"{key}: {_scalar(value) if isinstance(value, str) else json.dumps(value)}"]


def _scalar(text: str) -> str:
    return text if _PLAIN.fullmatch(text) else _quoted(text)


def _quoted(text: str) -> str:
    plain = (c if " " <= c <= "~" and c not in '"\\' else f"\\U{ord(c):08x}" for c in text)
    return f'"{"".join(plain)}"'
