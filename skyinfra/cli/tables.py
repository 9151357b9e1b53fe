"""Tables for a person, JSON for a program."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from skyinfra.deploy.cost import Cost
from skyinfra.deploy.reporting import short
from skyinfra.terraform.program import Plan
from skyinfra.terraform.project import SynthesizedStack

_SIGNS = {"create": "[green]+[/]", "delete": "[red]-[/]", "update": "[yellow]~[/]", "replace": "[yellow]±[/]"}


def print_json(value: object) -> None:
    """*value* on stdout, two spaces deep."""
    sys.stdout.write(json.dumps(value, indent=2) + "\n")


def console(*, to_stderr: bool = False) -> Console:
    """A console that never cuts a line where nobody watches."""
    made = Console(stderr=to_stderr, highlight=False)
    if not made.is_terminal:
        made = Console(stderr=to_stderr, highlight=False, width=200)
    return made


def table(*columns: str) -> Table:
    """The look of every table."""
    made = Table(box=None, header_style="bold", pad_edge=False, padding=(0, 2, 0, 0))
    for column in columns:
        made.add_column(column, overflow="fold")
    return made


def price(pool: dict[str, Any]) -> str:
    """Price of a pool per hour, all nodes and a head besides them, with its region and date."""
    if pool.get("hourly_cost") is None:
        return str(pool["price_note"])
    head = pool.get("head_price")
    amount = pool["hourly_cost"] * pool["nodes"] + (head["usd_per_hour"] if head else 0.0)
    about = f"; with{'' if head else 'out'} its head" if pool.get("head") else ""
    return f"${amount:.2f}/h ({pool['price_note']}{about})"


def simulated_mark(simulated: bool) -> str:
    """What every place that shows a simulated fleet says."""
    return " (simulated)" if simulated else ""


def span(seconds: float) -> str:
    """A length of time in one word: ``12s``, ``5m``, ``3h``, ``2d``."""
    for unit, length in (("d", 86400), ("h", 3600), ("m", 60)):
        if seconds >= 2 * length:
            return f"{seconds / length:.0f}{unit}"
    return f"{max(0.0, seconds):.0f}s"


def show_choices(stacks: Iterable[SynthesizedStack], *, as_json: bool = False, to_stderr: bool = False) -> None:
    """What was chosen for every pool of *stacks*."""
    stacks = list(stacks)
    if as_json:
        print_json({"stacks": [{"name": s.name, "folder": str(s.folder), "pools": list(s.pools)} for s in stacks]})
        return
    made = table("STACK", "POOL", "PROVIDER", "NODES", "MACHINE", "ACCELERATOR", "SLOTS/NODE", "PRICE")
    for stack in stacks:
        for pool in stack.pools:
            accelerator = pool.get("accelerator") or "none (CPU)"
            made.add_row(
                stack.name,
                pool["name"],
                pool["provider"],
                str(pool["nodes"]),
                ", ".join(pool["machine_types"]),
                escape(f"{accelerator}{simulated_mark(pool['simulated'])}"),
                str(pool["slots_per_node"]),
                price(pool),
            )
    console(to_stderr=to_stderr).print(made)


def show_plan(
    name: str, plan: Plan, *, as_json: bool = False, to_stderr: bool = False, cost: Cost | None = None
) -> None:
    """The changes of *plan*. The *cost* is printed in JSON only; `show_cost` prints it for a person."""
    if as_json:
        document: dict[str, Any] = {"stack": name, "changes": [{"action": a, "address": r} for a, r in plan.changes]}
        if plan.run is not None:
            document["run"] = plan.run
        print_json(document if cost is None else {**document, "cost": cost.to_json()})
        return
    out = console(to_stderr=to_stderr)
    if plan.empty:
        out.print(f"{name}: no changes, everything is as declared")
        return
    for action, address in plan.changes:
        out.print(f"  {_SIGNS.get(action, escape(action))} {escape(short(address))}")
    counts = {
        action: sum(1 for a, _ in plan.changes if a == action) for action in ("create", "update", "replace", "delete")
    }
    counted = ", ".join(f"{count} to {action}" for action, count in counts.items() if count)
    out.print(f"{name}: {counted or 'outputs change'}")
    if plan.run is not None:
        out.print(f"{name}: planned by HCP Terraform: {plan.run}", soft_wrap=True)


def show_fleets(stack: SynthesizedStack) -> None:
    """One line for each deployed fleet, and what to do with it."""
    out = console()
    for manifest in stack.fleets().values():
        slots = len(manifest.slots) * manifest.node_count
        out.print(
            f"{manifest.fleet}: {_count(manifest.node_count, 'node')}, {_count(slots, 'slot')}"
            f"{simulated_mark(manifest.simulated)}, "
            f"head {manifest.head}"
        )


def _count(number: int, what: str) -> str:
    return f"{number} {what}{'' if number == 1 else 's'}"
