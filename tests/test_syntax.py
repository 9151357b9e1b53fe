"""The syntax tree of Python source, where other parsers run in the middle of it."""

from __future__ import annotations

import ast
import gc
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

import skyinfra
from skyinfra import syntax
from skyinfra.bootstrap import program
from skyinfra.notebook import names
from skyinfra.tasks import cells

LONG = "".join(f"def f{number}(a, b):\n    return [a, b, {number}]\n" for number in range(300))


@contextmanager
def interrupted() -> Iterator[None]:
    """Another parser runs at each of the next collections of garbage, of which each parse of LONG has some."""
    left = 12

    def collects(phase: str, info: dict[str, int]) -> None:
        nonlocal left
        if phase == "start" and left:
            left -= 1
            ast.parse("x = 1")

    gc.collect()
    gc.callbacks.append(collects)
    try:
        yield
    finally:
        gc.callbacks.remove(collects)
    assert left < 12


def test_another_parser_in_the_middle_of_it_changes_nothing() -> None:
    with interrupted():
        tree = syntax.parsed(LONG)
    assert len(tree.body) == 300


def test_what_nodes_carry_is_compiled_whoever_parses_besides() -> None:
    with interrupted():
        text = program.stripped(LONG)
    assert text.count("\n return") == 300


def test_a_cell_runs_whoever_parses_besides() -> None:
    with interrupted():
        used = names.used(LONG + "print(f1(x, 2))")
        ran = cells.cell(LONG + "f1(1, 2)", "<cell>", {}, [])
    assert used == ["print", "x"] and ran.shown["text/plain"] == "[1, 2, 1]"


@pytest.mark.parametrize("source", ["def f(:", b"\xff"], ids=["syntax", "encoding"])
def test_what_is_no_python_is_refused(source: str | bytes) -> None:
    with pytest.raises(SyntaxError):
        syntax.parsed(source)


def test_all_of_the_package_parses_here() -> None:
    places = [
        str(path.relative_to(skyinfra.__path__[0]))
        for path in sorted(Path(skyinfra.__path__[0]).rglob("*.py"))
        if re.search(r"\bast\.parse\(", path.read_text(encoding="utf-8"))
    ]
    assert places == ["syntax/__init__.py"]
