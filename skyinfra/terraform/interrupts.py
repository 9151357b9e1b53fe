"""Ctrl-C while a library of cdktf talks to its Node: no traceback of either. Imports nothing of ours."""

from __future__ import annotations

import sys
from types import TracebackType


def hush_node() -> None:
    """Leaves out that a pipe to a Node, which an interrupt of the terminal has ended as well, is broken at the end."""
    before = sys.unraisablehook

    def report(found: sys.UnraisableHookArgs, /) -> None:
        owner = type(getattr(found.object, "__self__", found.object))
        if not (isinstance(found.exc_value, OSError) and owner.__module__.startswith("jsii.")):
            before(found)

    sys.unraisablehook = report


def hush_program() -> None:
    """Ends this program, which cdktf or skyinfra runs to synthesize, without a traceback where it is interrupted."""
    hush_node()
    before = sys.excepthook

    def report(kind: type[BaseException], error: BaseException, traceback: TracebackType | None) -> None:
        if issubclass(kind, KeyboardInterrupt):
            sys.stderr.write("interrupted\n")
        else:
            before(kind, error, traceback)

    sys.excepthook = report
