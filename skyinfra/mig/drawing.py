"""Layouts as text."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from skyinfra.mig.geometry import Geometry

if TYPE_CHECKING:
    from skyinfra.mig.placement import Placement


def draw(layout: Sequence[Placement], geometry: Geometry) -> str:
    """Two lines: the placement units of the GPU, and which instance takes which of them.

        memory   0       1       2       3       4       5       6       7
                |3g.40gb                        |1g.10gb|       |1g.10gb|       |

    Free units are blank. The line width follows the longest name.
    """
    units = geometry.placement_units or 0
    cell = max([4, *(-(-(len(placement.profile) + 1) // placement.size) for placement in layout)])
    head = "".join(f"{unit:<{cell}}" for unit in range(units))
    starts = {placement.start: placement for placement in layout}
    bars, unit = "", 0
    while unit < units:
        placement = starts.get(unit)
        width = placement.size if placement else _free(unit, starts, units)
        bars += "|" + (placement.profile if placement else "").ljust(width * cell - 1)
        unit += width
    return f"memory   {head.rstrip()}\n        {bars}|"


def _free(unit: int, starts: dict[int, Placement], units: int) -> int:
    """How many units from *unit* on are free."""
    return min([start for start in starts if start > unit], default=units) - unit
