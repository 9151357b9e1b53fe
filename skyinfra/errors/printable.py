"""Text of nodes, tasks, manifests and clouds as a terminal, a page or a notebook may show it.

A terminal obeys control sequences: they move the cursor, change the title, the clipboard or the answers to questions.
Bidirectional controls and invisible characters make a text read as another one. All of them become their names, such
as ``\\x1b``: CVE-2021-25743 (kubectl), CVE-2024-52005 (git) and https://trojansource.codes were of this kind.
"""

from __future__ import annotations

import re

# Of a line of a message. Output of programs and JSON are never cut.
LONGEST = 4000
_HIDDEN = (
    "[\x00-\x08\x0b-\x1f\x7f-\x9f\xad\u061c\u180e\u200b\u200e\u200f\u2028-\u202e\u2060-\u206f\ufeff\ufff9-\ufffb"
    "\U000e0000-\U000e007f\ud800-\udfff]"
)
# Colours, the rest of a line erased, and the two characters by which bars of progress go back in their own line.
_COLOUR = "\x1b\\[[0-9;:]{0,64}m"
_CONTROL = re.compile(_HIDDEN)
_OUTPUT = re.compile(f"({_COLOUR}|\x1b\\[[012]?K|[\r\b])|{_HIDDEN}")
_PAINTED = re.compile(f"({_COLOUR})|{_HIDDEN}")
_DRESS = re.compile(f"{_COLOUR}|\x1b\\[[012]?K")


def printable(text: str, longest: int | None = LONGEST) -> str:
    """Returns *text* with the names of control characters in place of them, but for newlines and tabs.

    longest: of a line, whose rest is counted; None cuts nothing.
    """
    if not text.isprintable():
        text = _CONTROL.sub(_named, text.replace("\r\n", "\n"))
    if longest is None or len(text) <= longest:
        return text
    return "\n".join(_cut(line, longest) for line in text.split("\n"))


def program_output(text: str) -> str:
    """Returns what a program printed as a terminal may show it: `printable`, with its colours and progress bars."""
    return text if text.isprintable() else _OUTPUT.sub(lambda found: found[1] or _named(found), text)


def coloured(text: str) -> str:
    """Returns *text* `printable`, with its colours, in lines of any length."""
    return _PAINTED.sub(lambda found: found[1] or _named(found), text)


def undressed(text: str) -> str:
    """Returns what a program printed without colours, for a place that shows none; each state of a bar is a line."""
    return printable(_DRESS.sub("", text).replace("\r\n", "\n").replace("\r", "\n"))


def printable_tree(value: object) -> object:
    """Returns a tree of JSON values whose texts are `printable`."""
    if isinstance(value, str):
        return printable(value)
    if isinstance(value, dict):
        return {key: printable_tree(each) for key, each in value.items()}
    return [printable_tree(each) for each in value] if isinstance(value, list | tuple) else value


def _named(found: re.Match[str]) -> str:
    return found[0].encode("unicode_escape").decode()


def _cut(line: str, longest: int) -> str:
    left = len(line) - longest
    return line if left <= 0 else f"{line[:longest]}… ({left:,} more characters)"
