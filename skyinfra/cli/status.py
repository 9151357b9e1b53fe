"""``skyinfra status``: fleets, nodes and slots as they are, asked of Terraform and of the heads."""

from __future__ import annotations

from typing import Any

from rich.markup import escape

from skyinfra._errors import FleetError
from skyinfra.cli import tables
from skyinfra.cli.strips import lines, strips
from skyinfra.project import Project, SynthesizedStack
from skyinfra.protocol.instance import InstanceInfo
from skyinfra.protocol.manifest import Manifest


def show_status(stack: str | None, *, as_json: bool) -> None:
    """Prints the status of one stack, or of all."""
    project = Project.find()
    stacks = (project.stack(stack),) if stack else project.stacks() or project.synth()
    found = [_stack_status(each) for each in stacks]
    if as_json:
        tables.print_json({"stacks": _plain(found)})
        return
    for each in found:
        _print_stack(each)


def _stack_status(stack: SynthesizedStack) -> dict[str, Any]:
    fleets = stack.fleets()
    pools = [_fleet_status(manifest) for manifest in fleets.values()]
    for declared in stack.pools:
        if declared["name"] not in fleets:
            pools.append({"pool": declared["name"], "fleet": f"{stack.name}/{declared['name']}", "deployed": False})
    return {"stack": stack.name, "pools": pools}


def _fleet_status(manifest: Manifest) -> dict[str, Any]:
    slots: list[InstanceInfo] = []
    problem: str | None = None
    try:
        slots = _live_slots(manifest)
    except FleetError as error:
        problem = str(error)
    return {
        "pool": manifest.pool,
        "fleet": manifest.fleet,
        "deployed": True,
        "provider": manifest.provider,
        "simulated": manifest.simulated,
        "head": {"address": manifest.head.address, "port": manifest.head.port},
        "problem": problem,
        "nodes": [_node_status(manifest, index, slots) for index in range(len(manifest.nodes))],
    }


def _live_slots(manifest: Manifest) -> list[InstanceInfo]:
    from skyinfra.client import open_pool

    with open_pool(manifest, timeout=5) as pool:
        return pool.slots()


def _plain(stacks: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The same for a program: the GPUs of the nodes as JSON values."""
    for node in (node for stack in stacks for pool in stack["pools"] for node in pool.get("nodes", ())):
        node["gpus"] = [gpu.to_json() for gpu in node["gpus"]]
    return stacks


def _node_status(manifest: Manifest, index: int, slots: list[InstanceInfo]) -> dict[str, Any]:
    node = manifest.nodes[index]
    live = {slot.worker: slot for slot in slots if slot.node == node.name}
    wanted = {slot.index for slot in manifest.slots}
    gpus = strips(live.values(), manifest.slots)
    return {
        "name": node.name,
        "id": node.id,
        "head": node.head,
        "address": node.address,
        "machine_type": node.machine_type,
        "state": "ready" if wanted <= set(live) else "missing slots" if live else "not reachable",
        "slots": [
            {**live[slot.index].to_json(), "state": "ready"}
            if slot.index in live
            else {
                "worker": slot.index,
                "slot": f"{node.name}/{slot.index}",
                "kind": slot.kind,
                "profile": slot.profile,
                "accelerator": slot.accelerator,
                "uuid": None,
                "state": "missing",
            }
            for slot in manifest.slots
        ],
        "gpus": gpus,
    }


def _print_stack(status: dict[str, Any]) -> None:
    out = tables.console()
    for pool in status["pools"]:
        if not pool["deployed"]:
            out.print(f"[bold]{pool['fleet']}[/] is not deployed")
            continue
        mark = tables.simulated_mark(pool["simulated"])
        head = f"{pool['head']['address']}:{pool['head']['port']}"
        out.print(f"[bold]{pool['fleet']}[/] on {pool['provider']}{mark}, head {head}")
        if pool["problem"]:
            out.print(f"[red]{escape(pool['problem'])}[/]")
        for line in lines((node["name"], node["gpus"]) for node in pool["nodes"]):
            out.print(line, soft_wrap=True)
        made = tables.table("NODE", "SLOT", "KIND", "ACCELERATOR", "PROFILE", "UUID", "STATE")
        for node in pool["nodes"]:
            for slot in node["slots"]:
                made.add_row(
                    node["name"] + (" (head)" if node["head"] else ""),
                    str(slot["worker"]),
                    slot["kind"],
                    f"{slot['accelerator']}{mark}" if slot["accelerator"] else "",
                    slot["profile"] or "",
                    slot["uuid"] or "",
                    slot["state"] if slot["state"] == "ready" else f"[red]{slot['state']}[/]",
                )
        out.print(made)
