"""The needs of a call on a node, besides its bytes: own modules, values of the script's variables, and secrets."""

from __future__ import annotations

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


def _reach(value: Any) -> _Reach:
    if value not in _known:
        codes: list[types.CodeType] = []
        found: dict[Secret, None] = {}
        waiting, seen = [value], set()
        while waiting:
            each = undecorated(waiting.pop())
            if isinstance(each, Secret):
                found[each] = None
            elif id(each) not in seen and _is_own(each):
                seen.add(id(each))
                if isinstance(each, types.FunctionType) and each.__module__ == script.NAME:
                    codes.append(each.__code__)
                waiting += _used_by(each)
        _known[value] = _Reach(tuple(codes), tuple(found))
    return _known[value]


def _is_own(value: object) -> bool:
    name = getattr(value, "__module__", None)
    return isinstance(value, types.FunctionType | type) and (name == script.NAME or modules.is_own(name))


def _used_by(value: Any) -> Iterator[object]:
    """The values of the global names that *value* uses, those of the modules among them included."""
    if isinstance(value, type):
        yield from (getattr(each, "__func__", each) for each in vars(value).values())
        return
    for name in script.used(value.__code__):
        found = value.__globals__.get(name)
        yield found
        if isinstance(found, types.ModuleType) and modules.is_own(found.__name__):
            yield from (vars(found)[attribute] for attribute in value.__code__.co_names if attribute in vars(found))
