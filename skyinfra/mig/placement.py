"""Where the partitions of a layout stand on the GPU.

The driver places instances in the order in which they are asked for and can run into a dead end. Here the whole
layout is placed at once: the search is exact, and the same profiles give the same layout whatever their order.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import TypeAlias

from skyinfra._errors import InvalidLayout, LayoutDoesNotFit, LayoutError, MigNotSupported
from skyinfra.mig.drawing import draw
from skyinfra.mig.geometry import Geometry, Profile
from skyinfra.mig.layout import Declared, PerGpu, fills, largest_first, parse


@dataclass(frozen=True, slots=True)
class Placement:
    """One partition on the grid: start and size in placement units."""

    profile: str
    start: int
    size: int


# One GPU's partitions, ordered by start.
Layout: TypeAlias = tuple[Placement, ...]


def place(profiles: Sequence[str], geometry: Geometry) -> Layout:
    """A placement for every one of *profiles*, ordered by start.

    Of several possible layouts the one in which larger profiles start lower is taken. Raises UnknownProfile;
    LayoutDoesNotFit, with a drawing of how far it got; MigNotSupported where the placements of this GPU are unknown.
    """
    wanted = tuple(sorted((geometry.profile(name) for name in profiles), key=largest_first))
    return _place(wanted, geometry)


def max_count(profile: str, geometry: Geometry) -> int:
    """How many partitions of one profile fit on the GPU. Raises as place() does."""
    return len(fill(profile, geometry))


def fill(profile: str, geometry: Geometry) -> Layout:
    """As many partitions of one profile as fit on the GPU. Raises as place() does."""
    kind = geometry.profile(profile)
    grid = _Grid(geometry)
    while (start := next((at for at in _starts(kind, geometry) if grid.allows(kind, at)), None)) is not None:
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


def _one(declared: Declared, geometry: Geometry) -> Layout:
    names = parse(declared, geometry)
    if isinstance(declared, str) and fills(declared):
        return fill(names[0], geometry)
    return place(names, geometry)


@lru_cache(maxsize=1024)
def _place(wanted: tuple[Profile, ...], geometry: Geometry) -> Layout:
    search = _Search(_Grid(geometry), wanted)
    if search.run(0, 0):
        return search.grid.layout()
    raise _does_not_fit(wanted, search.deepest, geometry)


@dataclass
class _Grid:
    """The instances on one GPU while a layout is being built."""

    geometry: Geometry
    placed: list[tuple[Profile, int]] = field(default_factory=list)

    def allows(self, profile: Profile, start: int) -> bool:
        """Whether the GPU takes one more instance of *profile* at *start*."""
        end = start + (profile.size or 0)
        free = all(at >= end or start >= at + (other.size or 0) for other, at in self.placed)
        return free and not self.refusal(profile)

    def refusal(self, profile: Profile) -> str:
        """Why one more instance of *profile* is refused wherever it starts; empty where it is not."""
        others = [other for other, _ in self.placed]
        if profile.max_count is not None and others.count(profile) >= profile.max_count:
            return f"{profile.name} stands on this GPU {profile.max_count} times at most"
        used = sum(other.compute_slices for other in others)
        total = self.geometry.compute_slices or 0
        if used + profile.compute_slices > total:
            return f"compute slices: {used + profile.compute_slices} of {total}"
        return next((why for other in others if (why := _media_clash(profile, other))), "")

    def put(self, profile: Profile, start: int) -> None:
        self.placed.append((profile, start))

    def layout(self) -> Layout:
        placed = sorted(self.placed, key=lambda each: each[1])
        return tuple(Placement(profile.name, start, profile.size or 0) for profile, start in placed)


@dataclass
class _Search:
    """Depth first over the starts; `deepest` is the largest part of the layout that was placed."""

    grid: _Grid
    wanted: tuple[Profile, ...]
    deepest: tuple[tuple[Profile, int], ...] = ()

    def run(self, index: int, lowest: int) -> bool:
        """Places wanted[index:]; *lowest* keeps equal profiles in order, so that no layout is tried twice."""
        if index == len(self.wanted):
            return True
        profile = self.wanted[index]
        for start in _starts(profile, self.grid.geometry):
            if start < lowest or not self.grid.allows(profile, start):
                continue
            self.grid.put(profile, start)
            if len(self.grid.placed) > len(self.deepest):
                self.deepest = tuple(self.grid.placed)
            same_again = index + 1 < len(self.wanted) and self.wanted[index + 1] == profile
            if self.run(index + 1, start + 1 if same_again else 0):
                return True
            self.grid.placed.pop()
        return False


def _starts(profile: Profile, geometry: Geometry) -> tuple[int, ...]:
    if profile.starts is None or profile.size is None or geometry.placement_units is None:
        raise MigNotSupported(
            f"where {profile.name} may stand on {geometry.model} is not known, so a layout cannot be checked",
            hint="; ".join(geometry.notes) or None,
        )
    return profile.starts


def _media_clash(one: Profile, other: Profile) -> str:
    """Why two profiles exclude each other for the media engines, of which +me takes those that exist once.

    +me.all takes all of them, so that only instances without any (-me) stand beside it.
    """
    for first, second in ((one, other), (other, one)):
        if first.attributes == "+me.all" and second.attributes != "-me":
            return f"{first.name} takes every media engine: only profiles with -me stand beside it"
        if first.attributes == second.attributes == "+me":
            return "only one partition of a GPU is +me"
    return ""


def _does_not_fit(
    wanted: tuple[Profile, ...], deepest: tuple[tuple[Profile, int], ...], geometry: Geometry
) -> LayoutDoesNotFit:
    grid = _Grid(geometry, list(deepest))
    rest = list(wanted)
    for profile, _ in deepest:
        rest.remove(profile)
    reasons = list(dict.fromkeys(why for profile in rest if (why := grid.refusal(profile))))
    why = "; ".join(reasons) or f"no free place for {', '.join(dict.fromkeys(profile.name for profile in rest))}"
    fitting = [
        profile.name
        for profile in geometry.profiles
        if any(grid.allows(profile, start) for start in _starts(profile, geometry))
    ]
    hint = f"{draw(grid.layout(), geometry)}\nWould still fit: {', '.join(fitting) or 'nothing'}."
    names = "+".join(profile.name for profile in wanted)
    return LayoutDoesNotFit(f"the layout has no placement on {geometry.model}: {why}", given=names, hint=hint)
