"""The network: subnets with free addresses, security groups, and room for a network of the pool's own."""

from __future__ import annotations

from typing import Any

from skyinfra.errors import counted
from skyinfra.preflight.api import CallFailed
from skyinfra.preflight.facts import Context, is_of_stack, listed, node_zones, nodes_running, subnets
from skyinfra.preflight.pool_inputs import PoolInputs
from skyinfra.preflight.quotas import room
from skyinfra.preflight.report import Finding, failed, passed, warned
from skyinfra.providers.quotas import address_quota, vpc_quota


def check_network(context: Context) -> list[Finding]:
    """The declared subnets; or whether the account may have one more VPC. And the Elastic IPs that are needed."""
    inputs = context.inputs
    if "subnet_ids" in inputs.unknown:
        return [warned("the subnets are outputs of other constructs", "They are known when Terraform has made them.")]
    found = [_subnets(context)] if inputs.subnet_ids else [_own_network(context)]
    if _addresses_needed(inputs):
        found.append(_elastic_ips(context))
    return found


def _subnets(context: Context) -> Finding:
    inputs = context.inputs
    try:
        found = subnets(context)
    except CallFailed as error:
        if not error.code.startswith("InvalidSubnetI"):
            raise
        return failed(f"{error.words or listed(inputs.subnet_ids)}", f"Declare subnets of {inputs.region} that exist.")
    vpcs = list(dict.fromkeys(subnet["VpcId"] for subnet in found))
    if len(vpcs) > 1:
        return failed(f"the subnets belong to several VPCs: {listed(vpcs)}", "Declare subnets of one VPC.")
    if inputs.vpc_id and inputs.vpc_id != vpcs[0]:
        return failed(
            f"the subnets belong to {vpcs[0]}, not to {inputs.vpc_id}", f"Declare vpc_id={vpcs[0]!r}, or none."
        )
    return _free_addresses(context, found)


def _free_addresses(context: Context, found: list[dict[str, Any]]) -> Finding:
    """Returns every interface takes an address. Of several subnets in a zone the module takes the first."""
    inputs = context.inputs
    free: dict[str, int] = {}
    for subnet in found:
        free.setdefault(subnet["AvailabilityZone"], subnet["AvailableIpAddressCount"])
    usable = {zone: free[zone] for zone in node_zones(context).zones if zone in free}
    missing = max(0, inputs.nodes - nodes_running(context))
    each = max(inputs.interfaces_of(kind) for kind in inputs.machine_types)
    needed = missing * each
    text = f"{listed(f'{number} free addresses in {zone}' for zone, number in usable.items()) or 'no zone to stand in'}"
    asked = f"{counted(missing, 'node')} to come with {counted(each, 'interface')} each"
    if needed > sum(usable.values()):
        return failed(f"{text}; {asked} need {needed}", "Declare larger or more subnets, or free addresses in these.")
    if usable and needed > min(usable.values()):
        return warned(
            f"{text}; {asked} need {needed}", "They do not all fit in every zone, should one zone alone have capacity."
        )
    return passed(f"{text}; {asked}")


def _own_network(context: Context) -> Finding:
    """Returns the module makes a VPC for each pool without subnets."""
    vpcs = context.api.ask("ec2", "describe_vpcs")["Vpcs"]
    used = sum(not is_of_stack(vpc, context) for vpc in vpcs)
    needed = sum(not peer.subnet_ids for peer in context.peers)
    found = room(context.api, vpc_quota(), used, needed, context.inputs, "VPC")
    text = f"a network of its own: {found.found}"
    return passed(text) if found.result == "pass" else failed(text, f"Declare subnet_ids, or: {found.to_do}")


def _addresses_needed(inputs: PoolInputs) -> int:
    """Returns the number of addresses: one for the head, one for a NAT gateway of nodes with several interfaces."""
    if inputs.subnet_ids:
        return int(inputs.head_public_ip)
    several = any(inputs.interfaces_of(kind) > 1 for kind in inputs.machine_types)
    return 2 if several and (inputs.nodes > 1 or inputs.grouped) else 1


def _elastic_ips(context: Context) -> Finding:
    addresses = context.api.ask("ec2", "describe_addresses")["Addresses"]
    used = sum(not is_of_stack(address, context) for address in addresses)
    needed = sum(_addresses_needed(peer) for peer in context.peers)
    return room(context.api, address_quota(), used, needed, context.inputs, "Elastic IP")


def check_security_groups(context: Context) -> list[Finding]:
    """Returns the declared security groups: there, in the VPC of the subnets, and open to their own members."""
    inputs = context.inputs
    if not inputs.security_group_ids:
        return []
    ids = list(inputs.security_group_ids)
    try:
        groups = context.api.ask("ec2", "describe_security_groups", GroupIds=ids)["SecurityGroups"]
    except CallFailed as error:
        if not error.code.startswith("InvalidGroup"):
            raise
        return [failed(error.words or listed(ids), f"Declare security groups of {inputs.region} that exist.")]
    vpc = next((subnet["VpcId"] for subnet in subnets(context)), None)
    strange = [group["GroupId"] for group in groups if group.get("VpcId") != vpc]
    if strange:
        return [
            failed(f"{listed(strange)}: not of {vpc}, the VPC of the subnets", f"Declare security groups of {vpc}.")
        ]
    if not any(_admits_members(group, set(ids)) for group in groups):
        return [
            warned(
                f"{listed(ids)}: no rule lets all traffic in from the members themselves",
                "Nodes must reach each other on every port: add a rule for all traffic from the group itself.",
            )
        ]
    return [passed(f"{listed(ids)} in {vpc}, open to their own members")]


def _admits_members(group: dict[str, Any], ids: set[str]) -> bool:
    return any(
        rule["IpProtocol"] == "-1" and ids & {pair.get("GroupId") for pair in rule.get("UserIdGroupPairs", ())}
        for rule in group.get("IpPermissions", ())
    )
