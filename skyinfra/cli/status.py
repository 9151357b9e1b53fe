"""``skyinfra status``: fleets, nodes and slots as they are, asked of Terraform and of the heads."""

from __future__ import annotations

import io
import os
import stat
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, TextIO

import typer
from rich.markup import escape

from skyinfra.cli.options import Fleet, Fleets, Json, Since, Wide
from skyinfra.cli.stacks import show_orphans
from skyinfra.deploy.fleet_status import block_status, orphan_status, plain, stack_status
from skyinfra.deploy.kept import gone_spent, gone_stacks, stack_spent
from skyinfra.deploy.missing_nodes import MOST_AN_HOUR
from skyinfra.deploy.orphans import find_orphans
from skyinfra.errors import InvalidField, ProjectError, counted
from skyinfra.terminal import tables
from skyinfra.terminal.drawing import lines
from skyinfra.terminal.progress import synthesized, working
from skyinfra.terminal.spent import begin_of, day_of, show_so_far, show_spent
from skyinfra.terraform.project import Project

# Of the changes of layouts that follow the work.
_SHOWN_CHANGES = 5
_REPLACED = f" A deploy replaces it when half of its slots stay so for ten minutes; {MOST_AN_HOUR} an hour at most."
_GONE = (
    "Where its machine still runs, it costs as before: `skyinfra plan {stack}` asks the place. A deploy makes anew "
    "what is gone there."
)


app = typer.Typer()


@app.command()
def status(fleet: Fleets = None, as_json: Json = False, wide: Wide = False) -> None:
    """Show fleets, nodes and slots as they are. Exit code 1 where the last deploy of a stack has not ended well."""
    name, _, pool = (fleet or "").partition("/")
    project = Project.find()
    declared = project.stacks() or (synthesized(project) if project.app else ())
    blocks = {block.stack.folder: block for block in project.blocks()}
    every = (*declared, *(block.stack for block in blocks.values()))
    stacks = (project.stack(name, stacks=every),) if name else every
    with working("status: Terraform's outputs, and the heads"):
        found = [{**stack_status(each, pool), "block": block_status(blocks.get(each.folder))} for each in stacks]
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
def cost(fleet: Fleets = None, since: Since = None, as_json: Json = False, wide: Wide = False) -> None:
    """Show what fleets have cost so far: hours and money by node, submitter and job. Of those that are gone, what was
    kept. Prices are those of their date, and what is not known is named. Exit code 1 where a budget is spent, or nobody
    knows whether it is.
    """
    name, _, pool = (fleet or "").partition("/")
    begin = begin_of(since)
    project = Project.sought()
    declared = () if project is None else project.stacks() or (synthesized(project) if project.app else ())
    every = (*declared, *(block.stack for block in (project.blocks() if project else ())))
    with working("cost: Terraform's outputs, and the heads"):
        selected = [each for each in every if name in ("", each.name)]
        found = [stack_spent(each, project.base_of(each), pool, begin) for each in selected] if project else []
        base = project.folder if project else Path.cwd()
        gone = ({name} if name else gone_stacks(base)) - {each.name for each in every}
        found += filter(None, [gone_spent(base, each, pool, begin) for each in sorted(gone)])
    if not found and (name or project is None):
        Project.find().stack(name, stacks=every)  # says what there is
    if as_json:
        tables.print_document({"since": since and day_of(begin), "stacks": found})
    else:
        show_spent(found, since and day_of(begin))
    budgets = (pool["budget"] for each in found for pool in each["pools"])
    if any(budget and (budget["fraction"] is None or budget["fraction"] >= 1) for budget in budgets):
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
        tables.say(
            "It holds the fleet secret: only you may read the file now. Hand it on as you would a key.", to_stderr=True
        )
    if found.head.address.startswith(("127.", "::1", "localhost")) and found.via is None:
        tables.say("The head of this fleet is reached from this machine alone.", to_stderr=True)
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
        tables.say(f"{status['stack']}: {status['block']['text']}")
        if not status["block"]["running"]:
            tables.say(f"Destroy it with: `skyinfra destroy {status['stack']}`")
    for pool in status["pools"]:
        if not pool["deployed"]:
            _print_absent(pool)
            continue
        mark = tables.simulated_mark(pool["simulated"])
        head = f"{pool['head']['address']}:{pool['head']['port']}"
        tables.say((pool["fleet"], "bold"), f" on {pool['provider']}{mark}, head {head}")
        if pool["problem"]:
            tables.say((pool["problem"], "red"))
        if pool["upgrade"]:
            text = f"Its runner is {pool['runner'] or 'older'}, that of this skyinfra {pool['upgrade']}."
            tables.say(f"{text} What it knows works; `skyinfra upgrade {pool['fleet']}` brings it here.")
        if spent := pool["spent"]:
            show_so_far(spent)
        for node in pool["nodes"]:
            if node["failed"]:
                tables.say((_failure(node), "red"))
        for line in lines(((node["name"], node["gpus"]) for node in pool["nodes"]), out.width):
            out.print(line, soft_wrap=True)
        made = tables.table(
            *("NODE", "SLOT", "KIND", "ACCELERATOR", "PROFILE", "UUID", "STATE", "TASK"),
            leave_out=("KIND", "UUID", "ACCELERATOR"),
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
        _print_size(pool["size"])
        _print_follow(pool["follow"])
        for node in pool["nodes"]:
            if node["behind"]:
                text = f"{node['name']}: the head cannot connect to it, and uses the connections that its slots open"
                tables.say(text)
            if node["sick"]:
                text = f"{node['name']} is sick, and takes no tasks on {node['sick']}"
                replaced = _REPLACED if pool["replace_sick"] and not node["head"] else ""
                tables.say((text, "red"), f". `skyinfra doctor {pool['fleet']}` says more.{replaced}")
            if node["unwatched"]:
                tables.say(f"{node['name']}: {node['unwatched']}")
            if node["stops"]:
                idle = node["stops"].startswith("stops")  # what ends for another reason is not kept
                keep = f" `skyinfra keep {pool['fleet']} 2h` keeps it from being idle." if idle else ""
                tables.say((f"{node['name']} {node['stops']}.{keep}", "yellow"))
            if node["drain_reason"]:
                tables.say(f"{node['name']} is {node['state']}: {node['drain_reason']}")
            if node["silent_seconds"] is not None:
                text = f"{node['name']} is gone: its head has not heard of it for {tables.span(node['silent_seconds'])}"
                tables.say((text, "red"), f". {_GONE.format(stack=status['stack'])}")
    if run := status.get("last_run"):
        if status["existing"] is not None and all(pool["deployed"] for pool in status["pools"]):
            tables.say(f"{status['stack']} holds {status['existing']['text']}.")
        if run["running"]:
            tables.say((f"A {run['verb']}, begun at {run['began']}, is still running.", "yellow"))
            return
        text = "was killed." if run["message"] is None else "failed:"
        tables.say((f"The last {run['verb']}, begun at {run['began']}, {text}", "red"))
        if run["message"] is not None:
            tables.say(run["message"])


def _profile(slot: Mapping[str, Any]) -> str:
    """Returns the profile of a slot, and with how many others it shares its memory where it does."""
    name = str(slot["profile"] or "")
    count = slot.get("shared_by")
    return f"{name} ({slot['memory_gb']:g} GB shared by {count})" if count and count > 1 else name


def _print_size(size: dict[str, Any] | None) -> None:
    """Prints how many nodes there are, and why so many are wanted since when."""
    if size is None:
        return
    text = f"{counted(size['nodes'], 'node')} of {size['least']} to {size['most']}"
    if size["wanted"] > size["nodes"]:
        text += f", {size['wanted']} are wanted"
    if size["why"]:
        text += f", for {tables.span(max(0.0, time.time() - size['since']))}: {size['why']}"
    tables.say(f"{text}.")
    if size["problem"]:
        tables.say((size["problem"], "red"))


def _print_follow(follow: dict[str, Any] | None) -> None:
    """Prints which layouts follow the work, and the last changes with their reasons."""
    if follow is None:
        return
    kept = f", {follow['keep']} kept" if follow["keep"] else ""
    text = f"Layouts follow the work: {', '.join(follow['among'])}, after {tables.span(follow['idle_seconds'])}{kept}."
    tables.say(text)
    for change in follow["changes"][-_SHOWN_CHANGES:]:
        ago = tables.span(max(0.0, time.time() - change["at"]))
        where = f"{change['node']} GPU {change['gpu']}: {change['before']} -> {change['layout']}"
        tables.say(f"  {ago} ago, {where}: {change['why']}")


def _print_absent(pool: dict[str, Any]) -> None:
    name, existing = (pool["fleet"], "bold"), pool["existing"]
    if existing is None:
        tables.say(name, " is not deployed")
        return
    tables.say(name, " is ", ("partly deployed", "red"), f": {existing['text']}")
    for address in existing["failed"]:
        tables.say(f"  {address} was created and failed")


def _failure(node: dict[str, Any]) -> str:
    failed = node["failed"]
    return "\n".join([f"{node['name']} was not set up: step {failed['step']}: {failed['error']}", *failed["lines"]])


def _state(slot: dict[str, Any]) -> str:
    if slot["state"] == "draining":
        tasks = ", ".join(slot["waits_for"])
        return f"[yellow]draining{escape(f': {tasks}') if tasks else ''}[/]"
    return f"[{'green' if slot['state'] == 'ready' else 'red'}]{slot['state']}[/]"
