"""The names that a cell of a notebook uses."""

from __future__ import annotations

import ast
import dis
import types
from collections.abc import Iterator, Sequence

from skyinfra import syntax

_READS = ("LOAD_NAME", "LOAD_GLOBAL", "LOAD_FROM_DICT_OR_GLOBALS", "DELETE_NAME", "DELETE_GLOBAL")
_WRITES = ("STORE_NAME", "STORE_GLOBAL")
# They run where they stand. Functions and generators may run later or never, and what a class body assigns is its own.
_COMPREHENSIONS = ("<listcomp>", "<setcomp>", "<dictcomp>")


def used(source: str, file: str = "<cell>") -> list[str]:
    """Returns the global names that *source* reads, in its functions too, but for those that it has assigned by then.

    Names of builtins are among them, and some that a branch has assigned. Raises SyntaxError.
    """
    tree = syntax.parsed(source, file)
    compile(tree, file, "exec", dont_inherit=True)
    found: dict[str, None] = {}
    _read(tree.body, set(), found)
    return list(found)


def _read(body: Sequence[ast.stmt], assigned: set[str], found: dict[str, None]) -> None:
    """Adds to *found* what the statements *body* read before it is in *assigned*, and to *assigned* what they assign
    whatever happens."""
    for statement in body:
        match statement:
            case ast.If():
                _read([ast.Expr(statement.test)], assigned, found)
                ways = [set(assigned), set(assigned)]
                _read(statement.body, ways[0], found)
                _read(statement.orelse, ways[1], found)
                assigned |= ways[0] & ways[1]
            case ast.While():
                _read([ast.Expr(statement.test)], assigned, found)
                _read(statement.body, set(assigned), found)
                _read(statement.orelse, set(assigned), found)
            case ast.For():
                _read([ast.Expr(statement.iter)], assigned, found)
                within = assigned | _stored(statement.target)
                _read(statement.body, within, found)
                _read(statement.orelse, set(assigned), found)
            case ast.With():
                for item in statement.items:
                    _read([ast.Expr(item.context_expr)], assigned, found)
                    assigned |= _stored(item.optional_vars)
                _read(statement.body, assigned, found)
            case ast.Try():
                _read(statement.body, within := set(assigned), found)
                for handler in statement.handlers:
                    _read([ast.Expr(handler.type)] if handler.type else [], set(assigned), found)
                    _read(handler.body, assigned | ({handler.name} if handler.name else set()), found)
                _read(statement.orelse, within, found)
                _read(statement.finalbody, assigned, found)
            case _:
                code = _compiled(statement)
                found.update(dict.fromkeys(name for name in _names(code, _READS) if name not in assigned))
                if not isinstance(statement, ast.Match | ast.TryStar):
                    assigned.update(_names(code, _WRITES))


def _stored(target: ast.expr | None) -> set[str]:
    nodes = ast.walk(target) if target is not None else ()
    return {node.id for node in nodes if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)}


def _compiled(statement: ast.stmt) -> types.CodeType:
    module = ast.fix_missing_locations(ast.Module([statement], []))
    code: types.CodeType = compile(module, "<cell>", "exec", dont_inherit=True)
    return code


def _names(code: types.CodeType, operations: Sequence[str]) -> Iterator[str]:
    """The names that such operations of *code* are about: reads in all code in it, writes in comprehensions alone."""
    for instruction in dis.get_instructions(code):
        if instruction.opname in operations:
            yield str(instruction.argval)
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType) and (operations is _READS or constant.co_name in _COMPREHENSIONS):
            yield from _names(constant, operations)
