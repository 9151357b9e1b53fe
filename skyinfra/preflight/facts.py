"""Facts about an account and region that several checks share."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from skyinfra import offers
from skyinfra.preflight.api import Api, CallFailed
from skyinfra.preflight.pool_inputs import PoolInputs

# A filter of EC2 takes at most 200 values.
_FILTER = 200
# A region's own zones; Local Zones and Wavelength Zones have to be opted into, and the module leaves them out.
_OWN_ZONES = [{"Name": "opt-in-status", "Values": ["opt-in-not-required"]}, {"Name": "state", "Values": ["available"]}]


@dataclass(frozen=True, slots=True)
class Context:
    """A pool that is checked. peers: the pools of its stack in the same region and account, itself among them."""

    api: Api
    inputs: PoolInputs
    peers: tuple[PoolInputs, ...]


@dataclass(frozen=True, slots=True)
class NodeZones:
    """The zones for the nodes of a pool; modules/aws decides in the same way.

    offered: the zones of the region that offer each machine type. present: the zones of the region, or of the declared
    subnets. considered: those of them that are declared, in order. zones: those in which nodes will stand.
    """

    offered: dict[str, frozenset[str]]
    present: tuple[str, ...]
    considered: tuple[str, ...]
    zones: tuple[str, ...]


def node_zones(context: Context) -> NodeZones:
    """Returns the zones for the nodes of the pool. Raises `CallFailed`."""
    inputs = context.inputs
    offered = offered_zones(context.api, types_of(inputs))
    if inputs.subnet_ids:
        present = tuple(dict.fromkeys(subnet["AvailabilityZone"] for subnet in subnets(context)))
    else:
        present = tuple(sorted(zone_ids(context.api).values()))
    considered = tuple(zone for zone in inputs.zones or present if zone in present)
    zones = tuple(zone for zone in considered if any(zone in offered[kind] for kind in inputs.machine_types))
    return NodeZones(offered, present, considered, zones[:1] if inputs.one_zone else zones)


def types_of(inputs: PoolInputs) -> tuple[str, ...]:
    """Returns the machine types of the nodes, and of a head besides them."""
    head = (inputs.head_machine_type,) if inputs.head_machine_type else ()
    return tuple(dict.fromkeys((*inputs.machine_types, *head)))


def zone_ids(api: Api) -> dict[str, str]:
    """Returns the names of the region's zones by their ids (use1-az1), which are the same in every account."""
    answer = api.ask("ec2", "describe_availability_zones", Filters=_OWN_ZONES)
    return {zone["ZoneId"]: zone["ZoneName"] for zone in answer["AvailabilityZones"]}


def offered_zones(api: Api, machine_types: Iterable[str]) -> dict[str, frozenset[str]]:
    """Returns the zones of the region that offer each of the machine types."""
    types = sorted(machine_types)
    filters = [{"Name": "instance-type", "Values": types}]
    answer = api.ask("ec2", "describe_instance_type_offerings", LocationType="availability-zone", Filters=filters)
    found = answer["InstanceTypeOfferings"]
    return {kind: frozenset(o["Location"] for o in found if o["InstanceType"] == kind) for kind in types}


def machine_facts(api: Api, machine_types: Iterable[str]) -> dict[str, dict[str, Any]]:
    """Returns EC2's description of each of the machine types that the region has."""
    types = sorted(set(machine_types))
    found: dict[str, dict[str, Any]] = {}
    for begin in range(0, len(types), _FILTER):
        filters = [{"Name": "instance-type", "Values": types[begin : begin + _FILTER]}]
        answer = api.ask("ec2", "describe_instance_types", Filters=filters)
        found |= {each["InstanceType"]: each for each in answer["InstanceTypes"]}
    return found


def vcpus(api: Api, machine_types: Iterable[str]) -> dict[str, int]:
    """Returns the vCPUs of each machine type, as far as the offers or the region know it."""
    known: dict[str, int] = {}
    asked = []
    for kind in sorted(set(machine_types)):
        offer = offers.named("aws", kind)
        if offer is not None and offer.vcpus is not None:
            known[kind] = offer.vcpus
        else:
            asked.append(kind)
    return known | {kind: each["VCpuInfo"]["DefaultVCpus"] for kind, each in machine_facts(api, asked).items()}


def subnets(context: Context) -> list[dict[str, Any]]:
    """Returns the declared subnets, in their order."""
    ids = list(context.inputs.subnet_ids)
    found = context.api.ask("ec2", "describe_subnets", SubnetIds=ids)["Subnets"]
    return sorted(found, key=lambda subnet: ids.index(subnet["SubnetId"]))


def running(api: Api) -> list[dict[str, Any]]:
    """Returns the instances of the region that run or are about to."""
    filters = [{"Name": "instance-state-name", "Values": ["pending", "running"]}]
    answer = api.ask("ec2", "describe_instances", Filters=filters)
    return [instance for reservation in answer["Reservations"] for instance in reservation["Instances"]]


def tags(resource: dict[str, Any]) -> dict[str, str]:
    """Returns the tags of a resource."""
    return {tag["Key"]: tag["Value"] for tag in resource.get("Tags", ())}


def is_of_stack(resource: dict[str, Any], context: Context) -> bool:
    """Returns whether this stack made the resource: it is there already, and not in the way."""
    found = tags(resource)
    return found.get("skyinfra:stack") == context.inputs.stack and found.get("skyinfra:pool") in {
        peer.pool for peer in context.peers
    }


def others_running(context: Context) -> Counter[tuple[str, str]]:
    """Returns the number of running instances outside this stack, by machine type and purchase."""
    return Counter(
        (instance["InstanceType"], instance.get("InstanceLifecycle") or "on-demand")
        for instance in running(context.api)
        if not is_of_stack(instance, context)
    )


def nodes_running(context: Context) -> int:
    """Returns the number of running nodes of the pool; 0 where AWS does not say."""
    inputs = context.inputs
    try:
        found = [tags(instance) for instance in running(context.api)]
    except CallFailed:
        return 0
    own = [
        each for each in found if (each.get("skyinfra:stack"), each.get("skyinfra:pool")) == (inputs.stack, inputs.pool)
    ]
    return sum(not inputs.grouped or each.get("skyinfra:role") == "worker" for each in own)


def listed(names: Iterable[str]) -> str:
    """Names one after the other."""
    return ", ".join(names)
