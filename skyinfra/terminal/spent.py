"""Shows what fleets have cost: a line in other tables, and the tables of `skyinfra cost`."""

from __future__ import annotations

import re
import time
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime, timedelta
from typing import Any

from rich.markup import escape

from skyinfra.errors import InvalidField
from skyinfra.offers import Price, usd
from skyinfra.terminal import tables

# Of a budget: from there on it is said in another colour.
_NEAR = 0.8
_NOBODY = "somebody unknown"


def begin_of(since: str | None) -> float:
    """Returns the begin of a day of UTC, ``2026-11-20`` or ``7d`` ago, in UNIX seconds. Raises `InvalidField`."""
    if since is None:
        return 0.0
    try:
        if days := re.fullmatch(r"(\d{1,4})d", since, re.ASCII):
            day = datetime.now(UTC) - timedelta(days=int(days[1]))
        else:
            day = datetime.strptime(since, "%Y-%m-%d").replace(tzinfo=UTC)
        return datetime(day.year, day.month, day.day, tzinfo=UTC).timestamp()
    except (ValueError, OverflowError):
        hint = "Uses of slots are counted by days of UTC."
        raise InvalidField("a day such as 2026-11-20, or 7d", field="--since", given=since, hint=hint) from None


def day_of(begin: float) -> str:
    """Returns the day of UTC that begins then."""
    return datetime.fromtimestamp(begin, UTC).strftime("%Y-%m-%d")


def show_so_far(spent: Mapping[str, Any]) -> None:
    """Prints in a line what a fleet has cost; nothing where nobody pays."""
    if spent["text"]:
        unknown = f" Not known: {'; '.join(spent['unknown'])}." if spent["unknown"] else ""
        tables.say((f"It has cost {spent['text']}.{unknown}", _style(spent)))


def _style(spent: Mapping[str, Any]) -> str:
    """Returns how a budget is shown: in another colour near its end, and where nobody knows how near that is."""
    fraction = spent["budget"]["fraction"] if spent["budget"] else 0.0
    return "yellow" if fraction is None or fraction >= _NEAR else ""


def show_spent(stacks: Sequence[Mapping[str, Any]], since: str | None) -> None:
    """Prints for each pool its machines, then who used them, then what is not known; and the sum of each stack."""
    if not any(each["pools"] for each in stacks):
        tables.say("There is nothing that could have cost anything.")
    for stack in stacks:
        for pool in stack["pools"]:
            _show_pool(pool, since)
        if len(stack["pools"]) > 1:
            text = f"{stack['stack']}: {_usd(stack)}, {stack['hours']:.2f} node hours"
            tables.say((text, "bold"))


def _show_pool(pool: Mapping[str, Any], since: str | None) -> None:
    begin = f" since {since}, 0:00 UTC" if since else ""
    at = time.strftime("%Y-%m-%d %H:%M", time.localtime(pool["at"] or 0))
    source = {"head": "", "kept": f", as it was kept {at}", None: "; nobody knows its hours"}[pool["source"]]
    text = f"{_usd(pool)}, {pool['hours']:.2f} node hours{begin}{source}"
    tables.say((pool["fleet"], "bold"), f": {text}")
    if pool["problem"]:
        tables.say((pool["problem"], "red"))
    rows = [
        ("node", each["node"] + ("" if each["ended"] is None else " (ended)"), each["machine_type"], each)
        for each in pool["nodes"]
    ]
    rows += [("submitter", each["submitter"] or _NOBODY, "", each) for each in pool["submitters"]]
    rows += [("job", f"{e['kind']} {e['name']} of {e['submitter'] or _NOBODY}", "", e) for e in pool["jobs"]]
    if rows:
        columns = ("BY", "WHAT", "MACHINE", "NODE HOURS", "USD", "PRICE")
        made = tables.table(*columns, leave_out=("PRICE", "MACHINE"), sentences=("WHAT", "PRICE"))
        for by, what, machine, each in (*rows, ("idle", "no task", "", pool["idle"])):
            price = str(Price(**each["price"])) if each.get("price") else ""
            amount = _usd({**each, "free": pool.get("free") or each.get("free")})
            made.add_row(by, escape(what), escape(machine), f"{each['hours']:.2f}", amount, escape(price))
        tables.console().print(made)
    if unknown := [*pool["unknown"], *pool["not_counted"]]:
        tables.say(f"Not known, and not in the sum: {'; '.join(unknown)}.")
    if budget := pool["budget"]:
        part = "nobody knows what" if budget["fraction"] is None else f"{budget['fraction']:.0%}"
        text = f"Budget: {usd(budget['usd'])}, of which this fleet has spent {part}."
        tables.say((text, _style(pool)))


def _usd(amount: Mapping[str, Any]) -> str:
    if amount["usd"] is None:
        return "unknown"
    return "free" if amount.get("free") else f"{'~' if amount.get('estimated') else ''}{usd(amount['usd'])}"
