"""Reading declared layouts.

A layout is declared as a string ("3g.40gb", "3g.40gb+2g.20gb+1g.10gb*2"), a mapping of profile names to counts, a
sequence of profile names, or PerGpu, which holds one of those for each GPU.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TypeAlias

from skyinfra._errors import InvalidLayout, LayoutDoesNotFit
from skyinfra.mig.geometry import Geometry, Profile, is_profile_name

Declared: TypeAlias = str | Mapping[str, int] | Sequence[str]

# A plus joins two profiles where a digit follows; "+me" and "+gfx" belong to a name.
_JOIN = re.compile(r"\+(?=\s*\d)")
_PART = re.compile(r"(?P<name>[^*]+?)\s*(?:\*\s*(?P<count>\d{1,9}))?", re.A)
_HINT = 'Write it like "3g.40gb" or "3g.40gb+2g.20gb+1g.10gb*2".'


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


def text(declared: Declared) -> str:
    """The declared layout as one string that parses to the same, so that it can be compared and hashed.

    A sequence or mapping of a single profile becomes "3g.40gb*1": the bare name would fill the GPU.
    Raises InvalidLayout for what cannot be read.
    """
    parts = _read(declared)
    if isinstance(declared, str) and fills(declared):
        return parts[0][0]
    counts: dict[str, int] = {}
    for name, count in parts:
        counts[name] = counts.get(name, 0) + count
    if len(counts) == 1:
        return "".join(f"{name}*{count}" for name, count in counts.items())
    return "+".join(name if count == 1 else f"{name}*{count}" for name, count in counts.items())


def fills(declared: str) -> bool:
    """Whether the string is one profile name alone, which fills each GPU with it."""
    return "*" not in declared and not _JOIN.search(declared)


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
    """How many of which profile one GPU's layout declares. Raises InvalidLayout and UnknownProfile."""
    found: dict[Profile, int] = {}
    for name, count in _read(declared):
        profile = geometry.profile(name)
        found[profile] = found.get(profile, 0) + count
    return found


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
    form = _PART.fullmatch(part.strip())
    if not form:
        raise InvalidLayout("not a profile and count", given=part.strip(), hint=_HINT)
    count = 1 if form["count"] is None else int(form["count"])
    return _name(form["name"]), _count(form["name"], count)


def _name(name: object) -> str:
    if not isinstance(name, str) or not is_profile_name(name):
        hint = _HINT
        if isinstance(name, str) and re.match(r"\s*\d+c\.", name):
            hint = "Each GPU instance carries one compute instance of its whole size; leave the part before its g out."
        raise InvalidLayout("not the name of a profile", given=name, hint=hint)
    return name.strip().lower()


def _count(name: object, count: object) -> int:
    if isinstance(count, bool) or not isinstance(count, int) or count < 1:
        raise InvalidLayout(f"{name}: the count is a whole number from 1", given=count)
    return count
