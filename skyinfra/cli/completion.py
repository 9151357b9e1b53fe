"""``skyinfra completion``."""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated

import typer
from typer._completion_shared import get_completion_script

app = typer.Typer()


class Shell(StrEnum):
    """A shell that completes commands."""

    bash = "bash"
    zsh = "zsh"
    fish = "fish"


@app.command()
def completion(shell: Annotated[Shell, typer.Argument(help="The shell.")]) -> None:
    """Print the completion of a shell. --install-completion installs it; it knows stacks, pools, nodes and jobs."""
    typer.echo(get_completion_script(prog_name="skyinfra", complete_var="_SKYINFRA_COMPLETE", shell=shell.value))
