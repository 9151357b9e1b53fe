"""``skyinfra jobs``: what the head of a fleet keeps and runs by itself."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Optional

import typer
from typer.core import TyperGroup


class _ListByDefault(TyperGroup):
    """``jobs STACK/POOL`` is ``jobs list STACK/POOL``."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Puts the command in that was left out."""
        if args and args[0] not in self.commands and args[0] not in ("-h", "--help"):
            args = ["list", *args]
        return super().parse_args(ctx, args)


app = typer.Typer(
    cls=_ListByDefault,
    help="Tasks and scripts that run without their client: `skyinfra run --detach`, `pool.submit(..., detach=NAME)`.",
    no_args_is_help=True,
)

# typer reads these annotations at run time.
Fleet = Annotated[str, typer.Argument(metavar="STACK/POOL", help="The fleet.")]
JobName = Annotated[str, typer.Argument(metavar="ID", help="The job's name, its id, or how that begins.")]


@app.command("list")
def list_jobs(fleet: Fleet, as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False) -> None:
    """List the jobs that the head keeps. `skyinfra jobs STACK/POOL` does the same."""
    from skyinfra.cli.job_tables import show_jobs

    show_jobs(fleet, as_json=as_json)


@app.command()
def logs(
    fleet: Fleet,
    job: JobName,
    lines: Annotated[int, typer.Option("--lines", "-n", min=1, help="How many of the last ones.")] = 100,
    follow: Annotated[bool, typer.Option("--follow", "-f", help="Go on until the job has ended.")] = False,
) -> None:
    """Print what a job has printed."""
    from skyinfra.cli.job_tables import show_logs

    show_logs(fleet, job, lines=lines, follow=follow)


@app.command()
def cancel(fleet: Fleet, job: JobName) -> None:
    """Take a job back; one that runs is ended on its slot. Exit code 1 where it has ended already."""
    from skyinfra.cli.job_tables import cancel_job

    if not cancel_job(fleet, job):
        raise typer.Exit(1)


@app.command()
def result(
    fleet: Fleet,
    job: JobName,
    timeout: Annotated[
        Optional[float],  # noqa: UP045
        typer.Option(min=0, metavar="SECONDS", help="Wait for so long; for ever, where it is left out."),
    ] = None,
    output: Annotated[
        Optional[Path],  # noqa: UP045
        typer.Option(metavar="FILE", help="Write the result there, as `pickle.load` reads it. It is not read here."),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the result as JSON.")] = False,
) -> None:
    """Wait for a job and print its result. The exit code of a script is ours; 1 where a task raised an exception."""
    from skyinfra.cli.job_tables import show_result

    if output is not None and as_json:
        raise typer.BadParameter("--output writes a file, and --json prints")
    raise typer.Exit(show_result(fleet, job, timeout=timeout, output=output, as_json=as_json))
