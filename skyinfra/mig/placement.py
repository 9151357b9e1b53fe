"""The placement of the partitions of a layout on the GPU.

The driver places instances in the order in which they are asked for and can run into a dead end. Here the whole
layout is placed at once: the search is exact, and the same profiles give the same layout whatever their order.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache

from skyinfra.errors import InvalidLayout, LayoutDoesNotFit, LayoutError
from skyinfra.mig.drawing import draw
from skyinfra.mig.geometry import Geometry, Profile
from skyinfra.mig.grid import Grid, Layout, starts
from skyinfra.mig.layout import Declared, PerGpu, counts, fills, largest_first, text
from skyinfra.mig.layouts import nearest


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
    desired = counts(declared, geometry)
    if isinstance(declared, str) and fills(declared):
        layout = fill(next(iter(desired)).name, geometry)
        return Attempt(layout, (), "", Grid.of(layout, geometry).fitting())
    return _attempt(desired, geometry)


def place(profiles: Sequence[str], geometry: Geometry) -> Layout:
    """A placement for every one of *profiles*, ordered by start.

    Of several possible layouts the one in which larger profiles start lower is taken. Raises UnknownProfile;
    LayoutDoesNotFit, with a drawing of how far it got; MigNotSupported where the placements of this GPU are unknown.
    """
    desired = Counter(geometry.profile(name) for name in profiles)
    return _whole(_attempt(desired, geometry), geometry, "+".join(profiles))


def max_count(profile: str, geometry: Geometry) -> int:
    """The number of partitions of one profile that fit on the GPU. Raises as place() does."""
    return len(fill(profile, geometry))


def fill(profile: str, geometry: Geometry) -> Layout:
    """As many partitions of one profile as fit on the GPU. Raises as place() does."""
    kind = geometry.profile(profile)
    grid = Grid(geometry)
    while (start := next((at for at in starts(kind, geometry) if grid.allows(kind, at)), None)) is not None:
        grid.put(kind, start)
    return grid.layout()


def resolve(declared: Declared | PerGpu, geometry: Geometry, gpus: int) -> tuple[Layout, ...]:
    """One layout for each of *gpus* GPUs.

    One profile name fills each GPU; any other string, a sequence or a mapping is the exact layout of each GPU; PerGpu
    holds as many layouts as there are GPUs. Raises InvalidLayout, and what parse() and place() raise.
    """
    if not isinstance(declared, PerGpu):
        return (_one(declared, geometry),) * gpus
    if len(declared.layouts) != gpus:
        raise InvalidLayout(
            f"per_gpu holds {len(declared.layouts)} layouts for {gpus} GPUs", hint="Give one layout for each GPU."
        )
    layouts = []
    for index, each in enumerate(declared.layouts):
        try:
            layouts.append(_one(each, geometry))
        except LayoutError as error:
            error.at(f"[{index}]")
            raise
    return tuple(layouts)


def joinable(profiles: Mapping[str, int] | Sequence[str], geometry: Geometry) -> tuple[str, ...]:
    """The profiles of which one more can be declared with *profiles*: all of them are placed anew."""
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


def _attempt(desired: Mapping[Profile, int], geometry: Geometry) -> Attempt:
    # One more than any GPU takes is refused like any larger number.
    limit = 1 + (geometry.compute_slices or 0)
    profiles = [profile for profile, count in desired.items() for _ in range(min(count, limit))]
    tried = _search(tuple(sorted(profiles, key=largest_first)), geometry)
    placed = Counter(placement.profile for placement in tried.layout)
    missing = {p.name: desired[p] - placed[p.name] for p in sorted(desired, key=largest_first)}
    return replace(tried, missing=tuple((name, count) for name, count in missing.items() if count))


@lru_cache(maxsize=1024)
def _search(desired: tuple[Profile, ...], geometry: Geometry) -> Attempt:
    search = _Search(_together(desired, geometry), geometry)
    search.run(0, 0, 0)
    grid = Grid(geometry, list(search.deepest))
    rest = Counter(desired)
    rest.subtract(profile for profile, _ in search.deepest)
    left = [profile for profile in rest if rest[profile]]
    reasons = dict.fromkeys(why for profile in left if (why := grid.refusal(profile)))
    why = "; ".join(reasons) or ("no free place for " + ", ".join(p.name for p in left) if left else "")
    return Attempt(grid.layout(), (), why, grid.fitting())


def _together(desired: tuple[Profile, ...], geometry: Geometry) -> tuple[Profile, ...]:
    """As many of *desired*, from its start, as are allowed beside one another in any place."""
    grid = Grid(geometry)
    for index, profile in enumerate(desired):
        starts(profile, geometry)  # raises where they are not known
        if grid.refusal(profile):
            return desired[:index]
        grid.put(profile, 0)
    return desired


@dataclass
class _Search:
    """Depth first over the starts; `deepest` is the largest part of the layout that was placed."""

    desired: tuple[Profile, ...]
    geometry: Geometry
    deepest: tuple[tuple[Profile, int], ...] = ()
    _path: list[tuple[Profile, int]] = field(default_factory=list)

    def run(self, index: int, lowest: int, taken: int) -> bool:
        """Places desired[index:]; *lowest* keeps equal profiles in order, so that no layout is tried twice.

        *taken* has a bit for each placement unit that is not free.
        """
        if index > len(self.deepest):
            self.deepest = tuple(self._path)
        if index == len(self.desired):
            return True
        profile = self.desired[index]
        units = (1 << (profile.size or 0)) - 1
        same_again = index + 1 < len(self.desired) and self.desired[index + 1] is profile
        for start in starts(profile, self.geometry):
            if start < lowest or taken & units << start:
                continue
            self._path.append((profile, start))
            if self.run(index + 1, start + 1 if same_again else 0, taken | units << start):
                return True
            self._path.pop()
        return False
