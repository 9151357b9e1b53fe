"""Finds the part of a value that cannot be pickled, for messages."""

from __future__ import annotations

import copyreg
from collections.abc import Callable, Iterator, Mapping
from itertools import islice

# It is looked for that deep, and among that many parts of one value: each of them is pickled.
_DEEPEST = 20
_MOST_PARTS = 10_000


def where(value: object, pack: Callable[[object], object]) -> str:
    """The way from *value* to what *pack* raises for, such as ``.model.locks['a'][0]``; empty where it is itself."""
    path = ""
    for _ in range(_DEEPEST):
        found = next(((step, part) for step, part in islice(_parts(value), _MOST_PARTS) if _fails(part, pack)), None)
        if found is None:
            break
        path += found[0]
        value = found[1]
    return path


def described(value: object, pack: Callable[[object], object], error: BaseException) -> str:
    """Returns why *value* cannot be pickled, in words: *error* is what pickling it raised."""
    path = where(value, pack)
    return f"{f'its {path}: ' if path else ''}{type(error).__name__}: {error}"


def _fails(value: object, pack: Callable[[object], object]) -> bool:
    try:
        pack(value)
    except Exception:  # noqa: BLE001 - __reduce__ and __getstate__ may raise anything
        return True
    return False


def _parts(value: object) -> Iterator[tuple[str, object]]:
    if type(value) is dict:
        for key, each in value.items():
            yield f"[{key!r}]", each
    elif type(value) in (list, tuple):
        for index, each in enumerate(value):  # type: ignore[arg-type]
            yield f"[{index}]", each
    elif not isinstance(value, type) and type(value) not in copyreg.dispatch_table:
        for name, each in _state(value).items():
            yield f".{name}", each


def _state(value: object) -> Mapping[str, object]:
    """Returns the attributes that pickle takes: not those that the class leaves out."""
    try:
        reduced = value.__reduce_ex__(4)
    except Exception:  # noqa: BLE001 - as above
        return {}
    state = reduced[2] if isinstance(reduced, tuple) and len(reduced) > 2 else None
    parts = state if isinstance(state, tuple) and len(state) == 2 else (state,)
    return {name: each for part in parts if isinstance(part, dict) for name, each in part.items()}
