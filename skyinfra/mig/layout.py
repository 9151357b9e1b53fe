"""Reading declared layouts.

A layout is declared as a string ("3g.40gb", "3g.40gb+2g.20gb+1g.10gb*2"), a mapping of profile names to counts, a
sequence of profile names, or PerGpu, which holds one of those for each GPU, or "off" for a GPU that stays whole. A
size may replace a profile: "2x>=20GB" is twice the smallest profile with at least 20 GB, and ">=20GB" alone fills the
GPU with it. "3g.40gb@4" insists on a place: the instance starts at memory slice 4.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TypeAlias

from skyinfra.errors import InvalidLayout, LayoutDoesNotFit, UnknownProfile
from skyinfra.mig.geometry import Geometry, Profile, is_profile_name

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
        """The same layouts, with the names of the GPU's profiles, as text() writes them."""
        return PerGpu(tuple(each if is_off(each) else text(each, geometry) for each in self.layouts))

    def __str__(self) -> str:
        return "|".join(self.layouts)


def per_gpu(*layouts: Declared) -> PerGpu:
    """Each GPU's own layout: as many as the node has GPUs. "off" is a GPU that stays whole.

    Raises InvalidLayout for what cannot be read, and where every GPU stays whole.
    """
    if not layouts:
        raise InvalidLayout("per_gpu needs a layout for each GPU", hint=_HINT)
    written = []
    for index, declared in enumerate(layouts):
        try:
            written.append(OFF if is_off(declared) else text(declared))
        except InvalidLayout as error:
            error.at(f"[{index}]")
            raise
    if all(map(is_off, written)):
        raise InvalidLayout("every GPU stays whole", given="|".join(written), hint="Leave the layout out.")
    return PerGpu(tuple(written))


def is_off(declared: Declared) -> bool:
    """Whether the layout of one GPU of several is "off": the GPU stays whole."""
    return isinstance(declared, str) and declared.strip().lower() == OFF


def text(declared: Declared, geometry: Geometry | None = None) -> str:
    """The declared layout as one string that parses to the same, so that it can be compared and hashed.

    With *geometry* it holds the names of the GPU's profiles in place of sizes and of other drivers' names.
    A sequence or mapping of a single profile becomes "3g.40gb*1": the bare name would fill the GPU.
    Raises InvalidLayout for what cannot be read, and UnknownProfile for what the GPU does not have.
    """
    counts: dict[str, int] = {}
    for name, start, count in _read(declared):
        known = name if geometry is None else _profile(name, geometry).name
        known += "" if start is None else f"@{start}"
        counts[known] = counts.get(known, 0) + count
    if isinstance(declared, str) and fills(declared):
        return next(iter(counts))
    alone = len(counts) == 1
    return "+".join(_written(name, count, alone=alone) for name, count in counts.items())


def fills(declared: str) -> bool:
    """Whether the string is one profile or size alone, which fills each GPU with it."""
    exact = "*" in declared or "@" in declared or _JOIN.search(declared)
    return not exact and not _TIMES.fullmatch(declared.strip())


def _written(name: str, count: int, *, alone: bool) -> str:
    if name.startswith(">"):
        return f"{count}x{name}"
    return name if count == 1 and (not alone or "@" in name) else f"{name}*{count}"


def parse(declared: Declared, geometry: Geometry) -> tuple[str, ...]:
    """The profiles of one GPU's declared layout, by the names in *geometry*, largest first.

    Raises InvalidLayout for what cannot be read, UnknownProfile for what this GPU does not have, and LayoutDoesNotFit
    for more instances of a profile than the GPU has compute slices.
    """
    profiles: list[Profile] = []
    for profile, count in counts(declared, geometry).items():
        if geometry.compute_slices is not None and count > geometry.compute_slices:
            limit = profile.max_count or geometry.compute_slices
            raise LayoutDoesNotFit(f"at most {limit} of {profile.name} on one {geometry.model}", given=count)
        profiles += [profile] * count
    return tuple(profile.name for profile in sorted(profiles, key=largest_first))


def counts(declared: Declared, geometry: Geometry) -> dict[Profile, int]:
    """The number of each profile in one GPU's declared layout. Raises InvalidLayout and UnknownProfile."""
    found: dict[Profile, int] = {}
    for name, _, count in _read(declared):
        profile = _profile(name, geometry)
        found[profile] = found.get(profile, 0) + count
    return found


def fixed(declared: Declared, geometry: Geometry) -> tuple[tuple[Profile, int], ...]:
    """The profiles of one GPU's declared layout that insist on a place, with the start. Raises as counts()."""
    read = _read(declared)
    return tuple((_profile(name, geometry), start) for name, start, _ in read if start is not None)


def _profile(name: str, geometry: Geometry) -> Profile:
    """The profile of that name, or the smallest of that size; not one with attributes, which is asked for by name."""
    size = _SIZE.fullmatch(name)
    if not size:
        return geometry.profile(name)
    plain = [profile for profile in geometry.profiles if not profile.attributes]
    enough = [profile for profile in plain if profile.memory_gb >= int(size["memory"])]
    if enough:
        return min(enough, key=lambda profile: (profile.memory_gb, profile.compute_slices))
    if not plain:
        return geometry.profile(name)
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


def _entry(written: object, count: object) -> tuple[str, int | None, int]:
    place = _PLACE.fullmatch(written) if isinstance(written, str) else None
    name, number = _name(place["name"] if place else written), _count(written, count)
    if place is None:
        return name, None, number
    if number != 1 or name.startswith(">"):
        hint = "Write each partition with its place: 1g.10gb@0+1g.10gb@1."
        raise InvalidLayout("a place is that of one partition of a named profile", given=written, hint=hint)
    return name, int(place["start"]), 1


def _name(name: object) -> str:
    """The name of a profile, or a size such as ">=20GB", in the one way in which it is written."""
    size = _SIZE.fullmatch(name.strip()) if isinstance(name, str) else None
    if size:
        return f">={int(size['memory'])}GB"
    if not isinstance(name, str) or not is_profile_name(name):
        hint = _HINT
        if isinstance(name, str) and name.strip().lower() in _NONE:
            hint = 'A node whose GPUs stay whole has no layout: leave it out; one GPU of several is "off" in per_gpu().'
        elif isinstance(name, str) and re.match(r"\s*\d+c\.", name):
            hint = "Each GPU instance carries one compute instance of its whole size; leave the part before its g out."
        raise InvalidLayout("not the name of a profile", given=name, hint=hint)
    return name.strip().lower()


def _count(name: object, count: object) -> int:
    if isinstance(count, bool) or not isinstance(count, int) or count < 1:
        raise InvalidLayout(f"{name}: the count is a whole number from 1", given=count)
    return count
