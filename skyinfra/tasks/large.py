"""Large values in the calls of tasks: each is a part of its own, which is sent once, and noted where it is again."""

from __future__ import annotations

import warnings
import weakref
from collections.abc import Callable, Iterable
from contextlib import suppress
from typing import Any

from skyinfra.blobs.payload import Apart, Payload
from skyinfra.blobs.store import in_words

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


def packed(values: tuple[object, ...], pack: Pack, *, of: object) -> Payload:
    """Returns *values*, the call of the function *of*, packed; large ones as parts of their own.

    Calls whose stream is large for what they have in common, such as the global variables of a function, share it then.
    """
    if not _is_known(of):
        found = pack(values)
        if sum(map(len, found.pieces)) < LARGE:
            return found
        with suppress(TypeError):  # such an object is looked at each time
            _known.add(of)
    return pack(tuple(_apart(value, pack) for value in values))


def _is_known(function: object) -> bool:
    with suppress(TypeError):
        return function in _known
    return False


def _apart(value: object, pack: Pack) -> object:
    if type(value) in (tuple, dict):
        if isinstance(value, dict):
            return {name: _apart(each, pack) for name, each in value.items()}
        return tuple(_apart(each, pack) for each in value)  # type: ignore[attr-defined]
    alone = pack(value)
    return Apart(alone.joined()) if not alone.buffers and alone.size >= _VALUE else value


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


def _largest(values: Iterable[tuple[str, object]], pack: Pack, name: str) -> str:
    """Returns the name of the first of *values* that is large."""
    for label, value in values:
        with suppress(Exception):  # whatever cannot be pickled alone is not the one
            if pack(value).size >= LARGE:
                return label.rstrip(",")
    return f"what {name} uses"
