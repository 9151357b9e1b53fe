"""The quotas: of vCPUs by family and purchase, and how much of them is in use.

On-demand instances and unused capacity reservations count towards the on-demand quotas, spot instances towards those of
spot; instances in capacity blocks towards none. What this stack runs already is not counted twice.
"""

from __future__ import annotations

from dataclasses import dataclass

from skyinfra.errors import counted
from skyinfra.preflight.api import Api, CallFailed
from skyinfra.preflight.facts import Context, listed, others_running, vcpus
from skyinfra.preflight.pool_inputs import PoolInputs
from skyinfra.preflight.report import Finding, failed, passed, warned
from skyinfra.providers.quotas import Quota, vcpu_quota


@dataclass(frozen=True, slots=True)
class Demand:
    """The demand of a pool on one quota, in vCPUs.

    machine_types: those that count towards it. least, most: with the smallest and the largest of them. first: whether
    it is what the pool tries first. head: whether it is the head's, which no other machine type can stand in for.
    """

    quota: Quota
    machine_types: tuple[str, ...]
    least: int
    most: int
    first: bool
    spot: bool
    head: bool = False


def check_quotas(context: Context) -> list[Finding]:
    """Returns a finding for each quota that the pool counts towards."""
    inputs = context.inputs
    if inputs.capacity_block_id:
        return [passed("instances in a capacity block count towards no quota of vCPUs")]
    if inputs.capacity_reservation_id:
        return [passed("the reservation has counted towards the quota since it was made")]
    demands = demands_of(context.api, inputs)
    found = [_finding(context, demand) for demand in demands]
    nodes = [each for each, demand in zip(found, demands, strict=True) if not demand.head]
    if any(each.result != "fail" for each in nodes):
        # The group falls back to machine types of the other quotas.
        found = [
            warned(each.found, each.to_do) if each.result == "fail" and not demand.head else each
            for each, demand in zip(found, demands, strict=True)
        ]
    unknown = [kind for kind in inputs.machine_types if not any(kind in demand.machine_types for demand in demands)]
    if unknown:
        purchase = "spot" if inputs.spot else "on-demand"
        found.append(
            warned(
                f"the {purchase} quota of {listed(unknown)} is not known here, or its vCPUs are not",
                f"See it in the console: https://{inputs.region}.console.aws.amazon.com/servicequotas/home/services/ec2",
            )
        )
    return found


def demands_of(api: Api, inputs: PoolInputs) -> list[Demand]:
    """Returns the demand on each quota; none where the capacity is reserved."""
    if inputs.reservation:
        return []
    sizes = vcpus(api, (*inputs.machine_types, *((inputs.head_machine_type,) if inputs.head_machine_type else ())))
    by_quota: dict[Quota, list[str]] = {}
    for kind in inputs.machine_types:
        quota = vcpu_quota(kind, spot=inputs.spot)
        if quota is not None and kind in sizes:
            by_quota.setdefault(quota, []).append(kind)
    found = []
    for quota, kinds in by_quota.items():
        needed = [sizes[kind] * inputs.nodes for kind in kinds]
        first = inputs.machine_types[0] in kinds
        found.append(Demand(quota, tuple(kinds), min(needed), max(needed), first, inputs.spot))
    head = inputs.head_machine_type
    head_quota = vcpu_quota(head) if head else None
    if head and head_quota and head in sizes:
        found.append(Demand(head_quota, (head,), sizes[head], sizes[head], first=True, spot=False, head=True))
    return found


def _finding(context: Context, demand: Demand) -> Finding:
    inputs, quota = context.inputs, demand.quota
    value = limit(context.api, quota)
    used, remark = _in_use(context, demand)
    sharing = {
        peer.pool: sum(d.least for d in demands_of(context.api, peer) if d.first and d.quota == quota)
        for peer in context.peers
    }
    together = sum(sharing.values()) if demand.first else demand.least
    what = f"{quota.name} ({quota.code}): {value} vCPUs, {used} in use{remark}"
    whose = f"{'the head ' if demand.head else ''}{listed(demand.machine_types)}"
    need = "needs" if len(demand.machine_types) == 1 else "need"
    asked = f"{whose} {need} {demand.least}" + (f" to {demand.most}" if demand.most > demand.least else "")
    desired = used + max(together, demand.most)
    to_do = f"{quota.increase(desired, inputs.region, inputs.profile)}"
    if used + demand.least > value:
        return failed(f"{what}; {asked}", to_do)
    if used + together > value:
        others = listed(pool for pool, needed in sharing.items() if needed)
        return failed(f"{what}; {asked}, and the pools {others} together {together}", to_do)
    if used + demand.most > value:
        return warned(f"{what}; {asked}", f"The larger machines do not fit. {to_do}")
    return passed(f"{what}; {asked}")


def limit(api: Api, quota: Quota) -> int:
    """Returns the value of a quota in this account and region; its default where the account has none of its own."""
    names = {"ServiceCode": quota.service, "QuotaCode": quota.code}
    try:
        answer = api.ask("service-quotas", "get_service_quota", **names)
    except CallFailed as error:
        if error.code != "NoSuchResourceException":
            raise
        answer = api.ask("service-quotas", "get_aws_default_service_quota", **names)
    return int(answer["Quota"]["Value"])


def _in_use(context: Context, demand: Demand) -> tuple[int, str]:
    """Returns the vCPUs in use under the quota by others, and the gaps in that number."""
    purchase = "spot" if demand.spot else "on-demand"
    counts: dict[str, int] = {}
    for (kind, option), number in others_running(context).items():
        if option == purchase and vcpu_quota(kind, spot=demand.spot) == demand.quota:
            counts[kind] = counts.get(kind, 0) + number
    remark = ""
    if not demand.spot:
        try:
            for kind, number in _unused(context.api, demand.quota).items():
                counts[kind] = counts.get(kind, 0) + number
        except CallFailed:
            remark = " (unused capacity reservations not counted)"
    sizes = vcpus(context.api, counts)
    return sum(sizes.get(kind, 0) * number for kind, number in counts.items()), remark


def _unused(api: Api, quota: Quota) -> dict[str, int]:
    """Returns the number of reserved instances under the quota that do not run, by machine type."""
    filters = [{"Name": "state", "Values": ["active"]}]
    answer = api.ask("ec2", "describe_capacity_reservations", Filters=filters)
    counts: dict[str, int] = {}
    for reservation in answer["CapacityReservations"]:
        kind = reservation["InstanceType"]
        if reservation.get("ReservationType", "default") == "default" and vcpu_quota(kind) == quota:
            counts[kind] = counts.get(kind, 0) + reservation["AvailableInstanceCount"]
    return counts


def room(api: Api, quota: Quota, used: int, needed: int, inputs: PoolInputs, what: str) -> Finding:
    """Returns whether *needed* more of *what*, such as VPCs, fit in a quota of which *used* are in use."""
    value = limit(api, quota)
    text = f"{used} of {counted(value, what)} are in use, and {needed} more needed ({quota.code})"
    if used + needed > value:
        return failed(text, quota.increase(used + needed, inputs.region, inputs.profile))
    return passed(text)
