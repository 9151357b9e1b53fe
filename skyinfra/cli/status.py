"""``skyinfra status``: fleets, nodes and slots as they are, asked of Terraform and of the heads."""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from rich.markup import escape

from skyinfra.cli import tables
from skyinfra.cli.drawing import lines, strips
from skyinfra.errors import FleetError
from skyinfra.protocol.manifest import Manifest, ManifestNode, ManifestSlot
from skyinfra.terraform.project import Project, SynthesizedStack

if TYPE_CHECKING:
    from skyinfra.client.fleet import RunningTask
    from skyinfra.client.snapshot import Snapshot

Tasks = dict[str, list["RunningTask"]]


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
    now: Snapshot | None = None
    tasks: Tasks = {}
    problem: str | None = None
    try:
        now, tasks = _look(manifest)
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
        "group_nodes": manifest.group_nodes,
        "nodes": [_node_status(manifest, node, now, tasks) for node in (*manifest.nodes, *_of_group(manifest, now))],
    }


def _look(manifest: Manifest) -> tuple[Snapshot, Tasks]:
    from skyinfra.client import open_pool

    with open_pool(manifest, timeout=5) as pool:
        return pool.look(), pool.running()


def _plain(stacks: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Turns the GPUs of the nodes into plain JSON values."""
    for node in (node for stack in stacks for pool in stack["pools"] for node in pool.get("nodes", ())):
        node["gpus"] = [gpu.to_json() for gpu in node["gpus"]]
    return stacks


def _of_group(manifest: Manifest, now: Snapshot | None) -> list[ManifestNode]:
    """Returns the nodes that only the head knows: nodes of a group come and go by themselves."""
    known = {node.name for node in manifest.nodes}
    found = {slot.node for slot in (*now.slots, *now.draining)} if now is not None else set()
    found |= set(now.state.failed) if now is not None and now.state is not None else set()
    found -= known
    return [ManifestNode(name, "", "") for name in sorted(found)]


def _node_status(manifest: Manifest, node: ManifestNode, now: Snapshot | None, tasks: Tasks) -> dict[str, Any]:
    live = {slot.slot: slot for slot in (now.slots if now else ()) if slot.node == node.name}
    draining = {slot.slot: slot for slot in (now.draining if now else ()) if slot.node == node.name}
    reported = now.state if now else None
    promised = {f"{node.name}/{slot.index}": slot for slot in manifest.slots_of(node)}
    wanted = reported.slots.get(node.name, tuple(promised)) if reported else tuple(promised)
    leaving = reported.leaving.get(node.name) if reported else None
    slots = [
        {
            **draining[name].to_json(),
            "state": "draining",
            "waits_for": reported.draining.get(name, ()) if reported else (),
        }
        for name in draining
    ]
    slots += [{**live[name].to_json(), "state": "ready"} for name in live]
    slots += [_missing(name, promised.get(name)) for name in wanted if name not in live and name not in draining]
    reached = bool(live) or (now is not None and node.head)
    state = "ready" if reached and set(wanted) <= set(live) else "missing slots" if live else "not reachable"
    failed = reported.failed.get(node.name) if reported else None
    if failed is not None and not live:
        state = "failed"
    to_be = [slot for name, slot in promised.items() if name in wanted]
    gpus = strips([*live.values(), *draining.values()], to_be, tasks)
    for slot in slots:
        slot["tasks"] = [asdict(task) for task in tasks.get(str(slot["slot"]), ())]
    return {
        "name": node.name,
        "id": node.id,
        "head": node.head,
        "address": node.address,
        "machine_type": node.machine_type,
        "state": "draining" if draining else "drained" if leaving and not live else state,
        "failed": asdict(failed) if failed is not None else None,
        "leaving": leaving,
        "slots": sorted(slots, key=lambda slot: int(slot["worker"])),
        "gpus": gpus,
    }


def _missing(name: str, slot: ManifestSlot | None) -> dict[str, Any]:
    return {
        "worker": int(name.rpartition("/")[2]),
        "slot": name,
        "kind": slot.kind if slot else None,
        "profile": slot.profile if slot else None,
        "accelerator": slot.accelerator if slot else None,
        "uuid": None,
        "state": "missing",
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
        for node in pool["nodes"]:
            if node["failed"]:
                out.print(f"[red]{escape(_failure(node))}[/]")
        for line in lines((node["name"], node["gpus"]) for node in pool["nodes"]):
            out.print(line, soft_wrap=True)
        made = tables.table("NODE", "SLOT", "KIND", "ACCELERATOR", "PROFILE", "UUID", "STATE", "TASK")
        for node in pool["nodes"]:
            for slot in node["slots"]:
                made.add_row(
                    node["name"] + (" (head)" if node["head"] else ""),
                    str(slot["worker"]),
                    slot["kind"] or "",
                    f"{slot['accelerator']}{mark}" if slot["accelerator"] else "",
                    slot["profile"] or "",
                    slot["uuid"] or "",
                    _state(slot),
                    escape(", ".join(f"{task['name']} {tables.span(task['seconds'])}" for task in slot["tasks"])),
                )
        out.print(made)
        for node in pool["nodes"]:
            if node["leaving"]:
                out.print(f"{node['name']} is {node['state']}: {escape(node['leaving'])}", soft_wrap=True)


def _failure(node: dict[str, Any]) -> str:
    failed = node["failed"]
    return "\n".join([f"{node['name']} was not set up: step {failed['step']}: {failed['error']}", *failed["lines"]])


def _state(slot: dict[str, Any]) -> str:
    if slot["state"] == "draining":
        tasks = ", ".join(slot["waits_for"])
        return f"[yellow]draining{escape(f': {tasks}') if tasks else ''}[/]"
    return "ready" if slot["state"] == "ready" else f"[red]{slot['state']}[/]"
