"""Accelerators: the catalog of hardware, and the ways to ask for it.

    accelerators.H100(count=4, memory="80GB", form_factor="SXM", mig="3g.40gb")
    accelerators.MI300X(count=8, partition="CPX", memory_mode="NPS4")
    accelerators.parse("H100:4/3g.40gb")
    accelerators.Custom("My-GPU", memory="48GB")

There is a factory for every name of the catalog; dir() lists them. The string form is
`NAME[-MEMORY][-FORM FACTOR][!][:COUNT][/LAYOUT]`: "H100", "A100-40GB:4", "H100!" (no other may stand in),
"H100:8/3g.40gb+2g.20gb+1g.10gb*2", "H100:8/2x>=20GB" by size, and "H100:2/3g.40gb|7g.80gb" with a layout for each GPU.
The layout of an AMD GPU is its partition mode, with its memory mode where that is not NPS1: "MI300X:8/CPX+NPS4".
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from skyinfra.accelerators.accelerator import Accelerator, Options, parse, parse_preferences
from skyinfra.accelerators.catalog import Variant, aliases, names, sources, variants
from skyinfra.accelerators.factories import (
    NVIDIA,
    AcceleratorSpec,
    Custom,
    Factory,
    factory,
    identifiers,
    is_amd,
    is_nvidia,
    is_tpu,
    is_trainium,
)

if TYPE_CHECKING:
    # The factories, for editors and type checkers; written by tools/build_stubs.py.
    from skyinfra.accelerators._names import *  # noqa: F403
else:

    def __getattr__(name):  # noqa: ANN001, ANN202 - only at run time, so that a wrong name stays a type error
        if name.startswith("__"):
            raise AttributeError(name)
        return factory(name)


__all__ = [
    "Accelerator",
    "AcceleratorSpec",
    "Custom",
    "Factory",
    "NVIDIA",
    "Options",
    "Variant",
    "aliases",
    "is_amd",
    "is_nvidia",
    "is_tpu",
    "is_trainium",
    "names",
    "parse",
    "parse_preferences",
    "sources",
    "variants",
]


def __dir__() -> list[str]:
    return sorted({*__all__, *identifiers()})
