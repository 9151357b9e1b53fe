"""An independent check of packings, and the cheapest one by trying everything. Nothing of the packing room is used."""

from __future__ import annotations

import contextlib
import re
from collections import Counter
from collections.abc import Iterator, Sequence
from decimal import Decimal
from functools import cache
from itertools import combinations_with_replacement

from skyinfra import UnknownProfile, mig
from skyinfra.accelerators import catalog
from skyinfra.offers import Offer
from skyinfra.packing import Packing

# (geometry or None, profile or None for the whole GPU, memory)
Part = tuple[str | None, str | None, int]


def model_of(offer: Offer) -> str | None:
    return catalog.choose(offer.accelerator, offer.memory_gb, offer.form_factor).mig_model


def divided(offer: Offer) -> bool:
    geometry = mig.geometry(offer.mig_model) if offer.mig_model else None
    return geometry is not None and all(profile.starts is not None for profile in geometry.profiles)


def part(offer: Offer, profile: str | None) -> Part:
    model = model_of(offer)
    if profile is None or model is None:
        return model, profile, offer.memory_gb
    found = mig.geometry(model).profile(profile)
    largest = max(each.memory_gb for each in mig.geometry(model).profiles)
    return model, found.name, max(largest, offer.memory_gb) if found.memory_gb == largest else found.memory_gb


def serves(have: Part, wanted: str, *, exact: bool) -> bool:
    """The rule as it is documented, for profiles without attributes."""
    model, name, memory = have
    if wanted.startswith(">="):
        return memory >= int(wanted[2:-2]) and not (exact and name is None)
    geometry = mig.geometry(model) if model else None
    if name is not None and geometry is not None:
        with contextlib.suppress(UnknownProfile):
            if geometry.profile(wanted).name == name:
                return True
    if exact or geometry is None or not geometry.profiles or memory < int(re.split("[.g]+", wanted)[1]):
        return False
    mine = max(geometry.profiles, key=lambda each: each.compute_slices) if name is None else geometry.profile(name)
    others = [(mig.geometry(key), each) for key in mig.models() for each in mig.geometry(key).profiles]
    for other, profile in others:
        if profile.name != wanted:
            continue
        if mine.sm and profile.sm:
            if mine.sm >= profile.sm:
                return True
        elif other.compute_slices == geometry.compute_slices and mine.compute_slices >= profile.compute_slices:
            return True
    return False


def check(packing: Packing, wanted: dict[str, int], *, exact: bool = False) -> None:
    """Placements exist and leave no room, the demand is met by what may serve it, and the cost is what it costs."""
    there: Counter[Part] = Counter()
    cost = Decimal(0)
    for machines in packing.machines:
        offer = machines.offer
        assert machines.nodes >= 1 and len(machines.layouts) == offer.count
        assert machines.price == offer.price(spot=packing.spot)
        cost += machines.nodes * Decimal(str(machines.price.usd_per_hour))
        for layout, placements in zip(machines.layouts, machines.placements, strict=True):
            assert (layout is None) == (not divided(offer)) == (not placements)
            if layout is None:
                there[part(offer, None)] += machines.nodes
                continue
            geometry = mig.geometry(offer.mig_model or "")
            names = mig.parse(layout, geometry)
            assert Counter(each.profile for each in placements) == Counter(names)
            assert mig.place(names, geometry) == placements
            plain = {each.name for each in geometry.profiles if not each.attributes}
            assert not plain & set(mig.joinable(names, geometry)), f"{layout} has room left"
            there.update({part(offer, name): machines.nodes * names.count(name) for name in set(names)})
    assert float(cost) == packing.cost_per_hour
    assert packing.bound <= packing.cost_per_hour
    handed: Counter[tuple[str | None, int]] = Counter()
    for given in (*packing.given, *packing.spare):
        handed[given.profile, given.memory_gb] += given.count
        if given.wanted is not None:
            candidates = [each for each in there if each[1:] == (given.profile, given.memory_gb)]
            assert any(serves(each, given.wanted, exact=exact) for each in candidates)
    assert handed == sum((Counter({each[1:]: count}) for each, count in there.items()), Counter())
    met: Counter[str] = Counter()
    for given in packing.given:
        met[given.wanted or ""] += given.count
    assert met == wanted
    assert packing.nodes == sum(each.nodes for each in packing.machines)


def cheapest(
    offers: Sequence[Offer],
    wanted: dict[str, int],
    *,
    machines: int,
    exact: bool = False,
    up_to: tuple[Decimal, int] = (Decimal("Infinity"), 0),
) -> tuple[Decimal, int] | None:
    """Cost and number of machines of the cheapest packing with up to *machines* machines, by trying all of them.

    up_to: cost and number beyond which nothing is tried. None where nothing holds the demand.
    """
    sets = [selected for number in range(1, machines + 1) for selected in combinations_with_replacement(offers, number)]
    priced = (
        (sum((Decimal(str(each.on_demand.usd_per_hour)) for each in one if each.on_demand), Decimal(0)), one)
        for one in sets
    )
    for cost, selected in sorted(priced, key=lambda each: (each[0], len(each[1]))):
        if (cost, len(selected)) > up_to:
            return None
        if holds(selected, wanted, exact=exact):
            return cost, len(selected)
    return None


def _cost(machines: Sequence[Offer]) -> Decimal:
    return sum((Decimal(str(each.on_demand.usd_per_hour)) for each in machines if each.on_demand), Decimal(0))


def holds(selected: Sequence[Offer], wanted: dict[str, int], *, exact: bool) -> bool:
    """Whether the machines hold the demand with some layouts."""
    names = tuple(wanted)
    gpus = sorted(((offer, model_of(offer)) for offer in selected for _ in range(offer.count)), key=lambda g: str(g))

    @cache
    def rest_holds(index: int, left: tuple[int, ...]) -> bool:
        if not any(left):
            return True
        if index == len(gpus):
            return False
        return any(rest_holds(index + 1, after) for after in sorted(_after(gpus[index][0], names, left, exact=exact)))

    return rest_holds(0, tuple(wanted.values()))


def _after(offer: Offer, names: tuple[str, ...], left: tuple[int, ...], *, exact: bool) -> set[tuple[int, ...]]:
    """What may be left of the demand after one GPU, with any layout and any use of its partitions."""
    found: set[tuple[int, ...]] = set()
    for parts in _layouts(offer):
        states = {left}
        for each in parts:
            able = [i for i, name in enumerate(names) if serves(each, name, exact=exact)]
            states |= {
                tuple(count - (i == j) for j, count in enumerate(state)) for state in states for i in able if state[i]
            }
        found |= states
    return {state for state in found if not any(_less(other, state) for other in found)}


def _layouts(offer: Offer) -> Iterator[tuple[Part, ...]]:
    if not divided(offer):
        yield (part(offer, None),)
        return
    geometry = mig.geometry(offer.mig_model or "")
    plain = [each.name for each in geometry.profiles if not each.attributes]
    for names in mig.multisets(mig.layouts(geometry, plain), geometry):
        yield tuple(part(offer, name) for name in names)


def _less(one: tuple[int, ...], other: tuple[int, ...]) -> bool:
    return one != other and all(a <= b for a, b in zip(one, other, strict=True))
