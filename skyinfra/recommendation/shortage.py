"""Advice for a task whose device had no more memory: a larger slot of its fleet, a larger profile, or an offer."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterable
from itertools import groupby

from skyinfra import mig, providers
from skyinfra.accelerators import catalog
from skyinfra.errors import SkyinfraError
from skyinfra.offers import Query, described, load
from skyinfra.packing.declare import sellers
from skyinfra.protocol.instance import InstanceInfo
from skyinfra.protocol.shortage import Shortage

_SHOWN = 3


def advice(shortage: Shortage, slots: Iterable[InstanceInfo]) -> str:
    """Returns sentences on which of *slots* would carry the task, else which profile of its GPU, and which offer.

    Where the need is not known, whatever has more memory is told.
    """
    least, slots = wanted_gb(shortage), list(slots)
    larger = sorted(
        (slot for slot in slots if (slot.own_memory_gb or 0) >= least and slot.slot != shortage.slot),
        key=lambda slot: (slot.own_memory_gb or 0, slot.profile or "", slot.slot),
    )
    if larger:
        kinds = [list(group) for _, group in groupby(larger, key=lambda slot: (slot.profile, slot.own_memory_gb))]
        shown = "; ".join(
            f"{', '.join(slot.slot for slot in group[:_SHOWN])}{', ...' if len(group) > _SHOWN else ''} "
            f"({group[0].profile or group[0].accelerator or group[0].kind}, "
            f"{round(group[0].own_memory_gb or 0, 1):g} GB)"
            for group in kinds[:_SHOWN]
        )
        return f"This fleet has larger slots: {shown}. Ask for one: @sky.compute(gpu_memory_gb={least})."
    # A slot of CPUs has none.
    known = all(slot.own_memory_gb or slot.accelerator is None for slot in slots)
    lines = [f"No slot of this fleet {'has' if known else 'is known to have'} {least} GB."]
    profile = _profile(shortage, least)
    if profile is not None:
        lines.append(f"A larger profile of its GPU: {profile}.")
    offer = _offer(least, shortage.accelerator)
    if offer is not None:
        lines.append(f"The cheapest offer: {offer}.")
    return " ".join(lines)


def wanted_gb(shortage: Shortage) -> int:
    """Returns the nominal memory of a slot that would be enough, in GB; more than the slot had, in any case."""
    more = math.floor((shortage.has or 0) / 1e9) + 1
    return max(more, math.ceil((shortage.needs or 0) / 1e9))


def _profile(shortage: Shortage, least: int) -> str | None:
    """Returns the smallest profile with that memory of the GPU that the slot is a partition of."""
    if shortage.profile is None or shortage.accelerator is None:
        return None
    models = [row.mig_model for row in _variants(shortage.accelerator) if row.mig_model is not None]
    # Of the variants of the GPU those that have the slot's profile; of several, none is known to be it.
    geometries = {mig.geometry(model) for model in models}
    having = [each for each in geometries if any(profile.name == shortage.profile for profile in each.profiles)]
    larger = {
        min(found, key=lambda profile: (profile.memory_gb, profile.compute_slices)).name
        for each in having
        if (found := [one for one in each.profiles if one.memory_gb >= least and not one.attributes])
    }
    return larger.pop() if len(larger) == 1 else None


def _variants(accelerator: str | None) -> list[catalog.Variant]:
    with contextlib.suppress(SkyinfraError):  # a name of the user's own, or none
        return list(catalog.variants(accelerator or ""))
    return []


def _offer(least: int, accelerator: str | None) -> str | None:
    """Returns the cheapest machine of a provider that can be deployed to, with a GPU of that memory, and of the vendor
    of *accelerator*, where that is known: the program is made for it."""
    vendors = {row.vendor for row in _variants(accelerator)} or {"nvidia", "amd"}
    found = Query(memory_gb=least, providers=sellers()).run(load())
    gpus = (offer for offer in found if offer.vendor in vendors and offer.price() is not None)
    best = next((offer for offer in gpus if providers.refuses(offer) is None and providers.on_demand(offer)), None)
    return described(best, spot=False) if best is not None else None
