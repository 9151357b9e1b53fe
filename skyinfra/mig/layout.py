"""Reading declared layouts.

A layout is declared as a string ("3g.40gb", "3g.40gb+2g.20gb+1g.10gb*2"), a mapping of profile names to counts, a
sequence of profile names, or PerGpu, which holds one of those for each GPU, or "off" for a GPU that stays whole. A
size may replace a profile: "2x>=20GB" is twice the smallest profile with at least 20 GB, and ">=20GB" alone fills the
GPU with it. "3g.40gb@4" insists on a place: the instance starts at memory slice 4.

"1c.3g.40gb" is a compute instance that shares a GPU instance of the profile 3g.40gb: its memory and media engines, not
its compute slices. Those of one profile share as few GPU instances as hold them: larger ones first, each in the first
one that has room; "1c.3g.40gb@4*2+2c.3g.40gb@0" says which share one.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TypeAlias

from skyinfra.errors import InvalidLayout, LayoutDoesNotFit, UnknownProfile, at, counted
from skyinfra.mig.geometry import Geometry, Profile, gpu_profile, is_profile_name
from skyinfra.mig.grid import divide, written

Declared: TypeAlias = str | Mapping[str, int] | Sequence[str]

# A plus joins two profiles where a digit or a size follows; "+me" and "+gfx" belong to a name.
_JOIN = re.compile(r"\+(?=\s*[\d>])")
_PART = re.compile(r"(?P<name>[^*]+?)\s*(?:\*\s*(?P<count>\d{1,9}))?", re.A)
_TIMES = re.compile(r"(?P<count>\d{1,9})\s*x\s*(?P<size>>.*)", re.A | re.I)
_SIZE = re.compile(r">=\s*(?P<memory>\d{1,4})\s*GB", re.A | re.I)
_PLACE = re.compile(r"(?P<name>[^@]*?)\s*@\s*(?P<start>\d{1,3})", re.A)
# A GPU that stays whole, and what a person may write for it, as the driver and skyinfra-runner do.
OFF = "off"
_NONE = (OFF, "none", "no", "disabled", "all-disabled")
_HINT = 'Write it like "3g.40gb", "3g.40gb+2g.20gb+1g.10gb*2", "3g.40gb@4" or, by size, "2x>=20GB".'


@dataclass(frozen=True, slots=True)
class PerGpu:
    """A declared layout for each GPU of a node, in the order of the GPUs, "off" where it stays whole.

    Made by per_gpu().
    """

    layouts: tuple[str, ...]

    def named(self, geometry: Geometry) -> PerGpu:
        """Returns the same layouts, with the names of the GPU's profiles, as text() writes them."""
        return PerGpu(tuple(each if is_off(each) else text(each, geometry) for each in self.layouts))

    def check_gpus(self, count: int) -> None:
        """Raises InvalidLayout unless there is a layout for each of *count* GPUs."""
        if len(self.layouts) != count:
            raise InvalidLayout(
                f"per_gpu holds {counted(len(self.layouts), 'layout')} for {counted(count, 'GPU')}",
                hint="Give one layout for each GPU.",
            )

    def __str__(self) -> str:
        return "|".join(self.layouts)


def per_gpu(*layouts: Declared) -> PerGpu:
    """Returns each GPU's own layout: as many as the node has GPUs. "off" is a GPU that stays whole.

    Raises InvalidLayout for what cannot be read, and where every GPU stays whole.
    """
    if not layouts:
        raise InvalidLayout("per_gpu needs a layout for each GPU", hint=_HINT)
    written = []
    for index, declared in enumerate(layouts):
        with at(f"[{index}]", InvalidLayout):
            written.append(OFF if is_off(declared) else text(declared))
    if all(map(is_off, written)):
        raise InvalidLayout("every GPU stays whole", given="|".join(written), hint="Leave the layout out.")
    return PerGpu(tuple(written))


def is_off(declared: Declared) -> bool:
    """Returns whether the layout of one GPU of several is "off": the GPU stays whole."""
    return isinstance(declared, str) and declared.strip().lower() == OFF


def text(declared: Declared, geometry: Geometry | None = None) -> str:
    """Returns the declared layout as one string that parses to the same, so that it can be compared and hashed.

    With *geometry* it holds the names of the GPU's profiles in place of sizes and of other drivers' names.
    A sequence or mapping of a single profile becomes "3g.40gb*1": the bare name would fill the GPU.
    Raises InvalidLayout for what cannot be read, and UnknownProfile for what the GPU does not have.
    """
    counts: dict[str, int] = {}
    for name, start, count in _read(declared):
        known = name if geometry is None else _spelled(*_found(name, start, count, geometry))
        known += "" if start is None else f"@{start}"
        counts[known] = counts.get(known, 0) + count
    if isinstance(declared, str) and fills(declared):
        return next(iter(counts))
    alone = len(counts) == 1
    return "+".join(_written(name, count, alone=alone) for name, count in counts.items())


def fills(declared: str) -> bool:
    """Returns whether the string is one profile or size alone, which fills each GPU with it."""
    exact = "*" in declared or "@" in declared or _JOIN.search(declared)
    return not exact and not _TIMES.fullmatch(declared.strip())


def _written(name: str, count: int, *, alone: bool) -> str:
    if name.startswith(">"):
        return f"{count}x{name}"
    return f"{name}*1" if alone and count == 1 and "@" not in name else written({name: count})


def parse(declared: Declared, geometry: Geometry) -> tuple[str, ...]:
    """The profiles and compute instances of one GPU's declared layout, by the names in *geometry*, largest first.

    Raises InvalidLayout for what cannot be read, UnknownProfile for what this GPU does not have, and LayoutDoesNotFit
    for more instances of a profile than the GPU has compute slices.
    """
    found: dict[tuple[Profile, int], int] = {}
    for name, start, count in _read(declared):
        known = _found(name, start, count, geometry)
        found[known] = found.get(known, 0) + count
    for (profile, slices), count in found.items():
        _check_count(profile, slices, count, geometry)
    largest = sorted(found, key=lambda known: (largest_first(known[0]), -(known[1] or known[0].compute_slices)))
    return tuple(_spelled(*known) for known in largest for _ in range(found[known]))


@dataclass(frozen=True, slots=True)
class Wanted:
    """One GPU's declared layout as GPU instances.

    counts: how many there are of each profile. pins: those that insist on a place, with the start.
    shared: of those that compute instances share and that insist on none, the sizes of the compute instances, largest
    first, of each. pinned: the same of those that insist on a place.
    """

    counts: dict[Profile, int] = field(default_factory=dict)
    pins: tuple[tuple[Profile, int], ...] = ()
    shared: dict[Profile, tuple[tuple[int, ...], ...]] = field(default_factory=dict)
    pinned: dict[tuple[Profile, int], tuple[int, ...]] = field(default_factory=dict)


def wanted(declared: Declared, geometry: Geometry) -> Wanted:
    """Returns the GPU instances of one GPU's declared layout.

    Raises InvalidLayout, UnknownProfile, and LayoutDoesNotFit for compute instances that no GPU instance can hold.
    """
    entries = ((*_found(*entry, geometry), *entry[1:]) for entry in _read(declared))
    return gathered(entries, geometry)


def gathered(entries: Iterable[tuple[Profile, int, int | None, int]], geometry: Geometry) -> Wanted:
    """Returns the same of *entries*: profile, size of the compute instance or 0, start or None, and count."""
    counts: dict[Profile, int] = {}
    pins: dict[tuple[Profile, int, int], None] = {}
    loose: dict[Profile, list[int]] = {}
    placed: dict[tuple[Profile, int], list[int]] = {}
    for profile, slices, start, count in entries:
        counts.setdefault(profile, 0)
        if slices:
            _check_count(profile, slices, count, geometry)
            same = loose.setdefault(profile, []) if start is None else placed.setdefault((profile, start), [])
            same += [slices] * count
        else:
            counts[profile] += count
        if start is not None:
            pins[profile, start, -1 if slices else len(pins)] = None
    shared = {profile: _packed(profile, sizes) for profile, sizes in loose.items()}
    pinned = {where: tuple(sorted(sizes, reverse=True)) for where, sizes in placed.items()}
    for (profile, start), sizes in pinned.items():
        counts[profile] += 1
        if divide(profile, sizes) is None:
            names = written(_spelled(profile, size) for size in sizes)
            raise LayoutDoesNotFit(
                f"one {profile.name} has {profile.compute_slices} compute slices", given=f"{names} at {start}"
            )
    for profile, groups in shared.items():
        counts[profile] += len(groups)
    return Wanted(counts, tuple((profile, start) for profile, start, _ in pins), shared, pinned)


def counts(declared: Declared, geometry: Geometry) -> dict[Profile, int]:
    """Returns the number of GPU instances of each profile in one GPU's declared layout. Raises as wanted()."""
    return wanted(declared, geometry).counts


def alone(declared: Declared, geometry: Geometry) -> tuple[Profile, int]:
    """The profile of a layout that fills() a GPU, and the size of its compute instances; 0: each fills its instance."""
    return _known(_read(declared)[0][0], geometry)


def _packed(profile: Profile, sizes: Iterable[int]) -> tuple[tuple[int, ...], ...]:
    """Returns the compute instances of these *sizes* in GPU instances of *profile*: each in the first that has room."""
    groups: list[tuple[int, ...]] = []
    for size in sorted(sizes, reverse=True):
        index = next((i for i, group in enumerate(groups) if divide(profile, (*group, size)) is not None), None)
        if index is None:
            groups.append((size,))
        else:
            groups[index] = (*groups[index], size)
    return tuple(groups)


def _check_count(profile: Profile, slices: int, count: int, geometry: Geometry) -> None:
    """Raises LayoutDoesNotFit for more partitions of one kind than the GPU has compute slices."""
    if geometry.compute_slices is not None and count > geometry.compute_slices:
        limit = geometry.compute_slices // slices if slices else profile.max_count or geometry.compute_slices
        name = _spelled(profile, slices)
        raise LayoutDoesNotFit(f"at most {limit} of {name} on one {geometry.model}", given=count)


def _spelled(profile: Profile, slices: int) -> str:
    return f"{slices}c.{profile.name}" if slices else profile.name


def _found(name: str, start: int | None, count: int, geometry: Geometry) -> tuple[Profile, int]:
    """The same as `_known`. Raises InvalidLayout for several at one place that no GPU instance can hold together."""
    profile, slices = _known(name, geometry)
    if start is not None and count != 1 and not slices:
        raise _one_place(f"{name}@{start}*{count}")
    return profile, slices


def _known(name: str, geometry: Geometry) -> tuple[Profile, int]:
    """The profile of that name and the size of the compute instance in it, 0 for one that fills its GPU instance.

    Or the smallest profile of that size; not one with attributes, which is asked for by name.
    """
    size = _SIZE.fullmatch(name)
    if not size:
        return geometry.divided(name)
    plain = [profile for profile in geometry.profiles if not profile.attributes]
    enough = [profile for profile in plain if profile.memory_gb >= int(size["memory"])]
    if enough:
        return min(enough, key=lambda profile: (profile.memory_gb, profile.compute_slices)), 0
    if not plain:
        return geometry.profile(name), 0
    largest = max(plain, key=lambda profile: profile.memory_gb)
    raise UnknownProfile(
        f"{geometry.model} has no profile of that size", given=name, hint=f"The largest is {largest.name}."
    )


def largest_first(profile: Profile) -> tuple[int, int, str]:
    """Sort key. In this order the driver's own placement never fails where a placement exists."""
    return -profile.compute_slices, -(profile.size or 0), profile.name


def _read(declared: Declared) -> list[tuple[str, int | None, int]]:
    """Names, starts where they are given, and counts, as declared."""
    if isinstance(declared, str):
        parts = [_part(part) for part in _JOIN.split(declared)]
    elif isinstance(declared, Mapping):
        parts = [_entry(name, count) for name, count in declared.items()]
    elif isinstance(declared, Sequence):
        parts = [_entry(name, 1) for name in declared]
    else:
        raise InvalidLayout("a layout is a string, a list or a mapping", given=declared, hint=_HINT)
    if not parts:
        raise InvalidLayout("the layout is empty", given=declared, hint=_HINT)
    return parts


def _part(part: str) -> tuple[str, int | None, int]:
    times = _TIMES.fullmatch(part.strip())
    form = _PART.fullmatch(times["size"] if times else part.strip())
    if not form or (times and form["count"]):
        raise InvalidLayout("not a profile and count", given=part.strip(), hint=_HINT)
    given = times["count"] if times else form["count"]
    return _entry(form["name"], 1 if given is None else int(given))


def _entry(given: object, count: object) -> tuple[str, int | None, int]:
    place = _PLACE.fullmatch(given) if isinstance(given, str) else None
    name, number = _name(place["name"] if place else given), _count(given, count)
    if place is None:
        return name, None, number
    if name.startswith(">") or (number != 1 and gpu_profile(name) == name):
        raise _one_place(given)
    return name, int(place["start"]), number


def _one_place(given: object) -> InvalidLayout:
    hint = "Write each partition with its place: 1g.10gb@0+1g.10gb@1; only compute instances share one."
    return InvalidLayout("a place is that of one partition of a named profile", given=given, hint=hint)


def _name(name: object) -> str:
    """Returns the name of a profile, or a size such as ">=20GB", in the one way in which it is written."""
    size = _SIZE.fullmatch(name.strip()) if isinstance(name, str) else None
    if size:
        return f">={int(size['memory'])}GB"
    if not isinstance(name, str) or not is_profile_name(name):
        hint = _HINT
        if isinstance(name, str) and name.strip().lower() in _NONE:
            hint = 'A node whose GPUs stay whole has no layout: leave it out; one GPU of several is "off" in per_gpu().'
        raise InvalidLayout("not the name of a profile", given=name, hint=hint)
    return name.strip().lower()


def _count(name: object, count: object) -> int:
    if isinstance(count, bool) or not isinstance(count, int) or count < 1:
        raise InvalidLayout(f"{name}: the count is a whole number from 1", given=count)
    return count
