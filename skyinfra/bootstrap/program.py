"""`skyinfra.first_boot` as it travels: the source of its modules, without what only people read."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import skyinfra

_FOLDER = Path(skyinfra.__file__).with_name("first_boot")


@cache
def modules() -> tuple[tuple[str, str], ...]:
    """File name and source of each module, in order; the same text for the same code, whichever Python compiles."""
    return tuple((path.name, stripped(path.read_text(encoding="utf-8"))) for path in sorted(_FOLDER.glob("*.py")))


def stripped(source: str) -> str:
    """*source* without docstrings, empty lines and lines that are a comment. It does the same."""
    tree = ast.parse(source)
    gone = {line for node in _docstrings(tree) for line in range(node.lineno, (node.end_lineno or 0) + 1)}
    # A string that goes on over several lines is left as it is. (tokenize would find comments behind code as well, and
    # take ten times as long.)
    strings = [node for node in ast.walk(tree) if isinstance(node, ast.Constant | ast.JoinedStr)]
    kept = {line for node in strings for line in range(node.lineno + 1, (node.end_lineno or 0) + 1)}
    found = []
    for number, text in enumerate(source.splitlines(), 1):
        line = text.strip()
        if number not in gone and (number in kept or (line and not line.startswith("#"))):
            found.append(f"{text}\n")
    return "".join(found)


def _docstrings(tree: ast.Module) -> Iterator[ast.Expr]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Module) or (isinstance(node, ast.ClassDef | ast.FunctionDef) and len(node.body) > 1):
            first = node.body[0] if node.body else None
            if isinstance(first, ast.Expr) and isinstance(first.value, ast.Constant):
                yield first
