"""Which layouts are legal, by the rules written again and by trying all of them: nothing of the planner is used."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence

from skyinfra import mig


def legal(layout: Sequence[mig.Placement], geometry: mig.Geometry) -> bool:
    """The rules, written again: starts of the table, disjoint units, compute slices, counts, media engines."""
    units: list[int] = []
    compute = 0
    for placement in layout:
        profile = {p.name: p for p in geometry.profiles}[placement.profile]
        if placement.start not in (profile.starts or ()) or placement.size != profile.size:
            return False
        units += range(placement.start, placement.start + placement.size)
        compute += profile.compute_slices
    counts = Counter(placement.profile for placement in layout)
    limits = {p.name: p.max_count for p in geometry.profiles}
    suffixes = Counter(name.partition("gb")[2] for name in counts.elements())
    media = suffixes["+me"] + suffixes["+me.all"] <= 1
    if suffixes["+me.all"]:
        media = media and len(layout) == 1 + suffixes["-me"]
    return (
        len(units) == len(set(units))
        and compute <= (geometry.compute_slices or 0)
        and all(count <= (limits[name] or 0) for name, count in counts.items())
        and media
    )


def every_layout(geometry: mig.Geometry, names: Sequence[str]) -> Iterator[tuple[mig.Placement, ...]]:
    """Every legal layout of these profiles, by trying all sets of places; the empty one first."""
    places = [
        mig.Placement(p.name, start, p.size or 0)
        for p in geometry.profiles
        if p.name in names
        for start in p.starts or ()
    ]

    def grow(layout: tuple[mig.Placement, ...], first: int) -> Iterator[tuple[mig.Placement, ...]]:
        yield layout
        for index in range(first, len(places)):
            larger = (*layout, places[index])
            if legal(larger, geometry):
                yield from grow(larger, index + 1)

    return grow((), 0)


def plain(geometry: mig.Geometry) -> list[str]:
    """The whole-, half-, ... profiles without attributes and without the double-memory one."""
    return [p.name for p in geometry.profiles if p.nvml_enum in (0, 1, 2, 3, 4)]
