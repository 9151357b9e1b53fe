"""Writes the changes of a plan and their cost, for a person and as JSON."""

from __future__ import annotations

from typing import Any

from rich.markup import escape

from skyinfra.deploy.cost import HOURS, Cost, PoolCost
from skyinfra.deploy.disks import cost_lines
from skyinfra.deploy.reporting import short
from skyinfra.offers import usd
from skyinfra.terminal import tables
from skyinfra.terraform.program import Plan

_SIGNS = {"create": "[green]+[/]", "delete": "[red]-[/]", "update": "[yellow]~[/]", "replace": "[yellow]±[/]"}


def show_plan(
    name: str, plan: Plan, *, as_json: bool = False, to_stderr: bool = False, cost: Cost | None = None
) -> None:
    """Prints the changes of *plan*, then the *cost*; as JSON, both in one document."""
    if as_json:
        tables.print_document(plan_document(name, plan, cost))
        return
    out = tables.console(to_stderr=to_stderr)
    if plan.empty:
        out.print(f"{name}: no changes, everything is as declared")
    else:
        for action, address in plan.changes:
            out.print(f"  {_SIGNS.get(action, escape(action))} {escape(short(address))}")
        actions = [action for action, _ in plan.changes]
        counts = {action: actions.count(action) for action in ("create", "update", "replace", "delete")}
        text = ", ".join(f"{count} to {action}" for action, count in counts.items() if count)
        tables.say((name, "bold"), f": {text or 'outputs change'}", to_stderr=to_stderr)
        if plan.run is not None:
            tables.say(f"{name}: planned by HCP Terraform: {plan.run}", to_stderr=to_stderr)
    if cost is not None:
        show_cost(name, cost, to_stderr=to_stderr)


def plan_document(name: str, plan: Plan, cost: Cost | None) -> dict[str, Any]:
    """Returns a plan and its cost as JSON values."""
    document: dict[str, Any] = {"stack": name, "changes": [{"action": a, "address": r} for a, r in plan.changes]}
    if plan.run is not None:
        document["run"] = plan.run
    return document if cost is None else {**document, "cost": cost.to_json()}


def show_cost(name: str, cost: Cost, *, to_stderr: bool = False) -> None:
    """Prints the cost of each pool and of all pools, with the dates of the prices and the extra costs."""
    out = tables.console(to_stderr=to_stderr)
    for line in cost_lines(cost.volumes):
        tables.say(line, to_stderr=to_stderr)
    if all(pool.free for pool in cost.pools):
        if cost.pools:
            out.print(f"{name} costs nothing: it runs on this machine")
        return
    made = tables.table(
        *("POOL", "NODES", "MACHINE", "PER HOUR", "PER 30 DAYS", "PRICE"),
        leave_out=("NODES", "PRICE"),
        sentences=("MACHINE", "PRICE"),
    )
    for pool in cost.pools:
        others = f" or {pool.others} more" if pool.others else ""
        made.add_row(
            pool.pool,
            tables.node_range(pool.least, pool.nodes),
            escape(f"{pool.machine}{others}"),
            _amount(pool, 1),
            _amount(pool, HOURS),
            escape(pool.note),
        )
    if len(cost.pools) > 1:
        about = "~" if any(pool.estimated for pool in cost.pools) else ""
        made.add_row("all", "", "", f"{about}{usd(cost.usd_per_hour)}", f"{about}{usd(cost.usd_per_30_days)}", "")
    out.print(made)
    for line in _cost_remarks(cost):
        tables.say(line, to_stderr=to_stderr)


def _amount(pool: PoolCost, hours: int) -> str:
    amount = pool.usd_per_hour
    if pool.free:
        return "free"
    if amount is None:
        return "unknown"
    least = pool.least_usd_per_hour
    low = "" if least is None else f"{usd(least * hours)} to "
    return f"{'~' if pool.estimated else ''}{low}{usd(amount * hours)}"


def _head(pool: PoolCost) -> str:
    what = f"its head, {pool.head} on demand, a machine besides the nodes,"
    if pool.head_price is None:
        return f"{what} is not in the sum, for its price is not known."
    if pool.price is None:
        return f"{what} costs {pool.head_price}."
    return f"{what} is in the sum at {pool.head_price}."


def _cost_remarks(cost: Cost) -> list[str]:
    lines = []
    for pool in cost.pools:
        if pool.preferences:
            line = f"{pool.pool}: {pool.machine} is taken, of {', '.join(pool.preferences)}"
            lines.append(f"{line}; a deploy that the cloud refuses tries the next." if pool.moves else f"{line}.")
        if pool.elsewhere is not None:
            lines.append(f"{pool.pool}: the price is that of {pool.elsewhere}; none of {pool.region} is known.")
        if pool.price is not None and pool.price.is_old():
            lines.append(f"{pool.pool}: the price is of {pool.price.date}, more than 12 months ago.")
        if pool.dearest is not None:
            machine, price = pool.dearest
            lines.append(f"{pool.pool}: up to {usd(pool.of_nodes(price))}/h if all nodes are {machine}.")
        if pool.head is not None:
            lines.append(f"{pool.pool}: {_head(pool)}")
        if pool.budget is not None and pool.usd_per_hour:
            hours = pool.budget / pool.usd_per_hour
            lines.append(f"{pool.pool}: its budget of {usd(pool.budget)} lasts for {hours:.1f} hours of all nodes.")
    if len(cost.pools) > 1 and any(pool.least is not None for pool in cost.pools):
        lines.append("The sum is that of the most nodes.")
    if cost.unknown:
        which = "all" if len(cost.unknown) == len(cost.pools) else ", ".join(cost.unknown)
        lines.append(f"Not in the sum, for its price is not known: {which}.")
    if any(pool.estimated for pool in cost.pools):
        lines.append("~ is an estimate, not a quote.")
    lines.append("These are the machines at the prices of their date; disks, public addresses and traffic cost extra.")
    return lines
