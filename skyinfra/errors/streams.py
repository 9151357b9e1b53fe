"""Streams on which nodes, tasks and clouds print nothing that a terminal obeys. Travels to nodes."""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from typing import Any, TextIO, cast

from skyinfra.errors.printable import printable, program_output

# What may be the begin of a sequence that the next part of an output ends.
_BEGUN = re.compile(r"\x1b(\[[0-9;:]{0,64})?\Z")
_RESET = "\x1b[0m"


class Guarded:
    """A stream whose ``write`` makes all text `printable`.

    stream: the one behind it, to which rich writes sequences of its own: `skyinfra.console` cleans its words.
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
