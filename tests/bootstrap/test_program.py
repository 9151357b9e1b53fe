"""What travels of the first boot's program does the same as its source."""

from __future__ import annotations

import ast

import pytest

from skyinfra.bootstrap import program

SOURCE = '''
"""Says what it is."""
# A comment.
def f(a: int, *b: "str", c: dict[str, int] | None = None, **d: object) -> list[str]:
    """Says what it does."""
    text = """of
        several  # lines
"""

    def g(x: int = 1) -> "int": return x  # behind code
    more: list[str] = []  # noqa: X1 - for checkers
    class D:
        field: int = 1
    return [text, str(a), g(2), *more]

class C:
    x: int = 3
    async_: str

    def long(
        self,
        first: int,
        second: str = "a: b -> c",
    ) -> tuple[
        int, str
    ]:
        return first, second
'''


class _Bare(ast.NodeTransformer):
    """Removes docstrings and annotations of functions."""

    def visit_FunctionDef(self, node: ast.FunctionDef) -> ast.AST:
        node.returns = None
        node.body = [_plain(each) for each in node.body]
        for each in ast.walk(node.args):
            if isinstance(each, ast.arg):
                each.annotation = None
        return self.generic_visit(node)

    def visit_Expr(self, node: ast.Expr) -> ast.AST | None:
        return None if isinstance(node.value, ast.Constant) and isinstance(node.value.value, str) else node


def _plain(node: ast.stmt) -> ast.stmt:
    if isinstance(node, ast.AnnAssign) and node.value is not None:
        return ast.copy_location(ast.Assign([node.target], node.value), node)
    if not isinstance(node, ast.ClassDef | ast.FunctionDef):
        for block in ("body", "orelse", "finalbody", "handlers"):
            if isinstance(found := getattr(node, block, None), list):
                setattr(node, block, [_plain(each) for each in found])
    return node


def bare(source: str) -> str:
    return ast.dump(_Bare().visit(ast.parse(source)))


@pytest.mark.parametrize("source", [SOURCE, *(path.read_text() for path in sorted(program._FOLDER.glob("*.py")))])
def test_it_does_the_same(source: str) -> None:
    assert bare(program.stripped(source)) == bare(source)


def test_it_is_shorter() -> None:
    text = program.stripped(SOURCE)
    assert "Says" not in text and "# A comment" not in text
    assert "def f(a, *b, c = None, **d):" in text
    assert '        several  # lines\n"""' in text
    assert "more = []\n" in text and "field: int = 1\n" in text
