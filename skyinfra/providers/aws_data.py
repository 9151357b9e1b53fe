"""The data of AWS in aws.json: images, prices and machine types without accelerators."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from skyinfra.accelerators import Accelerator
from skyinfra.errors import InvalidField, NotOffered, NotSupported
from skyinfra.offers import Offer, Price
from skyinfra.providers.base import Request

_DATA = Path(__file__).with_name("aws.json")
_ACTIONS = Path(__file__).with_name("aws_actions.json")


def data() -> dict[str, Any]:
    """The whole file."""
    found: dict[str, Any] = json.loads(_DATA.read_text(encoding="utf-8"))
    return found


def permissions() -> dict[str, Any]:
    """The IAM actions of a deploy, by part of modules/aws: those that Terraform calls, and others with a reason."""
    found: dict[str, Any] = json.loads(_ACTIONS.read_text(encoding="utf-8"))
    return found


def is_arm(machine_type: str) -> bool:
    """Whether the machines of a type have Arm processors."""
    family = machine_type.partition(".")[0]
    # Graviton's families end in g and what they have besides: m7g, c8gd.
    return (
        family in data()["arm_families"] or family.lstrip("abcdefghijklmnopqrstuvwxyz").lstrip("0123456789")[:1] == "g"
    )


def image(accelerator: Accelerator, chosen: list[Offer]) -> str:
    """An image with the driver of *accelerator*, for the chosen machines. Raises `NotSupported`."""
    known = data()
    why = known["no_image"].get(accelerator.name)
    images = known["images"].get(accelerator.vendor, {})
    arm = {is_arm(offer.machine_type) for offer in chosen}
    path = images.get("arm64" if True in arm else "x86_64")
    if why or path is None or len(arm) > 1:
        reason = why or f"no image with the driver of {accelerator.name} is known"
        raise NotSupported(reason, field="provider.ami", hint="Give the id of an image that has it: ami='ami-...'.")
    return str(path)


def plain_image(machine_types: tuple[str, ...]) -> str:
    """An image without drivers, for the architecture of these machines. Raises `InvalidField` where they have two."""
    arm = {is_arm(name) for name in machine_types}
    if len(arm) > 1:
        raise InvalidField(
            "machines of two architectures cannot share one image",
            field="provider.instance_types",
            given=", ".join(machine_types),
            hint="Name types of one architecture.",
        )
    return str(data()["images"]["cpu"]["arm64" if True in arm else "x86_64"])


def partition(region: str) -> str:
    """The AWS partition of a region, which has accounts and prices of its own."""
    return "aws-cn" if region.startswith("cn-") else "aws-us-gov" if region.startswith("us-gov-") else "aws"


def plain_price(machine_type: str, region: str) -> Price | None:
    """The on-demand price of a machine without accelerators in the partition of *region*; None where not known."""
    known = data()["prices"]
    if partition(region) != partition(known["region"]):
        return None
    usd = known["usd_per_hour"].get(machine_type)
    return None if usd is None else Price(usd, known["region"], known["date"])


def general(request: Request) -> str:
    """The smallest machine type without accelerators for *request*. Raises `NotOffered`."""
    table = data()["cpu_types"]
    for name, vcpus, memory in table["rows"]:
        if vcpus >= (request.vcpus or 0) and memory >= (request.memory_gb or 0):
            return str(name)
    raise NotOffered(
        "no general machine has as many vCPUs and as much memory",
        field="vcpus",
        given=f"{request.vcpus} vCPUs, {request.memory_gb} GB",
        hint=f"The largest is {table['rows'][-1][0]}; name another with instance_types.",
    )
