"""Providers: each turns a declaration into machine types, image and module inputs."""

from __future__ import annotations

import importlib
import json
from functools import cache
from pathlib import Path
from typing import Any

import skyinfra
from skyinfra.offers import Offer
from skyinfra.providers.base import Places, Provider, Request, Selection
from skyinfra.providers.cloud import CloudProvider
from skyinfra.providers.data import Boot, Data, TerraformProvider, Traits, kinds, read, sold_by, strings
from skyinfra.providers.from_state import Machines, machines_of, provider_of

__all__ = [
    "Boot",
    "CloudProvider",
    "Data",
    "Machines",
    "Places",
    "Provider",
    "Request",
    "Selection",
    "TerraformProvider",
    "Traits",
    "deployable",
    "elastic_providers",
    "kinds",
    "machines_of",
    "on_demand",
    "provider_of",
    "read",
    "refuses",
    "sold_by",
    "strings",
    "undeployable",
    "who_partitions",
]
# The classes of each provider, as its data file names them.
for _module, _names in vars(skyinfra)["_PROVIDERS"].items():
    for _name in _names.split():
        globals()[_name] = getattr(importlib.import_module(_module), _name)
        __all__ += [_name]

_NOT_DEPLOYABLE = Path(__file__).with_name("not_deployable.json")


@cache
def deployable() -> dict[str, type[Provider]]:
    """The providers that this version deploys to, by kind: the classes of this package that have a data file."""
    exported = (globals()[name] for name in __all__)
    classes = (each for each in exported if isinstance(each, type) and issubclass(each, Provider))
    return {cls.kind: cls for cls in classes if getattr(cls, "kind", None) in kinds()}


def elastic_providers() -> list[type[Provider]]:
    """Returns the providers whose number of nodes follows the work."""
    return [cls for kind, cls in sorted(deployable().items()) if read(kind).elastic is not None]


def undeployable(kind: str) -> str | None:
    """Returns why this version deploys nothing to the provider *kind*, and what to use instead; None where it does."""
    if kind in deployable():
        return None
    known: dict[str, Any] = json.loads(_NOT_DEPLOYABLE.read_text(encoding="utf-8"))
    if kind not in known:
        return "this version of skyinfra has no module"
    return f"{known[kind]['why']}; {known[kind]['instead']}"


def refuses(offer: Offer) -> str | None:
    """Returns the reason why a declaration without an image of one's own cannot have that machine; None where it can.

    None as well for a provider that this version does not deploy to: `undeployable` says why.
    """
    # Some become another provider for what is set up in another way, as Google Cloud does for TPUs.
    sellers = [kind for kind in deployable() if sold_by(kind) == offer.provider]
    reasons = [read(kind).refuses(offer) for kind in sellers if offer.vendor not in read(kind).apart]
    return None if None in reasons else next(iter(reasons), None)


def on_demand(offer: Offer) -> bool:
    """Returns whether the machine of *offer* is sold on demand, as far as this version knows."""
    return offer.provider not in deployable() or read(offer.provider).on_demand(offer.machine_type)


def network(offer: Offer) -> str | None:
    """Returns the kind of the network for RDMA between machines of *offer*, such as EFA; None where none is known."""
    row = read(offer.provider).fabric(offer) if offer.provider in deployable() else None
    return row.network if row else None


def who_partitions(offer: Offer) -> str | None:
    """Returns who may partition the accelerators of *offer*: tenant, provider, nobody, unknown; None where nobody can.

    A provider that this version does not deploy to has no traits, so that it is unknown there.
    """
    if not offer.partitionable:
        return None
    if not offer.divisible or offer.fraction != 1:
        return "nobody"
    return read(offer.provider).traits.partitioned_by if offer.provider in deployable() else "unknown"
