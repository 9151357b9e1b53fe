"""Streams and consoles: their colours, and that nodes, tasks and clouds print nothing on them that a terminal obeys.

Imports nothing heavy.
"""

from __future__ import annotations

import os
import re
import stat
import sys
from array import array
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from functools import cache
from typing import TYPE_CHECKING, Any, TextIO, cast

from skyinfra.errors.printable import printable, program_output

if TYPE_CHECKING:
    from rich.console import Console, ConsoleOptions
    from rich.segment import Segment

# What may be the begin of a sequence that the next part of an output ends.
_BEGUN = re.compile(r"\x1b(\[[0-9;:]{0,64})?\Z")
_RESET = "\x1b[0m"
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


class Guarded:
    """A stream whose ``write`` makes all text `printable`.

    stream: the one behind it, to which rich writes sequences of its own: `console` cleans the words that rich is given.
    It has no ``buffer``, through which click would write past it.
    """

    def __init__(self, stream: TextIO) -> None:
        self.stream = stream
        self._rest = ""
        self._dressed = False

    def write(self, text: str) -> int:
        """Writes words of commands, of errors and of what they quote."""
        self.settle()
        self.stream.write(printable(text, None))
        return len(text)

    def writelines(self, lines: Iterable[str]) -> None:
        """Writes *lines* as `write` does."""
        for line in lines:
            self.write(line)

    def write_output(self, text: str) -> None:
        """Writes what a program printed: as it is where no terminal reads it, as `program_output` on a terminal."""
        if not self.stream.isatty():
            self.stream.write(text)
            return
        text = self._rest + text
        begun = _BEGUN.search(text)
        self._rest = begun[0] if begun else ""
        shown = program_output(text[: len(text) - len(self._rest)])
        self._dressed = self._dressed or "\x1b[" in shown
        self.stream.write(shown)

    def settle(self) -> None:
        """Ends the colours that a program has left."""
        if self._dressed:
            self.stream.write(_RESET)
        self._rest, self._dressed = "", False

    def __getattr__(self, name: str) -> Any:
        if name == "buffer":
            raise AttributeError(name)
        return getattr(self.stream, name)


@contextmanager
def guarded() -> Iterator[None]:
    """Guards the two streams of this program in the block; see `Guarded`."""
    before = sys.stdout, sys.stderr
    streams = [Guarded(stream) for stream in before]
    sys.stdout, sys.stderr = (cast(TextIO, stream) for stream in streams)
    try:
        yield
    finally:
        sys.stdout, sys.stderr = before
        for stream in streams:
            _written_out(stream)


def _written_out(stream: Guarded) -> None:
    """Writes what waits in *stream*; nothing more where its reader has gone, which Python would say when it ends."""
    with suppress(AttributeError, OSError, ValueError):  # there is none
        try:
            stream.settle()
            stream.flush()
        except BrokenPipeError:
            os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())


def write_output(stream: TextIO, text: str) -> None:
    """Writes what a program printed to *stream*, at once."""
    if isinstance(stream, Guarded):
        stream.write_output(text)
    else:
        stream.write(program_output(text) if stream.isatty() else text)
    stream.flush()


def own(stream: TextIO) -> TextIO:
    """Returns the stream behind a guarded one, for sequences that this program makes."""
    return stream.stream if isinstance(stream, Guarded) else stream


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
