"""The images: there, for the architecture of the machines, and not larger than the declared disk."""

from __future__ import annotations

import re
from collections.abc import Iterable
from datetime import UTC, datetime
from typing import Any

from skyinfra.preflight.api import CallFailed
from skyinfra.preflight.facts import Context, listed, machine_facts
from skyinfra.preflight.report import Finding, failed, passed, warned


def check_images(context: Context) -> list[Finding]:
    """Returns a finding for the image of the nodes, and one for that of a head besides them."""
    inputs = context.inputs
    if "image" in inputs.unknown:
        return [warned("the image is an output of another construct", "It is known when Terraform has made it.")]
    found = [_image(context, inputs.image, inputs.machine_types, inputs.disk_gb)]
    if inputs.head_machine_type:
        found.append(_image(context, inputs.head_image or inputs.image, (inputs.head_machine_type,), 0))
    return found


def _image(context: Context, name: str, machine_types: Iterable[str], disk_gb: int) -> Finding:
    ami = name
    if name.startswith("/"):
        try:
            ami = context.api.ask("ssm", "get_parameter", Name=name)["Parameter"]["Value"]
        except CallFailed as error:
            if error.code != "ParameterNotFound":
                raise
            to_do = f"Give an image of {context.inputs.region} that has the driver: ami='ami-...'."
            return failed(f"{context.inputs.region} has no SSM parameter {name}", to_do)
        if not re.fullmatch(r"ami-[0-9a-z]+", ami):
            # The value is not shown.
            return failed(f"the SSM parameter {name} holds no id of an image", "Name one that holds an id, ami-...")
    image = _describe(context, ami)
    if image is None:
        to_do = f"Give an image that is in {context.inputs.region} and shared with this account."
        return failed(f"there is no image {ami} in {context.inputs.region}", to_do)
    text = f"{f'{name}: ' if ami != name else ''}{ami}, {image.get('Name', 'without a name')}"
    return _fits(context, text, image, machine_types, disk_gb)


def _describe(context: Context, ami: str) -> dict[str, Any] | None:
    try:
        images: list[dict[str, Any]] = context.api.ask("ec2", "describe_images", ImageIds=[ami])["Images"]
    except CallFailed as error:
        if not error.code.startswith("InvalidAMIID"):
            raise
        return None
    return images[0] if images else None


def _fits(context: Context, text: str, image: dict[str, Any], machine_types: Iterable[str], disk_gb: int) -> Finding:
    if image.get("State", "available") != "available":
        return failed(f"{text}, is {image['State']}", "Wait until it is available, or give another image.")
    if image.get("Platform") == "windows":
        return failed(f"{text}, is for Windows", "Give a Linux image with systemd and cloud-init.")
    architecture = image["Architecture"]
    facts = machine_facts(context.api, machine_types)
    other = [
        kind for kind, each in facts.items() if architecture not in each["ProcessorInfo"]["SupportedArchitectures"]
    ]
    if other:
        needed = listed(facts[other[0]]["ProcessorInfo"]["SupportedArchitectures"])
        return failed(f"{text}, is for {architecture}; {listed(other)} needs {needed}", f"Give an image for {needed}.")
    size = _root_gib(image)
    if disk_gb and size > disk_gb:
        return failed(f"{text}, needs {size} GiB; disk_gb is {disk_gb}", f"Declare disk_gb={size} or more, or none.")
    ended = image.get("DeprecationTime")
    if ended and datetime.fromisoformat(ended) < datetime.now(UTC):
        return warned(f"{text}, is deprecated since {ended[:10]}", "Give a newer image; this one may be withdrawn.")
    return passed(f"{text}, {architecture}, {size} GiB")


def _root_gib(image: dict[str, Any]) -> int:
    for device in image.get("BlockDeviceMappings", ()):
        if device.get("DeviceName") == image.get("RootDeviceName"):
            return int(device.get("Ebs", {}).get("VolumeSize", 0))
    return 0
