"""Consoles and their colours, on which nodes, tasks and clouds print nothing that a terminal obeys.

Imports nothing heavy.
"""

from __future__ import annotations

import os
import stat
import sys
from array import array
from collections.abc import Iterable
from functools import cache
from typing import TYPE_CHECKING, Any, TextIO, cast

from skyinfra.errors.printable import printable
from skyinfra.errors.streams import own

if TYPE_CHECKING:
    from rich.console import Console, ConsoleOptions
    from rich.segment import Segment

# The eight colours that every terminal has in its own shades. Of rich's bars, which have shades of their own.
_BARS = {
    "bar.back": "dim",
    "bar.complete": "cyan",
    "bar.finished": "green",
    "bar.pulse": "cyan",
    "progress.download": "none",
    "progress.elapsed": "none",
    "progress.spinner": "cyan",
}


def colours(stream: TextIO) -> str | None:
    """Returns the colours of *stream* as rich calls them, ``auto`` for those of its terminal; None: none, nor weight.

    The first that is set decides: NO_COLOR, FORCE_COLOR (0: none; 2, 3: more than 16), CLICOLOR_FORCE, CLICOLOR=0. Else
    terminals have colours, and files and pipes have none.
    """
    said = os.environ.get
    force, clicolor = said("FORCE_COLOR", "").lower(), said("CLICOLOR_FORCE", "")
    if said("NO_COLOR") or force in ("0", "false"):
        return None
    if force or clicolor not in ("", "0"):
        full = force == "3" or said("COLORTERM", "").lower() in ("truecolor", "24bit")
        return "truecolor" if full else "256" if force == "2" or said("TERM", "").endswith("256color") else "standard"
    return "auto" if stream.isatty() and said("CLICOLOR") != "0" else None


def is_one_terminal() -> bool:
    """Returns whether both streams are a terminal: there alone a bar on stderr may print what goes to stdout."""
    return sys.stdout.isatty() and sys.stderr.isatty()


def console(*, to_stderr: bool = False, **options: Any) -> Console:
    """Returns a console of rich whose words are `printable`, with the `colours` of its stream. options: those of rich.

    Where colours are forced into a pipe, it is no terminal for that: nothing moves there, and nothing is folded.
    """
    from rich.theme import Theme

    stream = sys.stderr if to_stderr else sys.stdout
    given = {
        "color_system": colours(stream), "force_terminal": stream.isatty(), "no_color": False, "theme": Theme(_BARS)
    }  # fmt: skip
    made: Console = _clean()(stderr=to_stderr, **{**given, **options})
    return made


def unread() -> bool:
    """Returns whether something waits in the standard input: in a pipe, or in a file of which nothing was read yet."""
    import fcntl
    import termios

    try:
        number = sys.stdin.fileno()
        found, waiting = os.fstat(number), array("i", [0])
        if stat.S_ISREG(found.st_mode):
            return found.st_size > 0 and os.lseek(number, 0, os.SEEK_CUR) == 0
        if stat.S_ISFIFO(found.st_mode):
            fcntl.ioctl(number, termios.FIONREAD, waiting)
        return waiting[0] > 0
    except (AttributeError, OSError, ValueError):  # there is none
        return False


@cache
def _clean() -> type[Console]:
    from rich.console import Console
    from rich.segment import Segment

    class Clean(Console):
        @property
        def file(self) -> Any:
            return own(cast(TextIO, cast(property, Console.file).__get__(self)))

        @file.setter
        def file(self, file: Any) -> None:
            cast(property, Console.file).__set__(self, file)

        def render(self, renderable: Any, options: ConsoleOptions | None = None) -> Iterable[Segment]:
            for part in super().render(renderable, options):
                if part.control:
                    yield part
                    continue
                # No link is ours: one in a markup that was not escaped leads elsewhere than it says.
                style = part.style.update_link(None) if part.style is not None and part.style.link else part.style
                yield Segment(printable(part.text, None), style)

    return Clean
