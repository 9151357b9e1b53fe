"""Providers: each turns a declaration into machine types, image and module inputs."""

from __future__ import annotations

import json
import re
from functools import cache
from pathlib import Path
from typing import Any

from skyinfra.accelerators import parse
from skyinfra.errors import NotSupported
from skyinfra.offers import Offer
from skyinfra.providers.aws import AWS, CapacityBlock, CapacityReservation
from skyinfra.providers.azure import Azure
from skyinfra.providers.base import Provider, Request, Selection
from skyinfra.providers.cloud import CloudProvider
from skyinfra.providers.container import Container
from skyinfra.providers.crusoe import Crusoe
from skyinfra.providers.data import Boot, Data, TerraformProvider, Traits, kinds, read, strings
from skyinfra.providers.digitalocean import DigitalOcean
from skyinfra.providers.from_state import Machines, machines_of, provider_of
from skyinfra.providers.gcp import GCP
from skyinfra.providers.gcptpu import GCPTPU
from skyinfra.providers.lambdalabs import Lambda
from skyinfra.providers.local import Local
from skyinfra.providers.nebius import Nebius
from skyinfra.providers.oci import OCI
from skyinfra.providers.runpod import RunPod
from skyinfra.providers.scaleway import Scaleway
from skyinfra.providers.ssh import SSH, Host
from skyinfra.providers.vastai import VastAI
from skyinfra.providers.verda import Verda
from skyinfra.providers.vultr import Vultr

__all__ = [
    "Scaleway",
    "Vultr",
    "Azure",
    "OCI",
    "AWS",
    "GCP",
    "GCPTPU",
    "Boot",
    "CapacityBlock",
    "CapacityReservation",
    "CloudProvider",
    "Container",
    "Crusoe",
    "Data",
    "DigitalOcean",
    "Host",
    "Lambda",
    "Local",
    "Machines",
    "Nebius",
    "Provider",
    "Request",
    "RunPod",
    "SSH",
    "Selection",
    "TerraformProvider",
    "Traits",
    "VastAI",
    "Verda",
    "deployable",
    "kinds",
    "machines_of",
    "provider_of",
    "read",
    "refuses",
    "strings",
    "undeployable",
    "who_partitions",
]

_NOT_DEPLOYABLE = Path(__file__).with_name("not_deployable.json")


@cache
def deployable() -> dict[str, type[Provider]]:
    """The providers that this version deploys to, by kind: the classes of this package that have a data file."""
    exported = (globals()[name] for name in __all__)
    classes = (each for each in exported if isinstance(each, type) and issubclass(each, Provider))
    return {cls.kind: cls for cls in classes if getattr(cls, "kind", None) in kinds()}


def undeployable(kind: str) -> str | None:
    """Why this version deploys nothing to the provider *kind*, and what to use instead; None where it does."""
    if kind in deployable():
        return None
    known: dict[str, Any] = json.loads(_NOT_DEPLOYABLE.read_text(encoding="utf-8"))
    if kind not in known:
        return "this version of skyinfra has no module"
    return f"{known[kind]['why']}; {known[kind]['instead']}"


def refuses(offer: Offer) -> str | None:
    """The reason why a declaration without an image of one's own cannot have that machine; None where it can.

    None as well for a share of an accelerator, and for a provider that this version does not deploy to: `undeployable`
    says why.
    """
    # Some become another provider for what is set up in another way, as Google Cloud does for TPUs.
    sellers = [
        cls.kind for cls in deployable().values() if (getattr(cls, "offered_by", "") or cls.kind) == offer.provider
    ]
    reasons = [_refused(read(kind), offer) for kind in sellers] if offer.fraction == 1 else []
    return None if None in reasons else next(iter(reasons), None)


def _refused(data: Data, offer: Offer) -> str | None:
    if not re.match(data.machines.get("deployed", ""), offer.machine_type):
        return f"{data.about.called} sells it otherwise than as an instance"
    try:
        data.image((offer.machine_type,), parse(offer.carries), field="provider.image")
    except NotSupported as error:
        return error.message
    return None


def who_partitions(offer: Offer) -> str | None:
    """Who may partition the accelerators of *offer*: tenant, provider, nobody or unknown; None where nobody can at all.

    A provider that this version does not deploy to has no traits, so that it is unknown there.
    """
    if not offer.partitionable:
        return None
    if not offer.divisible or offer.fraction != 1:
        return "nobody"
    return read(offer.provider).traits.partitioned_by if offer.provider in deployable() else "unknown"
