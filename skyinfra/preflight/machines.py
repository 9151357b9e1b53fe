"""The machine types: offered in the region and in the zones, and sold in the way that is asked for."""

from __future__ import annotations

from typing import Any

from skyinfra import offers
from skyinfra.preflight.facts import Context, NodeZones, listed, machine_facts, node_zones, types_of
from skyinfra.preflight.report import Finding, failed, passed, warned

_SOLD = {"on-demand": "on-demand", "spot": "as spot capacity", "capacity-block": "as capacity blocks"}


def check_machines(context: Context) -> list[Finding]:
    """Returns a finding for each machine type, including that of a separate head."""
    inputs, zones_of = context.inputs, node_zones(context)
    facts = machine_facts(context.api, types_of(inputs))
    missing = [zone for zone in inputs.zones if zone not in zones_of.present]
    if missing:
        whose = "the declared subnets" if inputs.subnet_ids else inputs.region
        to_do = f"Declare zones among {listed(zones_of.present)}."
        return [failed(f"{listed(missing)}: not among the zones of {whose}", to_do)]
    found = [_machine(context, zones_of, facts, kind, inputs.purchase) for kind in inputs.machine_types]
    if len(found) > 1 and any(each.result != "fail" for each in found):
        # The group takes what there is.
        found = [warned(each.found, each.to_do) if each.result == "fail" else each for each in found]
    if inputs.head_machine_type:
        found.append(_machine(context, zones_of, facts, inputs.head_machine_type, "on-demand"))
    return found


def _machine(
    context: Context, zones_of: NodeZones, facts: dict[str, dict[str, Any]], kind: str, purchase: str
) -> Finding:
    inputs, zones = context.inputs, zones_of.offered[kind]
    whose = f"the head, {kind}," if kind == inputs.head_machine_type else kind
    stead = " ".join(offers.instead("aws", kind, inputs.region, spot=inputs.spot))
    if not zones:
        return failed(f"{whose} is not offered in {inputs.region}", stead or "Declare another machine type or region.")
    here = [zone for zone in zones_of.considered if zone in zones]
    if not here:
        given = "subnets in" if inputs.subnet_ids else "zones among"
        return failed(
            f"{whose} is offered in {listed(sorted(zones))}, but not in {listed(zones_of.considered)}",
            f"Declare {given} {listed(sorted(zones))}. {stead}".strip(),
        )
    sold = facts.get(kind, {}).get("SupportedUsageClasses", [purchase])
    if purchase not in sold:
        ways = " or ".join(_SOLD.get(each, each) for each in sold)
        return failed(f"{whose} is not sold {_SOLD[purchase]}, but {ways}", _other_way(sold, stead))
    lacking = [zone for zone in zones_of.considered if zone not in zones]
    if lacking and not inputs.one_zone and (inputs.zones or inputs.subnet_ids):
        return warned(
            f"{whose} is offered in {listed(here)}, but not in {listed(lacking)}",
            f"There is no node in {listed(lacking)}. Declare zones among {listed(sorted(zones))} for more chances.",
        )
    where = f"; the nodes stand in {zones_of.zones[0]}" if inputs.one_zone and zones_of.zones else ""
    return passed(f"{whose} is offered in {listed(here)}{where}")


def _other_way(sold: list[str], stead: str) -> str:
    if "capacity-block" in sold and "on-demand" not in sold:
        return f"Buy a capacity block, and declare it: capacity=sky.CapacityBlock(id='cr-...'). {stead}".strip()
    return f"Declare the pool {'without' if 'spot' not in sold else 'with'} spot=True. {stead}".strip()
