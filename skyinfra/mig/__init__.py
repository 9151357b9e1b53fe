"""MIG: profiles, layouts and placement of NVIDIA's multi-instance GPUs. Standard library only; also runs on nodes.

geometry = mig.geometry("h100_80gb")
mig.parse("3g.40gb+1g.10gb*2", geometry)     # ('3g.40gb', '1g.10gb', '1g.10gb')
mig.resolve("3g.40gb", geometry, gpus=8)     # one layout for each GPU
"""

from __future__ import annotations

from skyinfra.mig.drawing import Picture, Segment, draw, picture, render
from skyinfra.mig.drivers import check_driver, required_driver
from skyinfra.mig.geometry import Geometry, Profile, geometry, models, sources
from skyinfra.mig.grid import Layout, Placement
from skyinfra.mig.layout import Declared, PerGpu, parse, per_gpu, text
from skyinfra.mig.layouts import (
    fitting,
    joinable,
    layouts,
    maximal_layouts,
    maximal_multisets,
    multisets,
    nearest,
    plain_profiles,
)
from skyinfra.mig.placement import Attempt, attempt, fill, max_count, place, resolve
from skyinfra.mig.svg import svg

__all__ = [
    "Attempt",
    "Declared",
    "Geometry",
    "Layout",
    "PerGpu",
    "Picture",
    "Placement",
    "Profile",
    "Segment",
    "attempt",
    "check_driver",
    "draw",
    "fill",
    "fitting",
    "geometry",
    "joinable",
    "layouts",
    "max_count",
    "maximal_layouts",
    "maximal_multisets",
    "models",
    "multisets",
    "nearest",
    "parse",
    "per_gpu",
    "picture",
    "place",
    "plain_profiles",
    "render",
    "required_driver",
    "resolve",
    "sources",
    "svg",
    "text",
]
