"""The syntax tree of Python source."""

from __future__ import annotations

import ast

# More than threads of one process interrupt each other in a row.
_ATTEMPTS = 20


def parsed(source: str | bytes, file: str = "<unknown>") -> ast.Module:
    """Returns the syntax tree of *source*. Raises SyntaxError, ValueError.

    CPython 3.11 before 3.11.8 counts the depth of all trees that a process makes in one number: a parser that another
    thread or a finalizer runs in the middle of this one ends it with SystemError, and so it is tried again. Tracebacks
    that a thread prints are among them. Source: https://github.com/python/cpython/issues/106905.
    """
    for _ in range(_ATTEMPTS - 1):
        try:
            return ast.parse(source, file)
        except SystemError:
            continue
    return ast.parse(source, file)
