"""The values that calls bring for global variables of the script: each holds for its call alone.

A process of a node keeps the script between tasks, and a client sends only what it has changed. So a variable that the
next call does not bring has the value again that the script has set as it was imported, or a task has set since.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator, Mapping
from typing import Any

from skyinfra.protocol.pickles import MARK

# A variable of the script: the values of those that a call has brought, as they were before.
_BEFORE = "__skyinfra_before__"
_ABSENT = object()


class Values:
    """*values* of global variables of the script that is the module ``__main__`` now.

    On a client that is its own script, of which nothing is set.
    """

    def __init__(self, values: Mapping[str, object]) -> None:
        main = vars(sys.modules["__main__"])
        self._space: dict[str, Any] = main if MARK in main else {}
        self._values = values if MARK in main else {}

    def set(self) -> None:
        """Sets them until `put_back`."""
        before = _exchange(self._space, self._values)
        self._space[_BEFORE] = {**before, **self._space.get(_BEFORE, {})}

    @contextlib.contextmanager
    def in_place(self) -> Iterator[None]:
        """Sets them for the body, and then puts back the values before."""
        before = _exchange(self._space, self._values)
        try:
            yield
        finally:
            _exchange(self._space, before)


def put_back(space: dict[str, Any]) -> None:
    """Gives variables of the script, whose are *space*, the values that they had before calls brought others."""
    _exchange(space, space.pop(_BEFORE, {}))


def _exchange(space: dict[str, Any], values: Mapping[str, object]) -> dict[str, object]:
    """Sets *values* in *space*. Returns the values before, with which that is undone."""
    before = {name: space.get(name, _ABSENT) for name in values}
    space.update(values)
    for name in [name for name, value in values.items() if value is _ABSENT]:
        space.pop(name, None)
    return before
