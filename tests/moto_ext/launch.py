"""RunInstances: what a launch template adds, and what EC2 remembers of the request."""

from __future__ import annotations

from typing import Any

from moto.core.responses import ActionResult
from moto.ec2.exceptions import EC2ClientError
from moto.ec2.models.instances import Instance
from moto.ec2.models.spot_requests import SpotInstanceRequest
from moto.ec2.responses import EC2Response
from moto.ec2.utils import convert_tag_spec, parse_user_data, random_spot_request_id

from moto_ext import images, placement, refusals


def install() -> None:
    EC2Response.run_instances = run_instances


def run_instances(self: Any) -> ActionResult:
    self.error_on_dryrun()
    return ActionResult(launch(self.ec2_backend, dict(self.params)))


def launch(backend: Any, request: dict[str, Any]) -> Any:
    """Launches what *request*, in the words of RunInstances, asks for, and returns moto's reservation."""
    request = _with_template(backend, request)
    tags = convert_tag_spec(request.get("TagSpecifications", []))
    zone = _zone(backend, request)
    refusals.check(backend, request, zone)
    market = request.get("InstanceMarketOptions", {})
    profile = request.get("IamInstanceProfile", {})
    reservation = backend.run_instances(
        request["ImageId"],
        int(request.get("MinCount", 1)),
        parse_user_data(request["UserData"]) if request.get("UserData") else None,
        [],
        instance_type=request["InstanceType"],
        is_instance_type_default=False,
        region_name=backend.region_name,
        placement=zone,
        subnet_id=request.get("SubnetId"),
        key_name=request.get("KeyName"),
        security_group_ids=list(request.get("SecurityGroupIds", [])),
        nics=list(request.get("NetworkInterfaces", [])),
        associate_public_ip=request.get("AssociatePublicIpAddress"),
        tags={**tags, "volume": tags.get("volume", {})},
        instance_market_options=None,
        metadata_options=request.get("MetadataOptions", {}),
        launch_template=request.get("LaunchTemplate", {}),
        client_token=request.get("ClientToken"),
        instance_initiated_shutdown_behavior=request.get("InstanceInitiatedShutdownBehavior"),
        block_device_mappings=_volumes(backend, request),
    )
    for instance in reservation.instances:
        _remember(backend, instance, request, market, tags)
        if profile.get("Name"):
            backend.associate_iam_instance_profile(instance.id, iam_instance_profile_name=profile["Name"])
    return reservation


def _with_template(backend: Any, request: dict[str, Any]) -> dict[str, Any]:
    """The request over its launch template: what it says itself wins; tags count for each kind of resource."""
    if not request.get("LaunchTemplate"):
        return request
    data = dict(backend._get_template_from_args(request["LaunchTemplate"]).data)
    mine = data.get("TagSpecifications", [])
    own = request.get("TagSpecifications", [])
    kinds = {spec["ResourceType"] for spec in own}
    data["TagSpecifications"] = [*own, *(spec for spec in mine if spec["ResourceType"] not in kinds)]
    if data.get("UserData") is not None:
        data["UserData"] = str(data["UserData"])
    return {**data, **{key: value for key, value in request.items() if key != "TagSpecifications"}}


def _zone(backend: Any, request: dict[str, Any]) -> str:
    nics = request.get("NetworkInterfaces", [])
    for nic in nics:
        if nic.get("NetworkInterfaceId"):
            return backend.get_network_interface(nic["NetworkInterfaceId"]).availability_zone
    subnet = request.get("SubnetId") or next((nic["SubnetId"] for nic in nics if nic.get("SubnetId")), None)
    if subnet is None:
        raise EC2ClientError("MissingInput", "No subnets found for the default VPC. Please specify a subnet.")
    return backend.get_subnet(subnet).availability_zone


def _volumes(backend: Any, request: dict[str, Any]) -> list[dict[str, Any]]:
    """The volumes of the image, as the request changes them."""
    root = {"DeleteOnTermination": True, "VolumeSize": images.ROOT_GB, "VolumeType": "gp3"}
    volumes = {backend.amis[request["ImageId"]].root_device_name: root}
    for mapping in request.get("BlockDeviceMappings", []):
        given = {key: value for key, value in mapping.get("Ebs", {}).items() if value not in (None, 0, "")}
        volumes[mapping["DeviceName"]] = {**volumes.get(mapping["DeviceName"], {}), **given}
    return [{"DeviceName": name, "Ebs": ebs} for name, ebs in volumes.items()]


def _remember(
    backend: Any, instance: Any, request: dict[str, Any], market: dict[str, Any], tags: dict[str, Any]
) -> None:
    group = request.get("Placement", {}).get("GroupName")
    if group:
        instance.placement.group_name = placement.find(backend, group).name
    for eni in instance.nics.values():
        # An interface that was there before keeps its own tags.
        if not any(nic.get("NetworkInterfaceId") == eni.id for nic in request.get("NetworkInterfaces", [])):
            eni.add_tags(tags.get("network-interface", {}))
    asked = request.get("CapacityReservationSpecification") or {"CapacityReservationPreference": "open"}
    instance.capacity_reservation_specification = asked
    instance.capacity_reservation_id = asked.get("CapacityReservationTarget", {}).get("CapacityReservationId")
    instance.lifecycle = market.get("MarketType")
    if instance.lifecycle == "spot":
        spot = _SpotRequest(backend, instance, market.get("SpotOptions", {}))
        backend.spot_instance_requests[spot.id] = spot
        instance.spot_instance_request_id = spot.id


class _SpotRequest(SpotInstanceRequest):
    """The spot request that RunInstances makes for an instance, which is there already."""

    def __init__(self, backend: Any, instance: Any, options: dict[str, Any]) -> None:
        self._launched = instance
        super().__init__(
            backend,
            random_spot_request_id(),
            options.get("MaxPrice") or "",
            instance.image_id,
            options.get("SpotInstanceType", "one-time"),
            None,
            options.get("ValidUntil"),
            None,
            None,
            instance.key_name,
            [group.id for group in instance.security_groups],
            None,
            instance.instance_type,
            instance.placement.zone,
            None,
            None,
            False,
            instance.subnet_id,
            {},
            None,
            options.get("InstanceInterruptionBehavior"),
        )

    def launch_instance(self) -> Instance:
        return self._launched
