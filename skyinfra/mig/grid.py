"""The instances on one GPU, and the rules for instances beside one another."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import TypeAlias

from skyinfra.errors import MigNotSupported
from skyinfra.mig.geometry import Geometry, Profile


@dataclass(frozen=True, slots=True)
class Placement:
    """One partition on the grid: start and size in placement units.

    fixed: it was declared to stand there, as in "3g.40gb@4"; it is never placed elsewhere.
    """

    profile: str
    start: int
    size: int
    fixed: bool = field(default=False, compare=False, metadata={"later": True})


# One GPU's partitions, ordered by start.
Layout: TypeAlias = tuple[Placement, ...]


@dataclass
class Grid:
    """The instances on one GPU while a layout is being built."""

    geometry: Geometry
    placed: list[tuple[Profile, int]] = field(default_factory=list)

    @classmethod
    def of(cls, layout: Iterable[Placement], geometry: Geometry) -> Grid:
        """The grid with the partitions of *layout* on it. Raises UnknownProfile."""
        return cls(geometry, [(geometry.profile(each.profile), each.start) for each in layout])

    def allows(self, profile: Profile, start: int) -> bool:
        """Whether the GPU takes one more instance of *profile* at *start*."""
        end = start + (profile.size or 0)
        free = all(at >= end or start >= at + (other.size or 0) for other, at in self.placed)
        return free and not self.refusal(profile)

    def refusal(self, profile: Profile) -> str:
        """Why one more instance of *profile* is refused wherever it starts; empty where it is not."""
        others = [other for other, _ in self.placed]
        if profile.max_count is not None and others.count(profile) >= profile.max_count:
            return f"at most {profile.max_count} of {profile.name} on one GPU"
        used = sum(other.compute_slices for other in others)
        total = self.geometry.compute_slices or 0
        if used + profile.compute_slices > total:
            return f"compute slices: {used + profile.compute_slices} of {total}"
        return next((why for other in others if (why := media_clash(profile, other))), "")

    def fitting(self) -> tuple[str, ...]:
        """The profiles of which one more fits. Raises MigNotSupported where the placements are unknown."""
        profiles = self.geometry.profiles
        return tuple(p.name for p in profiles if any(self.allows(p, at) for at in starts(p, self.geometry)))

    def put(self, profile: Profile, start: int) -> None:
        self.placed.append((profile, start))

    def layout(self) -> Layout:
        placed = sorted(self.placed, key=lambda each: each[1])
        return tuple(Placement(profile.name, start, profile.size or 0) for profile, start in placed)


def starts(profile: Profile, geometry: Geometry) -> tuple[int, ...]:
    """The starts of an instance of *profile*. Raises MigNotSupported where they are not known."""
    if profile.starts is None or profile.size is None or geometry.placement_units is None:
        raise MigNotSupported(
            f"where {profile.name} may stand on {geometry.model} is not known, so a layout cannot be checked",
            hint="; ".join(geometry.notes) or None,
        )
    return profile.starts


def media_clash(one: Profile, other: Profile) -> str:
    """Why two profiles exclude each other for the media engines, of which +me takes those that exist once.

    +me.all takes all of them, so that only instances without any (-me) stand beside it.
    """
    if "+me" not in one.name and "+me" not in other.name:
        return ""  # most pairs, and this is asked thousands of times while a layout is placed
    for first, second in ((one, other), (other, one)):
        if first.attributes == "+me.all" and second.attributes != "-me":
            return f"{first.name} takes every media engine: only profiles with -me stand beside it"
        if first.attributes == second.attributes == "+me":
            return "only one partition of a GPU is +me"
    return ""
