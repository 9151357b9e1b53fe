"""The desired layout of a node, and where it comes from.

The layout of the head is the layout of the fleet. On the head it is that of ``desired.json`` in the node's directory,
where that file exists; else that of the node configuration. Every other node has the layout that the
head sends. The node keeps the last one in ``told.json``, with the digest of the node configuration of that time: a node
that boots with an old configuration comes up with the last layout that it knows of, and a new configuration counts
until the head sends a layout. An impossible layout is refused and changes nothing.

Where the runner is not root, both files are its messages to root, which partitions: tasks may write them too. So
nothing but a layout of the node's own accelerators stands in them, of which every field is checked here.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

from skyinfra.errors import InvalidNodeConfig, LayoutError, MigNotSupported, SkyinfraError
from skyinfra.mig import Layout, geometry, models
from skyinfra.mig.grid import Grid, starts
from skyinfra.node.folder import NodeDirectory, message
from skyinfra.protocol import _schema
from skyinfra.protocol.fleet import VERSION, FleetLayout
from skyinfra.protocol.nodeconfig import NodeAccelerator, NodeConfig

# They go to amd-smi as they are.
_AMD_MODE, _AMD_MEMORY = re.compile("[A-Z]PX"), re.compile("NPS[0-9]")
Source = Literal["node.json", "desired.json", "told.json"]


@dataclass(frozen=True)
class Desired:
    """The desired state of the node.

    config: the node configuration, with the desired layout. source: the file of that layout. refused: why the layout of
    another file, which would have come first, does not count.
    """

    config: NodeConfig
    source: Source
    refused: SkyinfraError | None = None

    @property
    def layout(self) -> FleetLayout:
        """The desired layout, as the head sends it to other nodes."""
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


def find(config: NodeConfig, sha256: str, directory: NodeDirectory, of_head: FleetLayout | None = None) -> Desired:
    """The desired state of the node *config*, whose file has the digest *sha256*.

    *of_head*: the layout that the head sends now; None where it is not known: the one that it sent last counts.
    """
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
        return Desired(_with(config, layout, "the head's layout"), "told.json", refused)
    except InvalidNodeConfig as error:
        return Desired(config, "node.json", refused or error)


def remember(layout: FleetLayout, sha256: str, directory: NodeDirectory) -> None:
    """Keeps *layout* as the last one of the head. Raises `StateDirectoryError`."""
    text = json.dumps(_FromHead(VERSION, sha256, layout).to_json()) + "\n"
    if not directory.told_file.exists() or directory.told_file.read_text(encoding="utf-8") != text:
        directory.write(directory.told_file, text)


def spelled(layout: Layout) -> str:
    """Returns one GPU's layout as text, such as ``3g.40gb+1g.10gb*2``; ``whole`` for one that is not partitioned."""
    counts = Counter(partition.profile for partition in layout)
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
            f"{len(layout.layouts)} layouts, and this node has {accelerator.count} accelerators",
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
    changed = replace(accelerator, layouts=layout.layouts, memory_mode=layout.memory_mode)
    return replace(config, accelerator=changed)


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
        grid.put(profile, partition.start)
