"""`skyinfra.first_boot` as it travels: the source of its modules, without what only people and checkers read."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import skyinfra
from skyinfra import syntax
from skyinfra.providers.data import Delivery

# The start of a string of several lines.
_SEVERAL = re.compile(r"\"{3}|'{3}|\\$")
# Behind code: what only checkers read.
_MARK = re.compile(r"  # (noqa|type: ignore).*")
# What ruff indents by.
_INDENT = 4
_FOLDER = Path(skyinfra.__file__).with_name("first_boot")
# For those whom a node tells of its failure: they have the package.
_STAYS = "report_client.py"
# By module: the delivery of the runner that it is for.
_FOR = {"gce.py": "metadata", "slices.py": "metadata"}
# For what nodes mount, where they do.
_MOUNTED = {"mounts.py": "volumes", "buckets.py": "buckets"}


@cache
def modules(delivery: Delivery, *, mounted: frozenset[str] = frozenset()) -> tuple[tuple[str, str], ...]:
    """File name and source of each module, in order; the same text for the same code, whichever Python compiles.

    delivery: of the runner's wheel. mounted: what the nodes mount, "volumes" and "buckets".
    """
    files = [
        path
        for path in sorted(_FOLDER.glob("*.py"))
        if path.name != _STAYS
        and _FOR.get(path.name, delivery) == delivery
        and (path.name not in _MOUNTED or _MOUNTED[path.name] in mounted)
    ]
    return tuple((path.name, stripped(path.read_text(encoding="utf-8"))) for path in files)


def stripped(source: str) -> str:
    """*source* without docstrings, annotations in functions, empty lines and lines that are a comment, indented by 1.

    It does the same.
    """
    source = _without_annotations(source)
    tree = syntax.parsed(source)
    gone = {line for node in docstrings(tree) for line in range(node.lineno, (node.end_lineno or 0) + 1)}
    lines = list(enumerate(source.splitlines(), 1))
    # A string that goes on over several lines is left as it is. (tokenize would find comments behind code as well, and
    # take ten times as long; to walk the tree for nothing takes as long as all the rest.)
    several = any(_SEVERAL.search(text) for number, text in lines if number not in gone)
    strings = [node for node in ast.walk(tree) if isinstance(node, ast.Constant | ast.JoinedStr)] if several else []
    kept = {line for node in strings for line in range(node.lineno + 1, (node.end_lineno or 0) + 1)}
    found = []
    for number, text in lines:
        line = text.strip()
        if number in gone or (number not in kept and (not line or line.startswith("#"))):
            continue
        depth = (len(text) - len(text.lstrip(" "))) // _INDENT
        found.append(f"{text}\n" if number in kept else f"{' ' * depth}{_MARK.sub('', text.lstrip())}\n")
    return "".join(found)


def _without_annotations(source: str) -> str:
    lines = [line.encode() for line in source.splitlines(keepends=True)]
    found = _annotated(syntax.parsed(source))
    # From the end on, so that what is cut moves nothing that is still to be cut.
    for node in sorted(found, key=lambda each: (each.lineno, each.col_offset), reverse=True):
        row, end = node.lineno - 1, node.end_col_offset or 0
        if node.lineno == node.end_lineno:
            before = lines[row][: node.col_offset].rstrip()
            mark = b"->" if before.endswith(b"->") else b":"
            lines[row] = before.removesuffix(mark).rstrip() + lines[row][end:]
    return b"".join(lines).decode()


def _annotated(node: ast.AST, *, inside: bool = False) -> Iterator[ast.expr]:
    """Yields the annotations of all functions in *node*, and of what is assigned in them. inside: *node* is in one."""
    if inside and isinstance(node, ast.AnnAssign) and node.value is not None:
        yield node.annotation
    if isinstance(node, ast.ClassDef):
        inside = False  # these are fields
    if isinstance(node, ast.FunctionDef):
        inside = True
        every = node.args
        for each in (*every.posonlyargs, *every.args, every.vararg, *every.kwonlyargs, every.kwarg):
            if each is not None and each.annotation is not None:
                yield each.annotation
        if node.returns is not None:
            yield node.returns
    for block in ("body", "orelse", "finalbody", "handlers"):
        for inner in _statements(node, block):
            yield from _annotated(inner, inside=inside)


def docstrings(node: ast.AST) -> Iterator[ast.Expr]:
    """Yields the docstrings of *node* and of all classes and functions in it that have something else."""
    body = getattr(node, "body", ())
    if isinstance(node, ast.Module) or (isinstance(node, ast.ClassDef | ast.FunctionDef) and len(body) > 1):
        first = body[0] if body else None
        if isinstance(first, ast.Expr) and isinstance(first.value, ast.Constant):
            yield first
    for block in ("body", "orelse", "finalbody", "handlers"):
        for each in _statements(node, block):
            yield from docstrings(each)


def _statements(node: ast.AST, block: str) -> list[ast.AST]:
    found = getattr(node, block, ())
    return [each for each in found if isinstance(each, ast.stmt | ast.excepthandler)] if isinstance(found, list) else []
