"""``skyinfra upgrade``."""

from __future__ import annotations

import sys

import typer

from skyinfra.deploy.upgrade import Running, Upgrade, check_kind, running, wanted
from skyinfra.errors import FleetUnreachable, NotSupported, counted
from skyinfra.terminal import tables
from skyinfra.terminal.progress import every_stack
from skyinfra.terraform.project import Project


def upgrade_fleet(fleet: str, *, auto_approve: bool, drain_s: float) -> bool:
    """Upgrades *fleet*, ``STACK/POOL``, after a question. Returns False where a node has gone back to its runner."""
    from skyinfra.client import open_questions

    name, _, pool_name = fleet.partition("/")
    project = Project.find()
    stack = project.stack(name, stacks=every_stack(project))
    manifest = stack.fleet(pool_name or stack.only_pool)
    check_kind(manifest)
    version = wanted(stack, manifest)
    with open_questions(manifest, any_version=True) as pool:
        names = pool.node_names()
        found = running(pool, names)
        _show(manifest.fleet, found, version)
        _check(manifest.provider, manifest.fleet, found)
        if version is not None and all(each.version == version for each in found.values()):
            return True
        tasks = sum(map(len, pool.running().values()))
        now = f"{counted(tasks, 'running task')} may go on for {drain_s:g} s" if tasks else "No task runs now"
        typer.echo(f"{now}. Jobs wait, and go on afterwards.", err=True)
        if not auto_approve:
            if not sys.stdin.isatty():
                typer.echo("error: nobody can be asked here; give --auto-approve to upgrade", err=True)
                raise typer.Exit(2)
            if not typer.confirm(f"Upgrade {manifest.fleet}?", err=True):
                return False

        def say(text: str) -> None:
            typer.echo(f"{manifest.fleet}: {text}", err=True)

        failed = Upgrade(stack, manifest, pool, names, drain_s, say).run()
        _show(manifest.fleet, running(pool, names), version)
    for node, why in failed.items():
        typer.echo(f"{node} was not upgraded: {why}", err=True)
    return not failed


def _show(fleet: str, found: dict[str, Running], version: str | None) -> None:
    """Prints which runner each node has."""
    made = tables.table("NODE", "RUNNER", "")
    for node, each in found.items():
        made.add_row(node, each.version or "older", "" if each.version == version else each.problem or "")
    tables.console().print(made)
    if version is not None and all(each.version == version for each in found.values()):
        typer.echo(f"{fleet}: every node has the runner of this skyinfra, {version}")
    elif version is not None:
        typer.echo(f"{fleet}: the runner of this skyinfra is {version}")


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
            hint="What they know goes on working. To have this version, replace the nodes: docs/upgrading.md.",
        )
