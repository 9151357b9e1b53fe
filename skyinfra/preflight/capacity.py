"""Reserved capacity: the declared reservation, and the capacity blocks on sale."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from typing import Any

from skyinfra import offers
from skyinfra.preflight.api import CallFailed
from skyinfra.preflight.facts import Context, listed, machine_facts, node_zones, nodes_running
from skyinfra.preflight.report import Finding, failed, passed, warned

_ENDS_SOON = timedelta(hours=24)
_HOURS = 24
# The sizes that capacity blocks are sold in.
_SIZES = (1, 2, 4, 8, 16, 32, 64)


def check_reservation(context: Context) -> list[Finding]:
    """The declared capacity block or reservation: there, active, of the machine type, in the zone, with room."""
    inputs = context.inputs
    if inputs.reservation is None:
        return []
    try:
        found = context.api.ask("ec2", "describe_capacity_reservations", CapacityReservationIds=[inputs.reservation])[
            "CapacityReservations"
        ]
    except CallFailed as error:
        if not error.code.startswith("InvalidCapacityReservationId"):
            raise
        found = []
    if not found:
        to_do = "See those that there are with: aws ec2 describe-capacity-reservations"
        return [failed(f"there is no {inputs.reservation} in {inputs.region}", f"{to_do} --region {inputs.region}")]
    return [_reservation(context, found[0])]


def _reservation(context: Context, found: dict[str, Any]) -> Finding:
    inputs = context.inputs
    kind, zone, state = found["InstanceType"], found["AvailabilityZone"], found["State"]
    block = found.get("ReservationType", "default") == "capacity-block"
    text = f"{found['CapacityReservationId']}: {found['TotalInstanceCount']} x {kind} in {zone}"
    if block != bool(inputs.capacity_block_id):
        what, declared = ("a capacity block", "CapacityBlock") if block else ("a reservation", "CapacityReservation")
        return failed(f"{text}, is {what}", f"Declare it as sky.{declared}(id={found['CapacityReservationId']!r}).")
    if kind not in inputs.machine_types:
        return failed(f"{text}, is not for {inputs.machine_types[0]}", f"Declare instance_types=[{kind!r}].")
    zones = node_zones(context).zones
    if zone not in zones:
        to_do = f"Declare zones=[{zone!r}], or a subnet in it."
        return failed(f"{text}; the nodes stand in {listed(zones) or 'no zone'}", to_do)
    if state in ("scheduled", "pending", "payment-pending", "assessing", "delayed"):
        return warned(f"{text}, begins at {_time(found.get('StartDate'))}", "Deploy when it has begun.")
    if state != "active":
        return failed(f"{text}, is {state}", "Declare one that is active.")
    return _free(context, found, text)


def _free(context: Context, found: dict[str, Any], text: str) -> Finding:
    free = found["AvailableInstanceCount"]
    missing = max(0, context.inputs.nodes - nodes_running(context))
    text += f", {free} free"
    if missing > free:
        return failed(f"{text}; {missing} more needed", "Declare fewer nodes, or free instances in it.")
    ends = found.get("EndDate")
    if ends is not None:
        text += f", ends at {_time(ends)}"
        if ends - datetime.now(UTC) < _ENDS_SOON:
            return warned(text, "Its instances are ended with it; those of a block half an hour before.")
    return passed(text)


def check_blocks(context: Context) -> list[Finding]:
    """Returns the capacity block on sale instead, for machine types that are sold in blocks."""
    inputs = context.inputs
    kind = inputs.machine_types[0]
    if inputs.purchase != "on-demand" or inputs.reservation:
        return []
    sold = machine_facts(context.api, [kind]).get(kind, {}).get("SupportedUsageClasses", [])
    if "capacity-block" not in sold:
        return []
    count = next((size for size in _SIZES if size >= inputs.nodes), _SIZES[-1])
    answer = context.api.ask(
        "ec2",
        "describe_capacity_block_offerings",
        InstanceType=kind,
        InstanceCount=count,
        CapacityDurationHours=_HOURS,
    )
    found = sorted(answer["CapacityBlockOfferings"], key=lambda each: (each["StartDate"], float(each["UpfrontFee"])))
    what = f"capacity block of {count} x {kind} for {_HOURS} hours"
    only = "on-demand" not in sold
    if not found:
        text = f"no {what} is on offer in {inputs.region}"
        return [warned(text, "Ask for another day or region.") if only else passed(text)]
    first = found[0]
    text = (
        f"a {what} can be bought: in {first['AvailabilityZone']} from {_time(first['StartDate'])} for "
        f"{offers.usd(float(first['UpfrontFee']))}"
    )
    to_do = (
        f"aws ec2 purchase-capacity-block --capacity-block-offering-id {first['CapacityBlockOfferingId']} "
        f"--instance-platform Linux/UNIX --region {inputs.region}"
    )
    return [warned(text, to_do) if only else passed(text)]


def _time(moment: datetime | None) -> str:
    return moment.astimezone(UTC).strftime("%Y-%m-%d %H:%M UTC") if moment else "a time that AWS does not say"
