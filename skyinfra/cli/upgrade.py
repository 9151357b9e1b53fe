"""``skyinfra upgrade | move | scale``: fleets that exist, changed without a change of what is declared."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import replace
from threading import Event
from typing import Annotated

import typer
from rich.markup import escape

from skyinfra.cli.options import Fleet, Yes, can_be_asked
from skyinfra.cli.stacks import deploy_stack, synthesize
from skyinfra.deploy.moving import move as move_pools
from skyinfra.deploy.orphans import stack_to_destroy
from skyinfra.deploy.upgrade import Running, Upgrade, check_kind, running, wanted
from skyinfra.errors import (
    FleetUnreachable,
    InvalidField,
    NotSupported,
    PoolNotFound,
    counted,
    did_you_mean,
)
from skyinfra.places.choices import NAME, Choices
from skyinfra.terminal import tables
from skyinfra.terminal.progress import deployed, synthesized
from skyinfra.terraform.project import Project
from skyinfra.terraform.synthesized import SynthesizedStack

app = typer.Typer()


@app.command()
def move(
    source: Annotated[
        str, typer.Argument(metavar="STACK[/POOL]", help="The stack that has it; all pools without one.")
    ],
    target: Annotated[str, typer.Argument(metavar="STACK", help="The stack that declares it.")],
) -> None:
    """Move a pool with its nodes to another stack, or all pools of a stack to its new name."""
    project = Project.find()
    selected = synthesize(target, project)
    stack, _, pool = source.partition("/")
    moved = move_pools(stack_to_destroy(project, stack), selected, pool or None)
    tables.say(f"{', '.join(moved)}: moved from {stack} to {selected.name}, and nothing else was changed")
    tables.say(f"See what is left to change, such as tags: skyinfra plan {selected.name}")


@app.command()
def upgrade(
    fleet: Fleet,
    auto_approve: Yes = False,
    drain: Annotated[float, typer.Option(min=0, metavar="SECONDS", help="For how long running tasks may go on.")] = 600,
) -> None:
    """Bring the runner of a fleet to this version of skyinfra. Jobs wait and go on; running tasks end first."""
    from skyinfra.client import open_questions

    stack, manifest = deployed(fleet)
    check_kind(manifest)
    version = wanted(stack, manifest)
    with open_questions(manifest, any_version=True) as pool:
        names = pool.node_names()
        found = running(pool, names)
        _show(manifest.fleet, found, version)
        _check(manifest.provider, manifest.fleet, found)
        if version is not None and all(each.version == version for each in found.values()):
            return
        tasks = sum(map(len, pool.running().values()))
        now = f"{counted(tasks, 'running task')} may go on for {drain:g} s" if tasks else "No task runs now"
        tables.say(f"{now}. Jobs wait, and go on afterwards.", to_stderr=True)
        if not auto_approve:
            can_be_asked("upgrade")
            if not typer.confirm(f"Upgrade {manifest.fleet}?", err=True):
                raise typer.Exit(1)

        def say(text: str) -> None:
            tables.say(f"{manifest.fleet}: {text}", to_stderr=True)

        failed = Upgrade(stack, manifest, pool, names, drain, say).run()
        _show(manifest.fleet, running(pool, names), version)
    for node, why in failed.items():
        tables.say(f"{node} was not upgraded: {why}", to_stderr=True)
    if failed:
        raise typer.Exit(1)


@app.command()
def scale(
    fleet: Fleet,
    nodes: Annotated[int, typer.Argument(metavar="N", min=1, help="Of the range that the pool declares.")],
    auto_approve: Yes = False,
    wait: Annotated[bool, typer.Option(help="Until cloud nodes have booted and their slots are ready.")] = True,
) -> None:
    """Change the number of nodes of a pool within its declared range, by a deploy of its stack. The number stands in
    skyinfra.places.json, for version control: later deploys keep it.
    """
    project = Project.find()
    stack, _, name = fleet.partition("/")
    known = project.stack(stack)
    key = f"{known.name}/{name or known.only_pool}"
    before = Choices.read(project.folder).of(key).nodes
    begun = Event()
    try:
        _choose(project, key, nodes)
        _check_scale(project.stack(stack, stacks=synthesized(project)), key, nodes)
        deploy_stack(known.name, auto_approve=auto_approve, wait=wait, begun=begun.set)
    except BaseException:
        if not begun.is_set():  # nothing was changed
            with suppress(OSError):  # of a full disk: this error says why
                _choose(project, key, before)
        raise
    tables.say(f"{key} has {counted(nodes, 'node')}: {NAME} says so, and belongs into version control.", to_stderr=True)


def _choose(project: Project, fleet: str, nodes: int | None) -> None:
    choices = Choices.read(project.folder)
    choices.having(fleet, replace(choices.of(fleet), nodes=nodes))


def _check_scale(stack: SynthesizedStack, fleet: str, nodes: int) -> None:
    """Raises `PoolNotFound`, and `InvalidField` for a pool whose number of nodes is fixed, or follows the work."""
    pools = {pool["name"]: pool for pool in stack.pools}
    name = fleet.partition("/")[2]
    if (pool := pools.get(name)) is None:
        hint = f"{did_you_mean(name, pools)} Its pools: {', '.join(pools)}.".strip()
        raise PoolNotFound(f"the stack {stack.name!r} has no such pool", field="pool", given=name, hint=hint)
    if pool.get("scale") is not None:
        return
    least, most = pool.get("min_nodes"), pool["nodes"]
    if least is not None:
        hint = f"It has {least} to {most} as tasks ask for them: declare another range for others."
        raise InvalidField(f"the number of nodes of {fleet} follows its work", field="N", given=nodes, hint=hint)
    hint = f"Declare a range, nodes=sky.Range(1, {max(2, most, nodes)}), or another number."
    raise InvalidField(f"{fleet} declares nodes={most}", field="N", given=nodes, hint=hint)


def _show(fleet: str, found: dict[str, Running], version: str | None) -> None:
    """Prints which runner each node has."""
    made = tables.table("NODE", "RUNNER", "")
    for node, each in found.items():
        problem = "" if each.version == version else each.problem or ""
        made.add_row(node, escape(each.version or "older"), escape(problem))
    tables.console().print(made)
    if version is not None and all(each.version == version for each in found.values()):
        tables.say(f"{fleet}: every node has the runner of this skyinfra, {version}")
    elif version is not None:
        tables.say(f"{fleet}: the runner of this skyinfra is {version}")


def _check(provider: str, fleet: str, found: dict[str, Running]) -> None:
    """Raises `FleetUnreachable` where a node does not answer, `NotSupported` where one cannot be upgraded."""
    for node, each in found.items():
        if each.problem is not None:
            hint = "`skyinfra status` shows the nodes; upgrade when all of them are there."
            raise FleetUnreachable(f"{node} of {fleet} does not answer: {each.problem}", hint=hint)
    older = [node for node, each in found.items() if each.version is None]
    if older and provider != "local":
        raise NotSupported(
            f"the runner of {', '.join(older)} knows no upgrade: an earlier skyinfra made them",
            field=fleet,
            hint="What they know still works. To have this version, replace the nodes: docs/upgrading.md.",
        )
