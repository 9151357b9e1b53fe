"""Layouts that follow the work: which GPUs of a fleet get which of the declared layouts, for the tasks that wait.

`choose` makes the whole choice, and is pure: tasks, GPUs and the time go in, changes come out. The head of a fleet
calls it (skyinfra.head.workload_layouts), and so does the simulation (``python -m benchmarks follow``). It knows
nothing of Dask, and it orders nothing: a node brings its GPUs to the layout as after any other change.

GPU by GPU it takes the change that serves most of the tasks that no idle partition takes, then the one that destroys
fewest partitions. A task counts once, and once more for each `idle_seconds` that it has waited, so that a few that wait
long are not passed over for ever. A change destroys only partitions that had no task for `idle_seconds`. A GPU whose
layout was changed is left for `idle_seconds`, and so are GPUs that stay whole and those whose change is not done yet.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate

from skyinfra.errors import InvalidField, InvalidLayout, LayoutDoesNotFit, LayoutError, at
from skyinfra.mig.geometry import Geometry
from skyinfra.mig.grid import Layout, written
from skyinfra.mig.layout import Declared, counts, text
from skyinfra.mig.placement import carries, rearranged, resolve

_WHOLE = "Give layouts of whole GPU instances; mig= takes compute instances."
# What one task less or more makes is more than that.
_NOTHING = 1e-9


@dataclass(frozen=True, init=False)
class Follow:
    """The layouts of one GPU among which those of a fleet follow its work.

    among: the layouts, each of one GPU, as text. idle_seconds: a partition is destroyed only after so long without a
    task; a GPU whose layout was changed is left for so long. keep: profiles of which the fleet always keeps as many,
    such as ``1g.10gb*2``, as text; empty for none. Raises `InvalidLayout`, `InvalidField`.
    """

    among: tuple[str, ...]
    idle_seconds: float
    keep: str

    def __init__(self, among: Sequence[Declared], *, idle_seconds: float = 300.0, keep: Declared | None = None) -> None:
        if isinstance(among, str) or not isinstance(among, Sequence) or not among:
            hint = 'among=["1g.10gb*7", "7g.80gb"]'
            raise InvalidLayout("expected a list of layouts of one GPU", field="among", given=among, hint=hint)
        if isinstance(idle_seconds, bool) or not isinstance(idle_seconds, int | float) or not 0 <= idle_seconds < 1e9:
            raise InvalidField("expected seconds, from 0", field="idle_seconds", given=idle_seconds)
        object.__setattr__(self, "among", tuple(_text(each, f"among[{i}]") for i, each in enumerate(among)))
        object.__setattr__(self, "idle_seconds", float(idle_seconds))
        object.__setattr__(self, "keep", _text(keep, "keep") if keep else "")

    def on(self, geometry: Geometry) -> Follow:
        """Returns the same with the names of the profiles of *geometry*, each layout once.

        Raises what resolve() raises, with the path of the field, and LayoutDoesNotFit where no layout has a profile
        that is to be kept.
        """
        named: dict[str, Layout] = {}
        for index, each in enumerate(self.among):
            with at(f"among[{index}]", LayoutError):
                layout = resolve(each, geometry, 1)[0]
                if any(place.compute for place in layout):
                    raise InvalidLayout("compute instances do not follow the work", given=each, hint=_WHOLE)
                named[text(each, geometry)] = layout
        with at("keep", LayoutError):
            keep = text(self.keep, geometry) if self.keep else ""
        there = {partition.profile for layout in named.values() for partition in layout}
        if lacking := [name for name in kept(keep, geometry) if name not in there]:
            hint = "Name one of among that has it."
            raise LayoutDoesNotFit("no layout has what is to be kept", field="keep", given=lacking[0], hint=hint)
        return Follow(tuple(named), idle_seconds=self.idle_seconds, keep=keep or None)


@dataclass(frozen=True, slots=True)
class Want:
    """Tasks that wait for a partition: of *profile*, with *memory_gb* at least, or any.

    since: when each of them began to wait, on the clock of *now*.
    """

    profile: str | None = None
    memory_gb: float = 0.0
    since: tuple[float, ...] = ()

    def __str__(self) -> str:
        many = f"{len(self.since)} task{'s' if len(self.since) != 1 else ''}"
        what = self.profile or (f"{self.memory_gb:g} GB" if self.memory_gb else "a slot")
        return f"{many} for {what}"


@dataclass(frozen=True, slots=True)
class Gpu:
    """One GPU of the fleet.

    existing: its partitions. used: when each of them had a task last, in the order of *existing*; math.inf: it has one.
    changed: when its layout was changed last; -math.inf: never. coming: the profiles of a change that is not done yet:
    the GPU is left, and they count as idle partitions.
    """

    node: str
    index: int
    existing: Layout
    used: tuple[float, ...]
    changed: float = -math.inf
    coming: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Change:
    """Another layout for one GPU, which is one of those declared; before: the profiles that stand; why: a sentence."""

    node: str
    index: int
    before: str
    layout: str
    why: str


def kept(keep: str, geometry: Geometry) -> Counter[str]:
    """Returns the number of partitions of each profile that are kept. Raises UnknownProfile, InvalidLayout."""
    return Counter({profile.name: count for profile, count in counts(keep, geometry).items()}) if keep else Counter()


def profiles(layout: str, geometry: Geometry) -> Counter[str]:
    """Returns the profiles of one GPU's layout, by how many there are. Raises what resolve() raises."""
    return Counter(placement.profile for placement in _resolved(layout, geometry))


def choose(
    follow: Follow, geometry: Geometry, queue: Iterable[Want], gpus: Sequence[Gpu], now: float
) -> tuple[Change, ...]:
    """The changes that serve most of the *queue*, in the order in which they were chosen; at most one for each GPU.

    *follow*: of this *geometry*, as Follow.on() gives it. *gpus*: all of the fleet, also those that cannot change.
    """
    fleet = _Fleet(follow, geometry, _Demand(queue, geometry, now, follow.idle_seconds), gpus, now)
    free = [gpu for gpu in gpus if gpu.existing and not gpu.coming and now - gpu.changed >= follow.idle_seconds]
    found: list[Change] = []
    while best := fleet.best(free):
        free.remove(best.gpu)
        found.append(fleet.take(best))
    return tuple(found)


@dataclass(frozen=True, slots=True)
class _Option:
    """A layout for a GPU, and the profiles that go and come with it."""

    gpu: Gpu
    layout: str
    gone: Counter[str]
    comes: Counter[str]


class _Fleet:
    """The idle partitions of a fleet, and all of them, by profile."""

    def __init__(self, follow: Follow, geometry: Geometry, demand: _Demand, gpus: Sequence[Gpu], now: float) -> None:
        self._follow = follow
        self._geometry = geometry
        self._demand = demand
        self._now = now
        self._idle, self._all = Counter[str](), Counter[str]()
        for gpu in gpus:
            pairs = zip(gpu.existing, gpu.used, strict=True)
            self._idle.update(gpu.coming or (place.profile for place, at in pairs if at != math.inf))
            self._all.update(gpu.coming or (place.profile for place in gpu.existing))
        # Where there are fewer than are to be kept, none of them goes.
        self._least = {name: min(count, self._all[name]) for name, count in kept(follow.keep, geometry).items()}

    def best(self, gpus: Sequence[Gpu]) -> _Option | None:
        """The change that serves most besides what idle partitions do, then destroys least; None where none serves."""
        base = self._demand.served(self._idle)
        if self._demand.all - base <= _NOTHING:
            return None
        best: tuple[tuple[float, int, int], _Option] | None = None
        tried: set[tuple[Layout, frozenset[int]]] = set()
        for gpu in gpus:
            used = self._used(gpu)
            if (gpu.existing, used) in tried:  # GPUs that are alike need one look
                continue
            tried.add((gpu.existing, used))
            for order, layout in enumerate(self._follow.among):
                change = _change(layout, gpu.existing, used, self._geometry)
                if change is None or not self._keeps(*change):
                    continue
                gone, comes = change
                gain = self._demand.served(self._idle - gone + comes) - base
                rank = (round(gain, 6), -gone.total(), -order)
                if gain > _NOTHING and (best is None or rank > best[0]):
                    best = rank, _Option(gpu, layout, gone, comes)
        return best[1] if best is not None else None

    def take(self, option: _Option) -> Change:
        """Counts with the change from now on."""
        after = self._idle - option.gone + option.comes
        why = self._why(self._demand.newly(self._idle, after), option.gone)
        self._idle, self._all = after, self._all - option.gone + option.comes
        before = written(sorted((place.profile for place in option.gpu.existing), reverse=True))
        return Change(option.gpu.node, option.gpu.index, before, option.layout, why)

    def _used(self, gpu: Gpu) -> frozenset[int]:
        """Returns the starts of the partitions that had a task within the idle time, or have one."""
        pairs = zip(gpu.existing, gpu.used, strict=True)
        return frozenset(
            place.start for place, at in pairs if at == math.inf or self._now - at < self._follow.idle_seconds
        )

    def _keeps(self, gone: Counter[str], comes: Counter[str]) -> bool:
        after = self._all - gone + comes
        return all(after[name] >= count for name, count in self._least.items())

    def _why(self, served: Sequence[Want], gone: Counter[str]) -> str:
        waited = max((self._now - at for want in served for at in want.since), default=0.0)
        removed = "nothing is removed"
        if gone:
            removed = (
                f"{written(sorted(gone.elements(), reverse=True))} had no task for {self._follow.idle_seconds:g} s"
            )
        return f"{' and '.join(map(str, served))} waited up to {waited:.0f} s, and no idle slot takes them; {removed}"


@lru_cache(maxsize=4096)
def _change(
    layout: str, existing: Layout, used: frozenset[int], geometry: Geometry
) -> tuple[Counter[str], Counter[str]] | None:
    """The profiles that go and come with *layout*; None where it stands, or where one that is *used* would go."""
    desired = _resolved(layout, geometry)
    stays = Counter(place.profile for place in existing if place.start in used)
    if carries(existing, desired) or not stays <= Counter(place.profile for place in desired):
        return None
    after = set(rearranged(desired, existing, geometry, in_use=used))
    gone = [place for place in existing if place not in after]
    if any(place.start in used for place in gone):
        return None
    comes = after - set(existing)
    return Counter(place.profile for place in gone), Counter(place.profile for place in comes)


@lru_cache(maxsize=1024)
def _resolved(layout: str, geometry: Geometry) -> Layout:
    return resolve(layout, geometry, 1)[0]


class _Demand:
    """The tasks of *queue* by what they want, and how many of them a number of partitions takes."""

    def __init__(self, queue: Iterable[Want], geometry: Geometry, now: float, idle_seconds: float) -> None:
        together: dict[tuple[str | None, float], list[float]] = {}
        for want in queue:
            together.setdefault((want.profile, want.memory_gb), []).extend(want.since)
        # Those that fewest partitions take come first.
        order = sorted(together, key=lambda kind: (kind[0] is None, -kind[1], kind[0] or ""))
        self._wants = [Want(profile, memory, tuple(sorted(together[profile, memory]))) for profile, memory in order]
        self._worth = [
            [0.0, *accumulate(1 + (max(0.0, now - at) / idle_seconds if idle_seconds else 0.0) for at in want.since)]
            for want in self._wants
        ]
        self.all = sum(worth[-1] for worth in self._worth)
        self._memory = {profile.name: float(profile.memory_gb) for profile in geometry.profiles}

    def served(self, free: Mapping[str, int]) -> float:
        """Returns the sum of the weights of the tasks that *free* partitions take, the longest waiting first."""
        return sum(worth[count] for worth, count in zip(self._worth, self._taken(free), strict=True))

    def newly(self, before: Mapping[str, int], after: Mapping[str, int]) -> tuple[Want, ...]:
        """Returns the tasks that partitions take *after* a change and not *before*."""
        pairs = zip(self._wants, self._taken(before), self._taken(after), strict=True)
        return tuple(Want(w.profile, w.memory_gb, w.since[less:more]) for w, less, more in pairs if more > less)

    def _taken(self, free: Mapping[str, int]) -> list[int]:
        """Returns the number of tasks of each want that *free* partitions take: each the smallest left for it."""
        left = {name: count for name, count in free.items() if count > 0}
        smallest = sorted(left, key=lambda name: (self._memory.get(name, 0.0), name))
        taken = []
        for want in self._wants:
            rest = len(want.since)
            for name in smallest:
                fits = want.profile in (None, name) and self._memory.get(name, 0.0) >= want.memory_gb
                if fits and rest and left[name]:
                    count = min(rest, left[name])
                    rest, left[name] = rest - count, left[name] - count
            taken.append(len(want.since) - rest)
        return taken


def _text(declared: Declared, field: str) -> str:
    with at(field, LayoutError):
        return text(declared)
