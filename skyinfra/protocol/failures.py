"""Exceptions on their way from a node to the client: class, arguments, frames, and the exceptions before and in them.

Each is pickled on its own, so that one that cannot be shipped does not spoil the others. Travels to nodes.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import linecache
import os
import textwrap
import traceback
import types
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from skyinfra.errors import SkyinfraError, TaskTimeout
from skyinfra.protocol.pickles import dumped, said

# Outcomes of earlier versions name it so.
from skyinfra.protocol.pickles import rebuild as _rebuild  # noqa: F401

# Of the exceptions of one failure, the nearest and the earliest ones travel.
_NEAREST, _EARLIEST = 80, 20
# So many exceptions are looked at.
_MOST_SEEN = 100_000
# A traceback keeps its outermost and innermost frames; a runaway recursion would not survive pickling otherwise.
_OUTER_FRAMES, _INNER_FRAMES = 20, 60
# Characters of a summary, of the text of one exception, and of a line of source; lines of one frame.
_SUMMARY, _TEXT, _LINE, _LINES = 300, 32_768, 300, 4
# An error of ours that passed no other files tells all in its text.
_OURS = (f"{Path(__file__).parents[1]}{os.sep}", contextlib.__file__)
# Exceptions that take more bytes together are left out of `Failure.brief`.
_SMALL = 65_536


@dataclass(frozen=True)
class Failure:
    """An exception on its way: pickled where that is possible, and as text for where it is not.

    error: unpickles to the exception, or for a group to a function that makes it of its members. cause, context,
    members: the exceptions before it, and in it. frames: of its traceback, from the first one of the task, as JSON; see
    `Frame`. traceback: the pickled traceback, of earlier versions. left_out: how many exceptions were too many to
    travel. summary: class (with its module unless that is ``builtins``) and message in one line, for who does not
    unpickle what a task raised. shortage: a `Shortage` as JSON, where the memory of the device ran out; advice: what
    the client says about it.
    """

    error: bytes | None
    text: str
    traceback: bytes | None = None
    cause: Failure | None = None
    context: Failure | None = None
    suppress_context: bool = False
    summary: str = ""
    shortage: dict[str, Any] | None = None
    advice: str = ""
    frames: bytes | None = None
    members: tuple[Failure, ...] = ()
    left_out: int = 0

    @property
    def size(self) -> int:
        """How many bytes the pickled exceptions have together."""
        parts = [each for each in (self.cause, self.context, *self.members) if each is not None]
        return len(self.error or b"") + sum(each.size for each in parts)

    def brief(self) -> Failure:
        """Returns the failure without the exceptions that are large, which are texts then."""
        return replace(
            self,
            error=self.error if len(self.error or b"") <= _SMALL else None,
            cause=self.cause and self.cause.brief(),
            context=self.context and self.context.brief(),
            members=tuple(each.brief() for each in self.members),
        )


@dataclass(frozen=True)
class Frame:
    """A frame of a traceback. first: the first line of its function. source: the lines from *line* on, as far as the
    node has them. end, column, end_column: of the expression, where they are known."""

    file: str
    name: str
    qualname: str
    module: str
    first: int
    line: int
    end: int | None
    column: int | None
    end_column: int | None
    source: list[str]

    @classmethod
    def read(cls, frames: bytes) -> list[Frame]:
        """Returns the frames in `Failure.frames`, the outermost first. Raises ValueError, TypeError."""
        rows: list[list[Any]] = json.loads(frames)
        return [cls(*row) for row in rows]


def late(name: str, seconds: float) -> TaskTimeout:
    """Returns the error of a task that ran for too long."""
    return TaskTimeout(
        f"{name} ran for more than {seconds:g} s and was stopped",
        hint="Give it more time: @sky.compute(timeout=...), or task.options(timeout=...), skyinfra run --timeout.",
    )


def of(error: BaseException, *, below: str, shortage: dict[str, Any] | None = None) -> Failure:
    """*error* with the exceptions before it and in it. *below*: the file whose frames stand in front of the task's."""
    links = _links(error)
    made: dict[int, Failure] = {}
    kept = links if len(links) <= _NEAREST + _EARLIEST else links[:_NEAREST] + links[-_EARLIEST:]
    for link in reversed(kept):
        try:
            made[id(link)] = _failure(link, below, made)
        except Exception as reason:  # noqa: BLE001 - it is made of code of the user
            name = type(link.error).__qualname__
            made[id(link)] = Failure(None, f"{name}, which raises {type(reason).__name__} when described", summary=name)
    return replace(made[id(links[0])], shortage=shortage, left_out=len(links) - len(kept))


# The exceptions of a failure ----------------------------------------------------------------------------------------


@dataclass(eq=False)
class _Link:
    """An exception, and those that are reached through it first."""

    error: BaseException
    cause: _Link | None = None
    context: _Link | None = None
    members: list[_Link] = field(default_factory=list)


def _links(error: BaseException) -> list[_Link]:
    """*error* and those before it and in it, each once, the nearest first."""
    links = [_Link(error)]
    seen = {id(error)}

    def new(found: BaseException | None) -> _Link | None:
        if found is None or id(found) in seen or len(links) >= _MOST_SEEN:
            return None
        seen.add(id(found))
        links.append(_Link(found))
        return links[-1]

    for link in links:
        link.cause, link.context = new(link.error.__cause__), new(link.error.__context__)
        if isinstance(link.error, BaseExceptionGroup):
            link.members = [each for each in map(new, link.error.exceptions) if each is not None]
    return links


def _kept(link: _Link | None, made: Mapping[int, Failure]) -> Failure | None:
    """Returns the failure of *link*, or else of the nearest before it that was *made*."""
    while link is not None and id(link) not in made:
        link = link.cause or link.context
    return None if link is None else made[id(link)]


def _failure(link: _Link, below: str, made: Mapping[int, Failure]) -> Failure:
    error, suppressed = link.error, link.error.__suppress_context__
    frames = _trimmed(error.__traceback__, below)
    if isinstance(error, SkyinfraError) and all(each.tb_frame.f_code.co_filename.startswith(_OURS) for each in frames):
        frames = []
    text = said(error)
    members = tuple(made[id(each)] for each in link.members if id(each) in made)
    with _alone(error):
        shown = error if isinstance(error, SyntaxError) else _Said(text, error)
        described = traceback.TracebackException(type(error), shown, _chained(frames))
        # Those of a SyntaxError begin with the place.
        lines = [line for line in described.format_exception_only() if not line.startswith(" ")]
        return Failure(
            error=dumped(error, text),
            text=_cut("".join([*described.format(chain=False), *_boxed(members)])),
            cause=_kept(link.cause, made),
            context=_kept(link.context, made),
            suppress_context=suppressed,
            summary="".join(lines).partition("\n")[0][:_SUMMARY],
            frames=_rows(frames),
            members=members,
        )


@contextlib.contextmanager
def _alone(error: BaseException) -> Iterator[None]:
    """In the body *error* has neither traceback nor chain. Its class may refuse to set attributes."""
    bare = {
        name: getattr(error, name) for name in ("__traceback__", "__cause__", "__context__", "__suppress_context__")
    }
    for name in list(bare)[:-1]:
        BaseException.__setattr__(error, name, None)
    try:
        yield
    finally:
        for name, value in bare.items():
            BaseException.__setattr__(error, name, value)


# Texts --------------------------------------------------------------------------------------------------------------


class _Said(Exception):
    """Stands for an exception whose text is known: formatting it calls nothing of the user, and follows no chain."""

    def __init__(self, text: str | None, error: BaseException) -> None:
        super().__init__("<exception str() failed>" if text is None else _cut(text))
        notes = getattr(error, "__notes__", None)
        self.__notes__ = [_cut(str(note)) for note in notes] if isinstance(notes, list | tuple) else []


def _cut(text: str) -> str:
    """*text* without the middle of what is too much."""
    if len(text) <= _TEXT:
        return text
    half = _TEXT // 2
    return f"{text[:half]}\n[{len(text) - 2 * half} characters are left out here]\n{text[-half:]}"


def _boxed(members: Sequence[Failure]) -> Iterator[str]:
    for number, member in enumerate(members, 1):
        yield textwrap.indent(f"---------------- {number} ----------------\n{member.text}", "  | ")


# Frames -------------------------------------------------------------------------------------------------------------


def _trimmed(frames: types.TracebackType | None, below: str) -> list[types.TracebackType]:
    """Without the frames of *below*, which stand in front of the task's own, and at most 80 frames."""
    kept: list[types.TracebackType] = []
    while frames is not None:
        if kept or frames.tb_frame.f_code.co_filename != below:
            kept.append(frames)
        frames = frames.tb_next
    return kept if len(kept) <= _OUTER_FRAMES + _INNER_FRAMES else kept[:_OUTER_FRAMES] + kept[-_INNER_FRAMES:]


def _chained(frames: Sequence[types.TracebackType]) -> types.TracebackType | None:
    chain = None
    for each in reversed(frames):
        chain = types.TracebackType(chain, each.tb_frame, each.tb_lasti, each.tb_lineno)
    return chain


def _rows(frames: Sequence[types.TracebackType]) -> bytes | None:
    """*frames* as JSON; see `Frame.read`."""
    return json.dumps([_row(each) for each in frames]).encode() if frames else None


def _row(found: types.TracebackType) -> list[object]:
    code, line, space = found.tb_frame.f_code, found.tb_lineno or 1, found.tb_frame.f_globals
    position: tuple[int | None, ...] = (None, None, None, None)
    if found.tb_lasti >= 0:
        position = next(itertools.islice(code.co_positions(), found.tb_lasti // 2, None), position)
    start, end, *columns = position
    if start != line:  # of another statement
        end, columns = None, [None, None]
    last = min(max(line, end or line), line + _LINES - 1)
    source = [linecache.getline(code.co_filename, each, space).rstrip("\n")[:_LINE] for each in range(line, last + 1)]
    module = space.get("__name__")
    names = [code.co_filename, code.co_name, code.co_qualname, module if isinstance(module, str) else ""]
    return [*names, code.co_firstlineno, line, end, *columns, source if any(source) else []]
