"""How a packing is shown: machines with their layouts, who gets which partition, what is left over, and JSON."""

from __future__ import annotations

from collections import Counter
from dataclasses import asdict
from typing import Any

from rich.markup import escape
from rich.table import Table

from skyinfra import offers, packing
from skyinfra.errors import counted
from skyinfra.packing import Given, Machines, Packing
from skyinfra.terminal import tables
from skyinfra.terminal.offers import cell

SUPPLY = "As many machines as needed are taken to be there: the quotas of your account are not known here."


def headline(made: Packing) -> str:
    """Cost and proof in a sentence."""
    proof = "optimal: no cheaper set of machines holds it"
    if made.status != "optimal":
        proof = f"at most {made.gap:.2%} above the cheapest: the proof took too long"
    machines = counted(made.nodes, "machine")
    return f"{packing.text(made.demand)} on {machines} for {offers.usd(made.cost_per_hour)}/h, {proof}"


def remarks(made: Packing) -> list[str]:
    """Returns notes on the partitions for each demand, the spare ones, and the prices."""
    lines = []
    for demand in made.demand:
        given = [f"{each.count} x {said(each)}" for each in made.given if each.wanted == demand.wanted]
        lines.append(f"{demand}: {', '.join(given)}")
    if made.spare:
        lines.append(f"spare: {', '.join(f'{each.count} x {said(each)}' for each in made.spare)}")
    waste = made.waste
    lines.append(
        f"waste: {waste.share:.0%} of {waste.bought} GB bought; {waste.oversize} GB handed out beyond what was asked "
        f"for, {waste.spare} GB spare, {waste.lost} GB that the layouts leave over"
    )
    lines += _price_remarks(made)
    if made.left_out:
        why = ", ".join(f"{count} ({reason})" for reason, count in made.left_out.items())
        lines.append(f"{made.considered} offers were looked at; left out: {why}.")
    lines.append(SUPPLY)
    return lines


def _price_remarks(made: Packing) -> list[str]:
    moved = [(each.price.region, each.region) for each in made.machines if each.price.region != offers.EVERYWHERE]
    lines = [
        f"Prices are of {priced}: none of {declared} are known."
        for priced, declared in sorted({(priced, declared) for priced, declared in moved if declared})
        if priced != declared
    ]
    if any(each.price.basis == "estimated" for each in made.machines):
        lines.append("~ is an estimate, not a quote.")
    return lines


def said(given: Given) -> str:
    """Returns a partition or GPU in words: "2g.48gb of RTX PRO 6000"."""
    return f"{given.profile} of {given.gpu}" if given.profile else f"whole {given.gpu}"


def machine_table(made: Packing) -> Table:
    table = tables.table(
        *("NODES", "PROVIDER", "MACHINE", "REGION", "GPUS", "LAYOUTS", "EACH PER HOUR", "PER HOUR"),
        leave_out=("REGION", "EACH PER HOUR", "PROVIDER"),
        sentences=("LAYOUTS",),
    )
    for each in made.machines:
        table.add_row(
            str(each.nodes),
            each.offer.provider,
            escape(each.offer.machine_type),
            escape(each.region or "any"),
            each.offer.carries,
            _layouts(each),
            cell(each.price),
            offers.usd(each.nodes * each.price.usd_per_hour),
        )
    return table


def _layouts(machines: Machines) -> str:
    """Returns the layouts of one machine, equal ones counted: "4 x 3g.40gb+1g.10gb*4, 4 x 7g.80gb*1"."""
    counts = Counter(each or "whole" for each in machines.layouts)
    if len(counts) == 1:
        return next(iter(counts))
    return ", ".join(f"{count} x {layout}" for layout, count in counts.items())


def packing_document(made: Packing) -> dict[str, Any]:
    """Returns the packing as JSON."""
    return {
        "demand": [{"wanted": each.wanted, "count": each.count, "memory_gb": each.memory_gb} for each in made.demand],
        "status": made.status,
        "cost_per_hour": made.cost_per_hour,
        "bound": made.bound,
        "gap": made.gap,
        "spot": made.spot,
        "nodes": made.nodes,
        "machines": [_machines_document(each) for each in made.machines],
        "given": [asdict(each) for each in made.given],
        "spare": [{key: value for key, value in asdict(each).items() if key != "wanted"} for each in made.spare],
        "waste": {**asdict(made.waste), "share": round(made.waste.share, 6)},
        "considered": made.considered,
        "left_out": dict(made.left_out),
        "notes": [*_price_remarks(made), SUPPLY],
        "source": made.source(),
    }


def bought(machines: Machines) -> dict[str, Any]:
    """Returns the fields of a JSON document that say which machines are bought, where and for how much."""
    return {
        "nodes": machines.nodes,
        "provider": machines.offer.provider,
        "machine_type": machines.offer.machine_type,
        "region": machines.region,
        "accelerator": machines.accelerator,
        "price": asdict(machines.price),
    }


def _machines_document(machines: Machines) -> dict[str, Any]:
    return {
        **bought(machines),
        "gpus": [
            {"layout": layout, "partitions": [tables.place(each) for each in placements]}
            for layout, placements in zip(machines.layouts, machines.placements, strict=True)
        ],
    }
