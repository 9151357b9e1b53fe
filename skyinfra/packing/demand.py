"""Reading a demand: partitions by profile or by memory, and the number of each."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TypeAlias

from skyinfra import mig
from skyinfra.errors import InvalidDemand, MigNotSupported, UnknownProfile
from skyinfra.mig import Geometry, Profile
from skyinfra.mig.geometry import gpu_profile, is_profile_name

DemandInput: TypeAlias = str | Mapping[str, int]

# More than any fleet has partitions; beyond it the numbers of the integer programme lose their last digits.
LIMIT = 1_000_000

_PART = re.compile(r"(?:(?P<times>\d{1,30})\s*x\s*)?(?P<what>[^*]+?)\s*(?:\*\s*(?P<count>\d{1,30}))?", re.A | re.I)
_SIZE = re.compile(r">=\s*(?P<memory>\d{1,30})\s*GB?", re.A | re.I)
_HINT = 'Write it like "1g.10gb*20, 3g.40gb*4, >=18GB*6".'


@dataclass(frozen=True, slots=True)
class Demand:
    """A number of partitions of one profile, or of one memory size.

    wanted: "1g.10gb" or ">=18GB". count: how many. memory_gb: what each has at least.
    named: whether it is a profile.
    """

    wanted: str
    count: int
    memory_gb: int
    named: bool

    @property
    def attributes(self) -> str:
        """The text behind the size in the name of the profile: "+me", "+gfx", "-me", or nothing."""
        return self.wanted.partition("gb")[2] if self.named else ""

    def __str__(self) -> str:
        return f"{self.wanted}*{self.count}"


def read(declared: DemandInput) -> tuple[Demand, ...]:
    """Returns the demands, largest first; equal ones are added up, so that their order means nothing.

    A string of parts with commas between them ("1g.10gb*20, 3g.40gb*4, >=18GB*6", also "6x>=18GB"; a part without a
    number is one), or a mapping of profiles and sizes to counts. Raises InvalidDemand for what cannot be read, and
    UnknownProfile, with the nearest names, for a profile that no GPU has.
    """
    counts: dict[str, int] = {}
    for wanted, count in _parts(declared):
        counts[wanted] = counts.get(wanted, 0) + count
    if sum(counts.values()) > LIMIT:
        raise InvalidDemand(f"more than {LIMIT:,} partitions", field="demand", given=sum(counts.values()))
    found = [_demand(wanted, count) for wanted, count in counts.items()]
    return tuple(sorted(found, key=lambda each: (-each.memory_gb, each.named, each.wanted)))


def text(demands: tuple[Demand, ...]) -> str:
    """Returns the demand as one string that reads as the same."""
    return ", ".join(map(str, demands))


def having(name: str) -> tuple[tuple[Geometry, Profile], ...]:
    """Returns the GPUs that have a profile of that name, and the profile.

    The name that other drivers give it only counts where no GPU has the name itself. GPUs whose profiles have no memory
    of their own, because they share the machine's, are left out.
    """
    geometries = [mig.geometry(model) for model in mig.models()]
    named = [
        (each, profile)
        for each in geometries
        for profile in each.profiles
        if profile.name == name and profile.memory_gb
    ]
    if named:
        return tuple(named)
    drifted = []
    for geometry in geometries:
        with contextlib.suppress(UnknownProfile, MigNotSupported):
            drifted.append((geometry, geometry.profile(name)))
    return tuple(each for each in drifted if each[1].memory_gb)


def _parts(declared: DemandInput) -> list[tuple[str, int]]:
    if isinstance(declared, str):
        return [_part(part.strip()) for part in declared.split(",")]
    if isinstance(declared, Mapping) and declared:
        return [_counted(name, count) for name, count in declared.items()]
    raise InvalidDemand("a demand is a string or a mapping", field="demand", given=declared, hint=_HINT)


def _part(part: str) -> tuple[str, int]:
    form = _PART.fullmatch(part)
    if not form or (form["times"] and form["count"]):
        raise InvalidDemand("not a profile or size with a count", field="demand", given=part, hint=_HINT)
    return _counted(form["what"], int(form["times"] or form["count"] or 1))


def _counted(wanted: object, count: object) -> tuple[str, int]:
    if isinstance(count, bool) or not isinstance(count, int) or count < 1:
        raise InvalidDemand(f"{wanted}: the count is a whole number from 1", field="demand", given=count)
    size = _SIZE.fullmatch(wanted.strip()) if isinstance(wanted, str) else None
    if size and int(size["memory"]):
        return f">={int(size['memory'])}GB", count
    if not isinstance(wanted, str) or not is_profile_name(wanted):
        raise InvalidDemand("not the name of a profile, nor a size", field="demand", given=wanted, hint=_HINT)
    name = wanted.strip().lower()
    if gpu_profile(name) != name:
        hint = f"Ask for {gpu_profile(name)}, and declare its compute instances in the pool."
        raise InvalidDemand("a demand has no compute instances", field="demand", given=wanted, hint=hint)
    return name, count


def _demand(wanted: str, count: int) -> Demand:
    size = _SIZE.fullmatch(wanted)
    if size:
        return Demand(wanted, count, int(size["memory"]), named=False)
    if not having(wanted):
        raise UnknownProfile("no GPU has a profile of that name", field="demand", given=wanted, hint=_nearest(wanted))
    return Demand(wanted, count, int(re.findall(r"\d+", wanted)[1]), named=True)


def _nearest(name: str) -> str:
    """Returns the profiles that come near in compute slices, and then in memory."""
    slices, memory = map(int, re.findall(r"\d+", name)[:2])
    known = {
        p.name: p for model in mig.models() for p in mig.geometry(model).profiles if p.memory_gb and not p.attributes
    }
    near = sorted(known, key=lambda n: (abs(known[n].compute_slices - slices), abs(known[n].memory_gb - memory), n))
    return f"The nearest are {', '.join(near[:3])}."
