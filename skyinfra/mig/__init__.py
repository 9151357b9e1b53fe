"""MIG: profiles, layouts and placement of NVIDIA's multi-instance GPUs. Standard library only; also runs on nodes.

geometry = mig.geometry("h100_80gb")
mig.parse("3g.40gb+1g.10gb*2", geometry)     # ('3g.40gb', '1g.10gb', '1g.10gb')
mig.resolve("3g.40gb", geometry, gpus=8)     # one layout for each GPU
mig.pack("1g.10gb*20, >=18GB*6", provider="aws")     # the cheapest machines and layouts; not on nodes
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import skyinfra
from skyinfra.mig.advice import Advice, advise
from skyinfra.mig.clusters import (
    GresDevice,
    device_plugin,
    gres_actual,
    gres_counts,
    gres_declared,
    gres_type,
    mig_resource,
)
from skyinfra.mig.drawing import Picture, Segment, draw, picture, render
from skyinfra.mig.drivers import check_driver, required_driver
from skyinfra.mig.follow import Follow
from skyinfra.mig.geometry import Geometry, Profile, geometry, gpu_profile, models, same_profile, sources
from skyinfra.mig.grid import At, Compute, Layout, Placement, layout_text, parts, placed_text, together
from skyinfra.mig.layout import Declared, PerGpu, is_off, parse, per_gpu, text
from skyinfra.mig.layouts import (
    fitting,
    layouts,
    maximal_layouts,
    maximal_multisets,
    multisets,
    nearest,
    plain_profiles,
)
from skyinfra.mig.listing import check_listed, read_listing
from skyinfra.mig.manager import Selected, manager_text, selected
from skyinfra.mig.parted import (
    PartedEntry,
    PartedWarning,
    choose_config,
    declared_text,
    layouts_from_parted,
    parted_document,
    parted_from_layouts,
    parted_text,
    read_parted,
)
from skyinfra.mig.placement import Attempt, attempt, carries, fill, joinable, max_count, place, rearranged, resolve
from skyinfra.mig.simulation import TraceTask, read_trace, write_trace
from skyinfra.mig.steps import Actual
from skyinfra.mig.svg import svg

if TYPE_CHECKING:
    from skyinfra import pack
else:

    def __getattr__(name):  # noqa: ANN001, ANN202 - only at run time, so that a wrong name stays a type error
        if name != "pack":
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        # The older spelling of sky.pack, which needs offers and a solver; no node has them.
        return skyinfra.pack


__all__ = [
    "Actual",
    "Advice",
    "At",
    "Attempt",
    "Compute",
    "Declared",
    "Follow",
    "Geometry",
    "GresDevice",
    "Layout",
    "PartedEntry",
    "PartedWarning",
    "PerGpu",
    "Picture",
    "Placement",
    "Profile",
    "Selected",
    "TraceTask",
    "Segment",
    "advise",
    "attempt",
    "carries",
    "check_driver",
    "check_listed",
    "choose_config",
    "declared_text",
    "device_plugin",
    "draw",
    "fill",
    "fitting",
    "geometry",
    "gpu_profile",
    "gres_actual",
    "gres_counts",
    "gres_declared",
    "gres_type",
    "is_off",
    "joinable",
    "layout_text",
    "layouts",
    "layouts_from_parted",
    "manager_text",
    "max_count",
    "maximal_layouts",
    "maximal_multisets",
    "mig_resource",
    "models",
    "multisets",
    "nearest",
    "pack",
    "parse",
    "parted_document",
    "parted_from_layouts",
    "parted_text",
    "parts",
    "per_gpu",
    "picture",
    "place",
    "placed_text",
    "plain_profiles",
    "read_listing",
    "read_parted",
    "read_trace",
    "rearranged",
    "render",
    "required_driver",
    "resolve",
    "same_profile",
    "selected",
    "sources",
    "svg",
    "text",
    "together",
    "write_trace",
]
