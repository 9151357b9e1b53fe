"""Arguments, options and command classes that several commands share."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import fields, is_dataclass
from difflib import get_close_matches
from importlib import import_module
from inspect import Parameter, Signature, signature
from types import SimpleNamespace
from typing import TYPE_CHECKING, Annotated, Any, get_type_hints

import typer
from typer.core import TyperCommand, TyperGroup

from skyinfra.errors import DeclarationError, InvalidField
from skyinfra.errors.peers import meant
from skyinfra.errors.streams import write_output
from skyinfra.terminal import help as helping
from skyinfra.terminal import screen

if TYPE_CHECKING:
    from skyinfra.protocol.secrets import Secret


def names_of(kind: str, given: str | None = None) -> Callable[[typer.Context], list[str]]:
    """Returns what completes names of that *kind* (see `terminal.names`) in a shell; *given*: of what that argument
    names."""

    def complete(ctx: typer.Context) -> list[str]:
        from skyinfra.terminal import names  # only for a shell that asks

        found: list[str] = getattr(names, kind)(*([ctx.params.get(given) or ""] if given else []))
        return found

    return complete


def _widen(wide: bool) -> bool:
    screen.widen(wide)
    return wide


# typer reads these annotations at run time.
Fleet = Annotated[str, typer.Argument(metavar="STACK/POOL", help="The fleet.", autocompletion=names_of("fleets"))]
StackName = Annotated[
    str | None,
    typer.Argument(
        metavar="STACK",
        help="Name of the stack; may be left out where there is one.",
        autocompletion=names_of("stacks"),
    ),
]
Fleets = Annotated[
    str | None, typer.Argument(metavar="[STACK[/POOL]]", help="By default all.", autocompletion=names_of("both"))
]
Since = Annotated[str | None, typer.Option(metavar="DAY", help="From a day of UTC on: 2026-11-20, or 7d for so many.")]
NodeName = Annotated[
    str | None, typer.Argument(metavar="NODE", help="Only this node.", autocompletion=names_of("nodes", "fleet"))
]
JobName = Annotated[
    str,
    typer.Argument(
        metavar="ID", help="The job's name, its id, or how that begins.", autocompletion=names_of("jobs", "fleet")
    ),
]
OnlyNode = Annotated[
    str | None,
    typer.Option("--node", metavar="NODE", help="Only this node.", autocompletion=names_of("nodes", "fleet")),
]
OnNode = Annotated[
    str | None,
    typer.Option("--node", metavar="NODE", help="On a slot of this node.", autocompletion=names_of("nodes", "fleet")),
]
OnProfile = Annotated[
    str | None,
    typer.Option(metavar="PROFILE", help="On a slot with this profile.", autocompletion=names_of("profiles", "fleet")),
]
Secrets = Annotated[
    list[str] | None,
    typer.Option(metavar="NAME[=@FILE]", help="A secret for it: from this shell, the keyring, or FILE."),
]
Yes = Annotated[bool, typer.Option("--auto-approve", "-y", "--yes", help="Go on without asking.")]
Lines = Annotated[int, typer.Option("--lines", "-n", min=1, help="How many of the last ones.")]
OfProviders = Annotated[list[str] | None, typer.Option(help="Only of this provider; may be repeated.")]
InRegion = Annotated[str | None, typer.Option(help="Only what is offered there.")]
Json = Annotated[bool, typer.Option("--json", help="Print JSON.")]
Wide = Annotated[
    bool, typer.Option("--wide", callback=_widen, help="Show every column in full, however narrow the terminal is.")
]

Notify = Annotated[
    list[str] | None,
    typer.Option(
        metavar="TARGET",
        help="Tell of its end: https://..., as Slack takes it; NAME[=@FILE], which has such an address; command:CMD.",
    ),
]


def seconds(option: str, given: str, *, bare: bool = False) -> float:
    """Returns the seconds of a time such as ``30m`` that was *given* with an *option*. *bare*: whether it may be a
    number, of seconds. Raises `InvalidField`."""
    from skyinfra.declared import seconds_of

    if bare and re.fullmatch(r"\d{1,6}(\.\d{1,3})?", given, re.ASCII):
        return float(given)
    try:
        return seconds_of(given)
    except ValueError as error:
        message, _, hint = str(error).partition("\n")
        raise InvalidField(message, field=option, given=given, hint=hint.partition(" (given")[0]) from None


OPTIONS = {
    "batch": "--batch",
    "context": "--context",
    "count": "--count",
    "dtype": "--dtype",
    "fraction": "--fraction",
    "gpu_memory_gb": "--gpu-memory-gb",
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
    "retries": "--retries",
    "slots": "--slots",
    "task": "--task",
    "timeout": "--timeout",
    "vcpus": "--vcpus",
}
_COMMAND = "skyinfra.command"
# Longer than any first sentence of a help.
_SENTENCE = 200


@contextmanager
def errors_name_options() -> Iterator[None]:
    """Replaces the argument in the field of a `DeclarationError` by the option of the command line."""
    try:
        yield
    except DeclarationError as error:
        error.field = OPTIONS.get(error.field or "", error.field)
        raise


def write(stream: str, text: str) -> None:
    """Writes what a program printed on ``stdout`` or ``stderr`` to ours, at once."""
    write_output(sys.stderr if stream == "stderr" else sys.stdout, text)


def can_be_asked(verb: str) -> None:
    """Ends the command where nobody is there who could approve of what it does."""
    if not sys.stdin.isatty():
        from skyinfra.terminal.tables import say  # which takes longer to import than the help takes

        say(("error:", "bold red"), f" nobody can be asked here; give --auto-approve to {verb}", to_stderr=True)
        raise typer.Exit(2)


def exit_code(code: int) -> int:
    """Returns the exit code as a shell gives it: 128 and the number of the signal where a signal ended the program."""
    return code if code >= 0 else 128 - code


def takes_records(function: Callable[..., None]) -> Callable[..., None]:
    """Makes a command whose parameters that are dataclasses are given as options, one for each field."""
    hints = get_type_hints(function, include_extras=True)
    given: dict[str, Any] = {name: kind for name, kind in hints.items() if is_dataclass(kind)}
    parameters = []
    for name, parameter in signature(function).parameters.items():
        if name not in given:
            parameters.append(parameter.replace(annotation=hints[name], kind=Parameter.KEYWORD_ONLY))
            continue
        options = get_type_hints(given[name], include_extras=True)
        for field in fields(given[name]):
            kind, default = options[field.name], field.default
            parameters.append(Parameter(field.name, Parameter.KEYWORD_ONLY, default=default, annotation=kind))

    def command(**values: Any) -> None:
        records = {
            name: kind(**{field.name: values.pop(field.name) for field in fields(kind)}) for name, kind in given.items()
        }
        function(**values, **records)

    command.__name__, command.__doc__, command.__module__ = function.__name__, function.__doc__, function.__module__
    command.__signature__ = Signature(parameters)  # type: ignore[attr-defined]
    command.__annotations__ = {each.name: each.annotation for each in parameters}
    return command


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


def _name_values(command: Any) -> None:
    """Names the values of options as manuals do. Newer typers name their types as Python does: ``<list[str]>``."""
    for each in command.params:
        kind = getattr(each, "type_descriptor", None)
        if kind is None or kind.is_choice:
            continue
        if each.param_type_name == "argument":
            each.display_type_rich = lambda ctx: None
        elif each.metavar is None:
            each.metavar = "PATH" if kind.is_path else {"int": "N", "float": "NUMBER"}.get(each.bare_type(), "TEXT")


class _Commands(Mapping[str, Any]):
    """The commands of a group, in the order of the help. The module of one is imported when it is asked for.

    group: its name; empty for the first one. made: those that are made already.
    """

    def __init__(self, group: str, made: Mapping[str, Any]) -> None:
        self._group = group
        self.made = dict(made)
        self._names = helping.ordered(group)

    def __getitem__(self, name: str) -> Any:
        if name not in self.made:
            path = self.path(name)
            module = import_module(f"skyinfra.cli.{helping.COMMANDS[path][0]}")
            self.made[name] = typer.main.get_group(module.app).commands[name]
            command = self.made[name]
            command.epilog, command.rich_markup_mode = helping.epilog(path), None
            _name_values(command)
            command.get_help = lambda context, plain=command.get_help: helping.dressed(plain(context))
        return self.made[name]

    def __contains__(self, name: object) -> bool:
        return name in self._names

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def __len__(self) -> int:
        return len(self._names)

    def path(self, name: str) -> str:
        """Returns the path of the command in the tables of the help."""
        return f"{self._group} {name}".strip()

    def sentence(self, name: str) -> str:
        """Returns what the command does, without importing its module."""
        if name in self.made:
            return str(self.made[name].get_short_help_str(_SENTENCE))
        return f"{helping.COMMANDS[self.path(name)][1]}."


class Commands(TyperGroup):
    """A group of commands whose help lists them by what they are for, and ends with examples of each."""

    commands: Any

    def __init__(self, **attrs: Any) -> None:
        super().__init__(**attrs)
        name = self.name if self.name in ("mig", "jobs", "open") else ""
        self.commands = _Commands(name or "", self.commands)

    def list_commands(self, ctx: Any) -> list[str]:
        """Returns the names of the commands, in the order of the help."""
        return list(self.commands)

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        """Returns the command; while a shell completes the name of one, what it lists."""
        if ctx.resilient_parsing and cmd_name in self.commands and cmd_name not in self.commands.made:
            sentence = self.commands.sentence(cmd_name)
            return SimpleNamespace(hidden=False, get_short_help_str=lambda: sentence)
        return super().get_command(ctx, cmd_name)

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        """Imports the command that is named; one of another tool leads to ours."""
        if args[0] in self.commands:
            self.commands[args[0]]
        elif ctx.parent is None and (said := meant(args[0], "skyinfra", None)):
            ctx.fail(f"No such command '{args[0]}'. {said}")
        return super().resolve_command(ctx, args)

    def get_help(self, ctx: Any) -> str:
        """Returns the help, or prints it where it has colours."""
        return helping.dressed(super().get_help(ctx))

    def format_commands(self, ctx: Any, formatter: Any) -> None:
        """Writes a section for each group of commands; the commands of a subgroup in one."""
        groups = helping.GROUPS if ctx.parent is None else {"Commands": tuple(self.commands)}
        width = max(map(len, self.commands))  # in every section
        for title, names in groups.items():
            with formatter.section(title):
                formatter.write_dl([(name.ljust(width), self.commands.sentence(name)) for name in names])


class ListByDefault(Commands):
    """A group whose command ``list`` may be left out: ``jobs STACK/POOL`` is ``jobs list STACK/POOL``."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Inserts the command where it was left out, before the name of a fleet or an option."""
        if args and args[0] not in self.commands and args[0] not in ("-h", "--help"):
            if near := get_close_matches(args[0], self.commands, n=2, cutoff=0.66):
                of_stack = f"Of a stack of that name: {ctx.command_path} list {args[0]}"
                ctx.fail(f"No such command '{args[0]}'. Did you mean {' or '.join(near)}? {of_stack}")
            args = ["list", *args]
        return super().parse_args(ctx, args)


def named_secret(text: str, option: str = "--secret") -> Secret:
    """Returns the secret of ``--secret``: ``NAME``, or ``NAME=@FILE``. Raises `InvalidField`."""
    from skyinfra.protocol.secrets import Secret

    name, given, file = text.partition("=")
    if given and not file.startswith("@"):
        raise InvalidField(
            "a value in a command line is seen in the process list and in the history of the shell",
            field=option,
            given=name,
            hint=f"Set the variable {name} and say {option} {name}, or {option} {name}=@FILE.",
        )
    return Secret(name, file[1:] if given else None)


def named_target(text: str) -> str | Secret:
    """Returns the target of ``--notify``: an address, ``command:CMD``, or ``NAME``, or ``NAME=@FILE``, that has one."""
    from skyinfra.client.jobs import is_target

    return text if is_target(text) else named_secret(text, "--notify")


def targets(notify: Sequence[str] | None, *, by_head: bool = False) -> list[str]:
    """Returns the addresses and commands of ``--notify``; none that the head cannot notify where it does so.

    Raises `InvalidField`, `SecretNotFound` and `NotSupported`.
    """
    if not notify:
        return []
    from skyinfra.client import jobs

    with errors_name_options():
        named = [named_target(text) for text in notify]
        return jobs.addresses(named) if by_head else jobs.targets(named)
