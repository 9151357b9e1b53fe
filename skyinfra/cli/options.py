"""Arguments, options and command classes that several commands share."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from typing import Annotated, Any, Optional

import typer
from typer.core import TyperCommand, TyperGroup

from skyinfra.errors import DeclarationError
from skyinfra.terminal import screen


def _widen(wide: bool) -> bool:
    screen.widen(wide)
    return wide


# typer reads these annotations at run time.
Fleet = Annotated[str, typer.Argument(metavar="STACK/POOL", help="The fleet.")]
StackName = Annotated[Optional[str], typer.Argument(help="Name of the stack; may be left out where there is one.")]  # noqa: UP045
NodeName = Annotated[Optional[str], typer.Argument(metavar="NODE", help="Only this node.")]  # noqa: UP045
Lines = Annotated[int, typer.Option("--lines", "-n", min=1, help="How many of the last ones.")]
OfProviders = Annotated[Optional[list[str]], typer.Option(help="Only of this provider; may be repeated.")]  # noqa: UP045
InRegion = Annotated[Optional[str], typer.Option(help="Only what is offered there.")]  # noqa: UP045
Json = Annotated[bool, typer.Option("--json", help="Print JSON.")]
Wide = Annotated[
    bool, typer.Option("--wide", callback=_widen, help="Show every column in full, however narrow the terminal is.")
]

OPTIONS = {
    "batch": "--batch",
    "context": "--context",
    "count": "--count",
    "dtype": "--dtype",
    "fraction": "--fraction",
    "hidden": "--hidden",
    "kv_heads": "--kv-heads",
    "layers": "--layers",
    "max_nodes": "--max-nodes",
    "max_price": "--max-price",
    "max_restarts": "--max-restarts",
    "memory_gb": "--memory",
    "model": "MODEL",
    "nodes": "--nodes",
    "params": "--params",
    "per_node": "--per-node",
    "provider": "--provider",
    "ram_gib": "--ram",
    "region": "--region",
    "task": "--task",
    "vcpus": "--vcpus",
}
_COMMAND = "skyinfra.command"


@contextmanager
def errors_name_options() -> Iterator[None]:
    """Replaces the argument in the field of a `DeclarationError` by the option of the command line."""
    try:
        yield
    except DeclarationError as error:
        error.field = OPTIONS.get(error.field or "", error.field)
        raise


def exit_code(code: int) -> int:
    """Returns the exit code as a shell gives it: 128 and the number of the signal where a signal ended the program."""
    return code if code >= 0 else 128 - code


# Newer typers carry a click of their own, older ones use the package: their contexts are different classes.


class CommandWithCommand(TyperCommand):
    """A command that takes another command behind ``--``; `command_of` returns that one."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Leaves the words behind ``--`` alone."""
        at = args.index("--") if "--" in args else len(args)
        ctx.meta[_COMMAND] = args[at + 1 :]
        return super().parse_args(ctx, args[:at])

    def collect_usage_pieces(self, ctx: Any) -> list[str]:
        """Returns the parts of the usage line of the help."""
        return [*super().collect_usage_pieces(ctx), "[-- CMD...]"]


def command_of(context: typer.Context) -> list[str]:
    """Returns the words behind ``--``."""
    found: list[str] = context.meta.get(_COMMAND, [])
    return found


class ScriptCommand(TyperCommand):
    """A command ``FLEET [OPTIONS] SCRIPT ARGUMENTS``: all words behind the script are arguments of the script."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Puts the options in front of the fleet, where the parser takes them."""
        valued = {name for option in self.params for name in option.opts if not getattr(option, "is_flag", True)}
        return super().parse_args(ctx, options_first(args, valued))


def options_first(args: Sequence[str], valued: Collection[str]) -> list[str]:
    """Puts all options up to the second other word in front. *valued*: the options that take the next word."""
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


class ListByDefault(TyperGroup):
    """A group whose command ``list`` may be left out: ``jobs STACK/POOL`` is ``jobs list STACK/POOL``."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Inserts the command where it was left out."""
        if args and args[0] not in self.commands and args[0] not in ("-h", "--help"):
            args = ["list", *args]
        return super().parse_args(ctx, args)
