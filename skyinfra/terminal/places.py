"""The places of a pool as a table: the order in which a deploy tries them, and why."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any

from rich.markup import escape

from skyinfra.errors import InvalidField, PoolNotFound
from skyinfra.failover.blocks import PlaceState, environment_of, place_states
from skyinfra.failover.deploying import blocked
from skyinfra.offers import usd
from skyinfra.places.choices import NAME, Choices
from skyinfra.terminal import tables
from skyinfra.terraform.project import Project


def show_places(fleet: str, *, as_json: bool = False) -> None:
    """Prints the places of *fleet*, ``STACK/POOL``. Raises `InvalidField`, `PoolNotFound`."""
    name, _, pool_name = fleet.partition("/")
    if not pool_name:
        raise InvalidField("expected STACK/POOL", field="--for", given=fleet)
    project = Project.find()
    stack = project.stack(name)
    pool = next((each for each in stack.pools if each["name"] == pool_name), None)
    if pool is None:
        hint = f"Its pools: {', '.join(each['name'] for each in stack.pools)}."
        raise PoolNotFound(f"the stack {name!r} has no such pool", field="--for", given=pool_name, hint=hint)
    if not pool.get("places"):
        hint = "Declare several: ComputePool(provider=[sky.AWS(), sky.GCP()])."
        raise InvalidField("the pool has one place", field="--for", given=fleet, hint=hint)
    choice = Choices.read(project.folder).of(fleet)
    found = place_states(pool, choice, datetime.now(UTC), environment=environment_of(stack))
    if as_json:
        tables.print_document({"fleet": fleet, "places": list(map(_document, found))})
        return
    made = tables.table("", "PLACE", "MACHINE", "ALL NODES PER HOUR", "STATE", sentences=("STATE",))
    for each in found:
        price = each.place.get("usd_per_hour")
        mark = "->" if each.selected else ""
        cost = "unknown" if price is None else usd(price)
        made.add_row(
            mark, escape(each.place["place"]), escape(each.place["machine_types"][0]), cost, escape(_described(each))
        )
    tables.console().print(made)
    tables.say(f"-> is the place that counts. A deploy tries them from top to bottom; what has refused is in {NAME}.")


def _described(given: PlaceState) -> str:
    if given.missing:
        return given.missing
    return blocked(given) if given.until is not None else "free to try"


def _document(given: PlaceState) -> dict[str, Any]:
    return {
        **given.place,
        "selected": given.selected,
        "blocked_until": given.until.isoformat() if given.until else None,
        "state": _described(given),
    }
