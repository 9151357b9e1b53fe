"""``skyinfra`` itself and its groups. The modules of the commands are imported when they run: ``--help`` is quick."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated

import typer

from skyinfra.cli.options import Commands, ListByDefault

app = typer.Typer(
    cls=Commands,
    help="Infrastructure as code for accelerator fleets.",
    invoke_without_command=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    add_completion=True,
    context_settings={"help_option_names": ["-h", "--help"]},
)
for _name, _class, _help in (
    ("mig", Commands, "MIG: profiles and layouts of GPUs, without changing one."),
    (
        "jobs",
        ListByDefault,
        "Tasks and scripts that run without their client. From `skyinfra run --detach`, `pool.submit(..., detach=)`.",
    ),
    ("open", Commands, "Start a server on a slot, and open it in the browser of this machine."),
):
    app.add_typer(typer.Typer(cls=_class, help=_help, no_args_is_help=True), name=_name)


def _work_in(folder: Path | None) -> Path | None:
    if folder is not None:
        try:
            os.chdir(folder)
        except OSError as error:
            raise typer.BadParameter(f"{folder}: {error.strerror}") from None
    return folder


def _version(value: bool) -> None:
    if value:
        import skyinfra

        typer.echo(f"skyinfra {skyinfra.__version__}")
        raise typer.Exit


@app.callback()
def _root(
    context: typer.Context,
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version.")
    ] = False,
    folder: Annotated[
        Path | None,
        typer.Option("-C", metavar="DIR", callback=_work_in, help="Work as if it were started in this folder."),
    ] = None,
) -> None:
    """Infrastructure as code for accelerator fleets.

    Without a command: where the project of this folder stands, and what to do next.
    """
    if context.invoked_subcommand is None:
        from skyinfra.terminal.overview import show_overview

        show_overview()
