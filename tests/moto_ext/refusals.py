"""What EC2 refuses to launch and moto does not mind, in EC2's words."""

from __future__ import annotations

import base64
import re
from typing import Any

from moto.ec2.exceptions import EC2ClientError
from moto.ec2.models.instance_types import INSTANCE_TYPES
from moto.ec2.utils import convert_tag_spec

from moto_ext import world

MAX_USER_DATA = 16384


def check(backend: Any, request: dict[str, Any], zone: str) -> None:
    """Raises where EC2 would not launch *request*, in the words of RunInstances, in *zone*."""
    for rule in (_type, _image, _user_data, _interfaces, _tags, _capacity):
        rule(backend, request, zone)


def _type(backend: Any, request: dict[str, Any], zone: str) -> None:
    kind = request["InstanceType"]
    if kind not in INSTANCE_TYPES:
        raise EC2ClientError("InvalidParameterValue", f"Invalid value '{kind}' for InstanceType.")
    zones = world.offered_in(backend, kind)
    if zone not in zones:
        raise EC2ClientError(
            "Unsupported",
            f"Your requested instance type ({kind}) is not supported in your requested Availability Zone ({zone}). "
            f"Please retry your request by not specifying an Availability Zone or choosing {', '.join(zones)}.",
        )


def _image(backend: Any, request: dict[str, Any], zone: str) -> None:
    image = backend.amis.get(request.get("ImageId"))
    if image is None:
        raise EC2ClientError("InvalidAMIID.NotFound", f"The image id '[{request.get('ImageId')}]' does not exist")
    architectures = INSTANCE_TYPES[request["InstanceType"]]["ProcessorInfo"]["SupportedArchitectures"]
    if image.architecture not in architectures:
        raise EC2ClientError(
            "InvalidParameterValue",
            f"The architecture '{architectures[0]}' of the specified instance type does not match the architecture "
            f"'{image.architecture}' of the specified AMI.",
        )


def _user_data(backend: Any, request: dict[str, Any], zone: str) -> None:
    data = request.get("UserData")
    if data and len(base64.b64decode(data)) > MAX_USER_DATA:
        raise EC2ClientError("InvalidParameterValue", f"User data is limited to {MAX_USER_DATA} bytes")


def _interfaces(backend: Any, request: dict[str, Any], zone: str) -> None:
    nics, kind = request.get("NetworkInterfaces", []), request["InstanceType"]
    if nics and (request.get("SecurityGroupIds") or request.get("SubnetId")):
        raise EC2ClientError(
            "InvalidParameterCombination",
            "Network interfaces and an instance-level subnet ID or security groups may not be specified on the same "
            "request",
        )
    if len(nics) > 1 and any(nic.get("AssociatePublicIpAddress") is True for nic in nics):
        raise EC2ClientError(
            "InvalidParameterCombination",
            "The associatePublicIPAddress parameter cannot be specified when launching with multiple network "
            "interfaces.",
        )
    cards = {card["NetworkCardIndex"]: card for card in INSTANCE_TYPES[kind]["NetworkInfo"]["NetworkCards"]}
    for nic in nics:
        card = int(nic.get("NetworkCardIndex") or 0)
        if card not in cards:
            raise EC2ClientError("InvalidParameterValue", f"Network card index {card} exceeds the limit for {kind}.")
        if _interface_type(backend, nic) not in cards[card].get("InterfaceTypes", ("interface", "efa", "efa-only")):
            wanted = _interface_type(backend, nic)
            raise EC2ClientError("Unsupported", f"{kind} does not support {wanted} on network card {card}.")


def _interface_type(backend: Any, nic: dict[str, Any]) -> str:
    if not nic.get("NetworkInterfaceId"):
        return nic.get("InterfaceType") or "interface"
    if nic.get("InterfaceType") or nic.get("Groups") or nic.get("SubnetId"):
        raise EC2ClientError(
            "InvalidParameterCombination", "A network interface may not specify both an id and parameters"
        )
    return backend.get_network_interface(nic["NetworkInterfaceId"]).interface_type


def _tags(backend: Any, request: dict[str, Any], zone: str) -> None:
    """The metadata service shows tags by their keys, so some keys cannot be shown."""
    if request.get("MetadataOptions", {}).get("InstanceMetadataTags") != "enabled":
        return
    for key in convert_tag_spec(request.get("TagSpecifications", [])).get("instance", {}):
        if not re.fullmatch(r"[A-Za-z0-9+\-=.,_:@]+", key) or key in (".", "..", "_index"):
            raise EC2ClientError("InvalidParameterValue", f"'{key}' is not a valid tag key for instance metadata.")


def _capacity(backend: Any, request: dict[str, Any], zone: str) -> None:
    kind, market = request["InstanceType"], request.get("InstanceMarketOptions", {}).get("MarketType")
    if {kind, f"{kind}/{market}", f"{kind}/{backend.region_name}"} & set(world.told("no_capacity")):
        raise EC2ClientError(
            "InsufficientInstanceCapacity",
            f"We currently do not have sufficient {kind} capacity in the Availability Zone you requested ({zone}). "
            "Our system will be working on provisioning additional capacity.",
        )
