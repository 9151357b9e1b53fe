"""The places of the desired profiles on the GPUs of a node, where they are not those of the desired layout.

A change of the layout destroys as few partitions as any placement of the desired profiles allows, in-use ones last. The
runner chooses the places when another layout is desired, because it knows which slots have tasks, and keeps them in
``placed.json``: whoever partitions then, it or root, takes them, also after a reboot. Where the runner is not root the
file is its message to root, so that it counts only where it holds the desired profiles, in places that the GPU allows.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace

from skyinfra import mig
from skyinfra.errors import InvalidNodeConfig
from skyinfra.gpu.desired import check_places
from skyinfra.mig import At, Geometry, Layout, Placement
from skyinfra.mig.placement import insisted
from skyinfra.mig.steps import Partition
from skyinfra.node.folder import NodeDirectory, message
from skyinfra.protocol import _schema
from skyinfra.protocol.nodeconfig import NodeAccelerator

VERSION = 1


@dataclass(frozen=True)
class Placed(_schema.Document, error=InvalidNodeConfig, source="placed.json", version=VERSION):
    """The content of ``placed.json``: one layout for each GPU."""

    version: int
    layouts: tuple[Layout, ...] = ()


def read(accelerator: NodeAccelerator, directory: NodeDirectory) -> dict[int, Layout]:
    """The places that were chosen for the desired profiles of *accelerator*, by GPU; nothing for GPUs without."""
    file = directory.placed_file
    try:
        layouts = Placed.load(file, text_of=message).layouts
        for index, layout in enumerate(layouts):
            check_places(layout, accelerator, f"{file}.layouts[{index}]")
    except InvalidNodeConfig:
        return {}
    pairs = enumerate(zip(accelerator.per_gpu, layouts, strict=False))
    return {index: _flagged(layout, desired) for index, (desired, layout) in pairs if mig.carries(layout, desired)}


def choose(
    accelerator: NodeAccelerator,
    directory: NodeDirectory,
    standing: Sequence[Partition],
    in_use: Mapping[int, Collection[At]],
) -> None:
    """Chooses the places of the desired profiles among the *standing* partitions, and keeps them.

    *in_use*: `Placement.at` of the partitions whose slots have tasks, by GPU. Raises `StateDirectoryError`.
    """
    before = read(accelerator, directory)
    model = accelerator.mig_model
    geometry = mig.geometry(model) if model is not None and model in mig.models() else None
    layouts = tuple(
        mig.rearranged(before.get(gpu, desired), places(standing, gpu, desired), geometry, in_use=in_use.get(gpu, ()))
        if legal(desired, accelerator)
        else ()
        for gpu, desired in enumerate(accelerator.per_gpu)
    )
    if layouts != tuple(before.get(gpu) for gpu in range(accelerator.count)):
        directory.write(directory.placed_file, json.dumps(Placed(VERSION, layouts).to_json()) + "\n")


def legal(desired: Layout, accelerator: NodeAccelerator) -> bool:
    """Whether the GPU may have the *desired* partitions where they are desired; what it may not is for it to refuse."""
    try:
        check_places(desired, accelerator, "")
    except InvalidNodeConfig:
        return False
    return True


def target(
    desired: Layout,
    chosen: Layout | None,
    standing: Collection[Placement],
    geometry: Geometry | None,
    in_use: Collection[At] = (),
) -> Layout:
    """The layout that one GPU is to have: the *standing* one where it has the desired profiles, else the *chosen* one.

    Where none was chosen, that which disturbs the standing partitions least.
    """
    if chosen is None or mig.carries(standing, desired):
        return mig.rearranged(desired, standing, geometry, in_use=in_use)
    return chosen


def places(partitions: Sequence[Partition], gpu: int, desired: Layout) -> tuple[Placement, ...]:
    """The usable *partitions* of one GPU; a desired profile has its declared name, whatever the driver calls it."""
    declared = {each.profile for each in desired}
    mine = [(mig.gpu_profile(each.profile), each) for each in partitions if each.gpu == gpu and each.uuid]
    return mig.together(
        Placement(mig.same_profile(name, declared) or name, p.start, p.size, compute=(p.compute,) if p.compute else ())
        for name, p in mine
    )


def _flagged(layout: Layout, desired: Layout) -> Layout:
    """*layout*, with those fixed that are fixed in *desired*."""
    kept = insisted(desired)
    return tuple(replace(each, fixed=(each.kind, each.start, each.size) in kept) for each in layout)
