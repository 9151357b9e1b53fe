"""Auto Scaling groups: the mixed instances policy, which moto keeps and does not follow."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from moto.autoscaling.models import ASG_NAME_TAG, FakeAutoScalingGroup, InstanceState
from moto.autoscaling.responses import AutoScalingResponse
from moto.ec2.exceptions import EC2ClientError

from moto_ext.launch import launch


def install() -> None:
    update = FakeAutoScalingGroup.update

    def changed(self: Any, **given: Any) -> None:
        # What a request does not name stays: https://docs.aws.amazon.com/autoscaling/ec2/APIReference/API_UpdateAutoScalingGroup.html
        policy, size = self.mixed_instances_policy, given.get("desired_capacity")
        if policy is None or given.get("mixed_instances_policy"):
            update(self, **given)
            return
        update(self, **{**given, "desired_capacity": None})
        self.mixed_instances_policy = policy
        if size is not None:
            self.set_desired_capacity(size)

    FakeAutoScalingGroup.update = changed
    plain = FakeAutoScalingGroup.replace_autoscaling_group_instances

    def replace(self: Any, count_needed: int, propagated_tags: dict[str, str]) -> None:
        if not self.mixed_instances_policy:
            plain(self, count_needed, propagated_tags)
            return
        for number in range(count_needed):
            instance = _launch_first(self, len(self.instance_states) + number, propagated_tags)
            if instance is not None:
                self.instance_states.append(
                    InstanceState(instance, protected_from_scale_in=self.new_instances_protected_from_scale_in)
                )

    FakeAutoScalingGroup.replace_autoscaling_group_instances = replace
    FakeAutoScalingGroup.update = _updating(FakeAutoScalingGroup.update)
    AutoScalingResponse.delete_auto_scaling_group = _deleting(AutoScalingResponse.delete_auto_scaling_group)


def _updating(plain: Callable[..., None]) -> Callable[..., None]:
    """Returns *plain*, but that a request without a mixed instances policy leaves the policy as it is: properties that
    are not specified are not changed.

    https://docs.aws.amazon.com/autoscaling/ec2/APIReference/API_UpdateAutoScalingGroup.html
    """

    def update(self: Any, *arguments: Any, **given: Any) -> None:
        policy = self.mixed_instances_policy
        others = ("mixed_instances_policy", "launch_template", "launch_config_name")
        if policy and not any(given.get(each) for each in others):
            template = policy["LaunchTemplate"]
            # It keeps the name of the template too, and takes it by its id or by its name.
            selected = {**template["LaunchTemplateSpecification"], "LaunchTemplateName": None}
            template = {**template, "LaunchTemplateSpecification": selected}
            given["mixed_instances_policy"] = {**policy, "LaunchTemplate": template}
        plain(self, *arguments, **given)

    return update


def _deleting(plain: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """Returns *plain*, but that ForceDelete ends all instances of the group, those protected from scaling in as well.

    https://docs.aws.amazon.com/autoscaling/ec2/APIReference/API_DeleteAutoScalingGroup.html
    """

    def delete(self: Any) -> Any:
        if str(self._get_param("ForceDelete")).lower() == "true":
            group = self.autoscaling_backend.autoscaling_groups.get(self._get_param("AutoScalingGroupName"))
            for state in group.instance_states if group is not None else ():
                state.protected_from_scale_in = False
        return plain(self)

    return delete


def _launch_first(group: Any, number: int, tags: dict[str, str]) -> Any | None:
    """One instance of the first type of the policy that there is capacity for, in the zones in turn; else None."""
    policy = group.mixed_instances_policy
    template, distribution = policy["LaunchTemplate"], policy["InstancesDistribution"]
    subnets = group.vpc_zone_identifier.split(",")
    subnets = subnets[number % len(subnets) :] + subnets[: number % len(subnets)]
    spot = int(distribution.get("OnDemandPercentageAboveBaseCapacity", 100)) == 0
    for override in template["Overrides"] or [{}]:
        for subnet in subnets:
            request = _request(group, {**template, **override}, subnet, tags)
            if spot:
                options = {"MaxPrice": distribution.get("SpotMaxPrice"), "SpotInstanceType": "one-time"}
                request["InstanceMarketOptions"] = {"MarketType": "spot", "SpotOptions": options}
            try:
                reservation = launch(group.ec2_backend, request)
            except EC2ClientError as error:
                # Auto Scaling goes on with the next type or zone; anything but capacity is a mistake of the policy.
                if error.code not in ("InsufficientInstanceCapacity", "Unsupported"):
                    raise
                continue
            instance = reservation.instances[0]
            instance.autoscaling_group = group
            return instance
    return None


def _request(group: Any, override: dict[str, Any], subnet: str, tags: dict[str, str]) -> dict[str, Any]:
    selected = override["LaunchTemplateSpecification"]
    version = group.ec2_backend._get_template_from_args(selected)
    request: dict[str, Any] = {
        "LaunchTemplate": selected,
        "InstanceType": override.get("InstanceType") or version.instance_type,
        "TagSpecifications": [
            {
                "ResourceType": "instance",
                "Tags": [{"Key": k, "Value": v} for k, v in {**tags, ASG_NAME_TAG: group.name}.items()],
            }
        ],
    }
    nics = version.data.get("NetworkInterfaces")
    if nics:
        request["NetworkInterfaces"] = [{**nic, "SubnetId": subnet} for nic in nics]
    else:
        request["SubnetId"] = subnet
    return request
