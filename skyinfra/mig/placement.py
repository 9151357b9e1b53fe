"""The placement of the partitions of a layout on the GPU.

The driver places instances in the order in which they are asked for and can run into a dead end. Here the whole
layout is placed at once: the search is exact, and the same profiles give the same layout whatever their order. On an
empty GPU it leaves most room for what may come; among partitions that stand, rearranged() destroys fewest of them.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import permutations
from typing import NamedTuple, TypeAlias

from skyinfra.errors import LayoutDoesNotFit, LayoutError, at
from skyinfra.mig.drawing import draw
from skyinfra.mig.geometry import Geometry, Profile
from skyinfra.mig.grid import At, Grid, Layout, Placement, divide, parts, starts, written
from skyinfra.mig.layout import (
    Declared,
    PerGpu,
    Wanted,
    alone,
    fills,
    gathered,
    is_off,
    largest_first,
    text,
    wanted,
)
from skyinfra.mig.layouts import nearest

# Profiles and their starts.
Places: TypeAlias = tuple[tuple[Profile, int], ...]


@dataclass(frozen=True, slots=True)
class Attempt:
    """The result of placing one GPU's layout.

    layout: the placed partitions: all of them, or the largest part for which there is a placement.
    missing: the profiles without a place, with how many of each; empty where the layout is whole.
    why: why they have none.
    fitting: the profiles of which one more fits beside `layout`.
    """

    layout: Layout
    missing: tuple[tuple[str, int], ...]
    why: str
    fitting: tuple[str, ...]


def attempt(declared: Declared, geometry: Geometry) -> Attempt:
    """One GPU's layout, or as much of it as has a placement.

    One profile alone fills the GPU; anything else is exact. Raises InvalidLayout, UnknownProfile, and MigNotSupported
    where the placements of this GPU are unknown.
    """
    if isinstance(declared, str) and fills(declared):
        profile, slices = alone(declared, geometry)
        layout = fill(profile.name, geometry)
        if slices:
            each = (slices,) * (profile.compute_slices // slices)
            layout = _shared(layout, Wanted(shared={profile: (each,) * len(layout)}))
        return Attempt(layout, (), "", Grid.of(layout, geometry).fitting())
    return _attempt(wanted(declared, geometry), geometry)


def place(profiles: Sequence[str], geometry: Geometry) -> Layout:
    """Returns a placement for every one of *profiles*, ordered by start.

    Of several placements the one that leaves most room is taken: beside which most profiles fit, then in most places;
    of those the one in which larger profiles start lower. Raises UnknownProfile; LayoutDoesNotFit, with a drawing of
    how far it got; MigNotSupported where the placements of this GPU are unknown.
    """
    desired = gathered(((*geometry.divided(name), None, 1) for name in profiles), geometry)
    return _whole(_attempt(desired, geometry), geometry, written(profiles))


def carries(existing: Collection[Placement], desired: Collection[Placement]) -> bool:
    """Returns whether the *existing* partitions are the *desired* ones, in whatever places; fixed ones where they must.

    Compute instances share GPU instances as desired, in whatever places there.
    """
    if Counter(each.kind for each in existing) != Counter(each.kind for each in desired):
        return False
    return insisted(desired) <= {(each.kind, each.start, each.size) for each in existing}


def insisted(desired: Iterable[Placement]) -> set[tuple[object, ...]]:
    """Kind, start and size of those that are fixed."""
    return {(each.kind, each.start, each.size) for each in desired if each.fixed}


def rearranged(
    desired: Layout, existing: Collection[Placement], geometry: Geometry | None, *, in_use: Collection[At] = ()
) -> Layout:
    """Returns the placement of the *desired* profiles that disturbs the *existing* partitions least.

    It destroys fewest of those whose Placement.at is one of *in_use*, then fewest in all, then leaves most room; where
    that is undecided, it is *desired* itself, else the first in the order of place(). So a GPU that has the desired
    profiles stays as it is. Fixed placements are kept. A GPU instance whose compute instances change stays, with those
    of them that may. Where nothing stands it is *desired*, and where the placements of this GPU are unknown (*geometry*
    is None), unless the desired profiles stand.
    """
    if carries(existing, desired):
        kept = insisted(desired)
        found = (replace(each, fixed=(each.kind, each.start, each.size) in kept) for each in existing)
        return tuple(sorted(found, key=lambda each: each.start))
    if geometry is None or not existing:
        return desired
    try:
        called = {geometry.profile(each.profile): each.profile for each in desired}
        pins = tuple((geometry.profile(each.profile), each.start) for each in desired if each.fixed)
        rest = [geometry.profile(each.profile) for each in desired if not each.fixed]
        search = _Search(tuple(sorted(rest, key=largest_first)), geometry, pins)
        room = search.room()
    except LayoutError:
        return desired
    wanted_places, there = set(desired), _Existing(existing, in_use)
    sharing = any(each.compute for each in desired)

    def arranged(found: _Found) -> Layout:
        layout = _layout(found.places, pins, called)
        return _rearranged_shares(layout, desired, there, geometry) if sharing else layout

    def cost(found: _Found) -> tuple[int, int, tuple[int, int], bool]:
        layout = arranged(found)
        fits, ways = room(found)
        return *there.destroyed(layout), (-fits, -ways), set(layout) != wanted_places

    best = min(search.run(), key=cost, default=None)
    return desired if best is None else arranged(best)


class _Existing:
    """The partitions that stand on a GPU, and those of them that are in use."""

    def __init__(self, layout: Iterable[Placement], in_use: Collection[At]) -> None:
        self._parts = parts(layout)
        self._in_use = in_use

    def destroyed(self, layout: Iterable[Placement]) -> tuple[int, int]:
        """Returns how many that are in use go with *layout*, and how many in all."""
        stay = set(parts(layout))
        gone = [each.at for each in self._parts if each not in stay]
        return sum(at in self._in_use for at in gone), len(gone)

    def shared(self, place: Placement, profile: Profile, sizes: Sequence[int]) -> Placement:
        """Returns *place* with compute instances of these *sizes*, where they disturb least what shares it now."""
        here = [each for each in self._parts if (each.profile, each.start) == (place.profile, place.start)]
        used = [each.compute[0].start for each in here if each.compute and each.at in self._in_use]
        compute = divide(profile, sizes, [one for each in here for one in each.compute], used)
        return replace(place, compute=compute or ())


def _rearranged_shares(layout: Layout, desired: Layout, there: _Existing, geometry: Geometry) -> Layout:
    """*layout* with the compute instances of *desired*, so that fewest of those that stand are destroyed."""
    fixed = {(each.profile, each.start): each.kind[1] for each in desired if each.fixed}
    found = [
        there.shared(each, geometry.profile(each.profile), fixed[each.profile, each.start]) if each.fixed else each
        for each in layout
    ]
    for name in {each.profile for each in desired if each.compute and not each.fixed}:
        profile = geometry.profile(name)
        shares = sorted(each.kind[1] for each in desired if each.profile == name and not each.fixed)
        places = [index for index, each in enumerate(found) if each.profile == name and not each.fixed]
        ways = [
            [there.shared(found[index], profile, sizes) for index, sizes in zip(places, way, strict=True)]
            for way in sorted(set(permutations(shares)))
        ]
        for index, place in zip(places, min(ways, key=there.destroyed), strict=True):
            found[index] = place
    return tuple(found)


def max_count(profile: str, geometry: Geometry) -> int:
    """Returns the number of partitions of one profile that fit on the GPU. Raises as place() does."""
    return len(fill(profile, geometry))


def fill(profile: str, geometry: Geometry) -> Layout:
    """Returns as many partitions of one profile as fit on the GPU. Raises as place() does."""
    kind = geometry.profile(profile)
    grid = Grid(geometry)
    while (start := next((at for at in starts(kind, geometry) if grid.allows(kind, at)), None)) is not None:
        grid.put(kind, start)
    return grid.layout()


def resolve(declared: Declared | PerGpu, geometry: Geometry, gpus: int) -> tuple[Layout, ...]:
    """One layout for each of *gpus* GPUs; an empty one is that of a GPU that stays whole.

    One profile name fills each GPU; any other string, a sequence or a mapping is the exact layout of each GPU; PerGpu
    holds as many layouts as there are GPUs. Raises InvalidLayout, and what parse() and place() raise.
    """
    if not isinstance(declared, PerGpu):
        return (_one(declared, geometry),) * gpus
    declared.check_gpus(gpus)
    layouts = []
    for index, each in enumerate(declared.layouts):
        with at(f"[{index}]", LayoutError):
            layouts.append(() if is_off(each) else _one(each, geometry))
    return tuple(layouts)


def joinable(profiles: Mapping[str, int] | Sequence[str], geometry: Geometry) -> tuple[str, ...]:
    """Returns the profiles of which one more can be declared with *profiles*: all of them are placed anew."""
    held = Counter(profiles)
    return tuple(p.name for p in geometry.profiles if not attempt(held + Counter([p.name]), geometry).missing)


def _one(declared: Declared, geometry: Geometry) -> Layout:
    return _whole(attempt(declared, geometry), geometry, declared)


def _whole(tried: Attempt, geometry: Geometry, given: object) -> Layout:
    if not tried.missing:
        return tried.layout
    desired = Counter(placement.profile for placement in tried.layout) + Counter(dict(tried.missing))
    instead = " or ".join(text(names) for names in nearest(desired, geometry))
    hint = f"{draw(tried.layout, geometry)}\nWould still fit: {', '.join(tried.fitting) or 'nothing'}."
    hint += f"\nInstead: {instead}." if instead else ""
    raise LayoutDoesNotFit(f"the layout has no placement on {geometry.model}: {tried.why}", given=given, hint=hint)


def _attempt(desired: Wanted, geometry: Geometry) -> Attempt:
    # One more than any GPU takes is refused like any larger number.
    limit = 1 + (geometry.compute_slices or 0)
    counts, pins = desired.counts, desired.pins
    rest = Counter(counts) - Counter(profile for profile, _ in pins)
    profiles = [profile for profile, count in rest.items() for _ in range(min(count, limit))]
    tried = _search(tuple(sorted(profiles, key=largest_first)), geometry, pins)
    placed = Counter(placement.profile for placement in tried.layout)
    missing = {p.name: counts[p] - placed[p.name] for p in sorted(counts, key=largest_first)}
    layout = _shared(tried.layout, desired)
    return replace(tried, layout=layout, missing=tuple((name, count) for name, count in missing.items() if count))


def _shared(layout: Layout, desired: Wanted) -> Layout:
    """*layout* with the *desired* compute instances, those of one profile in the GPU instances that start last."""
    if not desired.shared and not desired.pinned:
        return layout
    sizes = {(profile.name, start): (profile, each) for (profile, start), each in desired.pinned.items()}
    for profile, groups in desired.shared.items():
        free = [each.start for each in layout if each.profile == profile.name and not each.fixed]
        last = free[-len(groups) :]
        sizes |= {(profile.name, start): (profile, group) for start, group in zip(last, groups, strict=False)}
    return tuple(
        replace(each, compute=divide(*sizes[each.profile, each.start]) or ())
        if (each.profile, each.start) in sizes
        else each
        for each in layout
    )


@lru_cache(maxsize=1024)
def _search(desired: tuple[Profile, ...], geometry: Geometry, pins: Places) -> Attempt:
    _check_pins(pins, geometry)
    search = _Search(_together(desired, geometry, pins), geometry, pins)
    best = max(search.run(), key=search.room(), default=None)
    places = search.deepest if best is None else best.places
    grid = Grid(geometry, list(places))
    rest = Counter(desired) + Counter(profile for profile, _ in pins)
    rest.subtract(profile for profile, _ in places)
    left = [profile for profile in rest if rest[profile]]
    reasons = dict.fromkeys(why for profile in left if (why := grid.refusal(profile)))
    why = "; ".join(reasons) or ("no free place for " + ", ".join(p.name for p in left) if left else "")
    return Attempt(_layout(places, pins), (), why, grid.fitting())


def _check_pins(pins: Places, geometry: Geometry) -> None:
    """Raises LayoutDoesNotFit where profiles cannot start where they insist to."""
    taken = 0
    for profile, start in pins:
        known = starts(profile, geometry)
        hint = f"On {geometry.model} it starts at {', '.join(map(str, known))}."
        if start not in known:
            raise LayoutDoesNotFit("the profile does not start there", given=f"{profile.name}@{start}", hint=hint)
        if taken & _units(profile, start):
            raise LayoutDoesNotFit("another partition is there", given=f"{profile.name}@{start}", hint=hint)
        taken |= _units(profile, start)


def _together(desired: tuple[Profile, ...], geometry: Geometry, pins: Places) -> tuple[Profile, ...]:
    """Returns as many of *desired*, from its start, as are allowed beside one another and *pins* in any place."""
    grid = Grid(geometry, list(pins))
    for index, profile in enumerate(desired):
        starts(profile, geometry)  # raises where they are not known
        if grid.refusal(profile):
            return desired[:index]
        grid.put(profile, 0)
    return desired


def _units(profile: Profile, start: int) -> int:
    """Returns a bit for each placement unit of an instance."""
    return (1 << (profile.size or 0)) - 1 << start


def _layout(places: Places, pins: Places = (), called: Mapping[Profile, str] | None = None) -> Layout:
    """Returns the layout by start; *called* has the names of the profiles where they are not those of the geometry."""
    return tuple(
        Placement(called[p] if called else p.name, start, p.size or 0, fixed=(p, start) in pins)
        for p, start in sorted(places, key=lambda place: place[1])
    )


class _Found(NamedTuple):
    """A placement of every profile, and a bit for each placement unit that it takes."""

    places: Places
    taken: int


class _Search:
    """Every placement of *desired* beside *pins*; `deepest` is the largest part of the layout that was placed."""

    def __init__(self, desired: tuple[Profile, ...], geometry: Geometry, pins: Places = ()) -> None:
        self._desired = desired
        self._geometry = geometry
        self._starts = [starts(profile, geometry) for profile in desired]
        self._pins = pins
        self.deepest = pins

    def run(self) -> Iterator[_Found]:
        """Yields the placements, depth first over the starts."""
        taken = 0
        for profile, start in self._pins:
            taken |= _units(profile, start)
        yield from self._from(0, 0, _Found(self._pins, taken))

    def room(self) -> Callable[[_Found], tuple[int, int]]:
        """Returns the function that counts the profiles of which one more fits beside a placement, and their places."""
        grid = Grid(self._geometry, [*self._pins, *((profile, 0) for profile in self._desired)])
        allowed = [profile for profile in self._geometry.profiles if not grid.refusal(profile)]
        masks = [[_units(profile, at) for at in starts(profile, self._geometry)] for profile in allowed]
        known: dict[int, tuple[int, int]] = {}

        def count(found: _Found) -> tuple[int, int]:
            if found.taken not in known:
                ways = [sum(not found.taken & mask for mask in each) for each in masks]
                known[found.taken] = len(ways) - ways.count(0), sum(ways)
            return known[found.taken]

        return count

    def _from(self, index: int, lowest: int, found: _Found) -> Iterator[_Found]:
        """Places desired[index:]; *lowest* keeps equal profiles in order, so that no layout is tried twice."""
        if len(found.places) > len(self.deepest):
            self.deepest = found.places
        if index == len(self._desired):
            yield found
            return
        profile = self._desired[index]
        same_again = index + 1 < len(self._desired) and self._desired[index + 1] is profile
        for start in self._starts[index]:
            units = _units(profile, start)
            if start >= lowest and not found.taken & units:
                more = _Found((*found.places, (profile, start)), found.taken | units)
                yield from self._from(index + 1, start + 1 if same_again else 0, more)
