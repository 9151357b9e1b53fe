"""The checks of pools on any provider whose data file says what it can be asked. They only read."""

from __future__ import annotations

import os
import re
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from skyinfra import offers
from skyinfra.offers import usd
from skyinfra.preflight.listing import Listed, listed
from skyinfra.preflight.live_offers import made
from skyinfra.preflight.pool_inputs import declared, logins, names_no_login, not_asked
from skyinfra.preflight.refreshed import same
from skyinfra.preflight.report import Finding, Line, failed, passed, warned
from skyinfra.preflight.rest import Api, Unanswered, at_once, first, number, rows, text
from skyinfra.providers import read
from skyinfra.providers.preflight_requests import Quota
from skyinfra.terraform.synthesized import SynthesizedStack

SECONDS = 20.0
# A price so many times that of the shipped offers is worth a warning.
_DEARER = 1.25


@dataclass(frozen=True)
class Pool:
    """A pool as the checks need it; see `stack.describe`. types: its machine types, in order of preference.

    existing: how many nodes of them it has already. account: the configuration of its Terraform provider.
    """

    name: str
    kind: str
    region: str | None
    nodes: int
    types: tuple[str, ...]
    accelerators: int
    spot: bool
    max_hourly_cost: float | None
    existing: int = 0
    account: Mapping[str, Any] | None = None

    @classmethod
    def of(cls, pool: Mapping[str, Any]) -> Pool:
        """Reads one of `SynthesizedStack.pools`."""
        return cls(
            pool["name"],
            pool["provider"],
            None if pool.get("region") == offers.EVERYWHERE else pool.get("region"),
            pool["nodes"],
            tuple(pool["machine_types"]),
            pool.get("accelerators_per_node") or 0,
            bool(pool.get("spot")),
            pool.get("max_hourly_cost"),
            pool.get("existing", 0),
            pool.get("configuration"),
        )


def with_existing(stack: SynthesizedStack, pools: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Returns *pools* of *stack* with their `existing` nodes, as far as is known without Terraform, and the
    `configuration` of their provider."""
    fleets, found = stack.known_fleets(), []
    for pool in pools:
        fleet, nodes = fleets.get(pool["name"]), 0
        if fleet is not None and fleet.provider == pool["provider"]:
            mine = sum(each.machine_type in pool["machine_types"] for each in fleet.nodes)
            nodes = fleet.node_count if fleet.has_group else mine
        found.append({**pool, "existing": nodes, "configuration": stack.configuration(pool["name"])})
    return found


def check_pools(
    pools: Sequence[Mapping[str, Any]], *, environment: Mapping[str, str] | None = None, seconds: float = SECONDS
) -> dict[str, list[Line]]:
    """The lines of each pool by its name, within *seconds*. environment: with the keys; None is that of the process."""
    deadline = time.monotonic() + seconds
    by_name = {pool["name"]: Pool.of(pool) for pool in pools}
    environment = os.environ if environment is None else environment

    def ask(name: str) -> list[Line]:
        pool = by_name[name]
        asked = read(pool.kind).preflight
        assert asked is not None  # noqa: S101 - only such pools are given
        given = _given(pool, environment)
        api = Api(read(pool.kind).about.called, asked, deadline=deadline, environment=given)
        return [each.line(name, check) for check, each in _findings(api, pool, [*by_name.values()])]

    found = at_once(ask, by_name, deadline + 1)
    return {
        name: [Line(name, by_name[name].kind, "warn", str(lines))] if isinstance(lines, Unanswered) else lines
        for name, lines in found.items()
    }


def _given(pool: Pool, environment: Mapping[str, str]) -> dict[str, str]:
    """Returns the *environment* as the provider block of *pool* takes it: with its account, or without credentials."""
    data, block = read(pool.kind), pool.account or {}
    if logins(data, block):
        unused = {name for names in data.terraform.get("credentials", ()) for name in names}
        return {name: value for name, value in environment.items() if name not in unused}
    return {**environment, **declared(data, block, environment)}


def _findings(api: Api, pool: Pool, pools: Sequence[Pool]) -> Iterator[tuple[str, Finding]]:
    asked = api.asked
    arguments = logins(read(pool.kind), pool.account or {})
    credentials = not_asked(arguments) if arguments else _credentials(api, pool)
    yield "credentials", credentials
    if asked.quota is not None and api.variables and credentials.result != "fail":
        yield "quota", _answered(api, lambda quota=asked.quota: _quota(api, quota, pool, pools))
    if asked.machines and (api.variables or asked.open) and credentials.result != "fail":
        yield from _machines(api, pool)
    if asked.unasked:
        yield "not asked", warned(asked.unasked, "")


def _answered(api: Api, ask: Any) -> Finding:
    try:
        found: Finding = ask()
        return found
    except Unanswered as error:
        return warned(f"{api.called}: {error.reason}", "The other checks stand; run it again later.")


def _credentials(api: Api, pool: Pool) -> Finding:
    """Returns whether there are credentials, and whether the provider takes them where that can be asked."""
    asked, names = api.asked, " and ".join(api.variables)
    if not api.variables:
        text = f"missing in the environment: {api.needed}"
        if not asked.credentials:
            text = f"no credentials of {api.called} are looked for"
        if asked.elsewhere or not asked.credentials:
            return warned(f"{text}; {asked.elsewhere}" if asked.elsewhere else text, asked.login)
        return failed(text, asked.login)
    if names_no_login(read(pool.kind), api.variables):
        return warned(f"{names} says which account, and not who logs in; {asked.elsewhere}", asked.login)
    if not asked.account:
        return passed(f"{names} {'is' if len(api.variables) == 1 else 'are'} set")
    try:
        api.get(asked.account)
    except Unanswered as error:
        said = f"{api.called}: {error.reason}"
        return failed(said, asked.login) if error.kind == "refused" else warned(said, "Run it again later.")
    return passed(f"{api.called} accepts {names}")


def _quota(api: Api, table: Quota, pool: Pool, pools: Sequence[Pool]) -> Finding:
    """Returns the quota of the first machine type, and whether what *pools* need of it fits.

    What the pools have already is not counted twice.
    """
    machine = pool.types[0]
    answer = api.get(table.path, region=pool.region or "")
    name = _counts_towards(table, pool)
    if table.names:
        if name is None:
            return warned(f"the quota that {machine} counts towards is not known here", "See it in the console.")
        found = [row for row in rows(answer, table.rows) if text(row, table.name) == name]
        answer = found[0] if found else {}
    limit, used = first(answer, table.limit), number(answer, table.used) if table.used else None
    if not isinstance(limit, int | float):
        return warned(f"{api.called} does not say the quota {name or table.what}", "See it in the console.")
    per = {each.name: each.accelerators if table.per == "accelerator" else 1 for each in pools}
    sharing = [each for each in pools if _shares(table, pool, each)]
    own = sum(per[each.name] * each.existing for each in sharing)
    others = None if used is None else max(0, used - own)
    need, together = per[pool.name] * pool.nodes, sum(per[each.name] * each.nodes for each in sharing)
    what = f"{name}: {limit:g}" if name else f"{limit:g} {table.what}{'' if limit == 1 else 's'}"
    in_use = "" if others is None else f", {others:g} in use{' by others' if own else ''}"
    said = f"{what} in all{in_use}; the pool needs {need}"
    if together > need:
        said += f", the pools {', '.join(each.name for each in sharing)} together {together}"
    if (others or 0) + together > limit:
        return failed(said, f"Declare fewer nodes, or ask {api.called} for more.")
    return passed(said)


def _counts_towards(table: Quota, pool: Pool) -> str | None:
    return next((row[2 if pool.spot else 1] for row in table.names if re.search(row[0], pool.types[0])), None)


def _shares(table: Quota, pool: Pool, other: Pool) -> bool:
    """Returns whether two pools count towards one quota, of one account."""
    here = "{region}" not in table.path or pool.region == other.region
    same = (pool.kind, pool.account) == (other.kind, other.account)
    return here and same and _counts_towards(table, pool) == _counts_towards(table, other)


def _machines(api: Api, pool: Pool) -> Iterator[tuple[str, Finding]]:
    """Returns whether each machine type can be had now, and its price now."""
    try:
        found = listed(api, names=pool.types, region=pool.region)
    except Unanswered as error:
        yield "machine", warned(f"{api.called}: {error.reason}", "The other checks stand; run it again later.")
        return
    for machine in pool.types:
        rows = _rows_of(api, pool.kind, machine, found)
        here = [each for each in rows if pool.region is None or each.priced_in in (None, pool.region)]
        yield "machine", _machine(api, pool, machine, here[0] if here else None)
        if here:
            yield "price", _price(pool, here[0]).at(here[0].spot if pool.spot else here[0].on_demand)


def _rows_of(api: Api, kind: str, machine: str, found: Sequence[Listed]) -> list[Listed]:
    """Returns the rows of a *machine* type: of its name, or several of what is listed one by one.

    Of a marketplace, whose names perish, those that are like it.
    """
    rows = [each for each in found if each.name == machine]
    if not rows and (several := re.fullmatch(r"(\d+)x (.+)", machine)):
        rows = [_several(int(several[1]), each) for each in found if each.name == several[2]]
    shipped = offers.named(kind, machine)
    if not rows and shipped is not None and any(table.cheapest is not None for table in api.asked.machines):
        rows = [each for each in found if (offer := made(kind, each, "")) and same(shipped, offer, perish=True)]
    return [replace(each, name=machine) for each in rows]


def _several(count: int, one: Listed) -> Listed:
    on_demand, spot = (price and count * price for price in (one.on_demand, one.spot))
    return replace(one, count=count, on_demand=on_demand, spot=spot)


def _machine(api: Api, pool: Pool, name: str, machine: Listed | None) -> Finding:
    other = " ".join(offers.instead(pool.kind, name, pool.region or "", spot=pool.spot))
    if machine is None and not pool.accelerators and not any(table.general for table in api.asked.machines):
        said = f"{api.called} is asked for machines with accelerators alone: whether it has {name} now is not known"
        return warned(said, "")
    if machine is None:
        return warned(f"{api.called} does not list {name} now", other or "Declare another machine type.")
    if machine.regions is None:
        return passed(f"{api.called} lists {name}; it does not say where it is free")
    if not machine.regions:
        return failed(f"{name} is nowhere to be had now", other or "Try again later, or declare another machine type.")
    places = ", ".join(machine.regions)
    if pool.region is None or pool.region in machine.regions:
        return passed(f"{name} can be had now in {places}")
    return failed(
        f"{name} cannot be had in {pool.region} now, but in {places}", f"Declare region={machine.regions[0]!r}."
    )


def _price(pool: Pool, machine: Listed) -> Finding:
    purchase, now = ("spot", machine.spot) if pool.spot else ("on-demand", machine.on_demand)
    offer = offers.named(pool.kind, machine.name)
    shipped = offer.price(spot=pool.spot) if offer else None
    about = f"the shipped price is {shipped}" if shipped else "no price of it is shipped"
    if now is None:
        return warned(f"the {purchase} price of {machine.name} now is not known; {about}", "")
    said = f"{machine.name} costs {usd(now)}/h {purchase} now; {about}"
    if pool.max_hourly_cost is not None and now > pool.max_hourly_cost:
        return failed(f"{said}; max_hourly_cost is {usd(pool.max_hourly_cost)}", f"Raise it above {usd(now)}.")
    if shipped is not None and now > _DEARER * shipped.usd_per_hour:
        return warned(said, "The costs that plan and deploy show are too low.")
    return passed(said)
