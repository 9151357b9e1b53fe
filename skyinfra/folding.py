"""Folds lines where they are wider than the terminal: between words, in cells also within long names."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from typing import TYPE_CHECKING

from rich.cells import cell_len
from rich.text import Text

from skyinfra.errors.printable import printable

if TYPE_CHECKING:
    from rich.console import Console

# A command is one word: it is copied as it stands.
_WORD = re.compile(r"`[^`\n]+`\S*|\S+")
# Cells are narrow. Names in them, such as those of layouts, are folded behind what joins their parts.
_JOINT = r"[|,]|\+(?!me)|/(?=\S{4})"
_PART = re.compile(rf"(?:(?!{_JOINT})\S)+(?:{_JOINT})*|(?:{_JOINT})+")
# Where a name that is wider than its column is folded besides.
_SEAM = re.compile(r"[^\s_.-]+[_.-]*|[_.-]+")
# Lines that begin so are code, or name a file of a traceback.
_CODE = ("    ", '  File "')


def say(out: Console, text: Text) -> None:
    """Prints *text* on *out*: its `sentences` where that is a terminal. Elsewhere its lines stay as they are."""
    if out.is_terminal:
        text.expand_tabs(8)
    for line in sentences(text, out.width if out.is_terminal else sys.maxsize):
        if "\t" in line.plain and not out.is_terminal:
            # Rich would print spaces.
            out.file.write(printable(line.plain, None) + "\n")
        else:
            out.print(line, soft_wrap=True)


def sentences(text: Text, width: int) -> Iterator[Text]:
    """Yields the lines of *text*; one that is wider goes on below its first word. Longer words and code stay whole."""
    for line in text.split("\n", allow_blank=True):
        yield from [line] if line.plain.startswith(_CODE) else _folded(line, width, _WORD)


def cell(text: Text, width: int) -> Text:
    """Returns *text* with the new lines that make it at most *width* wide, unless a part of a name is longer."""
    lines = [part for line in text.split("\n", allow_blank=True) for part in _folded(line, width, _PART)]
    return Text("\n").join(piece for line in lines for piece in _folded(line, width, _SEAM))


def least(text: Text) -> int:
    """Returns the width below which a part of a name in *text* is folded within."""
    return max((cell_len(part[0]) for part in _PART.finditer(text.plain)), default=0)


def _folded(line: Text, width: int, words: re.Pattern[str]) -> Iterator[Text]:
    plain = line.plain
    if cell_len(plain) <= width:
        yield line
        return
    margin = len(plain) - len(plain.lstrip())
    start = end = margin
    for word in words.finditer(plain):
        if end > start and margin + cell_len(plain[start : word.end()]) > width:
            yield Text(plain[:margin]) + line[start:end]
            start = word.start()
        end = word.end()
    yield Text(plain[:margin]) + line[start:end]
