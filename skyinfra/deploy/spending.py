"""Describes a fleet that exists and its cost in words: since when, and about how much so far."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime
from typing import Any

from skyinfra.deploy.cost import RunningCost, cost_of, running_cost
from skyinfra.errors import counted
from skyinfra.offers import usd
from skyinfra.terraform.blocks import Block, Opened
from skyinfra.terraform.state import Resource


def described(pools: Sequence[dict[str, Any]]) -> str:
    """Returns the nodes of *pools*, the choices of a synthesized stack, with their price where they have one."""
    parts = []
    for pool, cost in zip(pools, cost_of(pools).pools, strict=True):
        accelerator = pool.get("accelerator") or "CPU"
        mark = " (simulated)" if pool["simulated"] else ""
        nodes = f"{counted(cost.nodes, 'node')} of {pool['provider']}"
        machine = "" if cost.free else f" {cost.machine}{' spot' if pool.get('spot') else ''}"
        price = cost.usd_per_hour
        paid = "" if cost.free else ", of an unknown price" if price is None else f", {usd(price)}/h"
        parts.append(f"{nodes}{machine}, {accelerator}{mark}{paid}")
    return "; ".join(parts)


def since(opened: Opened) -> str:
    """Returns since when the fleet of a block exists: ``since 2026-11-25 09:40 (2.2 h)``."""
    try:
        began = datetime.fromisoformat(opened.began).astimezone().strftime("%Y-%m-%d %H:%M")
    except ValueError:
        return "since an unknown time"
    hours = opened.hours
    return f"since {began} ({f'{hours:.1f} h' if hours >= 1 else f'{hours * 60:.0f} min'})"


def spent(usd_per_hour: float, opened: Opened) -> str:
    """Returns what a fleet has cost since then, such as ``about $12.40``; nothing where nothing is paid."""
    return f"about {usd(usd_per_hour * opened.hours)}" if usd_per_hour else ""


def spending(cost: RunningCost, opened: Opened | None) -> str:
    """Returns the price of the machines that exist, and what they have cost since the block was opened."""
    if not cost.machines:
        return "It costs nothing."
    so_far = spent(cost.usd_per_hour, opened) if opened is not None else ""
    return f"It costs {cost}{f': {so_far} so far' if so_far else ''}."


def program_of(block: Block) -> str:
    """Returns whose block it is, whether that program still runs, and since when the fleet exists."""
    if block.opened is None:
        return "It is the fleet of a program that " + (
            "still runs." if block.running else "has ended without ending it."
        )
    program = f"It is the fleet of {block.opened.program}, process {block.opened.pid}"
    state = "which still runs" if block.running else "which ended without destroying it"
    return f"{program}, {state}; {since(block.opened)}."


def holdings(resources: Sequence[Resource]) -> str:
    """Returns the number of the resources, with the machines among them and their cost."""
    cost = str(running_cost(resources))
    return f"{counted(len(resources), 'resource')}{f' ({cost})' if cost else ''}"
