"""Reserved capacity: the declared reservation, and the capacity blocks on sale, which are bought on request alone."""

from __future__ import annotations

import re
import uuid
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import Any

from skyinfra import offers
from skyinfra.errors import (
    CapacityUnavailable,
    CloudCredentialsRefused,
    CloudPermissionDenied,
    CloudRefused,
    CloudThrottled,
    InvalidField,
)
from skyinfra.preflight.access import not_checked
from skyinfra.preflight.api import Api, CallFailed
from skyinfra.preflight.facts import Context, listed, machine_facts, node_zones, nodes_running
from skyinfra.preflight.pool_inputs import PoolInputs
from skyinfra.preflight.report import Finding, failed, passed, warned

_ENDS_SOON = timedelta(hours=24)
_DAY_HOURS = 24
# The sizes that capacity blocks are sold in, and the days: https://docs.aws.amazon.com/AWSEC2/latest/UserGuide/
# capacity-blocks-purchase.html, up to 64 instances, 1-day increments up to 14 days, 7-day ones up to 182 (2026-11-27).
_SIZES = (1, 2, 4, 8, 16, 32, 64)
_DAYS, _WEEKS_DAYS = 14, 182
# Until a reservation is active. https://docs.aws.amazon.com/AWSEC2/latest/APIReference/API_CapacityReservation.html
_BEFORE = ("scheduled", "pending", "payment-pending", "assessing", "delayed")
_PURCHASE = "skyinfra:purchase"
# Of AWS's codes those after which a request may have been carried out.
_UNCLEAR = ("InternalError", "InternalFailure", "ServiceUnavailable", "Unavailable", "RequestTimeout")
_REFUSALS: dict[str, type[CloudRefused]] = {
    "credentials": CloudCredentialsRefused,
    "throttled": CloudThrottled,
}


@dataclass(frozen=True, slots=True)
class Block:
    """A capacity block on sale. count: of machines. begins, ends: in UTC. usd: for all of it, paid at once."""

    id: str
    machine_type: str
    count: int
    zone: str
    begins: datetime
    ends: datetime
    hours: int
    usd: float

    @property
    def usd_per_hour(self) -> float:
        """Of one machine."""
        return self.usd / (self.count * self.hours)

    def __str__(self) -> str:
        span = f"from {_time(self.begins)} to {_time(self.ends)}"
        return f"{self.count} x {self.machine_type} in {self.zone} {span} for {offers.usd(self.usd)}"


def blocks(
    inputs: PoolInputs, *, days: int = 1, before: datetime | None = None, session: Any = None
) -> tuple[Block, ...]:
    """Returns the capacity blocks on sale for the nodes of a pool, the cheapest first, then the first to begin.

    before: they begin before that. session: see `aws.check_pools`. Raises `InvalidField` for what is sold in no block,
    `CloudRefused`.
    """
    if not (1 <= days <= _DAYS or (days % 7 == 0 and 1 <= days <= _WEEKS_DAYS)):
        hint = f"1 to {_DAYS}, or whole weeks, up to {_WEEKS_DAYS}."
        raise InvalidField("AWS sells no block of so many days", field="--days", given=days, hint=hint)
    if inputs.nodes > _SIZES[-1]:
        hint = f"Declare at most {_SIZES[-1]} nodes: a pool has one block."
        raise InvalidField("a block has fewer machines", field=f"{inputs.pool}.nodes", given=inputs.nodes, hint=hint)
    try:
        api = Api(inputs.region, inputs.profile, session)
        found = [_block(each, inputs) for each in _offerings(api, inputs, days * _DAY_HOURS, before)]
    except CallFailed as error:
        raise _refused(error, inputs) from None
    return tuple(sorted(found, key=lambda each: (each.usd_per_hour, each.begins, each.id)))


def buy(inputs: PoolInputs, block: Block, *, again: bool = False, session: Any = None) -> str:
    """Buys *block*, and returns the id of its reservation.

    It is asked for once: a second request would be a second purchase. again: also where the pool has one that it does
    not declare. Raises `InvalidField` where it has, `CloudRefused`, also where AWS does not say whether it was bought.
    """
    mark = uuid.uuid4().hex
    pool = {"skyinfra:stack": inputs.stack, "skyinfra:pool": inputs.pool}
    tags = [{"Key": name, "Value": value} for name, value in {**pool, _PURCHASE: mark}.items()]
    specification = {"ResourceType": "capacity-reservation", "Tags": tags}
    try:
        api = Api(inputs.region, inputs.profile, session)
        if not again:
            _refuse_second(inputs, _tagged(api, pool))
        made = api.once(
            "ec2",
            "purchase_capacity_block",
            CapacityBlockOfferingId=block.id,
            InstancePlatform="Linux/UNIX",
            TagSpecifications=[specification],
        )
        return str(made["CapacityReservation"]["CapacityReservationId"])
    except CallFailed as error:
        if error.kind != "unreachable" and error.code not in _UNCLEAR and not re.fullmatch("5..", error.code):
            raise _refused(error, inputs) from None
        return _bought(inputs, mark, error, session)


def _bought(inputs: PoolInputs, mark: str, lost: CallFailed, session: Any) -> str:
    """Returns the id of what was bought with that *mark*, after an answer that was *lost*. Raises `CloudRefused`."""
    try:
        found = _tagged(Api(inputs.region, inputs.profile, session), {_PURCHASE: mark})
    except CallFailed:
        found = []
    if found:
        return str(found[0]["CapacityReservationId"])
    raise CloudRefused(
        f"AWS did not say whether the block was bought ({lost.words}), and names no reservation of that purchase (yet)",
        hint="What was bought is paid. Look in some minutes, before you buy again: aws ec2 "
        f"describe-capacity-reservations --region {inputs.region} --filters Name=tag:{_PURCHASE},Values={mark}",
    )


def _tagged(api: Api, tags: dict[str, str]) -> list[dict[str, Any]]:
    """Returns the reservations that have *tags*. Raises `CallFailed`."""
    filters = [{"Name": f"tag:{name}", "Values": [value]} for name, value in tags.items()]
    found: list[dict[str, Any]] = api.ask("ec2", "describe_capacity_reservations", Filters=filters)[
        "CapacityReservations"
    ]
    return found


def _refuse_second(inputs: PoolInputs, found: list[dict[str, Any]]) -> None:
    """Raises `InvalidField` where one of *found* is paid and not declared: a purchase was cut off, perhaps."""
    for each in found:
        name, state = each["CapacityReservationId"], each["State"]
        if name != inputs.reservation and (state == "active" or state in _BEFORE):
            hint = f'Declare it: sky.AWS(capacity=sky.CapacityBlock(id="{name}")). Or buy another one with --again.'
            raise InvalidField(
                f"was bought for this pool already, and is {state}", field="capacity", given=name, hint=hint
            )


def begun(inputs: PoolInputs, *, session: Any = None) -> str | None:
    """Returns None where the declared block or reservation of a pool is active, else why it is not yet.

    Raises `InvalidField` where none is declared, `CapacityUnavailable` where it will not be active any more,
    `CloudRefused`.
    """
    if inputs.reservation is None:
        hint = 'Buy one with --buy, and declare it: sky.AWS(capacity=sky.CapacityBlock(id="cr-...")).'
        raise InvalidField("declares no capacity block and no reservation", field=inputs.pool, hint=hint)
    try:
        found = _declared(Api(inputs.region, inputs.profile, session), inputs.reservation)
    except CallFailed as error:
        raise _refused(error, inputs) from None
    state = found["State"] if found is not None else "not there"
    if found is not None and state == "active":
        return None
    if found is not None and state in _BEFORE:
        return f"{inputs.reservation} is {state}, and begins at {_time(found.get('StartDate'))}"
    hint = f"`skyinfra capacity {inputs.stack}/{inputs.pool}` lists what is on sale."
    raise CapacityUnavailable(f"{inputs.reservation} is {state}", hint=hint)


def _declared(api: Api, reservation: str) -> dict[str, Any] | None:
    """Returns what AWS says of a reservation; None where it has none of that id. Raises `CallFailed`."""
    try:
        found = api.ask("ec2", "describe_capacity_reservations", CapacityReservationIds=[reservation])
    except CallFailed as error:
        if error.code.startswith("InvalidCapacityReservationId"):
            return None
        raise
    return next(iter(found["CapacityReservations"]), None)


def _refused(error: CallFailed, inputs: PoolInputs) -> CloudRefused:
    if error.kind == "denied":
        hint = f"Allow the IAM action {error.action}; `skyinfra iam` has those of a deploy alone."
        return CloudPermissionDenied(f"the credentials may not call {error.action}", hint=hint)
    if error.kind == "refused":
        hint = f"What is on sale changes: skyinfra capacity {inputs.stack}/{inputs.pool} lists it again."
        return CloudRefused(f"{error.action}: {error.code}: {error.words}", hint=hint)
    finding = not_checked(error, inputs.region, inputs.profile, needed=True)
    return _REFUSALS.get(error.kind, CloudRefused)(finding.found, hint=finding.to_do)


def _offerings(api: Api, inputs: PoolInputs, hours: int, before: datetime | None = None) -> list[dict[str, Any]]:
    """Returns what is on sale for the nodes of a pool. Raises `CallFailed`."""
    count = next((size for size in _SIZES if size >= inputs.nodes), _SIZES[-1])
    kind, limit = inputs.machine_types[0], {"EndDateRange": before + timedelta(hours=hours)} if before else {}
    answer = api.ask(
        "ec2",
        "describe_capacity_block_offerings",
        InstanceType=kind,
        InstanceCount=count,
        CapacityDurationHours=hours,
        **limit,
    )
    asked = {"InstanceType": kind, "InstanceCount": count, "CapacityBlockDurationHours": hours}
    found = answer["CapacityBlockOfferings"]
    return [asked | each for each in found if not inputs.zones or each["AvailabilityZone"] in inputs.zones]


def _block(found: dict[str, Any], inputs: PoolInputs) -> Block:
    begins, hours = found["StartDate"].astimezone(UTC), int(found["CapacityBlockDurationHours"])
    ends = found.get("EndDate")
    return Block(
        found["CapacityBlockOfferingId"],
        found["InstanceType"],
        int(found["InstanceCount"]),
        found["AvailabilityZone"],
        begins,
        ends.astimezone(UTC) if ends is not None else begins + timedelta(hours=hours),
        hours,
        float(found["UpfrontFee"]),
    )


def check_reservation(context: Context) -> list[Finding]:
    """The declared capacity block or reservation: there, active, of the machine type, in the zone, with room."""
    inputs = context.inputs
    if inputs.reservation is None:
        return []
    found = _declared(context.api, inputs.reservation)
    if found is None:
        to_do = "See those that there are with: aws ec2 describe-capacity-reservations"
        return [failed(f"there is no {inputs.reservation} in {inputs.region}", f"{to_do} --region {inputs.region}")]
    return [_reservation(context, found)]


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
    if state in _BEFORE:
        to_do = f"Deploy when it has begun: skyinfra capacity {inputs.stack}/{inputs.pool} --wait"
        return warned(f"{text}, begins at {_time(found.get('StartDate'))}", to_do)
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
    found = [_block(each, inputs) for each in _offerings(context.api, inputs, _DAY_HOURS)]
    count = next((size for size in _SIZES if size >= inputs.nodes), _SIZES[-1])
    what = f"capacity block of {count} x {kind} for {_DAY_HOURS} hours"
    only = "on-demand" not in sold
    if not found:
        text = f"no {what} is on offer in {inputs.region}"
        return [warned(text, "Ask for another day or region.") if only else passed(text)]
    first = min(found, key=lambda each: (each.begins, each.usd))
    text = f"a {what} can be bought: in {first.zone} from {_time(first.begins)} for {offers.usd(first.usd)}"
    to_do = f"skyinfra capacity {inputs.stack}/{inputs.pool} --buy {first.id}"
    return [warned(text, to_do) if only else passed(text)]


def _time(moment: datetime | None) -> str:
    return moment.astimezone(UTC).strftime("%Y-%m-%d %H:%M UTC") if moment else "a time that AWS does not say"
