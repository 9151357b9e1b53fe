"""Pickling by which a node and its clients hand values to one another.

As `cloudpickle` does, but for functions and classes of a script that is the module ``__main__`` of both: they are named
rather than copied, so that a value that comes back has the class that its client knows.
"""

from __future__ import annotations

import io
import operator
import pickle
import sys
import types
from typing import Any

import cloudpickle

# A variable of the module ``__main__`` where it is the script of a client; see `skyinfra.program.main`.
MARK = "__skyinfra_program__"


class Pickler(cloudpickle.Pickler):  # type: ignore[misc]
    """Pickles as `cloudpickle.Pickler` does, and names what stands in the script."""

    def reducer_override(self, obj: Any) -> Any:
        """As `pickle.Pickler.reducer_override`."""
        if isinstance(obj, types.FunctionType | type) and _is_of_script(obj):
            return NotImplemented
        return super().reducer_override(obj)


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
