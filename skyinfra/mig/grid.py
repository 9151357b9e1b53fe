"""The instances on one GPU, and the rules for instances beside one another."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TypeAlias

from skyinfra.errors import MigNotSupported
from skyinfra.mig.geometry import Geometry, Profile

# The key of a slot on its GPU: where its GPU instance starts, and where in that its compute instance does, if it does
# not fill it.
At: TypeAlias = int | tuple[int, int]


@dataclass(frozen=True, slots=True)
class Compute:
    """One of the compute instances that share a GPU instance: start and size in the compute slices of that."""

    start: int
    size: int


@dataclass(frozen=True, slots=True)
class Placement:
    """One GPU instance on the grid: start and size in placement units.

    fixed: it was declared to stand there, as in "3g.40gb@4"; it is never placed elsewhere.
    compute: the compute instances that share it, by start, each of which is a partition of its own; empty where a
    single one fills it, so that the GPU instance is one partition.
    """

    profile: str
    start: int
    size: int
    fixed: bool = field(default=False, compare=False, metadata={"later": True})
    compute: tuple[Compute, ...] = field(default=(), metadata={"later": True})

    @property
    def kind(self) -> tuple[str, tuple[int, ...]]:
        """Profile and sizes of the compute instances: equal for what serves the same, wherever it stands."""
        sizes = sorted((each.size for each in self.compute), reverse=True) if self.compute else ()
        return self.profile, tuple(sizes)

    @property
    def name(self) -> str:
        """The profile, or the compute instances that share it: ``1c.3g.40gb*3``."""
        if not self.compute:
            return self.profile
        return written(f"{size}c.{self.profile}" for size in self.kind[1])

    @property
    def at(self) -> At:
        """The key of a single partition on its GPU, see parts()."""
        return (self.start, self.compute[0].start) if self.compute else self.start

    def __str__(self) -> str:
        where = f"{self.name} at {self.start}:{self.size}"
        return f"{where} ({self.compute[0].start}:{self.compute[0].size})" if len(self.compute) == 1 else where


# One GPU's partitions, ordered by start.
Layout: TypeAlias = tuple[Placement, ...]


def parts(layout: Iterable[Placement]) -> Layout:
    """The partitions of *layout* one by one: GPU instances that several compute instances share come once for each."""
    return tuple(
        part
        for each in layout
        for part in ([replace(each, compute=(one,)) for one in each.compute] if each.compute else [each])
    )


def layout_text(layout: Iterable[Placement], *, places: bool = False) -> str:
    """One GPU's layout as text: ``3g.40gb+1g.10gb*2``; without partitions it is empty.

    places: with the place of each, so that it parses to this very layout: ``3g.40gb@4+1g.10gb@0+1c.2g.20gb@2*2``.
    """
    return written(f"{part.name}@{part.start}" if places else part.name for part in parts(layout))


def placed_text(layout: Iterable[Placement]) -> str:
    """Returns the layout as declared, each partition with its place: layout_text() with places."""
    return layout_text(layout, places=True)


def written(names: Iterable[str] | Mapping[str, int]) -> str:
    """Returns the *names* of partitions in the order in which they come first, with how often each is there."""
    counts = Counter(names)
    return "+".join(name if count == 1 else f"{name}*{count}" for name, count in counts.items())


def together(partitions: Iterable[Placement]) -> Layout:
    """Returns the inverse of parts(): the GPU instances of the *partitions*, by start."""
    found: dict[tuple[str, int, int], list[Placement]] = {}
    for each in partitions:
        found.setdefault((each.profile, each.start, each.size), []).append(each)
    made = (
        replace(same[0], compute=tuple(sorted((c for each in same for c in each.compute), key=lambda c: c.start)))
        for same in found.values()
    )
    return tuple(sorted(made, key=lambda each: each.start))


def divide(
    profile: Profile,
    sizes: Sequence[int],
    existing: Collection[Compute] = (),
    in_use: Collection[int] = (),
) -> tuple[Compute, ...] | None:
    """The places of compute instances of these *sizes* in a GPU instance of *profile*, by start; None for no place.

    Of all places those that destroy fewest of the *existing* ones that start at one of *in_use*, then fewest of them;
    where that is undecided, larger ones start lower.
    """
    found = _divided(profile, tuple(sorted(sizes, reverse=True)), 0, 0)

    def cost(places: tuple[Compute, ...]) -> tuple[int, int]:
        gone = [each for each in existing if each not in places]
        return sum(each.start in in_use for each in gone), len(gone)

    best = min(found, key=cost, default=None)
    return best if best is None else tuple(sorted(best, key=lambda each: each.start))


def _divided(profile: Profile, sizes: tuple[int, ...], taken: int, lowest: int) -> Iterator[tuple[Compute, ...]]:
    """Every placement of *sizes* beside the compute slices *taken*; equal ones in order from *lowest*."""
    if not sizes:
        yield ()
        return
    size, rest = sizes[0], sizes[1:]
    for start in profile.compute_starts(size):
        slices = (1 << size) - 1 << start
        if start >= lowest and not taken & slices:
            for more in _divided(profile, rest, taken | slices, start + 1 if size in rest[:1] else 0):
                yield (Compute(start, size), *more)


def compute_refusal(profile: Profile, compute: Sequence[Compute]) -> str:
    """Returns the reason why these compute instances cannot share a GPU instance of *profile*; empty where they can."""
    taken = 0
    for each in compute:
        slices = (1 << each.size) - 1 << each.start
        if each.size not in profile.compute_sizes:
            return f"no compute instance of {each.size} slices shares a {profile.name}"
        if each.start not in profile.compute_starts(each.size) or taken & slices:
            starts = ", ".join(map(str, profile.compute_starts(each.size)))
            return f"{each.size}c.{profile.name} may start at compute slice {starts} where that is free"
        taken |= slices
    return ""


@dataclass
class Grid:
    """The instances on one GPU while a layout is being built."""

    geometry: Geometry
    placed: list[tuple[Profile, int]] = field(default_factory=list)

    @classmethod
    def of(cls, layout: Iterable[Placement], geometry: Geometry) -> Grid:
        """Returns the grid with the partitions of *layout* on it. Raises UnknownProfile."""
        return cls(geometry, [(geometry.profile(each.profile), each.start) for each in layout])

    def allows(self, profile: Profile, start: int) -> bool:
        """Returns whether the GPU takes one more instance of *profile* at *start*."""
        end = start + (profile.size or 0)
        free = all(at >= end or start >= at + (other.size or 0) for other, at in self.placed)
        return free and not self.refusal(profile)

    def refusal(self, profile: Profile) -> str:
        """Returns why one more instance of *profile* is refused wherever it starts; empty where it is not."""
        others = [other for other, _ in self.placed]
        if profile.max_count is not None and others.count(profile) >= profile.max_count:
            return f"at most {profile.max_count} of {profile.name} on one GPU"
        used = sum(other.compute_slices for other in others)
        total = self.geometry.compute_slices or 0
        if used + profile.compute_slices > total:
            return f"compute slices: {used + profile.compute_slices} of {total}"
        return next((why for other in others if (why := media_clash(profile, other))), "")

    def fitting(self) -> tuple[str, ...]:
        """Returns the profiles of which one more fits. Raises MigNotSupported where the placements are unknown."""
        profiles = self.geometry.profiles
        return tuple(p.name for p in profiles if any(self.allows(p, at) for at in starts(p, self.geometry)))

    def put(self, profile: Profile, start: int) -> None:
        self.placed.append((profile, start))

    def layout(self) -> Layout:
        placed = sorted(self.placed, key=lambda each: each[1])
        return tuple(Placement(profile.name, start, profile.size or 0) for profile, start in placed)


def starts(profile: Profile, geometry: Geometry) -> tuple[int, ...]:
    """Returns the starts of an instance of *profile*. Raises MigNotSupported where they are not known."""
    if profile.starts is None or profile.size is None or geometry.placement_units is None:
        raise MigNotSupported(
            f"where {profile.name} may stand on {geometry.model} is not known, so a layout cannot be checked",
            hint="; ".join(geometry.notes) or None,
        )
    return profile.starts


def media_clash(one: Profile, other: Profile) -> str:
    """Returns why two profiles exclude each other for the media engines, of which +me takes those that exist once.

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
