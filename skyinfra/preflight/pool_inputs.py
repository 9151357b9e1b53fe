"""The inputs of a pool's AWS module and Terraform provider, read from the synthesized stack."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from skyinfra.terraform.expressions import is_reference
from skyinfra.terraform.synthesized import SynthesizedStack


@dataclass(frozen=True, slots=True)
class PoolInputs:
    """The inputs of one pool on AWS; the fields are those of modules/aws.

    profile: of the shared AWS configuration, None for what the environment says. head_machine_type: where the head is a
    machine besides the nodes. interfaces: network interfaces of one node, by machine type; one where it is not named.
    buckets: what nodes mount of them: bucket, prefix, and whether they write there. grouped: whether the nodes are an
    Auto Scaling group. max_hourly_cost: the declared cap, USD per node and hour. unknown: inputs that are outputs of
    other constructs, which Terraform alone knows; they are left out.
    """

    stack: str
    pool: str
    region: str
    profile: str | None
    nodes: int
    machine_types: tuple[str, ...]
    grouped: bool
    spot: bool
    spot_max_price: float | None
    max_hourly_cost: float | None
    zones: tuple[str, ...]
    vpc_id: str | None = None
    subnet_ids: tuple[str, ...] = ()
    security_group_ids: tuple[str, ...] = ()
    head_public_ip: bool = False
    image: str = ""
    head_image: str | None = None
    disk_gb: int = 0
    iam_instance_profile: str | None = None
    capacity_block_id: str | None = None
    capacity_reservation_id: str | None = None
    interfaces: Mapping[str, int] = field(default_factory=dict)
    placement_group: bool = False
    head_machine_type: str | None = None
    elastic: bool = False
    buckets: tuple[tuple[str, str, bool], ...] = ()
    unknown: frozenset[str] = frozenset()

    @property
    def one_zone(self) -> bool:
        """Whether all nodes stand in one zone."""
        return not self.grouped or self.placement_group or bool(self.interfaces)

    @property
    def purchase(self) -> str:
        """The purchase option as EC2 names it: spot, capacity-block or on-demand."""
        return "spot" if self.spot else "capacity-block" if self.capacity_block_id else "on-demand"

    @property
    def reservation(self) -> str | None:
        """The id of the capacity block or reservation."""
        return self.capacity_block_id or self.capacity_reservation_id

    def interfaces_of(self, machine_type: str) -> int:
        """Network interfaces of one node of that type."""
        return self.interfaces.get(machine_type, 1)


def profile_of(place: Mapping[str, Any]) -> str | None:
    """Returns the profile of a *place*; of one that names none, its account is told by nothing else."""
    return place.get("profile", place.get("account")) or None


def is_group(inputs: Mapping[str, Any]) -> bool:
    """Returns whether nodes with these *inputs* are an Auto Scaling group; the module decides in the same way."""
    several = len(inputs["machine_types"]) > 1
    if inputs.get("min_nodes") is not None:
        return True
    if inputs.get("group") is not None:
        return several or bool(inputs["group"])
    return several or (inputs["spot"] and inputs["node_count"] > 1)


def of_place(stack: SynthesizedStack, pool: Mapping[str, Any]) -> PoolInputs:
    """Returns the inputs of a *pool* with the fields of one of its places, whose module the stack may not have.

    What is of no machine, such as networks and images, is left at nothing.
    """
    name, _, alias = (pool.get("own") or "").partition(".")
    own = next((each for each in stack.providers.get(name, ()) if each.get("alias", "") == alias), {}) if name else {}
    return PoolInputs(
        stack=stack.name,
        pool=pool["name"],
        region=own.get("region") or pool["region"],
        profile=own.get("profile") or profile_of(pool),
        nodes=pool["nodes"],
        machine_types=tuple(pool["machine_types"]),
        grouped=bool(pool.get("grouped")),
        spot=bool(pool.get("spot")),
        spot_max_price=None,
        max_hourly_cost=pool.get("max_hourly_cost"),
        zones=tuple(pool.get("zones", ())),
        head_machine_type=pool.get("head"),
    )


def read(stack: SynthesizedStack, pool: dict[str, Any]) -> PoolInputs:
    """Reads the inputs of *pool*, one of `stack.pools`."""
    name = pool["name"]
    configuration = stack.configuration(name)
    module = {key: value for key, value in stack.modules[name].items() if not is_reference(value)}
    grouped = is_group(module)
    return PoolInputs(
        stack=stack.name,
        pool=name,
        region=configuration.get("region") or pool["region"],
        profile=configuration.get("profile"),
        nodes=module["node_count"],
        machine_types=tuple(module["machine_types"]),
        grouped=grouped,
        spot=module["spot"],
        spot_max_price=module.get("spot_max_price"),
        max_hourly_cost=pool.get("max_hourly_cost"),
        zones=tuple(module.get("zones", ())),
        vpc_id=module.get("vpc_id"),
        subnet_ids=tuple(module.get("subnet_ids", ())),
        security_group_ids=tuple(module.get("security_group_ids", ())),
        head_public_ip=module.get("head_public_ip", False),
        image=module.get("image", ""),
        head_image=module.get("head_image") if grouped else None,
        disk_gb=module["disk_gb"],
        iam_instance_profile=module.get("iam_instance_profile"),
        capacity_block_id=module.get("capacity_block_id"),
        capacity_reservation_id=module.get("capacity_reservation_id"),
        interfaces={kind: len(cards) for kind, cards in module.get("efa_interfaces", {}).items()},
        placement_group=module.get("placement_group", False),
        head_machine_type=module.get("head_machine_type") if grouped else None,
        elastic=module.get("min_nodes") is not None,
        buckets=tuple((each["bucket"], each["prefix"], each["write"]) for each in module.get("buckets") or ()),
        unknown=frozenset(stack.modules[name].keys() - module.keys()),
    )
