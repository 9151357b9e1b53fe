"""The commands about the nodes of a fleet that runs."""

from __future__ import annotations

from typing import Annotated, Optional

import typer

Fleet = Annotated[str, typer.Argument(metavar="STACK/POOL", help="The fleet.")]
# typer reads these annotations at run time.
NodeName = Annotated[Optional[str], typer.Argument(metavar="[NODE]", help="Only this node.")]  # noqa: UP045
Json = Annotated[bool, typer.Option("--json", help="Print JSON.")]


def add(app: typer.Typer) -> None:
    """Adds the commands."""
    app.command()(doctor)


def doctor(fleet: Fleet, node: NodeName = None, as_json: Json = False) -> None:
    """Look for what is wrong on the nodes, and say what to do. Exit code 1 where something is."""
    from skyinfra.cli.doctor import examine

    if not examine(fleet, node, as_json=as_json):
        raise typer.Exit(1)
