"""Commands that take another command, or a script and its arguments."""

from __future__ import annotations

from typing import Any

import typer
from typer.core import TyperCommand

_KEY = "skyinfra.command"


class WithCommand(TyperCommand):
    """A command that takes another one behind ``--``, whatever options that has; `given` gives it."""

    # Newer typers carry a click of their own, older ones use the package: their contexts are different classes.

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Leaves what stands behind ``--`` alone."""
        at = args.index("--") if "--" in args else len(args)
        ctx.meta[_KEY] = args[at + 1 :]
        return super().parse_args(ctx, args[:at])

    def collect_usage_pieces(self, ctx: Any) -> list[str]:
        """For the help."""
        return [*super().collect_usage_pieces(ctx), "[-- CMD...]"]


class OptionsAfterFleet(TyperCommand):
    """A command ``FLEET SCRIPT ARGS``: its own options stand before or behind the fleet, all else is the script's.

    A ``--`` behind the script is no argument of it.
    """

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Puts the options behind the fleet in front of it, where they end at the script."""
        if args and not args[0].startswith("-"):
            count = self._options(args[1:])
            args = [*args[1 : 1 + count], args[0], *args[1 + count :]]
        leading = self._options(args)
        behind = leading + 2
        if args[behind : behind + 1] == ["--"]:
            del args[behind]
        return super().parse_args(ctx, args)

    def _options(self, args: list[str]) -> int:
        """How many of *args* are options of this command, and their values, before anything else."""
        flags = {name: bool(getattr(each, "is_flag", False)) for each in self.params for name in each.opts}
        flags |= {"--help": True, "-h": True}
        count = 0
        while count < len(args) and (option := args[count].partition("=")[0]) in flags and option.startswith("-"):
            count += 1 if flags[option] or "=" in args[count] else 2
        return min(count, len(args))


def given(context: typer.Context) -> list[str]:
    """What stands behind ``--`` of the command of *context*."""
    found: list[str] = context.meta.get(_KEY, [])
    return found
