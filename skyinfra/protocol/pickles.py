"""Pickling by which a node and its clients hand values to one another.

As `cloudpickle` does, with two exceptions. Functions and classes of a script that is the module ``__main__`` of both
are named rather than copied, so that a value that comes back has the class that its client knows. And the members of
an enumeration that is copied keep their aliases and attributes.
"""

from __future__ import annotations

import enum
import io
import operator
import pickle
import sys
import types
from typing import Any

import cloudpickle

# A variable of the module ``__main__`` where it is the script of a client; see `skyinfra.program.main`.
MARK = "__skyinfra_program__"
# Attributes of a member that `enum` sets.
_OF_ENUM = {"_value_", "_name_", "_sort_order_", "_inverted_", "__objclass__"}


class Pickler(cloudpickle.Pickler):  # type: ignore[misc]
    """Pickles as `cloudpickle.Pickler` does, and names what stands in the script."""

    def reducer_override(self, obj: Any) -> Any:
        """As `pickle.Pickler.reducer_override`."""
        if isinstance(obj, types.FunctionType | type) and _is_of_script(obj):
            return NotImplemented
        reduced = super().reducer_override(obj)
        if isinstance(obj, enum.EnumMeta) and isinstance(reduced, tuple) and len(reduced) == 6:
            return _enumeration(obj, reduced)
        return reduced


def dumps(value: object) -> bytes:
    """Returns *value*, pickled in one piece. Raises what pickling it raises."""
    with io.BytesIO() as file:
        Pickler(file, protocol=pickle.HIGHEST_PROTOCOL).dump(value)
        return file.getvalue()


def _is_of_script(value: Any) -> bool:
    main = sys.modules.get("__main__")
    if getattr(value, "__module__", None) != "__main__" or main is None or MARK not in vars(main):
        return False
    try:
        return operator.attrgetter(value.__qualname__)(main) is value
    except AttributeError:
        return False


# The copy that `cloudpickle` makes of an enumeration has its canonical members, and nothing that a constructor of the
# user's gave them.


def _enumeration(kind: type[Any], reduced: tuple[Any, ...]) -> tuple[Any, ...]:
    make, (bases, name, qualname, _, *rest), (names, slots), *_, setter = reduced
    members: dict[str, Any] = dict(kind.__members__)
    values = {each: member.value for each, member in members.items()}
    attributes = {
        each: {key: value for key, value in vars(member).items() if key not in _OF_ENUM}
        for each, member in members.items()
    }
    state = {key: value for key, value in names.items() if key not in members}, slots
    arguments = (bases, name, qualname, values, *rest)
    return make, arguments, (state, setter, attributes), None, None, _set_enumeration


def _set_enumeration(kind: type[Any], given: tuple[Any, Any, dict[str, dict[str, Any]]]) -> None:
    state, setter, attributes = given
    setter(kind, state)
    members: dict[str, Any] = dict(kind.__members__)
    for name, found in attributes.items():
        vars(members[name]).update(found)
