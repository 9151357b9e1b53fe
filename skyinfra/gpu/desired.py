"""The desired layout of a node, and where it comes from.

The layout of the head is the layout of the fleet. On the head it is that of ``desired.json`` in the node's directory,
where that file exists; else that of the node configuration. Every other node has the layout that the
head sends. The node keeps the last one in ``told.json``, with the digest of the node configuration of that time: a node
that boots with an old configuration comes up with the last layout that it knows of, and a new configuration counts
until the head sends a layout. An impossible layout is refused and changes nothing.

Where layouts follow the work, the head chooses others for single GPUs. They stand in ``followed.json`` and count above
those files: a deploy says what nodes begin with, and undoes nothing that the head has chosen among the declared ones.

Where the runner is not root, these files are its messages to root, which partitions: tasks may write them too. So
nothing but layouts stand in them, of which every field is checked here.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Literal

from skyinfra.errors import InvalidNodeConfig, LayoutError, MigNotSupported, SkyinfraError, counted
from skyinfra.mig import Layout, geometry, models, resolve
from skyinfra.mig.grid import Grid, compute_refusal, parts, starts
from skyinfra.node.folder import NodeDirectory, message
from skyinfra.protocol import _schema
from skyinfra.protocol.fleet import VERSION, FleetLayout
from skyinfra.protocol.nodeconfig import NodeAccelerator, NodeConfig

# They go to amd-smi as they are.
_AMD_MODE, _AMD_MEMORY = re.compile("[A-Z]PX"), re.compile("NPS[0-9]")
Source = Literal["node.json", "desired.json", "told.json", "followed.json"]


@dataclass(frozen=True)
class Desired:
    """The desired state of the node.

    config: the node configuration, with the desired layout. source: the file of that layout. refused: why the layout of
    another file, which would have come first, does not count. fleet: the layout of the fleet, where single GPUs have
    others.
    """

    config: NodeConfig
    source: Source
    refused: SkyinfraError | None = None
    fleet: FleetLayout | None = None

    @property
    def layout(self) -> FleetLayout:
        """The desired layout, as the head sends it to other nodes."""
        if self.fleet is not None:
            return self.fleet
        accelerator = self.config.accelerator
        if accelerator is None:
            return FleetLayout(VERSION)
        return FleetLayout(VERSION, accelerator.mig_model, accelerator.layouts, accelerator.memory_mode)


@dataclass(frozen=True)
class _FromHead(_schema.Document, error=InvalidNodeConfig, source="told.json", version=VERSION):
    """The content of ``told.json``."""

    version: int
    config_sha256: str
    layout: FleetLayout


@dataclass(frozen=True)
class _Followed(_schema.Document, error=InvalidNodeConfig, source="followed.json", version=VERSION):
    """The content of ``followed.json``: the layouts that the head chose, see `FleetLayout.by_node`."""

    version: int
    by_node: dict[str, tuple[str, ...]] = field(default_factory=dict)


def write_desired(directory: Path, layouts: Sequence[Layout], *, memory_mode: str | None = None) -> None:
    """Makes *layouts*, one for each GPU, the desired layout of the head whose node configuration is in *directory*.

    A running head takes it over within a second and sends it to every node. No layouts at all mean whole GPUs.
    *memory_mode*: that of AMD GPUs, NPS1 where it is None. The file is replaced atomically.
    Raises `StateDirectoryError`.
    """
    node = NodeDirectory(directory)
    layout = FleetLayout(VERSION, None, tuple(layouts), memory_mode)
    node.write(node.desired_file, json.dumps(layout.to_json()) + "\n")


def clear_desired(directory: Path) -> None:
    """Undoes `write_desired`: the layout of the node configuration counts again."""
    NodeDirectory(directory).desired_file.unlink(missing_ok=True)


def write_followed(directory: NodeDirectory, by_node: Mapping[str, Sequence[str]]) -> None:
    """Makes *by_node* the layouts that the head has chosen, see `FleetLayout.by_node`. Raises `StateDirectoryError`."""
    chosen = {node: tuple(layouts) for node, layouts in by_node.items()}
    directory.write(directory.chosen_file, json.dumps(_Followed(VERSION, chosen).to_json()) + "\n")


def find(config: NodeConfig, sha256: str, directory: NodeDirectory, of_head: FleetLayout | None = None) -> Desired:
    """The desired state of the node *config*, whose file has the digest *sha256*.

    *of_head*: the layout that the head sends now; None where it is not known: the one that it sent last counts.
    """
    found = _declared(config, sha256, directory, of_head)
    chosen = _chosen(config, directory)
    if not chosen:
        return found
    fleet = replace(found.layout, by_node=chosen)
    try:
        source: Source = "followed.json" if config.node in chosen else found.source
        return Desired(_with(found.config, fleet, str(directory.chosen_file)), source, found.refused, fleet)
    except InvalidNodeConfig as error:
        return replace(found, refused=found.refused or error)


def _chosen(config: NodeConfig, directory: NodeDirectory) -> dict[str, tuple[str, ...]]:
    """On a head whose layouts follow the work: those that it has chosen among the declared ones."""
    if config.follow is None or not config.head or not os.path.lexists(directory.chosen_file):
        return {}
    try:
        by_node = _Followed.load(directory.chosen_file, text_of=message).by_node
    except InvalidNodeConfig:
        return {}
    known = {
        node: tuple(each if each in config.follow.among else "" for each in layouts)
        for node, layouts in by_node.items()
    }
    return {node: layouts for node, layouts in known.items() if any(layouts)}


def _declared(config: NodeConfig, sha256: str, directory: NodeDirectory, of_head: FleetLayout | None) -> Desired:
    refused: InvalidNodeConfig | None = None
    if config.head:
        file = directory.desired_file
        if not os.path.lexists(file):
            return Desired(config, "node.json")
        try:
            return Desired(_with(config, FleetLayout.load(file, text_of=message), str(file)), "desired.json")
        except InvalidNodeConfig as error:
            refused, of_head = error, None
    layout = of_head or _remembered(sha256, directory)
    if layout is None:
        return Desired(config, "node.json", refused)
    try:
        fleet = layout if layout.by_node else None
        return Desired(_with(config, layout, "the head's layout"), "told.json", refused, fleet)
    except InvalidNodeConfig as error:
        return Desired(config, "node.json", refused or error)


def remember(layout: FleetLayout, sha256: str, directory: NodeDirectory) -> None:
    """Keeps *layout* as the last one of the head. Raises `StateDirectoryError`."""
    text = json.dumps(_FromHead(VERSION, sha256, layout).to_json()) + "\n"
    if not directory.told_file.exists() or directory.told_file.read_text(encoding="utf-8") != text:
        directory.write(directory.told_file, text)


def spelled(layout: Layout) -> str:
    """Returns one GPU's layout as text, such as ``3g.40gb+1g.10gb*2``; ``whole`` for one that is not partitioned."""
    counts = Counter(partition.name for partition in parts(layout))
    return "+".join(name if count == 1 else f"{name}*{count}" for name, count in counts.items()) or "whole"


def _remembered(sha256: str, directory: NodeDirectory) -> FleetLayout | None:
    """The last layout of the head for this very node configuration; None where the file cannot be read."""
    with contextlib.suppress(InvalidNodeConfig):
        last = _FromHead.load(directory.told_file, text_of=message)
        if last.layout.version == VERSION and last.config_sha256 == sha256:
            return last.layout
    return None


def _with(config: NodeConfig, layout: FleetLayout, where: str) -> NodeConfig:
    """*config* with *layout* of the file *where*. Raises `InvalidNodeConfig` where the node cannot have it."""
    accelerator = config.accelerator
    if accelerator is None:
        if layout.layouts:
            raise InvalidNodeConfig("this node has no accelerators", field=f"{where}.layouts")
        return config
    model = accelerator.mig_model
    if layout.mig_model is not None and model is not None and layout.mig_model != model:
        raise InvalidNodeConfig(
            f"the layout is for {layout.mig_model}, and this node has {model}",
            field=f"{where}.mig_model",
            hint="The nodes of one fleet have one layout, so they need the same GPU.",
        )
    if layout.layouts and len(layout.layouts) != accelerator.count:
        raise InvalidNodeConfig(
            f"{counted(len(layout.layouts), 'layout')}, and this node has {counted(accelerator.count, 'accelerator')}",
            field=f"{where}.layouts",
            hint="One layout for each accelerator is needed.",
        )
    for index, each in enumerate(layout.layouts):
        check_places(each, accelerator, f"{where}.layouts[{index}]")
    if layout.memory_mode is not None and accelerator.vendor != "amd":
        raise InvalidNodeConfig(
            f"{accelerator.name} has no memory modes", field=f"{where}.memory_mode", given=layout.memory_mode
        )
    if layout.memory_mode is not None and _AMD_MEMORY.fullmatch(layout.memory_mode) is None:
        raise InvalidNodeConfig("no memory mode", field=f"{where}.memory_mode", given=layout.memory_mode)
    layouts = _of_node(config.node, layout, accelerator, where)
    return replace(config, accelerator=replace(accelerator, layouts=layouts, memory_mode=layout.memory_mode))


def _of_node(node: str, layout: FleetLayout, accelerator: NodeAccelerator, where: str) -> tuple[Layout, ...]:
    """The layouts of the GPUs of *node*: those that the head chose for them, else those of the fleet."""
    chosen, where = layout.by_node.get(node), f"{where}.by_node.{node}"
    if chosen is None:
        return layout.layouts
    model, count = accelerator.mig_model, accelerator.count
    if len(chosen) != count or not layout.layouts or model is None or model not in models():
        raise InvalidNodeConfig(f"{counted(len(chosen), 'layout')} for {count} {accelerator.name}", field=where)
    try:
        pairs = zip(chosen, layout.layouts, strict=True)
        return tuple(resolve(text, geometry(model), 1)[0] if text else declared for text, declared in pairs)
    except LayoutError as error:
        raise InvalidNodeConfig(error.message, field=where, given=error.given, hint=error.hint) from None


def check_places(layout: Layout, accelerator: NodeAccelerator, where: str) -> None:
    """Refuses what the GPU does not allow, before anything is drained for it. The device checks it again later."""
    model = accelerator.mig_model
    if accelerator.vendor == "amd":
        # Uniform partition modes, of which the driver knows what goes together; see `skyinfra.gpu.amd.partitioner`.
        modes = {partition.profile for partition in layout}
        if len(modes) != 1 or not all(map(_AMD_MODE.fullmatch, modes)):
            given = ", ".join(sorted(modes)) or "none"
            raise InvalidNodeConfig("expected one partition mode, such as CPX", field=where, given=given)
        return
    if layout and model is None:
        raise InvalidNodeConfig(f"{accelerator.name} cannot be partitioned", field=where)
    if model is None or model not in models():
        return
    known = geometry(model)
    grid = Grid(known)
    for partition in layout:
        try:
            profile = known.profile(partition.profile)
            places = starts(profile, known)
        except MigNotSupported:
            return
        except LayoutError as error:
            raise InvalidNodeConfig(error.message, field=where, given=partition.profile, hint=error.hint) from None
        fits = partition.start in places and partition.size == profile.size and grid.allows(profile, partition.start)
        if not fits:
            why = grid.refusal(profile) or f"it may start at {', '.join(map(str, places))} where that is free"
            raise InvalidNodeConfig(
                f"{partition.profile} cannot stand at {partition.start}:{partition.size} on {model}",
                field=where,
                hint=f"{why}.",
            )
        if why := compute_refusal(profile, partition.compute):
            raise InvalidNodeConfig(f"{partition} cannot be: {why}", field=where)
        grid.put(profile, partition.start)
