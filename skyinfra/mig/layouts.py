"""All layouts of a GPU: the complete ones, the combinations of profiles, and those nearest to a desired one."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache

from skyinfra.mig.drivers import check_driver, rules, version
from skyinfra.mig.geometry import Geometry, Profile
from skyinfra.mig.grid import Grid, Layout, Placement, media_clash, starts
from skyinfra.mig.layout import largest_first


def plain_profiles(geometry: Geometry) -> tuple[str, ...]:
    """One profile for each number of compute slices: without attributes, and not the one with double memory."""
    geometry.check_known()
    plain: dict[int, Profile] = {}
    for profile in geometry.profiles:
        known = plain.get(profile.compute_slices)
        if not profile.attributes and (known is None or profile.memory_gb < known.memory_gb):
            plain[profile.compute_slices] = profile
    return tuple(profile.name for profile in plain.values())


def layouts(
    geometry: Geometry, profiles: Sequence[str] | None = None, *, driver: str | None = None
) -> tuple[Layout, ...]:
    """Returns every non-empty layout of *profiles* (default: all that the GPU has), in a fixed order.

    driver: only what this driver offers. Raises UnknownProfile; MigNotSupported where the placements of this GPU are
    unknown; DriverTooOld where the driver has no MIG on it; InvalidField for what is not a version.
    """
    return _layouts(geometry, _names(geometry, profiles), driver, complete=False)


def maximal_layouts(
    geometry: Geometry, profiles: Sequence[str] | None = None, *, driver: str | None = None
) -> tuple[Layout, ...]:
    """Returns the layouts beside whose partitions, where they stand, nothing more fits. Otherwise as layouts()."""
    return _layouts(geometry, _names(geometry, profiles), driver, complete=True)


def multisets(layouts: Iterable[Layout], geometry: Geometry) -> tuple[tuple[str, ...], ...]:
    """Returns the combinations of profiles in the layouts, whatever their places: each once, largest profiles first."""
    order = {p.name: index for index, p in enumerate(sorted(geometry.profiles, key=largest_first))}
    found = {tuple(sorted((p.profile for p in layout), key=order.__getitem__)) for layout in layouts}
    return tuple(sorted(found, key=lambda names: [order[name] for name in names]))


def maximal_multisets(
    geometry: Geometry, profiles: Sequence[str] | None = None, *, driver: str | None = None
) -> tuple[tuple[str, ...], ...]:
    """Returns the combinations to which no profile can be added, however the partitions are placed."""
    found = multisets(maximal_layouts(geometry, profiles, driver=driver), geometry)
    counted = [Counter(names) for names in found]
    return tuple(names for names, held in zip(found, counted, strict=True) if not any(held < more for more in counted))


def fitting(layout: Sequence[Placement], geometry: Geometry) -> tuple[str, ...]:
    """Returns the profiles of which one more fits beside the partitions, where they stand."""
    return Grid.of(layout, geometry).fitting()


def nearest(wanted: Mapping[str, int], geometry: Geometry, *, limit: int = 3) -> tuple[tuple[str, ...], ...]:
    """Returns the maximal combinations that have the most in common with the *wanted* profiles, best first.

    They consist of the wanted profiles and the plain ones. More memory in wanted partitions is better, then fewer
    partitions that are not wanted.
    """
    kinds = dict.fromkeys([geometry.profile(name).name for name in wanted])
    held = Counter({geometry.profile(name).name: count for name, count in wanted.items()})

    def distance(names: tuple[str, ...]) -> tuple[int, int]:
        common = held & Counter(names)
        return -sum(geometry.profile(name).memory_gb for name in common.elements()), len(names) - common.total()

    found = maximal_multisets(geometry, [*kinds, *(name for name in plain_profiles(geometry) if name not in kinds)])
    return tuple(sorted(found, key=distance)[:limit])


def _names(geometry: Geometry, profiles: Sequence[str] | None) -> tuple[str, ...]:
    if profiles is None:
        geometry.check_known()
        return tuple(profile.name for profile in geometry.profiles)
    return tuple(dict.fromkeys(geometry.profile(name).name for name in profiles))


@lru_cache(maxsize=64)
def _layouts(geometry: Geometry, names: tuple[str, ...], driver: str | None, *, complete: bool) -> tuple[Layout, ...]:
    kinds = sorted((geometry.profile(name) for name in names), key=largest_first)
    forbidden = []
    if driver is not None:
        check_driver((), geometry, driver)
        forbidden = [together for together, since in rules(geometry.model) if version(driver) < version(since)]
    return tuple(_Walk(geometry, kinds, forbidden).run(complete))


@dataclass
class _Walk:
    """All layouts, unit by unit. Profiles and units are bits, because there are thousands of layouts to look at."""

    geometry: Geometry
    kinds: Sequence[Profile]
    forbidden: Sequence[frozenset[str]]
    placed: list[tuple[int, int]] = field(default_factory=list)

    def __post_init__(self) -> None:
        units = self.geometry.placement_units or 0
        self.at: list[list[int]] = [[] for _ in range(units)]
        for index, kind in enumerate(self.kinds):
            for start in starts(kind, self.geometry):
                self.at[start].append(index)
        self.clashes = [
            sum(1 << other for other, kind in enumerate(self.kinds) if media_clash(mine, kind)) for mine in self.kinds
        ]
        names = [kind.name for kind in self.kinds]
        self.together = [sum(1 << names.index(name) for name in rule) for rule in self.forbidden if rule <= set(names)]
        self.room: dict[int, tuple[int, ...]] = {}

    def run(self, complete: bool) -> Iterator[Layout]:
        counts = [0] * len(self.kinds)
        for taken in self._from(0, 0, counts):
            if self.placed and not (complete and self._has_room(taken, counts)):
                yield tuple(Placement(self.kinds[i].name, start, self.kinds[i].size or 0) for i, start in self.placed)

    def _from(self, unit: int, taken: int, counts: list[int]) -> Iterator[int]:
        """Every way to go on at *unit*; yields the units that are taken in the end."""
        if unit == len(self.at):
            yield taken
            return
        for index in self.at[unit]:
            if self._allows(index, counts):
                size = self.kinds[index].size or 0
                counts[index] += 1
                self.placed.append((index, unit))
                yield from self._from(unit + size, taken | ((1 << size) - 1) << unit, counts)
                self.placed.pop()
                counts[index] -= 1
        yield from self._from(unit + 1, taken, counts)

    def _allows(self, index: int, counts: list[int]) -> bool:
        """Returns whether one more of the profile is allowed, wherever there is room."""
        kind = self.kinds[index]
        if kind.max_count is not None and counts[index] >= kind.max_count:
            return False
        used = sum(self.kinds[other].compute_slices for other, _ in self.placed)
        if used + kind.compute_slices > (self.geometry.compute_slices or 0):
            return False
        present = 0
        for other, _ in self.placed:
            present |= 1 << other
        if present & self.clashes[index]:
            return False
        present |= 1 << index
        return not any(present & rule == rule for rule in self.together)

    def _has_room(self, taken: int, counts: list[int]) -> bool:
        """Returns whether a profile fits into the free units."""
        if taken not in self.room:
            self.room[taken] = tuple(
                index
                for index, kind in enumerate(self.kinds)
                if any(not taken & ((1 << (kind.size or 0)) - 1) << start for start in starts(kind, self.geometry))
            )
        return any(self._allows(index, counts) for index in self.room[taken])
