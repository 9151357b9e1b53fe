"""Makes the tracebacks of nodes here: with the files of this machine, and with lines that only the node has."""

from __future__ import annotations

import ast
import contextlib
import linecache
import pickle
import re
import types
from dataclasses import replace

from skyinfra.program import views
from skyinfra.protocol.failures import Failure, Frame

# Of files that this machine has not: the lines that came with tracebacks.
_lines: dict[str, list[str]] = {}
# More columns than a line has.
_WIDE = 10_000


def made(failure: Failure) -> types.TracebackType | None:
    """Returns the traceback of *failure*, as terminals, notebooks and debuggers show it; None where it has none."""
    if failure.traceback is not None:  # of an earlier version
        return pickle.loads(failure.traceback)  # type: ignore[no-any-return]  # noqa: S301
    chain = None
    with contextlib.suppress(ValueError, TypeError):  # masked, or of a later version
        for frame in reversed(Frame.read(failure.frames or b"[]")):
            chain = _made(_here(frame), chain)
    return chain


def text(failure: Failure) -> str:
    """Returns the text of *failure*, with the files of this machine."""
    return re.sub(r'(?<=File ")[^"\n]+(?=", line)', lambda found: str(views.here(found[0]) or found[0]), failure.text)


def _here(frame: Frame) -> Frame:
    """*frame* in the file of this machine. Where there is none, its lines are put where Python looks for them."""
    place = views.here(frame.file)
    file = frame.file if place is None else str(place)
    if frame.source and (file in _lines or not linecache.getlines(file)):
        lines = _lines.setdefault(file, [])
        lines += ["\n"] * (frame.line - 1 + len(frame.source) - len(lines))
        lines[frame.line - 1 : frame.line - 1 + len(frame.source)] = [f"{line}\n" for line in frame.source]
        linecache.cache[file] = (sum(map(len, lines)), None, lines, file)
    return replace(frame, file=file)


def _made(frame: Frame, after: types.TracebackType | None) -> types.TracebackType | None:
    """Returns a traceback of one frame, which stands before those of *after*.

    Its code begins where the function does: IPython counts the lines of what is no file, such as a cell, from there.
    """
    first = min(frame.first, frame.line)
    # Columns that are not known are those of the whole line, which nothing marks then.
    columns = (0, _WIDE) if frame.column is None or frame.end_column is None else (frame.column, frame.end_column)
    place = {
        "lineno": frame.line - first + 1,
        "end_lineno": max(frame.end or 0, frame.line) - first + 1,
        "col_offset": columns[0],
        "end_col_offset": columns[1],
    }
    raising = ast.Raise(ast.Name("LookupError", ast.Load(), **place), None, **place)
    code = compile(ast.Module([raising], []), frame.file, "exec", dont_inherit=True)
    code = code.replace(co_firstlineno=first, co_name=frame.name, co_qualname=frame.qualname)
    try:
        exec(code, {"__name__": frame.module, "__file__": frame.file})  # noqa: S102 - raises LookupError
    except LookupError as error:
        found = error.__traceback__.tb_next if error.__traceback__ is not None else None
        return found and types.TracebackType(after, found.tb_frame, found.tb_lasti, found.tb_lineno)
    return after
