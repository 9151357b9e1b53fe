"""The needs of a call on a node, besides its bytes: own modules, values of the script's variables, and secrets."""

from __future__ import annotations

import contextlib
import functools
import sys
import types
import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

from skyinfra.errors import TaskNotPicklable
from skyinfra.protocol import secrets
from skyinfra.protocol.secrets import Secret
from skyinfra.tasks import modules, script
from skyinfra.tasks.script import Script
from skyinfra.tasks.task import undecorated

if TYPE_CHECKING:
    from skyinfra.tasks.included import Included


class Needs:
    """The own modules that a call needs, besides what is *included*. values: of the script's global variables."""

    def __init__(self, included: Included | None = None) -> None:
        self.included = included
        self.modules: set[str] = set()
        self.values: dict[str, object] = {}

    @cached_property
    def script(self) -> Script | None:
        """The script of this process, where nodes can import it."""
        return script.current()

    def files(self) -> Included | None:
        """Returns the included files with these modules."""
        from skyinfra.tasks.included import with_modules

        return with_modules(self.included, self.modules)

    def take(self, module: str) -> bool:
        """Notes that the call needs *module*. Returns False for one that is not the user's own.

        Raises `TaskNotPicklable`.
        """
        if module == script.NAME:
            if self.script is None:
                return False
        elif not modules.is_own(module):
            return False
        elif module.partition(".")[0] in sys.stdlib_module_names:
            raise TaskNotPicklable(
                f"the module {module} has the name of a module of Python, which nodes have loaded",
                given=str(sys.modules[module].__file__),
                hint="Rename the file.",
            )
        self.modules.add(module)
        return True

    def take_used(self, value: Any) -> None:
        """Notes the secrets, and the values of the script, that *value* uses, a function or class of an own module."""
        reach = _reach(value)
        for secret in reach.secrets:
            secrets.meet({secret.name: secret})
        if self.script is not None:
            for code in reach.of_script:
                self.values.update(script.values_used(code, self.script))


class InObject(ABC):
    """Names the object of a slot that it is about; its recipe is made when it is pickled. method: of its class."""

    method: Callable[..., object] | None = None

    @abstractmethod
    def reduced(self, needs: Needs | None) -> tuple[Any, ...]:
        """As ``__reduce__`` gives it. *needs*: gets the own modules that it needs."""

    def __reduce__(self) -> tuple[Any, ...]:
        return self.reduced(None)


@dataclass(frozen=True)
class _Reach:
    """Finds what a function or class of an own module uses, by the names of global variables, and what that uses.

    of_script: the code of functions of the script.
    """

    of_script: tuple[types.CodeType, ...]
    secrets: tuple[Secret, ...]


_known: weakref.WeakKeyDictionary[Any, _Reach] = weakref.WeakKeyDictionary()
# A collection of functions has fewer.
_MOST = 1000
# Of what stands for a function, the attributes with what it calls.
_INNER = {
    property: ("fget", "fset", "fdel"),
    functools.cached_property: ("func",),
    functools.partial: ("func", "args", "keywords"),
    functools.partialmethod: ("func",),
    types.MethodType: ("__func__", "__self__"),
    classmethod: ("__func__",),
    staticmethod: ("__func__",),
}


def _reach(value: Any) -> _Reach:
    if value not in _known:
        codes: list[types.CodeType] = []
        found: dict[Secret, None] = {}
        # By their ids: some are made as they are asked for, and would go.
        waiting, seen = [value], dict[int, object]()
        while waiting:
            each = undecorated(waiting.pop())
            if isinstance(each, Secret):
                found[each] = None
            elif id(each) not in seen:
                seen[id(each)] = each
                if isinstance(each, types.FunctionType) and each.__globals__ is vars(sys.modules[script.NAME]):
                    codes.append(each.__code__)
                waiting += _used_by(each)
        _known[value] = _Reach(tuple(codes), tuple(found))
    return _known[value]


def _is_own(value: object) -> bool:
    name = getattr(value, "__module__", None)
    return isinstance(name, str) and (name == script.NAME or modules.is_own(name))


def _used_by(value: Any) -> Iterator[object]:
    """The values that *value*, a function, class or object, uses; none of one that is installed, but what it wraps."""
    kind = type(value)
    if kind is types.FunctionType:
        yield from _used_by_function(value) if _is_own(value) else ()
    elif issubclass(kind, type):
        yield from (*vars(value).values(), *value.__mro__, kind) if _is_own(value) else ()
    elif kind in (dict, list, tuple, set, frozenset) and len(value) <= _MOST:
        yield from filter(callable, [*(value.values() if kind is dict else value)])
    elif _is_own(kind):
        yield kind
        yield from filter(callable, _variables(value).values())
    for attribute in next((_INNER[each] for each in _INNER if issubclass(kind, each)), ()):
        given = getattr(value, attribute)
        yield from given if isinstance(given, tuple) else given.values() if isinstance(given, dict) else [given]
    yield _variables(value).get("__wrapped__")


def _variables(value: object) -> dict[str, object]:
    try:
        return dict(object.__getattribute__(value, "__dict__"))
    except (AttributeError, TypeError):
        return {}


def _used_by_function(function: types.FunctionType) -> Iterator[object]:
    """The values of the global names that *function* uses, of its variables of functions around it, and its defaults.

    Of a module, those of its attributes that it names.
    """
    for name in script.used(function.__code__):
        found = function.__globals__.get(name)
        yield found
        if isinstance(found, types.ModuleType) and modules.is_own(found.__name__):
            yield from (vars(found)[attribute] for attribute in function.__code__.co_names if attribute in vars(found))
    for cell in function.__closure__ or ():
        with contextlib.suppress(ValueError):  # it is empty
            yield cell.cell_contents
    yield from (*(function.__defaults__ or ()), *(function.__kwdefaults__ or {}).values())
