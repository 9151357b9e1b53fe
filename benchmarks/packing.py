"""Packing 1,000 partitions over 20 machine types, against two rules of thumb in the same run: machines and cost.

Both rules buy machines of one type, each of the 20 in turn, and the cheapest result counts. Each partition becomes the
smallest profile of that GPU that serves it.

first-fit: in the order of the demand, onto the first GPU where the driver finds it a place beside those that stand.
sort and permute: largest first, onto the first GPU whose partitions have a place in some order of creation, as
mig-parted tries them.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from functools import cache, partial
from typing import TypeAlias

from benchmarks.measure import Result, seconds_of
from skyinfra import mig
from skyinfra.mig import Geometry, Profile
from skyinfra.mig.grid import Grid, starts
from skyinfra.mig.layouts import _layouts
from skyinfra.offers import Offer, load
from skyinfra.packing import Demand, Packing, pack, read
from skyinfra.packing.supply import _PATTERNS, Gpu, _maximal

DEMAND = "1g.10gb*500, 2g.20gb*200, 3g.40gb*150, >=18GB*100, 7g.80gb*50"
PROVIDERS = ("aws", "azure")
TYPES = 20

Rule: TypeAlias = Callable[[Sequence[Profile], Geometry], int]


def run() -> Iterator[Result]:
    machines = machine_types()
    seconds = seconds_of(_packed, machines)
    best = _packed(machines)
    if best.status != "optimal":
        raise SystemExit(f"the packing is {best.status}, not optimal")
    demand = read(DEMAND)
    rules = {"first-fit": first_fit, "mig-parted: sort and permute": sort_and_permute}
    for name, rule in rules.items():
        cost, nodes = min(filled for machine in machines if (filled := _filled(machine, demand, rule)))
        what = f"packing 1,000 partitions, {len(machines)} types"
        yield Result(f"{what}: cost", name, seconds, best.cost_per_hour / cost, aim="<= 1 s, optimal")
        yield Result(f"{what}: machines", name, seconds, best.nodes / nodes)
        limited = seconds_of(partial(_packed, max_nodes=nodes), machines)
        few = _packed(machines, max_nodes=nodes)
        yield Result(f"{what}: cost, on as few", name, limited, few.cost_per_hour / cost)


def machine_types() -> list[Offer]:
    """The first 20 types of two providers whose GPUs can be partitioned, by name."""
    able = [o for o in load() if o.provider in PROVIDERS and o.on_demand and Gpu.of(o).divided]
    return sorted(able, key=lambda offer: (offer.provider, offer.machine_type))[:TYPES]


def _packed(machines: Sequence[Offer], max_nodes: int | None = None) -> Packing:
    _layouts.cache_clear()
    _maximal.cache_clear()
    _PATTERNS.clear()
    return pack(DEMAND, offers=machines, max_nodes=max_nodes)


def _filled(machine: Offer, demand: Sequence[Demand], rule: Rule) -> tuple[float, int] | None:
    """Cost and number of machines of one type that hold the demand by a rule; None where its GPU serves not all."""
    gpu = Gpu.of(machine)
    geometry = gpu.divided
    profiles: list[Profile] = []
    for each in demand:
        able = [kind for kind in gpu.kinds() if kind.serves(each, exact=False)]
        if not able or geometry is None or machine.on_demand is None:
            return None
        least = min(able, key=lambda kind: (kind.memory_gb, kind.slices))
        profiles += [geometry.profile(least.profile or "")] * each.count
    if geometry is None or machine.on_demand is None:
        return None
    nodes = -(-rule(profiles, geometry) // machine.count)
    return nodes * machine.on_demand.usd_per_hour, nodes


def first_fit(profiles: Sequence[Profile], geometry: Geometry) -> int:
    """How many GPUs are filled, partition by partition."""
    grids: list[Grid] = []
    for profile in profiles:
        for grid in grids:
            start = next((at for at in starts(profile, geometry) if grid.allows(profile, at)), None)
            if start is not None:
                break
        else:
            grid, start = Grid(geometry), starts(profile, geometry)[0]
            grids.append(grid)
        grid.put(profile, start)
    return len(grids)


def sort_and_permute(profiles: Sequence[Profile], geometry: Geometry) -> int:
    """How many GPUs are filled, largest partitions first, each GPU's created anew in any order."""

    @cache
    def fits(names: tuple[str, ...]) -> bool:
        return not mig.attempt(Counter(names), geometry).missing

    gpus: list[tuple[str, ...]] = []
    for profile in sorted(profiles, key=lambda each: (-each.compute_slices, -each.memory_gb)):
        for index, held in enumerate(gpus):
            more = tuple(sorted((*held, profile.name)))
            if fits(more):
                gpus[index] = more
                break
        else:
            gpus.append((profile.name,))
    return len(gpus)
