"""Arguments, options and command classes that several commands share."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from enum import StrEnum
from typing import Annotated, Any, Literal, Optional

import typer
from typer.core import TyperCommand, TyperGroup

from skyinfra.errors import DeclarationError
from skyinfra.terminal import help as helping
from skyinfra.terminal import screen


class Shell(StrEnum):
    """A shell that completes commands."""

    bash = "bash"
    zsh = "zsh"
    fish = "fish"


# Completion of a shell. Each imports what it reads when it is asked.


def complete_stacks() -> list[str]:
    """Returns the names of the stacks."""
    from skyinfra.terminal import names

    return names.stacks()


def complete_fleets() -> list[str]:
    """Returns the fleets, ``STACK/POOL``."""
    from skyinfra.terminal import names

    return names.fleets()


def complete_accelerators() -> list[str]:
    """Returns the names of the accelerators."""
    from skyinfra.terminal import names

    return names.accelerators()


def of_fleet(kind: Literal["nodes", "profiles", "jobs"]) -> Callable[[typer.Context], list[str]]:
    """Returns what completes the names of that *kind* in the fleet that was given before."""

    def complete(ctx: typer.Context) -> list[str]:
        from skyinfra.terminal import names

        found: list[str] = getattr(names, kind)(ctx.params.get("fleet") or "")
        return found

    return complete


def complete_layout(ctx: typer.Context) -> list[str]:
    """Returns the profiles of the accelerator that was given before."""
    from skyinfra.terminal import names

    return names.layouts(ctx.params.get("accelerator") or "")


def _widen(wide: bool) -> bool:
    screen.widen(wide)
    return wide


# typer reads these annotations at run time.
Fleet = Annotated[str, typer.Argument(metavar="STACK/POOL", help="The fleet.", autocompletion=complete_fleets)]
StackName = Annotated[
    Optional[str],  # noqa: UP045
    typer.Argument(help="Name of the stack; may be left out where there is one.", autocompletion=complete_stacks),
]
NodeName = Annotated[
    Optional[str],  # noqa: UP045
    typer.Argument(metavar="NODE", help="Only this node.", autocompletion=of_fleet("nodes")),
]
JobName = Annotated[
    str,
    typer.Argument(metavar="ID", help="The job's name, its id, or how that begins.", autocompletion=of_fleet("jobs")),
]
Lines = Annotated[int, typer.Option("--lines", "-n", min=1, help="How many of the last ones.")]
OfProviders = Annotated[Optional[list[str]], typer.Option(help="Only of this provider; may be repeated.")]  # noqa: UP045
InRegion = Annotated[Optional[str], typer.Option(help="Only what is offered there.")]  # noqa: UP045
Json = Annotated[bool, typer.Option("--json", help="Print JSON.")]
Wide = Annotated[
    bool, typer.Option("--wide", callback=_widen, help="Show every column in full, however narrow the terminal is.")
]

Notify = Annotated[
    Optional[list[str]],  # noqa: UP045
    typer.Option(
        metavar="TARGET",
        help="Tell of its end: https://..., as Slack takes it; NAME[=@FILE], which has such an address; command:CMD.",
    ),
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
    "node": "--node",
    "nodes": "--nodes",
    "notify": "--notify",
    "params": "--params",
    "path": "PATH",
    "patterns": "--pattern",
    "per_node": "--per-node",
    "provider": "--provider",
    "ram_gib": "--ram",
    "region": "--region",
    "remote": "REMOTE",
    "slots": "--slots",
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
        if ctx.resilient_parsing:  # a shell completes the line, whose last option has no value yet
            return super().parse_args(ctx, args)
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


class Commands(TyperGroup):
    """A group of commands whose help lists them by what they are for, and ends with examples of each."""

    def list_commands(self, ctx: Any) -> list[str]:
        """Returns the names of the commands, in the order of the help."""
        return helping.ordered(self._path(ctx), list(self.commands))

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        """Returns the command, its help with examples."""
        found = super().get_command(ctx, cmd_name)
        if found is not None:
            found.epilog = helping.epilog(f"{self._path(ctx)} {cmd_name}".strip())
        return found

    def format_commands(self, ctx: Any, formatter: Any) -> None:
        """Writes a section for each group of commands; the commands of a subgroup in one."""
        names = [name for name in self.list_commands(ctx) if not self.commands[name].hidden]
        sections = [("Commands", names)] if self._path(ctx) else helping.grouped(names)
        width = max(map(len, names))  # in every section
        for title, group in sections:
            with formatter.section(title):
                helps = [self.commands[name].get_short_help_str(formatter.width - 4 - width) for name in group]
                formatter.write_dl([(name.ljust(width), text) for name, text in zip(group, helps, strict=True)])

    def _path(self, ctx: Any) -> str:
        """Returns the name of the group; empty for the first one."""
        return "" if ctx.parent is None else str(ctx.info_name)


class ListByDefault(Commands):
    """A group whose command ``list`` may be left out: ``jobs STACK/POOL`` is ``jobs list STACK/POOL``."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Inserts the command where it was left out."""
        if args and args[0] not in self.commands and args[0] not in ("-h", "--help"):
            args = ["list", *args]
        return super().parse_args(ctx, args)
