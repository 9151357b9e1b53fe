"""The commands about the nodes of a fleet that runs."""

from __future__ import annotations

from typing import Annotated, Optional

import typer

from skyinfra.cli.behind import WithCommand, given

Fleet = Annotated[str, typer.Argument(metavar="STACK/POOL", help="The fleet.")]
# typer reads these annotations at run time.
NodeName = Annotated[Optional[str], typer.Argument(metavar="NODE", help="Only this node.")]  # noqa: UP045
Json = Annotated[bool, typer.Option("--json", help="Print JSON.")]


def add(app: typer.Typer) -> None:
    """Adds the commands."""
    app.command()(doctor)
    app.command()(top)
    app.command()(dashboard)
    app.command()(logs)
    app.command("exec", cls=WithCommand)(execute)
    app.command(cls=WithCommand)(ssh)


def doctor(fleet: Fleet, node: NodeName = None, as_json: Json = False) -> None:
    """Look for what is wrong on the nodes, and say what to do. Exit code 1 where something is."""
    from skyinfra.cli.doctor import examine

    if not examine(fleet, node, as_json=as_json):
        raise typer.Exit(1)


def top(
    fleet: Fleet,
    node: NodeName = None,
    interval: Annotated[float, typer.Option(min=0.2, metavar="SECONDS", help="Between two looks.")] = 2.0,
    as_json: Json = False,
) -> None:
    """Show what each slot uses, and the task on it. Where nobody watches, and as JSON, once."""
    from skyinfra.cli.top import show

    show(fleet, node, interval=interval, as_json=as_json)


def dashboard(
    fleet: Fleet,
    port: Annotated[int, typer.Option(min=0, max=65535, help="Of this machine, on which to listen; 0 is any.")] = 0,
    browser: Annotated[bool, typer.Option(help="Open it, where a person watches.")] = True,
) -> None:
    """Show the pages of the fleet's scheduler in the browser of this machine, until it is interrupted."""
    from skyinfra.cli.dashboard import show

    show(fleet, port=port, browser=browser)


def logs(
    fleet: Fleet,
    node: NodeName = None,
    boot: Annotated[bool, typer.Option("--boot", help="Of the node's first boot.")] = False,
    runner: Annotated[bool, typer.Option("--runner", help="Of the runner; this is the default.")] = False,
    task: Annotated[str, typer.Option(metavar="KEY", help="What this task printed; the key may be cut short.")] = "",
    lines: Annotated[int, typer.Option("--lines", "-n", min=1, help="How many of the last ones.")] = 100,
    follow: Annotated[bool, typer.Option("--follow", "-f", help="Go on with what is added.")] = False,
    as_json: Json = False,
) -> None:
    """Show logs of the nodes, or what a task printed."""
    from skyinfra.cli.logs import show

    if boot + runner + bool(task) > 1:
        raise typer.BadParameter("--boot, --runner and --task are different logs")
    if follow and as_json:
        raise typer.BadParameter("--json is printed once, and --follow goes on")
    source = "boot" if boot else "task" if task else "runner"
    if not show(fleet, node, source=source, task=task, lines=lines, follow=follow, as_json=as_json):
        raise typer.Exit(1)


def execute(context: typer.Context, fleet: Fleet, node: NodeName = None) -> None:
    """Run a command on a node, the head unless another is named. Its output is streamed and its exit code is ours."""
    from skyinfra.cli.execute import on_node

    raise typer.Exit(on_node(fleet, node, given(context)))


def ssh(
    context: typer.Context,
    fleet: Fleet,
    node: NodeName = None,
    user: Annotated[str, typer.Option(help="The user on the node.")] = "ubuntu",
) -> None:
    """Open a shell on a node, the head unless another is named: by ssh, or Session Manager where no port is open."""
    from skyinfra.cli.execute import log_in

    log_in(fleet, node, given(context), user=user)
