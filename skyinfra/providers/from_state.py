"""Reads a Terraform state: the machines that stand in it, and the configuration of the providers that made them."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from skyinfra import offers
from skyinfra.offers import EVERYWHERE, Price
from skyinfra.providers.aws import AWS
from skyinfra.providers.data import TLS, TerraformProvider, kinds, read, sold_by

_ADDRESS = re.compile(r'provider\["(?P<source>[^"]+)"\](?:\.(?P<alias>\S+))?$')
_GOOGLE_GROUP = "google_compute_region_instance_group_manager"


@dataclass(frozen=True)
class Machines:
    """Machines of one type. region: where they stand. spot: whether they are interruptible."""

    provider: str
    machine_type: str
    region: str
    spot: bool = False
    count: int = 1

    @property
    def price(self) -> Price | None:
        """The price of one of them at the shipped prices, in its own region or else in another; None if not known."""
        if (offer := offers.named(sold_by(self.provider), self.machine_type)) is not None:
            return offer.price(spot=self.spot)
        known = read(self.provider) if self.provider in kinds() else None
        return None if self.spot or known is None else known.price(self.machine_type, self.region)

    @property
    def elsewhere(self) -> bool:
        """Whether the price is that of another region."""
        if self.price is None or self.price.region == EVERYWHERE:
            return False
        # A zone is named after its region.
        return not f"{self.region}-".startswith(f"{self.price.region}-")


def machines_of(type: str, attributes: Mapping[str, Any], template: Mapping[str, Any] | None = None) -> Machines | None:
    """Returns the machines of a resource; None for a resource that is no machine.

    type: of the resource. attributes: as Terraform's provider has written them. template: the attributes of that which
    a group of Google Cloud makes its machines from; without it, their type is not known.
    """
    if type == _GOOGLE_GROUP:
        return _google_group(attributes, template or {})
    if reader := _READERS.get(type):
        return reader(attributes)
    for data in map(read, kinds()):
        if named := data.terraform.get("machines", {}).get(type):
            return _declared(data.kind, named, attributes)
    return None


def _declared(kind: str, named: Mapping[str, str], attributes: Mapping[str, Any]) -> Machines:
    """A machine as the data of its provider name the attributes that say its type, region and whether it is spot."""
    machine_type = "/".join(str(_at(attributes, path) or "") for path in named["type"].split("/"))
    spot = _at(attributes, named["spot"]) not in (None, False, "", [], {}, "Regular") if "spot" in named else False
    return Machines(kind, machine_type, str(_at(attributes, named["region"]) or ""), spot)


def _at(attributes: Any, path: str) -> Any:
    """The value at *path*, such as ``resources.preset``; None where there is none. Of a list it is in the first."""
    for name in path.split("."):
        if isinstance(attributes, list):
            attributes = attributes[0] if attributes else None
        attributes = attributes.get(name) if isinstance(attributes, Mapping) else None
    return attributes


def _instance(attributes: Mapping[str, Any]) -> Machines:
    spot = attributes.get("instance_lifecycle") == "spot"
    return Machines(AWS.kind, attributes.get("instance_type") or "", _region(attributes), spot)


def _group(attributes: Mapping[str, Any]) -> Machines:
    """Returns as many machines as the group wants, of its first type."""
    (policy,) = attributes.get("mixed_instances_policy") or [{}]
    (share,) = policy.get("instances_distribution") or [{}]
    (template,) = policy.get("launch_template") or [{}]
    first = (template.get("override") or [{}])[0].get("instance_type") or ""
    spot = share.get("on_demand_percentage_above_base_capacity") == 0
    return Machines(AWS.kind, first, _region(attributes), spot, attributes.get("desired_capacity") or 0)


def _google_group(attributes: Mapping[str, Any], template: Mapping[str, Any]) -> Machines:
    """Returns as many machines as the group wants, as its *template* has them."""
    named = read("gcp").terraform["machines"]["google_compute_instance"]
    region, count = attributes.get("region") or "", attributes.get("target_size") or 0
    return replace(_declared("gcp", named, template), region=region, count=count)


def _region(attributes: Mapping[str, Any]) -> str:
    """Returns the region in the name of an AWS resource: ``arn:aws:ec2:us-east-1:123456789012:instance/i-0123``.

    Empty where it has no such name yet.
    """
    return "".join((attributes.get("arn") or "").split(":")[3:4])


_READERS = {"aws_instance": _instance, "aws_autoscaling_group": _group}


def provider_of(address: str) -> TerraformProvider | None:
    """Returns the provider of a resource by its *address* in a state; None for one that is built into Terraform.

    The alias of a provider holds its configuration, as `TerraformProvider.alias` has made it.
    """
    found = _ADDRESS.search(address)
    if found is None or not found["alias"]:
        return None
    if found["source"] == TLS.source:
        return TLS
    known = next((d for d in map(read, kinds()) if d.terraform.get("source") == found["source"]), None)
    if known is None:
        return None
    return known.terraform_provider(**known.configuration_of(found["alias"]))
