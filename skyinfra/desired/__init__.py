"""The desired layout of a node, and where it comes from.

The layout of the head is the layout of the fleet. On the head it is the one that the provider's metadata declare, where
they declare one; else that of the node configuration. Every other node has the layout that the head sends. The node
keeps the last one, with the digest of the node configuration of that time: a node that boots with an old configuration
comes up with the last layout that it knows of, and a new configuration counts until the head sends a layout. An
impossible layout is refused and changes nothing.

Where layouts follow the work, the head chooses others for single GPUs. They count above what is declared: a deploy says
what nodes begin with, and undoes nothing that the head has chosen among the declared ones.

`skyinfra.desired.file` has what is kept. Tasks may write it too, where the runner is not root: every field of a
layout is checked here.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

from skyinfra.desired import file
from skyinfra.desired.file import DesiredFile
from skyinfra.errors import InvalidNodeConfig, LayoutError, MigNotSupported, SkyinfraError, counted
from skyinfra.mig import Layout, geometry, models, resolve
from skyinfra.mig.grid import Grid, compute_refusal, starts
from skyinfra.node.folder import NodeDirectory
from skyinfra.protocol.fleet import VERSION, FleetLayout
from skyinfra.protocol.nodeconfig import NodeAccelerator, NodeConfig

# They go to amd-smi as they are.
_AMD_MODE, _AMD_MEMORY = re.compile("[A-Z]PX"), re.compile("NPS[0-9]")
# What said the layout: the node configuration, the provider's metadata, the head, or the work that the layouts follow.
Source = Literal["node.json", "metadata", "head", "work"]


@dataclass(frozen=True)
class Desired:
    """The desired state of the node.

    config: the node configuration, with the desired layout. source: where that comes from. refused: why the layout of
    another source, which would have come first, does not count. fleet: the layout of the fleet, where single GPUs have
    others. request: the name of the runner's last request to make it.
    """

    config: NodeConfig
    source: Source
    refused: SkyinfraError | None = None
    fleet: FleetLayout | None = None
    request: str = field(default="", compare=False)

    @property
    def layout(self) -> FleetLayout:
        """The desired layout, as the head sends it to other nodes."""
        if self.fleet is not None:
            return self.fleet
        accelerator = self.config.accelerator
        if accelerator is None:
            return FleetLayout(VERSION)
        return FleetLayout(VERSION, accelerator.mig_model, accelerator.layouts, accelerator.memory_mode)


def declare(directory: NodeDirectory, layout: FleetLayout) -> None:
    """Keeps *layout* as the one that the provider's metadata declare to the head. Raises `StateDirectoryError`."""
    file.update(directory, declared=layout)


def follow(directory: NodeDirectory, by_node: Mapping[str, Sequence[str]]) -> None:
    """Keeps *by_node* as the layouts that the head has chosen. Raises `StateDirectoryError`.

    It is that of `FleetLayout`.
    """
    file.update(directory, by_node={node: tuple(layouts) for node, layouts in by_node.items()})


def remember(layout: FleetLayout, sha256: str, directory: NodeDirectory) -> None:
    """Keeps *layout* as the last one of the fleet. Raises `StateDirectoryError`."""
    file.update(directory, fleet=layout, config_sha256=sha256)


def find(config: NodeConfig, sha256: str, directory: NodeDirectory, of_head: FleetLayout | None = None) -> Desired:
    """Returns the desired state of the node *config*, whose file has the digest *sha256*.

    *of_head*: the layout that the head sends now; None where it is not known: the one that it sent last counts.
    """
    refused: InvalidNodeConfig | None = None
    try:
        kept = file.read(directory)
    except InvalidNodeConfig as error:
        kept, refused = DesiredFile(), error if config.head else None
    where = str(directory.desired_file)
    found = replace(_declared(config, sha256, kept, of_head, where), request=kept.request)
    found = replace(found, refused=found.refused or refused)
    selected = _selected(config, kept)
    if not selected:
        return found
    fleet = replace(found.layout, by_node=selected)
    try:
        config_of_node = _with(found.config, fleet, where)
        return replace(
            found, config=config_of_node, fleet=fleet, source="work" if config.node in selected else found.source
        )
    except InvalidNodeConfig as error:
        return replace(found, refused=found.refused or error)


def _selected(config: NodeConfig, kept: DesiredFile) -> dict[str, tuple[str, ...]]:
    """On a head whose layouts follow the work: those that it has chosen among the declared ones."""
    if config.follow is None or not config.head:
        return {}
    known = {
        node: tuple(each if each in config.follow.among else "" for each in layouts)
        for node, layouts in kept.by_node.items()
    }
    return {node: layouts for node, layouts in known.items() if any(layouts)}


def _declared(config: NodeConfig, sha256: str, kept: DesiredFile, of_head: FleetLayout | None, where: str) -> Desired:
    refused: InvalidNodeConfig | None = None
    if config.head:
        if kept.declared is None:
            return Desired(config, "node.json")
        try:
            return Desired(_with(config, kept.declared, f"{where}.declared"), "metadata")
        except InvalidNodeConfig as error:
            refused, of_head = error, None
    layout = of_head or (kept.fleet if kept.config_sha256 == sha256 else None)
    if layout is None:
        return Desired(config, "node.json", refused)
    try:
        fleet = layout if layout.by_node else None
        return Desired(_with(config, layout, "the head's layout"), "head", refused, fleet)
    except InvalidNodeConfig as error:
        return Desired(config, "node.json", refused or error)


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
    """Returns the layouts of the GPUs of *node*: those that the head chose for them, else those of the fleet."""
    selected, where = layout.by_node.get(node), f"{where}.by_node.{node}"
    if selected is None:
        return layout.layouts
    model, count = accelerator.mig_model, accelerator.count
    if len(selected) != count or not layout.layouts or model is None or model not in models():
        raise InvalidNodeConfig(f"{counted(len(selected), 'layout')} for {count} {accelerator.name}", field=where)
    try:
        pairs = zip(selected, layout.layouts, strict=True)
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
