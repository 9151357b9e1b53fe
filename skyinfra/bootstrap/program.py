"""`skyinfra.first_boot` as it travels: the source of its modules, without what only people read."""

from __future__ import annotations

import ast
import io
import tokenize
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
    """*source* without docstrings, comments and empty lines. It does the same."""
    gone = {line for node in _docstrings(ast.parse(source)) for line in range(node.lineno, (node.end_lineno or 0) + 1)}
    tokens = list(tokenize.generate_tokens(io.StringIO(source).readline))
    comments = {token.start[0]: token.start[1] for token in tokens if token.type == tokenize.COMMENT}
    long = [token for token in tokens if token.end[0] > token.start[0]]
    # A string that goes on over several lines is left as it is.
    kept = {line for token in long for line in range(token.start[0], token.end[0] + 1)}
    found = []
    for number, text in enumerate(source.splitlines(), 1):
        line = text if number in kept else text[: comments.get(number)].rstrip()
        if number not in gone and (line or number in kept):
            found.append(f"{line}\n")
    return "".join(found)


def _docstrings(tree: ast.Module) -> Iterator[ast.Expr]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Module) or (isinstance(node, ast.ClassDef | ast.FunctionDef) and len(node.body) > 1):
            first = node.body[0] if node.body else None
            if isinstance(first, ast.Expr) and isinstance(first.value, ast.Constant):
                yield first
