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


def given(context: typer.Context) -> list[str]:
    """What stands behind ``--`` of the command of *context*."""
    found: list[str] = context.meta.get(_KEY, [])
    return found
