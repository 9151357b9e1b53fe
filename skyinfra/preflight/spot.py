"""Spot capacity: its price now, and how likely it is to be had."""

from __future__ import annotations

from dataclasses import replace
from datetime import UTC, datetime

from skyinfra import offers
from skyinfra.errors import counted
from skyinfra.preflight.facts import Context, listed, node_zones, zone_ids
from skyinfra.preflight.report import Finding, failed, passed, warned

_PRODUCTS = ["Linux/UNIX", "Linux/UNIX (Amazon VPC)"]
# A price so many times that of the shipped offers is worth a warning.
_DEARER = 1.25
# Scores are 1 to 10. With fewer machine types than this AWS gives low scores.
_LOW_SCORE = 3
_SCORED_TYPES = 3


def check_prices(context: Context) -> list[Finding]:
    """Returns a finding for each machine type of a spot pool: the last price in each zone, and the declared limit."""
    inputs = context.inputs
    if not inputs.spot:
        return []
    zones = node_zones(context).zones
    prices = _prices(context)
    found = [
        _price(context, kind, {zone: usd for zone, usd in prices.get(kind, {}).items() if zone in zones})
        for kind in inputs.machine_types
    ]
    if any(each.result != "fail" for each in found):
        # The group takes what there is.
        return [replace(each, result="warn") if each.result == "fail" else each for each in found]
    return found


def _prices(context: Context) -> dict[str, dict[str, float]]:
    """Returns the last price by machine type and zone. A history that begins now has the prices that hold now."""
    answer = context.api.ask(
        "ec2",
        "describe_spot_price_history",
        InstanceTypes=list(context.inputs.machine_types),
        ProductDescriptions=_PRODUCTS,
        StartTime=datetime.now(UTC).replace(minute=0, second=0, microsecond=0),
    )
    found: dict[str, dict[str, float]] = {}
    for price in sorted(answer["SpotPriceHistory"], key=lambda each: each["Timestamp"]):
        found.setdefault(price["InstanceType"], {})[price["AvailabilityZone"]] = float(price["SpotPrice"])
    return found


def _price(context: Context, kind: str, prices: dict[str, float]) -> Finding:
    inputs = context.inputs
    if not prices:
        return warned(
            f"{kind} has no spot price where the nodes stand: it may not be sold there",
            " ".join(offers.instead("aws", kind, inputs.region, spot=True)) or "Declare the pool without spot=True.",
        )
    text = f"{kind}: {listed(f'{offers.usd(usd)}/h in {zone}' for zone, usd in sorted(prices.items()))}"
    least = min(prices.values())
    for name, most in (("spot_max_price", inputs.spot_max_price), ("max_hourly_cost", inputs.max_hourly_cost)):
        if most is None:
            continue
        if most < least:
            return failed(f"{text}; {name} is {offers.usd(most)}", f"Raise {name} above {offers.usd(least)}.").at(least)
        above = sorted(zone for zone, usd in prices.items() if usd > most)
        if above:
            to_do = f"No node comes from {listed(above)} at that price."
            return warned(f"{text}; {name} is {offers.usd(most)}", to_do).at(least)
    offer = offers.named("aws", kind)
    shipped = offer.price(spot=True) if offer else None
    if shipped is not None and least > _DEARER * shipped.usd_per_hour:
        text, to_do = f"{text}; the shipped price is {shipped}", "The costs that plan and deploy show are too low."
        return warned(text, to_do).at(least)
    return passed(f"{text}; the shipped price is {shipped}" if shipped else text).at(least)


def check_score(context: Context) -> list[Finding]:
    """Returns AWS's spot placement score of each zone. A score promises nothing, so that no score fails."""
    inputs = context.inputs
    if not inputs.spot:
        return []
    answer = context.api.ask(
        "ec2",
        "get_spot_placement_scores",
        InstanceTypes=list(inputs.machine_types),
        TargetCapacity=inputs.nodes,
        TargetCapacityUnitType="units",
        SingleAvailabilityZone=True,
        RegionNames=[inputs.region],
    )
    names, zones = zone_ids(context.api), node_zones(context).zones
    by_zone = {names.get(each["AvailabilityZoneId"], ""): each["Score"] for each in answer["SpotPlacementScores"]}
    scores = {zone: by_zone[zone] for zone in zones if zone in by_zone}
    if not scores:
        return [
            warned(f"AWS scores no zone for {counted(inputs.nodes, 'node')}", "Declare more machine types or zones.")
        ]
    text = f"{listed(f'{score} of 10 in {zone}' for zone, score in scores.items())} for {counted(inputs.nodes, 'node')}"
    few = len(inputs.machine_types) < _SCORED_TYPES
    if few:
        text += f"; with fewer than {_SCORED_TYPES} machine types AWS always says little"
    if max(scores.values()) > (1 if few else _LOW_SCORE):
        return [passed(text)]
    return [warned(text, "Declare more machine types (instance_types=[...]) or zones, or fewer nodes.")]
