"""Large values in the calls of tasks: each is a part of its own, which is sent once, and noted where it is again."""

from __future__ import annotations

import warnings
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from typing import Any, TypeVar

from skyinfra.blobs.payload import Apart, Member, Payload
from skyinfra.blobs.store import in_words
from skyinfra.program import main as program
from skyinfra.tasks.task import Task

K = TypeVar("K")

# Of a call, from which on it is looked at.
LARGE = 10 * 2**20
# Of a value of it that is a part of its own then.
_VALUE = 2**20
# Of the parts that are remembered.
_KEPT = 1000

_INSTEAD = "An object of @sky.cls keeps it on its slot; pool.put() brings files to nodes."

# By the digest of a large part: that of a call that had it; None where its second call was said.
_calls: dict[str, str | None] = {}

# The functions whose calls were large.
_known: weakref.WeakSet[Any] = weakref.WeakSet()

Pack = Callable[[object], Payload]


def packed(task: Task[Any], values: dict[str, object], pack: Pack) -> Payload:
    """Returns the call of *task*, with *values* of global variables, packed; large ones as parts of their own.

    Calls whose stream is large for what they have in common, such as the global variables of a function, share it then.
    """
    if not _is_known(task.function):
        found = pack(call(task.function, task.args, task.kwargs, values))
        if sum(map(len, found.pieces)) < LARGE:
            return found
        with suppress(TypeError):  # such an object is looked at each time
            _known.add(task.function)
    function = _apart({"": task.function}, pack)[""]
    given = _apart({**dict(enumerate(task.args)), **task.kwargs}, pack)
    args = tuple(given[index] for index in range(len(task.args)))
    return pack(call(function, args, {name: given[name] for name in task.kwargs}, _apart(values, pack)))


def call(
    function: object, args: tuple[object, ...], kwargs: Mapping[str, object], values: Mapping[str, object]
) -> tuple[object, ...]:
    """Returns the call of *function* as a node gets it: its global variables have *values* then."""
    if values:
        return program.with_values, (dict(values), function, *args), dict(kwargs)
    return function, args, dict(kwargs)


def _is_known(function: object) -> bool:
    with suppress(TypeError):
        return function in _known
    return False


def _apart(values: Mapping[K, object], pack: Pack) -> dict[K, object]:
    """Returns *values*, of which the large ones are a part: one for all, as what they share is one object there too."""
    found = {name: pack(each) for name, each in dict(values).items()}
    large = {name: each for name, each in found.items() if not each.buffers and each.size >= _VALUE}
    if len(large) < 2:
        return {**values, **{name: Apart(each.joined()) for name, each in large.items()}}
    together = Apart(pack({name: values[name] for name in large}).joined())
    return {**values, **{name: Member(together, name) for name in large}}


def notice(name: str, packed: Payload, values: Iterable[tuple[str, object]], pack: Pack) -> None:
    """Warns, once, where a large part of the call of the task *name* is one of another call too.

    values: those of the call, with their names.
    """
    if packed.size < LARGE:
        return
    stream, *parts = packed.parts
    for part in parts:
        if part.size < LARGE:
            continue
        first = _calls.setdefault(part.digest, stream.digest)
        if len(_calls) > _KEPT:
            del _calls[next(iter(_calls))]
        if first is None or first == stream.digest:
            continue
        _calls[part.digest] = None
        what = f"{_largest(values, pack, name)}, {in_words(part.size)}, is in more than one call of {name}"
        warnings.warn(f"{what}: it is sent once, but each task reads it anew. {_INSTEAD}", stacklevel=2)


def notice_whole(name: str, packed: Payload, values: Iterable[tuple[str, object]], pack: Pack) -> None:
    """As `notice`, for a call that travels in one piece."""
    if packed.size < LARGE:
        return
    found = next(_large(values, pack), None)
    if found is None:
        return
    label, part = found
    digest = "".join(each.digest for each in part.parts)
    first = digest not in _calls
    said = _calls.setdefault(digest, "") is None
    if len(_calls) > _KEPT:
        del _calls[next(iter(_calls))]
    if first or said:
        return
    _calls[digest] = None
    what = f"{label}, {in_words(part.size)}, is in more than one call of {name}"
    how = "each job, and each task of several slots, takes all of it along, and is sent whole"
    warnings.warn(f"{what}: {how}. {_INSTEAD}", stacklevel=2)


def _largest(values: Iterable[tuple[str, object]], pack: Pack, name: str) -> str:
    """Returns the name of the first of *values* that is large."""
    return next((label for label, _ in _large(values, pack)), f"what {name} uses")


def _large(values: Iterable[tuple[str, object]], pack: Pack) -> Iterator[tuple[str, Payload]]:
    """Yields the names of those of *values* that are large, and each packed."""
    for label, value in values:
        with suppress(Exception):  # whatever cannot be pickled alone is not the one
            part = pack(value)
            if part.size >= LARGE:
                yield label.rstrip(","), part
