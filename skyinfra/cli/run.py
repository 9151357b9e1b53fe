"""``skyinfra run``: a script on a slot, or as a gang."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Any

from typer.core import TyperCommand

from skyinfra.cli.options import said_of_options
from skyinfra.errors import GangFailed, InvalidField


class ScriptCommand(TyperCommand):
    """A command ``FLEET [OPTIONS] SCRIPT ARGUMENTS``: what stands behind the script is the script's, whatever it is."""

    # Newer typers carry a click of their own, older ones use the package: their contexts are different classes.

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Puts the options in front of the fleet, where the parser takes them."""
        valued = {name for option in self.params for name in option.opts if not getattr(option, "is_flag", True)}
        return super().parse_args(ctx, options_first(args, valued))


def options_first(args: Sequence[str], valued: Collection[str]) -> list[str]:
    """*args* with all options up to the second other word in front. *valued*: the options that take the next word."""
    options: list[str] = []
    words: list[str] = []
    position = 0
    while position < len(args) and len(words) < 2 and args[position] != "--":
        word = args[position]
        if not word.startswith("-") or word == "-":
            words.append(word)
        else:
            options.append(word)
            if word in valued and position + 1 < len(args):
                position += 1
                options.append(args[position])
        position += 1
    return [*options, *words, *args[position:]]


def run_on_slot(fleet: str, script: Path, arguments: Sequence[str]) -> int:
    """Runs *script* on one slot of *fleet* (``STACK/POOL``) and streams what it prints.

    Returns its exit code; 128 and the signal's number where one ended it, as a shell does. Raises `InvalidField` where
    the file does not exist, and what ``connect`` raises.
    """
    if not script.is_file():
        raise InvalidField("there is no such file", field="SCRIPT", given=str(script))
    from skyinfra.client import connect, run_script

    def show(stream: str, line: str) -> None:
        target = sys.stderr if stream == "stderr" else sys.stdout
        target.write(f"{line}\n")
        target.flush()

    with connect(fleet) as pool:
        code = run_script(pool, script, list(arguments), on_line=show)
    return code if code >= 0 else 128 - code


def check_options(*, torchrun: bool, nodes: int | None, per_node: int | None, max_restarts: int) -> None:
    """Raises `InvalidField` for options of a gang where there is none."""
    for option, given in (("--nodes", nodes), ("--per-node", per_node), ("--max-restarts", max_restarts or None)):
        if given is not None and not torchrun:
            raise InvalidField("goes with --torchrun", field=option, given=given)


def run_gang(
    fleet: str,
    script: Path,
    arguments: Sequence[str],
    *,
    nodes: int | None,
    per_node: int | None,
    max_restarts: int,
) -> int:
    """Runs *script* as the ranks of a gang on *fleet* and streams what they print, each line with its rank.

    0, or the exit code of the rank that failed first, as `run_on_slot` gives it. Raises what `run_on_slot` raises.
    """
    if not script.is_file():
        raise InvalidField("there is no such file", field="SCRIPT", given=str(script))
    from skyinfra.client import GangWarning, connect
    from skyinfra.client.ranks import exit_code

    def show(rank: int, stream: str, line: str) -> None:
        target = sys.stderr if stream == "stderr" else sys.stdout
        target.write(f"{rank}: {line}\n")
        target.flush()

    with connect(fleet) as pool, said_of_options(), warnings.catch_warnings():
        warnings.simplefilter("always", GangWarning)
        warnings.showwarning = _show_warning
        try:
            pool.launch(script, *arguments, nodes=nodes, per_node=per_node, max_restarts=max_restarts, on_line=show)
        except GangFailed as error:
            sys.stderr.write(f"error: {error}\n")
            return exit_code(error)
    return 0


def _show_warning(message: Warning | str, *_: object, **__: object) -> None:
    sys.stderr.write(f"warning: {message}\n")
