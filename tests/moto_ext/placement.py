"""Placement groups: the three actions, which moto does not have."""

from __future__ import annotations

from typing import Any

from moto.core.responses import ActionResult, EmptyResult
from moto.ec2.exceptions import EC2ClientError
from moto.ec2.models import EC2Backend
from moto.ec2.models.core import TaggedEC2Resource
from moto.ec2.responses import EC2Response
from moto.moto_api._internal import mock_random


class PlacementGroup(TaggedEC2Resource):
    def __init__(self, backend: Any, name: str, strategy: str, tags: dict[str, str]) -> None:
        self.ec2_backend = backend
        self.id = f"pg-{mock_random.get_random_hex(17)}"
        self.name, self.strategy = name, strategy
        self.add_tags(tags)

    def describe(self) -> dict[str, Any]:
        arn = f"arn:aws:ec2:{self.ec2_backend.region_name}:{self.ec2_backend.account_id}:placement-group/{self.name}"
        return {
            "GroupId": self.id,
            "GroupName": self.name,
            "GroupArn": arn,
            "Strategy": self.strategy,
            "State": "available",
            "Tags": self.get_tags(),
        }


def placement_groups(backend: Any) -> dict[str, PlacementGroup]:
    """The placement groups of a region, by name."""
    return backend.__dict__.setdefault("placement_groups", {})


def find(backend: Any, name: str) -> PlacementGroup:
    try:
        return placement_groups(backend)[name]
    except KeyError:
        raise EC2ClientError("InvalidPlacementGroup.Unknown", f"The Placement Group '{name}' is unknown.") from None


def create_placement_group(self: Any) -> ActionResult:
    name = self._get_param("GroupName")
    if name in placement_groups(self.ec2_backend):
        raise EC2ClientError("InvalidPlacementGroup.Duplicate", f"The Placement Group '{name}' already exists.")
    tags = self._parse_tag_specification().get("placement-group", {})
    group = PlacementGroup(self.ec2_backend, name, self._get_param("Strategy", "cluster"), tags)
    placement_groups(self.ec2_backend)[name] = group
    return ActionResult({"PlacementGroup": group.describe()})


def describe_placement_groups(self: Any) -> ActionResult:
    names, ids = self._get_param("GroupNames", []), self._get_param("GroupIds", [])
    for name in names:
        find(self.ec2_backend, name)
    found = placement_groups(self.ec2_backend).values()
    selected = [g for g in found if (not names or g.name in names) and (not ids or g.id in ids)]
    return ActionResult({"PlacementGroups": [group.describe() for group in selected]})


def delete_placement_group(self: Any) -> EmptyResult:
    name = self._get_param("GroupName")
    find(self.ec2_backend, name)
    used = [i.id for i in self.ec2_backend.all_instances() if i.placement.group_name == name and i.state_code != 48]
    if used:
        raise EC2ClientError(
            "InvalidPlacementGroup.InUse", f"The placement group {name} is in use and may not be deleted."
        )
    del placement_groups(self.ec2_backend)[name]
    return EmptyResult()


def install() -> None:
    EC2Response.create_placement_group = create_placement_group
    EC2Response.describe_placement_groups = describe_placement_groups
    EC2Response.delete_placement_group = delete_placement_group
    assert not hasattr(EC2Backend, "create_placement_group"), "moto has placement groups now: drop this part"
