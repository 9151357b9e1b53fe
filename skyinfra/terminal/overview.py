"""``skyinfra`` alone: where a project stands, and what to do next. Starts neither Terraform nor Node."""

from __future__ import annotations

import sys
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

from skyinfra.deploy.cost import cost_of, running_cost
from skyinfra.deploy.spending import program_of, spent
from skyinfra.errors import FleetError, ProjectError, counted
from skyinfra.protocol.manifest import Manifest
from skyinfra.terminal import tables
from skyinfra.terraform.blocks import Block
from skyinfra.terraform.project import Project
from skyinfra.terraform.synthesized import SynthesizedStack

# For a head to say which jobs it has.
_PATIENCE_S = 2.0

Steps = list[tuple[str, str]]


def show_overview() -> None:
    """Prints where the project of this folder stands, and the next commands. Raises `ProjectNotFound` for a bad one."""
    project = Project.sought()
    if project is None:
        lines = [f"There is no project in {Path.cwd()}, nor in a folder above it."]
        steps = [
            ("skyinfra init my-project", "make one, with simulated nodes"),
            ("skyinfra init my-tour --example tour", "or one that shows what a fleet can do"),
        ]
    else:
        lines, steps = _overview(project)
    _print(lines, [*steps, ("skyinfra --help", "every command")])


def _overview(project: Project) -> tuple[list[str], Steps]:
    lines: list[str] = []
    steps: dict[str, str] = {}
    stacks = project.stacks()
    if project.app and not stacks:
        lines.append(f"{project.folder.name}: nothing is synthesized yet.")
        steps["skyinfra plan"] = "compile what is declared, and show what a deploy makes and costs"
        steps["skyinfra deploy"] = "make it"
    blocks = project.blocks()
    for stack in (*stacks, *(block.stack for block in blocks)):
        found, following = _stack(stack)
        lines += found
        lines += [f"  {program_of(block)}{_so_far(block)}" for block in blocks if block.stack is stack]
        steps |= dict(following)
    return lines, list(steps.items())


def _so_far(block: Block) -> str:
    with suppress(ProjectError):
        cost = running_cost(block.stack.resources()).usd_per_hour
        if cost and block.opened is not None:
            return f" It has cost {spent(cost, block.opened)}."
    return ""


def _stack(stack: SynthesizedStack) -> tuple[list[str], Steps]:
    if stack.state_file is None:
        backend = next(iter(stack.backend), "a backend")
        return [f"{stack.name}: Terraform keeps its state elsewhere ({backend})."], [
            (f"skyinfra status {stack.name}", "fleets, nodes and slots as they are"),
            (f"skyinfra plan {stack.name}", "what a deploy would change"),
        ]
    try:
        resources = stack.resources()
    except ProjectError as error:
        return [f"{stack.name}: {error}"], []
    if not resources:
        declared = cost_of(stack.pools)
        price = f" It would cost ${declared.usd_per_hour:.2f} an hour." if declared.usd_per_hour else ""
        return [f"{stack.name}: not deployed.{price}"], [
            (f"skyinfra plan {stack.name}", "what a deploy makes and costs"),
            (f"skyinfra deploy {stack.name}", "make it"),
        ]
    cost = running_cost(resources)
    price = f"at ${cost.usd_per_hour:.2f} an hour" if cost.usd_per_hour else "no machine of it is bought"
    if cost.unknown:
        price += f", and the price of {', '.join(cost.unknown)} is not known"
    fleets = stack.known_fleets()
    lines = [f"{stack.name}: deployed, {price}." if fleets else f"{stack.name}: partly deployed, {price}."]
    lines += [f"  {_fleet(manifest)}" for manifest in fleets.values()]
    first = next(iter(fleets.values()), None)
    steps = [] if first is None else [(f"skyinfra run {first.fleet} SCRIPT", "run a script on a slot")]
    steps.append((f"skyinfra status {stack.name}", "fleets, nodes and slots as they are"))
    steps.append((f"skyinfra destroy {stack.name}", "end it, and what it costs"))
    return lines, steps


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


def _print(lines: Iterable[str], steps: Steps) -> None:
    width = max(len(command) for command, _ in steps)
    text = "\n".join([*lines, "", "Next:", *(f"  {command:<{width}}  {what}" for command, what in steps)])
    sys.stdout.write(f"{text}\n")
