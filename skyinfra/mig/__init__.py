"""MIG: profiles, layouts and placement of NVIDIA's multi-instance GPUs. Standard library only; also runs on nodes.

geometry = mig.geometry("h100_80gb")
mig.parse("3g.40gb+1g.10gb*2", geometry)     # ('3g.40gb', '1g.10gb', '1g.10gb')
mig.resolve("3g.40gb", geometry, gpus=8)     # one layout for each GPU
"""

from __future__ import annotations

from skyinfra.mig.drawing import draw
from skyinfra.mig.geometry import Geometry, Profile, geometry, models, sources
from skyinfra.mig.layout import Declared, PerGpu, parse, per_gpu, text
from skyinfra.mig.placement import Layout, Placement, fill, max_count, place, resolve

__all__ = [
    "Declared",
    "Geometry",
    "Layout",
    "PerGpu",
    "Placement",
    "Profile",
    "draw",
    "fill",
    "geometry",
    "max_count",
    "models",
    "parse",
    "per_gpu",
    "place",
    "resolve",
    "sources",
    "text",
]
