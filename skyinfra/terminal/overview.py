"""``skyinfra`` alone: where a project stands, and what to do next. Starts neither Terraform nor Node."""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

from rich.text import Text

from skyinfra import folding
from skyinfra.deploy.cost import cost_of, running_cost
from skyinfra.deploy.last_run import last_run
from skyinfra.deploy.spending import program_of, spent
from skyinfra.errors import FleetError, ProjectError, counted
from skyinfra.protocol.manifest import Manifest
from skyinfra.terminal import tables
from skyinfra.terraform.blocks import Block
from skyinfra.terraform.project import Project
from skyinfra.terraform.synthesized import SynthesizedStack

# For a head to say which jobs it has.
_PATIENCE_S = 2.0

# What is said of a stack, in pieces: texts, some with a style.
Line = tuple[tables.Piece, ...]
Steps = list[tuple[str, str]]
# Beside commands, sentences have at least that room; else they stand below them, so far to the right.
_NARROW = 24
_BELOW = " " * 6


def show_overview() -> None:
    """Prints where the project of this folder stands, and the next commands. Raises `ProjectNotFound` for a bad one."""
    project = Project.sought()
    if project is None:
        lines: list[Line] = [(f"There is no project in {Path.cwd()}, nor in a folder above it.",)]
        steps = [
            ("skyinfra init my-project", "make one, with simulated nodes"),
            ("skyinfra init my-tour --example tour", "or one that shows what a fleet can do"),
        ]
    else:
        lines, steps = _overview(project)
    for line in lines:
        tables.say(*line)
    show_steps([*steps, ("skyinfra --help", "every command")])


def _overview(project: Project) -> tuple[list[Line], Steps]:
    lines: list[Line] = []
    steps: dict[str, str] = {}
    stacks = project.stacks()
    if project.app and not stacks:
        lines.append(((project.folder.name, "bold"), ": nothing is synthesized yet."))
        steps["skyinfra plan"] = "compile what is declared, and show what a deploy makes and costs"
        steps["skyinfra deploy"] = "make it"
    blocks = project.blocks()
    for stack in (*stacks, *(block.stack for block in blocks)):
        found, following = _stack(stack)
        lines += found
        lines += [(f"  {program_of(block)}{_so_far(block)}",) for block in blocks if block.stack is stack]
        steps |= dict(following)
    return lines, list(steps.items())


def _so_far(block: Block) -> str:
    with suppress(ProjectError):
        cost = running_cost(block.stack.resources()).usd_per_hour
        if cost and block.opened is not None:
            return f" It has cost {spent(cost, block.opened)}."
    return ""


def _stack(stack: SynthesizedStack) -> tuple[list[Line], Steps]:
    name = (stack.name, "bold")
    if stack.state_file is None:
        backend = next(iter(stack.backend), "a backend")
        return [(name, f": Terraform keeps its state elsewhere ({backend}).")], [
            (f"skyinfra status {stack.name}", "fleets, nodes and slots as they are"),
            (f"skyinfra plan {stack.name}", "what a deploy would change"),
        ]
    try:
        resources = stack.resources()
    except ProjectError as error:
        return [(name, ": ", (str(error), "red"))], []
    if not resources:
        declared = cost_of(stack.pools)
        price = f" It would cost ${declared.usd_per_hour:.2f} an hour." if declared.usd_per_hour else ""
        return [(name, ": not deployed.", price)], [
            (f"skyinfra plan {stack.name}", "what a deploy makes and costs"),
            (f"skyinfra deploy {stack.name}", "make it"),
        ]
    cost = running_cost(resources)
    known = [] if cost.machines else ["no machine of it is bought"]
    if len(cost.unknown) < len(cost.machines):
        known.append(f"at ${cost.usd_per_hour:.2f} an hour")
    if cost.unknown:
        known.append(f"the price of {', '.join(cost.unknown)} is not known")
    fleets, run = stack.known_fleets(), last_run(stack)
    whole = run is None and not {pool["name"] for pool in stack.pools} - set(fleets)
    state = ("deployed", "green") if whole else ("partly deployed", "yellow")
    lines: list[Line] = [(name, ": ", state, f", {', and '.join(known)}.")]
    if run is not None:
        how = "is still running" if run.running else "was killed" if run.message is None else "failed"
        lines.append((f"  The last {run.verb}, begun at {run.began}, {how}.",))
    lines += [(f"  {_fleet(manifest)}",) for manifest in fleets.values()]
    steps = steps_of(stack)
    if not whole and not (run and run.running):
        first = (f"skyinfra deploy {stack.name}", "make what is missing")
        steps = [*steps, first] if run is not None and run.verb == "destroy" else [first, *steps]
    return lines, steps


def steps_of(stack: SynthesizedStack) -> Steps:
    """Returns what to do with the fleets of *stack*, by the file of its state."""
    first = next(iter(stack.known_fleets().values()), None)
    steps = [] if first is None else [(f"skyinfra run {first.fleet} SCRIPT", "run a script on a slot")]
    return [
        *steps,
        (f"skyinfra status {stack.name}", "fleets, nodes and slots as they are"),
        (f"skyinfra destroy {stack.name}", "end it, and what it costs"),
    ]


def _fleet(manifest: Manifest) -> str:
    nodes = counted(manifest.node_count, "node")
    slots = counted(len(manifest.slots) * manifest.node_count, "slot")
    return f"{manifest.fleet}: {nodes}, {slots}{tables.simulated_mark(manifest.simulated)}, {_jobs(manifest)}"


def _jobs(manifest: Manifest) -> str:
    """Returns how many jobs the head runs and keeps waiting, asked of it for a moment."""
    from skyinfra.client import open_questions

    try:
        with open_questions(manifest, timeout=_PATIENCE_S, patience=_PATIENCE_S) as pool:
            states = [job.state for job in pool.jobs()]
    except FleetError:
        return "its head does not answer"
    running, waiting = states.count("running"), states.count("queued")
    if not running and not waiting:
        return "no job runs"
    return f"{counted(running, 'job')} running" + (f", {waiting} waiting" if waiting else "")


def show_steps(steps: Iterable[tuple[str, str]], *, to_stderr: bool = False) -> None:
    """Prints the next commands, and what each does."""
    steps, out = list(steps), tables.console(to_stderr=to_stderr)
    width = max(len(command) for command, _ in steps)
    out.print(Text.assemble("\n", ("Next:", "bold")))
    room, below = out.width - width - 4, " " * (width + 4)
    if narrow := room < _NARROW:
        room, below = out.width - len(_BELOW), _BELOW
    for command, what in steps:
        first, *more = folding.sentences(Text(what), room)
        if not what:
            lines = [Text.assemble("  ", (command, "cyan"))]
        elif narrow:
            lines = [Text.assemble("  ", (command, "cyan")), Text(below) + first]
        else:
            lines = [Text.assemble("  ", (command.ljust(width) + "  ", "cyan"), first)]
        for line in (*lines, *(Text(below) + each for each in more)):
            out.print(line, soft_wrap=True)
