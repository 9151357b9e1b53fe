"""``skyinfra status``: fleets, nodes and slots as they are, asked of Terraform and of the heads."""

from __future__ import annotations

import io
import os
import stat
import sys
import time
from collections.abc import Mapping
from typing import TYPE_CHECKING, Annotated, Any, TextIO

import typer
from rich.markup import escape

from skyinfra.cli.options import Fleet, Json, StackName, Wide
from skyinfra.cli.stacks import show_orphans
from skyinfra.deploy.fleet_status import block_status, orphan_status, plain, stack_status
from skyinfra.deploy.orphans import find_orphans
from skyinfra.errors import InvalidField, ProjectError
from skyinfra.terminal import tables
from skyinfra.terminal.drawing import lines
from skyinfra.terminal.progress import synthesized, working
from skyinfra.terraform.project import Project

if TYPE_CHECKING:
    pass

# Of the changes of layouts that follow the work.
_SHOWN_CHANGES = 5


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
        found = [{**stack_status(each), "block": block_status(blocks.get(each.folder))} for each in stacks]
    orphans = find_orphans(project, declared)
    if as_json:
        tables.print_document({"stacks": plain(found), "orphans": [orphan_status(each) for each in orphans]})
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
            if node["stops"]:
                text = f"{node['name']} {node['stops']}. `skyinfra keep {pool['fleet']} 2h` keeps it from being idle."
                out.print(f"[yellow]{escape(text)}[/]", soft_wrap=True)
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
