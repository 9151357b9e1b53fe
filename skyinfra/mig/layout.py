"""Reading declared layouts.

A layout is declared as a string ("3g.40gb", "3g.40gb+2g.20gb+1g.10gb*2"), a mapping of profile names to counts, a
sequence of profile names, or PerGpu, which holds one of those for each GPU. A size may replace a profile:
"2x>=20GB" is twice the smallest profile with at least 20 GB, and ">=20GB" alone fills the GPU with it.
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
# What a person may write for "no MIG", as the driver and skyinfra-runner do.
_NONE = ("off", "none", "no", "disabled", "all-disabled")
_HINT = 'Write it like "3g.40gb", "3g.40gb+2g.20gb+1g.10gb*2" or, by size, "2x>=20GB".'


@dataclass(frozen=True, slots=True)
class PerGpu:
    """A declared layout for each GPU of a node, in the order of the GPUs; made by per_gpu()."""

    layouts: tuple[str, ...]

    def __str__(self) -> str:
        return "|".join(self.layouts)


def per_gpu(*layouts: Declared) -> PerGpu:
    """Each GPU's own layout: as many as the node has GPUs. Raises InvalidLayout for what cannot be read."""
    if not layouts:
        raise InvalidLayout("per_gpu needs a layout for each GPU", hint=_HINT)
    written = []
    for index, declared in enumerate(layouts):
        try:
            written.append(text(declared))
        except InvalidLayout as error:
            error.at(f"[{index}]")
            raise
    return PerGpu(tuple(written))


def text(declared: Declared, geometry: Geometry | None = None) -> str:
    """The declared layout as one string that parses to the same, so that it can be compared and hashed.

    With *geometry* it holds the names of the GPU's profiles in place of sizes and of other drivers' names.
    A sequence or mapping of a single profile becomes "3g.40gb*1": the bare name would fill the GPU.
    Raises InvalidLayout for what cannot be read, and UnknownProfile for what the GPU does not have.
    """
    counts: dict[str, int] = {}
    for name, count in _read(declared):
        known = name if geometry is None else _profile(name, geometry).name
        counts[known] = counts.get(known, 0) + count
    if isinstance(declared, str) and fills(declared):
        return next(iter(counts))
    alone = len(counts) == 1
    return "+".join(_written(name, count, alone=alone) for name, count in counts.items())


def fills(declared: str) -> bool:
    """Whether the string is one profile or size alone, which fills each GPU with it."""
    return "*" not in declared and not _JOIN.search(declared) and not _TIMES.fullmatch(declared.strip())


def _written(name: str, count: int, *, alone: bool) -> str:
    if name.startswith(">"):
        return f"{count}x{name}"
    return name if count == 1 and not alone else f"{name}*{count}"


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
    for name, count in _read(declared):
        profile = _profile(name, geometry)
        found[profile] = found.get(profile, 0) + count
    return found


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


def _read(declared: Declared) -> list[tuple[str, int]]:
    """Names and counts, as declared."""
    if isinstance(declared, str):
        parts = [_part(part) for part in _JOIN.split(declared)]
    elif isinstance(declared, Mapping):
        parts = [(_name(name), _count(name, count)) for name, count in declared.items()]
    elif isinstance(declared, Sequence):
        parts = [(_name(name), 1) for name in declared]
    else:
        raise InvalidLayout("a layout is a string, a list or a mapping", given=declared, hint=_HINT)
    if not parts:
        raise InvalidLayout("the layout is empty", given=declared, hint=_HINT)
    return parts


def _part(part: str) -> tuple[str, int]:
    times = _TIMES.fullmatch(part.strip())
    form = _PART.fullmatch(times["size"] if times else part.strip())
    if not form or (times and form["count"]):
        raise InvalidLayout("not a profile and count", given=part.strip(), hint=_HINT)
    given = times["count"] if times else form["count"]
    return _name(form["name"]), _count(form["name"], 1 if given is None else int(given))


def _name(name: object) -> str:
    """The name of a profile, or a size such as ">=20GB", in the one way in which it is written."""
    size = _SIZE.fullmatch(name.strip()) if isinstance(name, str) else None
    if size:
        return f">={int(size['memory'])}GB"
    if not isinstance(name, str) or not is_profile_name(name):
        hint = _HINT
        if isinstance(name, str) and name.strip().lower() in _NONE:
            hint = "A GPU that is not partitioned has no layout: leave it out."
        elif isinstance(name, str) and re.match(r"\s*\d+c\.", name):
            hint = "Each GPU instance carries one compute instance of its whole size; leave the part before its g out."
        raise InvalidLayout("not the name of a profile", given=name, hint=hint)
    return name.strip().lower()


def _count(name: object, count: object) -> int:
    if isinstance(count, bool) or not isinstance(count, int) or count < 1:
        raise InvalidLayout(f"{name}: the count is a whole number from 1", given=count)
    return count
