"""Small things that moto does not remember as EC2 does, each of which Terraform would see as a change."""

from __future__ import annotations

from typing import Any

from moto.ec2.models import EC2Backend
from moto.ec2.models.security_groups import SecurityGroupRule


def install() -> None:
    create_template = EC2Backend.create_launch_template

    def _create_template(self: Any, name: str, description: str, data: dict[str, Any], tag_spec: Any) -> Any:
        # moto puts the tags of the template itself among those that it gives.
        given = [spec for spec in data.get("TagSpecifications", []) if spec["ResourceType"] != "launch-template"]
        return create_template(self, name, description, {**data, "TagSpecifications": given}, tag_spec)

    delete_nat = EC2Backend.delete_nat_gateway

    def _delete_nat(self: Any, nat_gateway_id: str) -> Any:
        # moto leaves its network interface behind.
        gateway = delete_nat(self, nat_gateway_id)
        self.enis.pop(gateway._eni.id, None)
        return gateway

    EC2Backend.create_launch_template = _create_template
    EC2Backend.delete_nat_gateway = _delete_nat
    # moto forgets the description of a rule between groups.
    SecurityGroupRule.description = property(
        lambda rule: rule.ip_range.get("Description") or rule.source_group.get("Description")
    )
