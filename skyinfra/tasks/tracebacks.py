"""Makes the tracebacks of nodes readable here."""

from __future__ import annotations

import ast
import linecache
import types
from pathlib import Path

from skyinfra.program import views


def readable(frames: types.TracebackType | None) -> types.TracebackType | None:
    """Returns the traceback *frames* of a node, with the lines of synced files, and counted right in notebooks."""
    if frames is None:
        return None
    name = frames.tb_frame.f_code.co_filename
    here = views.here(name)
    if here is not None and name not in linecache.cache:
        lines = linecache.getlines(str(here))
        linecache.cache[name] = (sum(map(len, lines)), None, lines, name)
    frames.tb_next = readable(frames.tb_next)
    return _counted(frames) if name in linecache.cache and not Path(name).exists() else frames


def _counted(frames: types.TracebackType) -> types.TracebackType:
    """The same first frame, of code that begins where its function does.

    IPython counts the lines of what is no file, such as a cell, from there; a pickled traceback has only its line.
    """
    frame, line = frames.tb_frame, frames.tb_lineno
    code = frame.f_code
    first = _first_line("".join(linecache.getlines(code.co_filename)), code.co_name, line)
    stub = compile("\n" * (line - first) + "raise LookupError", code.co_filename, "exec", dont_inherit=True)
    try:
        exec(stub.replace(co_firstlineno=first, co_name=code.co_name), dict(frame.f_globals), dict(frame.f_locals))  # noqa: S102
    except LookupError as error:
        made = error.__traceback__.tb_next if error.__traceback__ is not None else None
        if made is not None:
            made.tb_next = frames.tb_next
            return made
    return frames


def _first_line(source: str, name: str, line: int) -> int:
    """The line where the innermost function *name* around *line* begins; 1 for a module, *line* where there is none."""
    if name == "<module>":
        return 1
    try:
        tree = ast.parse(source)
    except SyntaxError:
        return line
    kinds = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)
    found = [node for node in ast.walk(tree) if isinstance(node, kinds) and node.name == name]
    firsts = [
        min([node.lineno, *(each.lineno for each in node.decorator_list)])
        for node in found
        if node.lineno <= line <= (node.end_lineno or line)
    ]
    return max(firsts, default=line)
