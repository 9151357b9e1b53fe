"""Exceptions on their way from a node to the client: class, arguments, traceback and chain.

Each is pickled on its own, so that one that cannot be shipped does not spoil the others. Travels to nodes.
"""

from __future__ import annotations

import contextlib
import pickle
import traceback
import types
from dataclasses import dataclass
from functools import partial
from typing import Any

from skyinfra.errors import TaskTimeout
from skyinfra.protocol import pickles

# A traceback keeps its outermost and innermost frames; a runaway recursion would not survive pickling otherwise.
_OUTER_FRAMES, _INNER_FRAMES = 20, 60
# Characters of a summary.
_SUMMARY = 300


@dataclass(frozen=True)
class Failure:
    """An exception on its way: pickled where that is possible, and as text for where it is not.

    traceback: the pickled traceback, from the first frame of the task. cause, context: the exceptions before it.
    summary: class (with its module unless that is ``builtins``) and message in one line, for who does not unpickle
    what a task raised. shortage: a `Shortage` as JSON, where the memory of the device ran out; advice: what the client
    says about it.
    """

    error: bytes | None
    traceback: bytes | None
    text: str
    cause: Failure | None = None
    context: Failure | None = None
    suppress_context: bool = False
    summary: str = ""
    shortage: dict[str, Any] | None = None
    advice: str = ""


def late(name: str, seconds: float) -> TaskTimeout:
    """The error of a task that ran for too long."""
    return TaskTimeout(
        f"{name} ran for more than {seconds:g} s and was stopped",
        hint="Give it more time: @sky.compute(timeout=...), or task.options(timeout=...).",
    )


def of(
    error: BaseException, *, below: str, seen: set[int] | None = None, shortage: dict[str, Any] | None = None
) -> Failure:
    """*error* with the chain of exceptions before it. *below*: the file whose frames stand in front of the task's."""
    seen = seen if seen is not None else set()
    seen.add(id(error))
    frames = _trimmed(error.__traceback__, below)
    cause, context = error.__cause__, error.__context__
    text = "".join(traceback.format_exception(type(error), error, frames, chain=False))
    return Failure(
        error=_dump_error(error),
        # Tracebacks can be pickled because `distributed` registers how; only names and line numbers travel.
        traceback=None if frames is None else pickle.dumps(frames),
        text=text,
        cause=None if cause is None or id(cause) in seen else of(cause, below=below, seen=seen),
        context=None if context is None or id(context) in seen else of(context, below=below, seen=seen),
        suppress_context=error.__suppress_context__,
        summary=_summary(error),
        shortage=shortage,
    )


def _summary(error: BaseException) -> str:
    lines = traceback.TracebackException(type(error), error, None).format_exception_only()
    # Those of a SyntaxError begin with the place.
    return next((line for line in lines if not line.startswith(" ")), "").partition("\n")[0][:_SUMMARY]


def _trimmed(frames: types.TracebackType | None, below: str) -> types.TracebackType | None:
    """Without the frames of *below*, which stand in front of the task's own, and at most 80 frames."""
    kept: list[types.TracebackType] = []
    while frames is not None:
        if kept or frames.tb_frame.f_code.co_filename != below:
            kept.append(frames)
        frames = frames.tb_next
    if len(kept) > _OUTER_FRAMES + _INNER_FRAMES:
        kept = kept[:_OUTER_FRAMES] + kept[-_INNER_FRAMES:]
    chain = None
    for frame in reversed(kept):
        chain = types.TracebackType(chain, frame.tb_frame, frame.tb_lasti, frame.tb_lineno)
    return chain


def _dump_error(error: BaseException) -> bytes | None:
    """*error* pickled without its traceback and chain, or None where that is impossible."""
    bare = error.__traceback__, error.__cause__, error.__context__, error.__suppress_context__
    error.__traceback__ = error.__cause__ = error.__context__ = None
    try:
        rebuilt = _rebuild, (type(error), error.args, dict(error.__dict__))
        for reduced in (partial(error.__reduce_ex__, pickle.HIGHEST_PROTOCOL), lambda: rebuilt):
            with contextlib.suppress(Exception):
                data = pickles.dumps(_Reduced(reduced()))
                pickle.loads(data)  # noqa: S301 - many exceptions can be pickled and not be read again
                return data
        return None
    finally:
        error.__traceback__, error.__cause__, error.__context__, error.__suppress_context__ = bare


@dataclass(frozen=True)
class _Reduced:
    """Pickles as *form*, whatever Dask registers for the class of an exception: that loses SystemExit's code."""

    form: str | tuple[object, ...]

    def __reduce__(self) -> str | tuple[object, ...]:
        return self.form


def _rebuild(kind: type[BaseException], args: tuple[object, ...], state: dict[str, object]) -> BaseException:
    """Without ``__init__``, which may take other arguments than it hands to ``Exception``."""
    error = kind.__new__(kind, *args)
    error.args = args
    error.__dict__.update(state)
    return error
