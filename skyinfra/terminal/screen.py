"""The screen: whether tables may be wider than it, and the characters that its encoding has. Imports nothing heavy."""

from __future__ import annotations

import codecs
import io
from typing import TextIO

# Where the encoding lacks a character, one of ASCII takes its place, so that columns stay in line.
_INSTEAD = str.maketrans(
    {"…": "~", "±": "+-", "°": " ", "→": ">", "·": ".", "•": "*"}
    | dict.fromkeys("│┃║", "|")
    | dict.fromkeys("─━═╸╺╌", "-")
    | dict.fromkeys("┌┐└┘├┤┬┴┼╭╮╯╰╔╗╚╝", "+")
    | {chr(dots): "*" for dots in range(0x2800, 0x2900)}  # the spinner of a progress bar
)
_NAME = "skyinfra.instead"
_wide = False


def widen(wide: bool) -> None:
    """Sets whether tables may be wider than the terminal: with every column, and nothing cut."""
    global _wide
    _wide = wide


def is_wide() -> bool:
    """Returns whether tables may be wider than the terminal."""
    return _wide


def print_on(stream: TextIO) -> None:
    """Makes *stream* print something similar where its encoding lacks a character, instead of failing."""
    codecs.register_error(_NAME, _similar)
    if isinstance(stream, io.TextIOWrapper):
        stream.reconfigure(errors=_NAME)


def _similar(error: UnicodeError) -> tuple[str, int]:
    if not isinstance(error, UnicodeEncodeError):
        raise error
    text = error.object[error.start : error.end].translate(_INSTEAD)
    return "".join(each if each.isascii() else "?" for each in text), error.end


def cut(text: str, width: int) -> str:
    """Returns *text* in at most *width* characters; what is cut out was in its middle, as the ends tell ids apart."""
    if len(text) <= width:
        return text
    tail = (width - 1) // 2
    return f"{text[: width - 1 - tail]}…{text[len(text) - tail :] if tail else ''}"
