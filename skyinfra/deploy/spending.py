"""Says in words what a fleet that exists costs; and what one has cost: the hours of its machines by their prices."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict
from datetime import UTC, datetime
from typing import Any, NamedTuple

from skyinfra.deploy.cost import FREE, RunningCost, cost_of, running_cost
from skyinfra.errors import counted
from skyinfra.offers import Price, load, usd
from skyinfra.protocol.manifest import Manifest, ManifestNode
from skyinfra.protocol.readings import FleetHours, MachineRun, SlotUse
from skyinfra.providers import Machines
from skyinfra.terraform.blocks import Block, Opened
from skyinfra.terraform.state import Resource

_HOUR = 3600.0
# A node that was heard of within that long runs, as far as is known.
_HEARD_S = 600.0


def described(pools: Sequence[dict[str, Any]]) -> str:
    """Returns the nodes of *pools*, the choices of a synthesized stack, with their price where they have one."""
    parts = []
    for pool, cost in zip(pools, cost_of(pools).pools, strict=True):
        accelerator = pool.get("accelerator") or "CPU"
        mark = " (simulated)" if pool["simulated"] else ""
        least = "" if cost.least is None else f"{cost.least} to "
        nodes = f"{least}{counted(cost.nodes, 'node')} of {pool['provider']}"
        machine = "" if cost.free else f" {cost.machine}{' spot' if pool.get('spot') else ''}"
        price = cost.usd_per_hour
        most = "up to " if least else ""
        paid = "" if cost.free else ", of an unknown price" if price is None else f", {most}{usd(price)}/h"
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


class PricedHours(NamedTuple):
    """The hours of a fleet, and what its machines cost then, by ``NODE/MACHINE``. live: the head has just said it."""

    hours: FleetHours
    machines: Mapping[str, Mapping[str, Any]]
    live: bool = False


def priced_hours(
    hours: FleetHours, pool: Mapping[str, Any], manifest: Manifest, resources: Iterable[Resource] = ()
) -> PricedHours:
    """Returns *hours* with the prices of its machines as they are.

    pool: its choices in the synthesized stack. resources: of the Terraform state, which knows better than a declaration
    that was changed since which machines there are, and whether they are interruptible.
    """
    nodes = {node.name: node for node in manifest.nodes}
    mine = running_cost(each for each in resources if each.module == manifest.pool)
    existing = {(each.machine_type, each.spot): each.price for each in mine.machines}
    names = {f"{run.node}/{run.machine}": nodes.get(run.node) for run in hours.runs}
    return PricedHours(hours, {key: _machine(pool, node, existing) for key, node in names.items()}, live=True)


def with_kept(now: PricedHours, kept: Sequence[PricedHours]) -> list[PricedHours]:
    """Returns *now* after the other fleets of *kept*: what was kept of this one has the prices of machines that have
    been replaced or removed since."""
    before = [each.machines for each in kept if each.hours.ledger == now.hours.ledger]
    last = {run.node: run.machine for run in now.hours.runs}
    gone = {f"{run.node}/{run.machine}" for run in now.hours.runs if last[run.node] != run.machine}
    gone |= {key for key, machine in now.machines.items() if machine["assumed"]}
    known = {key: machine for machines in before for key, machine in machines.items() if key in gone}
    others = [each for each in kept if each.hours.ledger != now.hours.ledger]
    return [*others, now._replace(machines={**now.machines, **known})]


def _machine(
    pool: Mapping[str, Any], node: ManifestNode | None, existing: Mapping[tuple[str, bool], Price | None]
) -> dict[str, Any]:
    """Returns the type and the price of a machine. *node*: None for one that is not in the manifest (any more).
    *existing*: the prices of those that exist, by type and whether they are interruptible."""
    head = pool.get("head") if node is not None and node.head else None
    known = (node and node.machine_type) or head
    machine, separate = str(known or pool["machine_types"][0]), known is not None and known == head
    spot = bool(pool.get("spot")) and not separate
    found = Price(**pool["head_price"]) if separate and pool.get("head_price") else existing.get((machine, spot))
    if found is None and machine != pool.get("head"):  # it is declared otherwise since
        found = existing.get((machine, not spot))
    if found is None and not separate and machine in pool.get("prices", {}):
        found = Price(**pool["prices"][machine])
    found = found or Machines(pool["provider"], machine, pool.get("region") or "", spot).price
    free = pool["provider"] in FREE
    # Nobody says of which type a machine is that has gone, or that is one of a group of several types.
    assumed = not free and known is None
    price = None if free or found is None else asdict(found)
    offer = next((o for o in load() if (o.provider, o.machine_type) == (pool["provider"], machine)), None)
    source = f"skyinfra/providers/{pool['provider']}.toml" if offer is None else offer.source
    return {"machine_type": machine, "price": price, "source": source, "free": free, "assumed": assumed}


def pool_spent(
    fleet: str,
    found: Sequence[PricedHours],
    *,
    pool: Mapping[str, Any] | None = None,
    manifest: Manifest | None = None,
    since: float = 0.0,
    problem: str | None = None,
) -> dict[str, Any]:
    """Returns what a pool has cost: hours and USD in all and by node, submitter and job, and what is not known.

    found: what the head says, and what was kept of this and of earlier fleets of the pool. pool: its choices, where it
    is declared. since: the begin of a day of UTC, in UNIX seconds. problem: why the head says nothing.
    """
    nodes = _nodes(found, since)
    heads = {node.name for node in manifest.nodes if node.head} if manifest and manifest.has_group else set()
    workers = [each for each in nodes if each["node"] not in heads]
    working, paid = sum(each["hours"] for each in workers), _sum(each["usd"] for each in workers)
    by_hour = None if paid is None else paid / (working or 1.0)
    day = datetime.fromtimestamp(since, UTC).strftime("%Y-%m-%d")
    uses = [use for each in found for use in each.hours.uses if use.day >= day]
    idle = max(0.0, working - sum(use.node_seconds for use in uses) / _HOUR)
    live = next((each for each in found if each.live), None)
    unpriced = sorted({each["machine_type"] for each in nodes if each["usd"] is None})
    unknown = [f"the price of {machine}, whose hours are in no sum of USD" for machine in unpriced]
    free = all(each["free"] for each in nodes) if nodes else bool(pool and pool["provider"] in FREE)
    budget = (pool or {}).get("budget")
    if budget is not None:  # of the fleet that exists; None where nobody knows
        none = None if manifest else 0.0
        paid_now = _sum(each["usd"] for each in _nodes((live,), 0.0)) if live else none
        fraction = None if paid_now is None else round(paid_now / budget["usd"], 4)
        budget = {**budget, "spent_usd": _rounded(paid_now), "fraction": fraction}
    volumes = [f"volume {each['name']}" for each in (pool or {}).get("volumes", ())]
    return {
        "pool": fleet.partition("/")[2],
        "fleet": fleet,
        "source": "head" if live else "kept" if found else None,
        "problem": problem,
        "at": max((each.hours.at for each in found), default=None),
        "free": free,
        "hours": round(sum(each["hours"] for each in nodes), 4),
        "usd": _rounded(_sum(each["usd"] for each in nodes)) if found else None,
        "estimated": any(each["estimated"] for each in nodes),
        "nodes": nodes,
        "submitters": _by(uses, ("submitter",), by_hour),
        "jobs": _by(uses, ("kind", "name", "submitter"), by_hour),
        "idle": {"hours": round(idle, 4), "usd": _rounded(by_hour if by_hour is None else by_hour * idle)},
        "not_counted": [] if free else ["disks", "public addresses", "traffic", *volumes],
        "unknown": [*unknown, *(_silent(live.hours, manifest) if live and manifest else ())],
        "budget": budget,
    }


def _nodes(found: Sequence[PricedHours], since: float) -> list[dict[str, Any]]:
    """Returns the machines in the order of their begins. One that several ledgers have is there once."""
    machines: dict[tuple[str, str], tuple[list[MachineRun], Mapping[str, Any], bool]] = {}
    for each in found:
        runs: dict[tuple[str, str], list[MachineRun]] = {}
        for run in each.hours.runs:
            runs.setdefault((run.node, run.machine), []).append(run)
        for key, mine in runs.items():
            if key not in machines or mine[-1].ended >= machines[key][0][-1].ended:
                running = each.live and each.hours.at - mine[-1].ended < _HEARD_S
                machines[key] = mine, each.machines["/".join(key)], running
    made = []
    for (node, _), (mine, machine, running) in sorted(machines.items(), key=lambda each: each[1][0][0].began):
        hours = sum(max(0.0, min(run.seconds, run.ended - since)) for run in mine) / _HOUR
        price = machine["price"]
        usd_per_hour = 0.0 if machine["free"] else price and price["usd_per_hour"]
        row = {
            "node": node,
            **{name: machine[name] for name in ("machine_type", "price", "source", "free")},
            "began": mine[0].began,
            "ended": None if running else mine[-1].ended,
            "hours": round(hours, 4),
            "usd": _rounded(None if usd_per_hour is None else usd_per_hour * hours),
            "estimated": machine["assumed"] or bool(price and price["basis"] == "estimated"),
        }
        made += [row] if hours or running else []
    return made


def _by(uses: Iterable[SlotUse], names: tuple[str, ...], by_hour: float | None) -> list[dict[str, Any]]:
    """Returns the *uses* together that have the same fields *names*, those that cost most first."""
    slots, nodes = Counter[tuple[str, ...]](), Counter[tuple[str, ...]]()
    for use in uses:
        key = tuple(getattr(use, name) for name in names)
        slots[key] += use.slot_seconds / _HOUR  # type: ignore[assignment]
        nodes[key] += use.node_seconds / _HOUR  # type: ignore[assignment]
    return [
        {
            **dict(zip(names, key, strict=True)),
            "slot_hours": round(slots[key], 4),
            "hours": round(hours, 4),
            "usd": _rounded(by_hour if by_hour is None else by_hour * hours),
        }
        for key, hours in sorted(nodes.items(), key=lambda each: (-each[1], each[0]))
    ]


def _silent(hours: FleetHours, manifest: Manifest) -> Iterator[str]:
    """Yields a sentence for each node that exists, and of which the head has heard nothing for long: it may bill."""
    heard = {run.node: run.ended for run in sorted(hours.runs, key=lambda run: run.ended)}
    for node in manifest.nodes:
        ago = hours.at - heard.get(node.name, 0.0)
        if node.name not in heard:
            yield f"the hours of {node.name}, which has not said any yet"
        elif ago >= _HEARD_S:
            yield f"the last {ago / _HOUR:.1f} hours of {node.name}, which has said nothing since"


def fleet_spent(manifest: Manifest, pool: Mapping[str, Any], hours: FleetHours) -> dict[str, Any]:
    """Returns in a few values what the fleet that exists has cost. pool: its choices in the synthesized stack."""
    found = pool_spent(manifest.fleet, (priced_hours(hours, pool, manifest),), pool=pool, manifest=manifest)
    return {"text": so_far(found), **{name: found[name] for name in ("hours", "usd", "estimated", "unknown", "budget")}}


def so_far(spent: Mapping[str, Any]) -> str:
    """Returns in words what a pool has cost; empty where nobody knows, or nobody pays."""
    if spent["source"] is None or spent["free"]:
        return ""
    hours, amount, budget = f"{spent['hours']:.1f} node hours", spent["usd"], spent["budget"]
    text = f"{hours} at a price that is not known" if amount is None else f"about {usd(amount)} for {hours}"
    part = "" if not budget or budget["fraction"] is None else f", {budget['fraction']:.0%} of its budget of "
    return text + (part and f"{part}{usd(budget['usd'])}")


def summed(stack: str, pools: list[dict[str, Any]]) -> dict[str, Any]:
    """Returns what *pools* of a stack have cost together."""
    hours = round(sum(each["hours"] for each in pools), 4)
    return {"stack": stack, "hours": hours, "usd": _rounded(_sum(each["usd"] for each in pools)), "pools": pools}


def _sum(amounts: Iterable[float | None]) -> float | None:
    """Returns the sum of the amounts that are known; None where there are some, and none is."""
    every = list(amounts)
    known = [each for each in every if each is not None]
    return sum(known) if known or not every else None


def _rounded(amount: float | None) -> float | None:
    return None if amount is None else round(amount, 6)
