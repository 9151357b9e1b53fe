"""``skyinfra status``: fleets, nodes and slots as they are, asked of Terraform and of the heads."""

from __future__ import annotations

import io
import os
import stat
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated, Any, TextIO

import typer
from rich.markup import escape

from skyinfra.cli.options import Fleet, Json, StackName, Wide
from skyinfra.cli.stacks import holdings, show_orphans
from skyinfra.deploy.cost import running_cost
from skyinfra.deploy.last_run import last_run
from skyinfra.deploy.orphans import Orphan, find_orphans
from skyinfra.deploy.spending import program_of, spending
from skyinfra.deploy.upgrade import Running, running, wanted
from skyinfra.errors import FleetError, InvalidField, ProjectError
from skyinfra.protocol.manifest import Manifest, ManifestNode, ManifestSlot
from skyinfra.terminal import tables
from skyinfra.terminal.drawing import lines, strips
from skyinfra.terminal.progress import synthesized, working
from skyinfra.terraform.blocks import Block
from skyinfra.terraform.project import Project
from skyinfra.terraform.state import Resource
from skyinfra.terraform.synthesized import SynthesizedStack

if TYPE_CHECKING:
    from skyinfra.submission.fleet import RunningTask
    from skyinfra.submission.snapshot import Snapshot

# Of the changes of layouts that follow the work.
_SHOWN_CHANGES = 5
Tasks = dict[str, list["RunningTask"]]


app = typer.Typer()


@app.command()
def status(stack: StackName = None, as_json: Json = False, wide: Wide = False) -> None:
    """Show fleets, nodes and slots as they are."""
    project = Project.find()
    declared = project.stacks() or (synthesized(project) if project.app else ())
    blocks = {block.stack.folder: block for block in project.blocks()}
    every = (*declared, *(block.stack for block in blocks.values()))
    stacks = (project.stack(stack, stacks=every),) if stack else every
    with working("status: Terraform's outputs, and the heads"):
        found = [{**_stack_status(each), "block": _block_status(blocks.get(each.folder))} for each in stacks]
    orphans = find_orphans(project, declared)
    if as_json:
        tables.print_document({"stacks": _plain(found), "orphans": [_orphan(each) for each in orphans]})
    else:
        for each in found:
            _print_stack(each)
        show_orphans(orphans)
    if any(each["incomplete"] for each in found):  # its last deploy has not ended well
        raise typer.Exit(1)


@app.command()
def manifest(
    fleet: Fleet,
    show_secret: Annotated[
        bool, typer.Option("--show-secret", help="Print it also on a terminal, with the fleet secret.")
    ] = False,
) -> None:
    """Print the manifest of a fleet. Others connect with it: `skyinfra run fleet.json SCRIPT`.

    It holds the fleet secret, which gives code execution on the nodes. A file that it is written to is made readable
    by you alone.
    """
    from skyinfra.client.lookup import find_manifest

    found = find_manifest(fleet)
    if sys.stdout.isatty() and not show_secret:
        raise InvalidField(
            "the manifest holds the fleet secret, which gives code execution on its nodes, and this is a terminal",
            field="skyinfra manifest",
            hint=f"Write it to a file: skyinfra manifest {fleet} > fleet.json. --show-secret prints it here.",
        )
    if _made_private(sys.stdout):
        sys.stderr.write("It holds the fleet secret: only you may read the file now. Hand it on as you would a key.\n")
    if found.head.address.startswith(("127.", "::1", "localhost")) and found.via is None:
        sys.stderr.write("The head of this fleet is reached from this machine alone.\n")
    tables.print_json(found.to_json())


def _made_private(stream: TextIO) -> bool:
    """Takes the file behind *stream* from everybody else, before anything is written to it. Returns whether it did."""
    try:
        number = stream.fileno()
        mode = os.fstat(number).st_mode
        if not stat.S_ISREG(mode) or not mode & 0o077:
            return False
        os.fchmod(number, 0o600)
    except io.UnsupportedOperation:
        return False
    except OSError as error:
        raise ProjectError(
            f"others may read the file, and its mode cannot be changed: {error.strerror}",
            field="skyinfra manifest",
            hint="The manifest holds the fleet secret. Write it to a file of your own.",
        ) from None
    return True


def _stack_status(stack: SynthesizedStack) -> dict[str, Any]:
    fleets = stack.fleets()
    pools = [_fleet_status(manifest, wanted(stack, manifest)) for manifest in fleets.values()]
    run = last_run(stack)
    absent = [declared["name"] for declared in stack.pools if declared["name"] not in fleets]
    existing = stack.resources() if run is not None or absent else ()
    for name in absent:
        held = [each for each in existing if each.module == name]
        pools.append({"pool": name, "fleet": f"{stack.name}/{name}", "deployed": False, **_existing(held)})
    return {
        "stack": stack.name,
        "pools": pools,
        "incomplete": not run.running if run is not None else any(pool.get("existing") for pool in pools),
        **_existing(existing if run is not None else ()),
        "last_run": asdict(run) if run is not None else None,
    }


def _block_status(block: Block | None) -> dict[str, Any] | None:
    """Describes the ``with`` block that a stack belongs to: its program, and what its fleet costs."""
    if block is None:
        return None
    cost = running_cost(block.stack.resources())
    return {
        **(asdict(block.opened) if block.opened is not None else {"program": None, "pid": None, "began": None}),
        "running": block.running,
        "text": f"{program_of(block)} {spending(cost, block.opened)}",
        "cost": cost.to_json(),
    }


def _existing(resources: Sequence[Resource]) -> dict[str, Any]:
    """Describes what exists of a pool or stack, also under the key of the version before."""
    found = _holds(resources)
    return {"existing": found, "standing": found}


def _holds(resources: Sequence[Resource]) -> dict[str, Any] | None:
    """Describes the resources of a pool or stack whose deploy has not ended well; None where there are none."""
    if not resources:
        return None
    failed = [f"{each.module}.{each.type}.{each.name}" for each in resources if each.tainted]
    cost = running_cost(resources).to_json()
    return {"resources": len(resources), "text": holdings(resources), "failed": failed, "cost": cost}


def _orphan(orphan: Orphan) -> dict[str, Any]:
    return {
        "stack": orphan.stack.name,
        "workspace": orphan.workspace,
        "state": orphan.where,
        "resources": len(orphan.resources),
        "cost": running_cost(orphan.resources).to_json(),
        "problem": orphan.problem,
    }


def _fleet_status(manifest: Manifest, version: str | None) -> dict[str, Any]:
    """Describes a deployed fleet. version: of the runner that this skyinfra has for it."""
    now: Snapshot | None = None
    tasks: Tasks = {}
    problem: str | None = None
    runner: Running | None = None
    try:
        now, tasks, runner = _look(manifest)
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
        "runner": runner.version if runner is not None else None,
        "upgrade": version if runner is not None and runner.problem is None and runner.version != version else None,
        "group_nodes": manifest.group_nodes,
        "follow": _follow_status(now),
        "nodes": [_node_status(manifest, node, now, tasks) for node in (*manifest.nodes, *_of_group(manifest, now))],
    }


def _follow_status(now: Snapshot | None) -> dict[str, Any] | None:
    """Describes how the layouts of a fleet follow its work; None where they do not, or the head does not answer."""
    follow_state = now.state.follow if now is not None and now.state is not None else None
    if follow_state is None:
        return None
    return {**asdict(follow_state.policy), "changes": [asdict(change) for change in follow_state.changes]}


def _look(manifest: Manifest) -> tuple[Snapshot, Tasks, Running]:
    """Returns the fleet, its tasks, and the runner of its head."""
    from skyinfra.client import open_questions

    head = [node.name for node in manifest.nodes if node.head]
    with open_questions(manifest, timeout=5) as pool:
        found = running(pool, head)
        return pool.look(), pool.running(), found[head[0]] if head else Running(None, "no node is the head")


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
    out_of_service = reported.out_of_service.get(node.name) if reported else None
    sick = reported.sick if reported else {}
    slots = [
        {
            **draining[name].to_json(),
            "state": "sick" if name in sick else "draining",
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
        slot["sick"] = sick.get(str(slot["slot"]))
    why_sick = reported.sick_nodes().get(node.name) if reported else None
    if any(name not in sick for name in draining):
        state = "draining"
    elif out_of_service and not live:
        state = "drained"
    elif why_sick:
        state = "sick"
    return {
        "name": node.name,
        "id": node.id,
        "head": node.head,
        "address": node.address,
        "machine_type": node.machine_type,
        "state": state,
        "failed": asdict(failed) if failed is not None else None,
        "drain_reason": out_of_service,
        "leaving": out_of_service,  # its name in the version before
        "sick": why_sick,
        "unwatched": reported.unwatched.get(node.name) if reported else None,
        "behind": bool(reported and node.name in reported.behind),
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
    if status.get("block") is not None:
        out.print(f"{status['stack']}: {escape(status['block']['text'])}", soft_wrap=True)
        if not status["block"]["running"]:
            out.print(f"Destroy it with: skyinfra destroy {status['stack']}", soft_wrap=True)
    for pool in status["pools"]:
        if not pool["deployed"]:
            _print_absent(pool)
            continue
        mark = tables.simulated_mark(pool["simulated"])
        head = f"{pool['head']['address']}:{pool['head']['port']}"
        out.print(f"[bold]{pool['fleet']}[/] on {pool['provider']}{mark}, head {escape(head)}")
        if pool["problem"]:
            out.print(f"[red]{escape(pool['problem'])}[/]")
        if pool["upgrade"]:
            text = f"Its runner is {pool['runner'] or 'older'}, that of this skyinfra {pool['upgrade']}."
            out.print(
                f"{escape(text)} What it knows works; `skyinfra upgrade {pool['fleet']}` brings it here.",
                soft_wrap=True,
            )
        for node in pool["nodes"]:
            if node["failed"]:
                out.print(f"[red]{escape(_failure(node))}[/]")
        for line in lines(((node["name"], node["gpus"]) for node in pool["nodes"]), out.width):
            out.print(line, soft_wrap=True)
        made = tables.table(
            *("NODE", "SLOT", "KIND", "ACCELERATOR", "PROFILE", "UUID", "STATE", "TASK"),
            leave_out=("KIND", "UUID", "ACCELERATOR", "PROFILE"),
            ids=("UUID",),
            sentences=("STATE", "TASK"),
        )
        for node in pool["nodes"]:
            for slot in node["slots"]:
                made.add_row(
                    node["name"] + (" (head)" if node["head"] else ""),
                    str(slot["worker"]),
                    slot["kind"] or "",
                    escape(f"{slot['accelerator']}{mark}" if slot["accelerator"] else ""),
                    escape(_profile(slot)),
                    escape(slot["uuid"] or ""),
                    _state(slot),
                    escape(", ".join(f"{task['name']} {tables.span(task['seconds'])}" for task in slot["tasks"])),
                )
        out.print(made)
        _print_follow(pool["follow"])
        for node in pool["nodes"]:
            if node["behind"]:
                text = f"{node['name']}: the head cannot connect to it, and uses the connections that its slots open"
                out.print(text, soft_wrap=True)
            if node["sick"]:
                text = f"{node['name']} is sick, and takes no tasks on {node['sick']}"
                out.print(f"[red]{escape(text)}[/]. `skyinfra doctor {pool['fleet']}` says more.", soft_wrap=True)
            if node["unwatched"]:
                out.print(f"{node['name']}: {escape(node['unwatched'])}", soft_wrap=True)
            if node["drain_reason"]:
                out.print(f"{node['name']} is {node['state']}: {escape(node['drain_reason'])}", soft_wrap=True)
    if run := status.get("last_run"):
        if status["existing"] is not None and all(pool["deployed"] for pool in status["pools"]):
            out.print(f"{status['stack']} holds {escape(status['existing']['text'])}.", soft_wrap=True)
        if run["running"]:
            out.print(f"[yellow]A {run['verb']}, begun at {run['began']}, is still running.[/]", soft_wrap=True)
            return
        text = "was killed." if run["message"] is None else "failed:"
        out.print(f"[red]The last {run['verb']}, begun at {run['began']}, {text}[/]", soft_wrap=True)
        if run["message"] is not None:
            out.print(escape(run["message"]), soft_wrap=True)


def _profile(slot: Mapping[str, Any]) -> str:
    """Returns the profile of a slot, and with how many others it shares its memory where it does."""
    name = str(slot["profile"] or "")
    count = slot.get("shared_by")
    return f"{name} ({slot['memory_gb']:g} GB shared by {count})" if count and count > 1 else name


def _print_follow(follow: dict[str, Any] | None) -> None:
    """Prints which layouts follow the work, and the last changes with their reasons."""
    if follow is None:
        return
    out = tables.console()
    kept = f", {follow['keep']} kept" if follow["keep"] else ""
    text = f"Layouts follow the work: {', '.join(follow['among'])}, after {tables.span(follow['idle_seconds'])}{kept}."
    out.print(escape(text), soft_wrap=True)
    for change in follow["changes"][-_SHOWN_CHANGES:]:
        ago = tables.span(max(0.0, time.time() - change["at"]))
        where = f"{change['node']} GPU {change['gpu']}: {change['before']} -> {change['layout']}"
        out.print(escape(f"  {ago} ago, {where}: {change['why']}"), soft_wrap=True)


def _print_absent(pool: dict[str, Any]) -> None:
    out = tables.console()
    existing = pool["existing"]
    if existing is None:
        out.print(f"[bold]{pool['fleet']}[/] is not deployed")
        return
    out.print(f"[bold]{pool['fleet']}[/] is [red]partly deployed[/]: {escape(existing['text'])}", soft_wrap=True)
    for address in existing["failed"]:
        out.print(f"  {escape(address)} was created and failed", soft_wrap=True)


def _failure(node: dict[str, Any]) -> str:
    failed = node["failed"]
    return "\n".join([f"{node['name']} was not set up: step {failed['step']}: {failed['error']}", *failed["lines"]])


def _state(slot: dict[str, Any]) -> str:
    if slot["state"] == "draining":
        tasks = ", ".join(slot["waits_for"])
        return f"[yellow]draining{escape(f': {tasks}') if tasks else ''}[/]"
    return "ready" if slot["state"] == "ready" else f"[red]{slot['state']}[/]"
