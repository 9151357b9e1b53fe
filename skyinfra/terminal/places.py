"""The places of a pool as a table: the order in which a deploy tries them, and why; what the clouds say of each."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, replace
from datetime import UTC, datetime
from typing import Any

from rich.markup import escape

from skyinfra.errors import InvalidField, PoolNotFound
from skyinfra.failover.blocks import (
    PlaceState,
    ago,
    cheapest_first,
    environment_of,
    moment,
    place_states,
)
from skyinfra.failover.deploying import blocked
from skyinfra.failover.live_places import Known, ask
from skyinfra.offers import usd
from skyinfra.places.choices import NAME, Choices
from skyinfra.preflight.report import Line
from skyinfra.terminal import tables
from skyinfra.terminal.progress import working
from skyinfra.terraform.project import Project
from skyinfra.terraform.synthesized import SynthesizedStack


def show_places(fleet: str, *, as_json: bool = False, live: bool = False) -> None:
    """Prints the places of *fleet*, ``STACK/POOL``. live: asks the clouds. Raises `InvalidField`, `PoolNotFound`."""
    project = Project.find()
    stack, pool = _pool(project, fleet)
    choice, now = Choices.read(project.folder).of(fleet), datetime.now(UTC)
    found = place_states(pool, choice, now, environment=environment_of(stack))
    by_price = bool(pool.get("by_price"))
    if live:
        known = ask_clouds(stack, pool)
        found = [replace(each, known=known[each.place["place"]]) for each in found]
        found = cheapest_first(found) if by_price else found
    order = f"the cheapest first, by {'the prices of now' if live else 'shipped prices'}" if by_price else "as declared"
    if as_json:
        places = [_document(each, now, live=live) for each in found]
        tables.print_document({"fleet": fleet, "order": order, "live": live, "places": places})
        return
    more = ("ASKED NOW",) if live else ()
    columns = ("", "PLACE", "MACHINE", "ALL NODES PER HOUR", "STATE", *more)
    made = tables.table(*columns, sentences=("STATE", *more))
    for each in found:
        row = ["->" if each.selected else "", each.place["place"], each.place["machine_types"][0], _price(each, live)]
        lines = [f"{line.check}: {line.found}" for line in each.known.lines if _says_more(line)]
        row += [_described(each, now), *(["\n".join(lines)] if live else [])]
        made.add_row(*map(escape, row))
    tables.console().print(made)
    tables.say(
        f"-> is the place that counts. A deploy tries them from top to bottom ({order}); what has refused is in {NAME}."
    )


def ask_clouds(stack: SynthesizedStack, pool: Mapping[str, Any]) -> dict[str, Known]:
    """Returns what clouds say of the places of *pool* now; prints that they are asked where a person is watching."""
    with working(f"{stack.name}/{pool['name']}: asking the clouds"):
        return ask(stack, pool)


def _pool(project: Project, fleet: str) -> tuple[SynthesizedStack, Mapping[str, Any]]:
    name, _, pool_name = fleet.partition("/")
    if not pool_name:
        raise InvalidField("expected STACK/POOL", field="--for", given=fleet)
    stack = project.stack(name)
    pool = next((each for each in stack.pools if each["name"] == pool_name), None)
    if pool is None:
        hint = f"Its pools: {', '.join(each['name'] for each in stack.pools)}."
        raise PoolNotFound(f"the stack {name!r} has no such pool", field="--for", given=pool_name, hint=hint)
    if not pool.get("places"):
        hint = "Declare several: ComputePool(provider=[sky.AWS(), sky.GCP()])."
        raise InvalidField("the pool has one place", field="--for", given=fleet, hint=hint)
    return stack, pool


def _says_more(line: Line) -> bool:
    return line.check != "credentials" or line.result != "pass"


def _price(given: PlaceState, live: bool) -> str:
    if given.usd_per_hour is None:
        return "unknown"
    note = f" ({given.place['price_note']})" if live and given.known.usd_per_hour is None else ""
    return f"{usd(given.usd_per_hour)}{note}"


def _described(given: PlaceState, now: datetime) -> str:
    if given.missing:
        return given.missing
    if given.until is not None:
        return blocked(given)
    if given.known.too_dear:
        return "costs more than the pool may"
    before = f"; refused {ago(given.last, now)}" if given.last is not None else ""
    return f"{'a deploy would fail' if given.known.problem else 'free to try'}{before}"


def _document(given: PlaceState, now: datetime, *, live: bool) -> dict[str, Any]:
    age = round((now - moment(given.last)).total_seconds()) if given.last is not None else 0
    return {
        **given.place,
        "selected": given.selected,
        "blocked_until": given.until.isoformat() if given.until else None,
        "state": _described(given, now),
        "refused": {**asdict(given.last), "age_seconds": age} if given.last is not None else None,
        "usd_per_hour_now": given.known.usd_per_hour,
        "checks": [asdict(each) for each in given.known.lines] if live else None,
    }
