"""The places of a pool, out of its declaration: providers and regions in order, and what each place is called."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from typing import Any

from skyinfra.accelerators import Accelerator
from skyinfra.declared import is_output
from skyinfra.errors import InvalidField, NotSupported
from skyinfra.pool import ComputePool
from skyinfra.providers import CloudProvider, Provider
from skyinfra.terraform.state import BETWEEN

# What tells one place of a provider from another, besides its region and its zones.
_ACCOUNT = ("profile", "project", "project_id", "account_id")
_DISTINCT = (*_ACCOUNT, "data_centers", "cloud", "instance_types", "host")
# Besides those, where two places would have one name.
_FINER = ("zone", "availability_domain", "subscription_id", "compartment_id", "provider")
# Of longer ones, which are ids, the end.
_LONGEST, _END = 24, 8


def alternatives(pool: ComputePool) -> Iterator[tuple[str, ComputePool]]:
    """Yields the *pool* with each provider and region that it declares, in order, and the path of the provider.

    Raises `NotSupported` for nodes that nobody sells beside others.
    """
    declared = pool.places.each if pool.places is not None else (pool.provider,)
    for position, provider in enumerate(declared):
        field = f"provider[{position}]" if pool.places is not None else "provider"
        if len(declared) > 1 and not _movable(provider):
            raise NotSupported(
                "only clouds, containers and this machine are tried one after the other, and nothing simulated",
                field=field,
                given=f"sky.{type(provider).__name__}()",
                hint="Give it a pool of its own.",
            )
        for region in getattr(provider, "regions", ()) or (None,):
            each = provider if region is None else _changed(provider, region=region)
            yield field, pool if each is pool.provider else pool.model_copy(update={"provider": each})


def _movable(provider: Provider) -> bool:
    """Returns whether its nodes are made and removed by Terraform, so that a pool can have them elsewhere."""
    own = provider.kind in ("local", "container") and not getattr(provider, "simulate", False)
    return own or isinstance(provider, CloudProvider)


def later_zones(pool: ComputePool) -> Iterator[ComputePool]:
    """Yields the *pool* in each zone behind the first that its provider names, of which nodes take one."""
    zones: Sequence[str] = getattr(pool.provider, "zones", ())
    for position in range(1, len(zones)):
        yield pool.model_copy(update={"provider": _changed(pool.provider, zones=list(zones[position:]))})


def preferring(pool: ComputePool, position: int) -> ComputePool:
    """Returns the *pool* with one accelerator of its list."""
    one = pool.accelerators[position]
    # The second is remembered by the pool, and would be copied.
    return pool.model_copy(update={"accelerator": one, "accelerators": (one,)})


def called(pool: ComputePool, accelerator: Accelerator | None, *, grouped: bool) -> str:
    """Returns the name of the place of *pool*: ``aws us-east-1 us-east-1a``.

    accelerator: of several that are declared; its layout is no part of it. grouped: whether all its zones are used.
    """
    provider = pool.provider
    zones = list(getattr(provider, "zones", ()))
    words = [provider.kind, *_texts(getattr(provider, "region", None)), *(zones if grouped else zones[:1])]
    for name in _DISTINCT:
        words += _texts(getattr(provider, name, None)) if name in provider.model_fields_set else []
    if accelerator is not None:
        words.append(str(accelerator.with_(mig=None)))
    return " ".join(words)


def account(provider: Provider) -> str | None:
    """Returns what a declaration says of the account of *provider*; None where that is the default one."""
    parts = [part for name in (*_ACCOUNT, "subscription_id") for part in _texts(getattr(provider, name, None))]
    return " ".join(parts) or None


def slug(place: str) -> str:
    """Returns the name of a *place* as it stands in the name of a module."""
    return re.sub(r"[^a-z0-9]+", "-", place.lower()).strip("-")


def module_of(pool: ComputePool, place: str) -> str:
    """Returns the name of the module of a *place* of *pool*."""
    return f"{pool.name}{BETWEEN}{slug(place)}"


def distinct_names(places: Sequence[tuple[str, Provider]]) -> list[str]:
    """Returns the names of the *places*, each with its provider; a later one of the same name is more exact.

    Raises `InvalidField` where one of them is declared twice, or two could not be told apart.
    """
    taken: set[str] = set()
    names = []
    for place, provider in places:
        finer = " ".join((place, *_finer(provider)))
        if slug(finer) in taken:
            hint = "Name each place once; two of them differ by region, zone, account, project or instance_types."
            raise InvalidField("the same place twice", field="provider", given=place, hint=hint)
        names.append(finer if slug(place) in taken else place)
        taken |= {slug(names[-1]), slug(finer)}
    return names


def _finer(provider: Provider) -> list[str]:
    found = [text for name in _FINER for text in _texts(getattr(provider, name, None)) if not is_output(text)]
    return [text if len(text) <= _LONGEST else text[-_END:] for text in found]


def _texts(value: object) -> list[str]:
    if value is None or value == "all regions":
        return []
    return [str(each) for each in value] if isinstance(value, list | tuple) else [str(value)]


def _changed(provider: Provider, **fields: Any) -> Provider:
    """Returns *provider* with other values of *fields*, which are checked again."""
    given = {name: getattr(provider, name) for name in provider.model_fields_set - {"regions"}}
    return type(provider)(**{**given, **fields})
