"""Reads the output of ``nvidia-smi mig -lgi``: the GPU instances that stand, as layouts with their places.

    |   0  MIG 3g.40gb           9        2          4:4     |

The columns are GPU, name, profile id, instance id, and start:size in memory slices. Drivers differ in the widths.
"""

from __future__ import annotations

import re

from skyinfra.errors import InvalidLayout
from skyinfra.mig.geometry import Geometry, same_profile
from skyinfra.mig.grid import Grid, Layout, Placement

_ROW = re.compile(r"\|+\s*(?P<gpu>\d+)\s+MIG\s+(?P<name>\S+)\s+\d+\s+\d+\s+(?P<start>\d+):(?P<size>\d+)\s*\|", re.ASCII)
# What the program prints where nothing stands, with exit code 6.
_NONE = re.compile(r"No (GPU instances|MIG-enabled devices) found", re.IGNORECASE)


def read_listing(text: str) -> dict[int, Layout]:
    """The partitions on each GPU that is listed, by start. Raises InvalidLayout where *text* is no such output."""
    found: dict[int, list[Placement]] = {}
    for row in _ROW.finditer(text):
        place = Placement(row["name"].lower(), int(row["start"]), int(row["size"]))
        found.setdefault(int(row["gpu"]), []).append(place)
    if not found and not _NONE.search(text):
        raise InvalidLayout(
            "no GPU instance is listed", hint="It is the output of `nvidia-smi mig -lgi`, run as root on the node."
        )
    return {gpu: tuple(sorted(places, key=lambda place: place.start)) for gpu, places in sorted(found.items())}


def check_listed(layout: Layout, geometry: Geometry) -> Layout:
    """*layout* by the names that *geometry* has. Raises UnknownProfile, and InvalidLayout for an impossible place."""
    names = [profile.name for profile in geometry.profiles]
    grid = Grid(geometry)
    placed = []
    for each in layout:
        profile = geometry.profile(same_profile(each.profile, names) or each.profile)
        if (
            each.size != profile.size
            or each.start not in (profile.starts or ())
            or not grid.allows(profile, each.start)
        ):
            raise InvalidLayout(
                f"{geometry.model} has no {profile.name} there, beside what is before it",
                given=f"{each.profile} at {each.start}:{each.size}",
                hint="Name the GPU that the node has, with its memory.",
            )
        grid.put(profile, each.start)
        placed.append(Placement(profile.name, each.start, each.size))
    return tuple(placed)
