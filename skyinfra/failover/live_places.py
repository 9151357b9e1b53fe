"""Prices, capacity and quotas of the places of a pool, as clouds say them now: the checks of preflight, for each."""

from __future__ import annotations

import importlib
import time
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from skyinfra.errors import MissingDependency
from skyinfra.preflight import clouds
from skyinfra.preflight.report import Line
from skyinfra.preflight.rest import Unanswered, at_once
from skyinfra.providers import kinds, read
from skyinfra.terraform.synthesized import SynthesizedStack

SECONDS = 30.0
# The checks that fail where a price is above what is declared, and for nothing else.
_PRICES = ("price", "spot price")


@dataclass(frozen=True, slots=True)
class Known:
    """Facts about a place, as its cloud says them now.

    usd_per_hour: of all nodes and a separate head; None where nobody says. lines: of the checks; one that could not be
    made says why.
    """

    usd_per_hour: float | None = None
    lines: tuple[Line, ...] = ()

    @property
    def problem(self) -> str:
        """Reasons for which a deploy there would fail; "" for none that are known."""
        return "; ".join(each.found for each in self.lines if each.result == "fail")

    @property
    def too_dear(self) -> bool:
        """Whether a machine costs more now than the pool may pay."""
        return any(each.result == "fail" and each.check in _PRICES for each in self.lines)


def ask(
    stack: SynthesizedStack,
    pool: Mapping[str, Any],
    *,
    environment: Mapping[str, str] | None = None,
    session: Any = None,
    seconds: float = SECONDS,
) -> dict[str, Known]:
    """Returns what is known of each place of *pool*, by its name; asked all at a time, within *seconds*.

    environment: with keys; None is that of the process. session: of boto3. What cannot be asked is a line that says so.
    """
    [here] = clouds.with_existing(stack, [pool])
    by_name = {
        each["place"]: {**at_place(pool, each), "name": each["place"], "configuration": _block(stack, each)}
        for each in pool["places"]
    }
    by_name[pool["place"]]["existing"] = here["existing"]
    deadline = time.monotonic() + seconds

    def lines(name: str) -> list[Line]:
        place = by_name[name]
        table = read(place["provider"]).preflight if place["provider"] in kinds() else None
        if table is None or table.nothing:
            return [Line(name, "not asked", "warn", f"nobody knows how to ask {place['provider']}")]
        if not table.module:
            return clouds.check_pools([place], environment=environment, seconds=seconds)[name]
        module = importlib.import_module(table.module)
        try:
            found: list[Line] = module.check_place(stack, {**place, "name": pool["name"]}, session=session)
        except MissingDependency as error:
            raise Unanswered("silent", f"{error.message} {error.hint}") from None
        return found

    answers = at_once(lines, by_name, deadline + 1)
    return {name: _known(by_name[name], found) for name, found in answers.items()}


def _block(stack: SynthesizedStack, place: Mapping[str, Any]) -> dict[str, Any]:
    """Returns what is known of the provider block of a *place*, which the stack may not have."""
    if place.get("own"):
        return stack.block(place["own"])
    rows = read(place["provider"]).terraform.get("place", ()) if place["provider"] in kinds() else ()
    return {row["field"]: place["account"] for row in rows if "environment" in row and place.get("account")}


def at_place(pool: Mapping[str, Any], place: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the description of *pool* at another *place* of it; what the place has none of, such as a region, is
    left out."""
    same = ("name", "nodes", "spot", "max_hourly_cost")
    return {**{name: pool[name] for name in same if name in pool}, **place}


def _known(place: Mapping[str, Any], found: list[Line] | Unanswered) -> Known:
    if isinstance(found, Unanswered):
        return Known(None, (Line(place["name"], "not asked", "warn", found.reason),))
    if place.get("own"):
        # The stack's own provider block may name credentials that are found nowhere else.
        found = [replace(each, result="warn") if each.check == "credentials" else each for each in found]
    price = next((each.usd_per_hour for each in found if each.usd_per_hour is not None), None)
    if price is None:
        return Known(None, tuple(found))
    # A separate head is no spot machine, and is priced as it was compiled.
    nodes, shipped, each = place["nodes"], place.get("usd_per_hour"), place.get("hourly_cost")
    head = shipped - nodes * each if place.get("grouped") and shipped is not None and each is not None else 0.0
    return Known(round(nodes * price + head, 6), tuple(found))
