"""What a stack costs, as a table below its plan."""

from __future__ import annotations

from rich.markup import escape

from skyinfra.cli import tables
from skyinfra.deploy.cost import HOURS, Cost, PoolCost
from skyinfra.offers import usd


def show_cost(name: str, cost: Cost, *, to_stderr: bool = False) -> None:
    """The cost of each pool and of all of them, with the dates of the prices and what is not in it."""
    out = tables.console(to_stderr=to_stderr)
    if all(pool.free for pool in cost.pools):
        if cost.pools:
            out.print(f"{name} costs nothing: it runs on this machine")
        return
    made = tables.table("POOL", "NODES", "MACHINE", "PER HOUR", "PER 30 DAYS", "PRICE")
    for pool in cost.pools:
        others = f" or {pool.others} more" if pool.others else ""
        made.add_row(
            pool.pool,
            str(pool.nodes),
            escape(f"{pool.machine}{others}"),
            _amount(pool, 1),
            _amount(pool, HOURS),
            escape(pool.note),
        )
    if len(cost.pools) > 1:
        about = "~" if any(pool.estimated for pool in cost.pools) else ""
        made.add_row("all", "", "", f"{about}{usd(cost.usd_per_hour)}", f"{about}{usd(cost.usd_per_30_days)}", "")
    out.print(made)
    for line in remarks(cost):
        out.print(escape(line), soft_wrap=True)


def _amount(pool: PoolCost, hours: int) -> str:
    amount = pool.usd_per_hour
    if pool.free:
        return "free"
    return "unknown" if amount is None else f"{'~' if pool.estimated else ''}{usd(amount * hours)}"


def _head(pool: PoolCost) -> str:
    what = f"its head, {pool.head} on demand, a machine besides the nodes,"
    if pool.head_price is None:
        return f"{what} is not in the sum, for its price is not known."
    if pool.price is None:
        return f"{what} costs {pool.head_price}."
    return f"{what} is in the sum at {pool.head_price}."


def remarks(cost: Cost) -> list[str]:
    """What a reader of the sums must know."""
    lines = []
    for pool in cost.pools:
        if pool.elsewhere is not None:
            lines.append(f"{pool.pool}: the price is that of {pool.elsewhere}; none of {pool.region} is known.")
        if pool.dearest is not None:
            machine, price = pool.dearest
            lines.append(f"{pool.pool}: up to {usd(pool.of_nodes(price))}/h if all nodes are {machine}.")
        if pool.head is not None:
            lines.append(f"{pool.pool}: {_head(pool)}")
    if cost.unknown:
        which = "all" if len(cost.unknown) == len(cost.pools) else ", ".join(cost.unknown)
        lines.append(f"Not in the sum, for its price is not known: {which}.")
    if any(pool.estimated for pool in cost.pools):
        lines.append("~ is an estimate, not a quote.")
    lines.append("These are the machines at the prices of their date; disks, public addresses and traffic cost extra.")
    return lines
