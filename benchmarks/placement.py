"""Placement of layouts and the listing of all maximal ones, each for the GPU and layout that takes longest."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import permutations

from benchmarks.measure import Result, seconds_of
from skyinfra import mig
from skyinfra.mig import Geometry
from skyinfra.mig.grid import Grid, starts
from skyinfra.mig.layouts import _layouts
from skyinfra.mig.placement import _search

GPUS = [
    geometry
    for geometry in map(mig.geometry, mig.models())
    if geometry.profiles and all(profile.starts is not None for profile in geometry.profiles)
]


def run() -> Iterator[Result]:
    yield _placing()
    yield _listing()


def _placing() -> Result:
    """Every legal layout: the slowest, and all of them against the rule of mig-parted."""
    legal = [(geometry, names) for geometry in GPUS for names in mig.multisets(mig.layouts(geometry), geometry)]
    ours = [seconds_of(_place, *each) for each in legal]
    theirs = [seconds_of(permuted, *each, runs=1) for each in legal]
    what = f"placement, slowest of {len(legal):,} legal layouts"
    return Result(what, "mig-parted: permuted order (of all)", max(ours), sum(ours) / sum(theirs), aim="< 1 ms")


def _listing() -> Result:
    """The slowest GPU against asking of each of its layouts what still fits."""
    slowest = max(GPUS, key=lambda each: seconds_of(_maximal, each))
    ours, theirs = seconds_of(_maximal, slowest), seconds_of(_filtered, slowest)
    what = f"all maximal layouts of {slowest.model}, the slowest GPU"
    return Result(what, "every layout, asked what fits", ours, ours / theirs, aim="< 50 ms")


def _place(geometry: Geometry, names: Sequence[str]) -> mig.Layout:
    _search.cache_clear()
    return mig.place(names, geometry)


def permuted(geometry: Geometry, names: Sequence[str]) -> mig.Layout | None:
    """Instances created in one order after the other, where the driver puts them: the lowest free start."""
    for order in permutations(sorted(names)):
        grid = Grid(geometry)
        for name in order:
            profile = geometry.profile(name)
            start = next((at for at in starts(profile, geometry) if grid.allows(profile, at)), None)
            if start is None:
                break
            grid.put(profile, start)
        else:
            return grid.layout()
    return None


def _maximal(geometry: Geometry) -> tuple[mig.Layout, ...]:
    _layouts.cache_clear()
    return mig.maximal_layouts(geometry)


def _filtered(geometry: Geometry) -> list[mig.Layout]:
    _layouts.cache_clear()
    return [layout for layout in mig.layouts(geometry) if not mig.fitting(layout, geometry)]
