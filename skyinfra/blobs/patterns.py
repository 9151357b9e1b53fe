"""Patterns for paths, as the lines of a .gitignore."""

from __future__ import annotations

import re
from collections.abc import Sequence
from functools import cache
from pathlib import PurePosixPath

# Of one line: matches paths, those of folders with / at their end; and whether the line takes back in.
Pattern = tuple[re.Pattern[str], bool]


def excluded(path: str, is_folder: bool, patterns: Sequence[Pattern]) -> bool | None:
    """Returns whether *path* itself is meant, folders above it left aside: the last pattern that is about it decides.

    None where none is about it.
    """
    named = f"{path}/" if is_folder else path
    return next((not again for pattern, again in reversed(patterns) if pattern.fullmatch(named)), None)


def meant(path: str, patterns: Sequence[Pattern]) -> bool:
    """Returns whether the file *path*, or a folder above it, is meant: the last pattern about one of them decides."""
    named = [path, *(f"{parent}/" for parent in PurePosixPath(path).parents)]
    return next((not again for pattern, again in reversed(patterns) if any(map(pattern.fullmatch, named))), False)


@cache
def read(lines: tuple[str, ...]) -> tuple[Pattern, ...]:
    """Returns the patterns of *lines*, without those that are empty or a comment."""
    return tuple(_pattern(line) for line in lines if line.strip() and not line.startswith("#"))


def _pattern(line: str) -> Pattern:
    text = line.removeprefix("!").strip()
    end = "(?<!/)/" if text.endswith("/") else "(?<!/)/?"
    text = text.rstrip("/")
    if "/" not in text:
        text = "**/" + re.sub(r"\*+", "*", text)
    return re.compile(_translated(text.removeprefix("/")) + end), line.startswith("!")


def _translated(text: str) -> str:
    """As a regular expression: ``*`` and ``?`` within a part of a path, ``**`` over several."""
    tokens = {"**/": "(?:.*/)?", "**": ".*", "*": "[^/]*", "?": "[^/]"}
    parts = re.split(r"(\*\*/|\*\*|\*|\?|\[[^\]/]+\])", text)
    return "".join(
        tokens.get(part)
        or ("(?!/)" + part.replace("[!", "[^", 1) if part.startswith("[") and part.endswith("]") else re.escape(part))
        for part in parts
    )
