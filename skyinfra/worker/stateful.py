"""Objects that stay in the worker process of a slot between tasks, such as a model that is loaded once."""

from __future__ import annotations

import pickle
import threading
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

from skyinfra.errors import refuses_unknown_options
from skyinfra.node import children
from skyinfra.program.main import with_values
from skyinfra.program.values import Values

F = TypeVar("F", bound=Callable[..., object])

# Attributes that mark methods.
ENTER, EXIT = "__skyinfra_enter__", "__skyinfra_exit__"


@refuses_unknown_options("@sky.enter")
def enter(method: F) -> F:
    """Decorator in a class of `skyinfra.cls`: *method* runs once in the process of a slot, before its first task."""
    setattr(method, ENTER, True)
    return method


@refuses_unknown_options("@sky.exit")
def exit(method: F) -> F:
    """Decorator in a class of `skyinfra.cls`: *method* runs when the object goes: its process ends, or another object
    takes its place. A process that is killed runs nothing any more."""
    setattr(method, EXIT, True)
    return method


def is_marked(method: object) -> bool:
    """Returns whether `enter` or `exit` marks *method*."""
    return any(getattr(method, mark, False) is True for mark in (ENTER, EXIT))


@dataclass(frozen=True)
class Recipe:
    """The recipe of an object. name: of its class; a process keeps at most *keep* objects of one name, the
    most recently used ones. digest: identifies the recipe. made: the pickled class and arguments."""

    name: str
    digest: str
    keep: int
    made: bytes


_lock = threading.RLock()
# The last one is the most recently used. Each with the values of the script with which it was made.
_objects: dict[str, tuple[Recipe, object, Values]] = {}


@dataclass(frozen=True)
class Method:
    """A *method* of the object of *recipe*, which is made at the first call in a process."""

    recipe: Recipe
    method: str

    def __post_init__(self) -> None:
        # The name of the task, as of a function.
        object.__setattr__(self, "__qualname__", f"{self.recipe.name.rpartition('.')[2]}.{self.method}")

    def __call__(self, *args: object, **kwargs: object) -> object:
        return getattr(_object(self.recipe), self.method)(*args, **kwargs)


def _object(recipe: Recipe) -> object:
    with _lock:
        if recipe.digest in _objects:
            _objects[recipe.digest] = _objects.pop(recipe.digest)
        else:
            same = [digest for digest, (other, *_) in _objects.items() if other.name == recipe.name]
            for digest in same[: max(0, len(same) + 1 - recipe.keep)]:
                _drop(digest)
            kind, args, kwargs = pickle.loads(recipe.made)  # noqa: S301 - the fleet's own, over mutual TLS
            values = Values(args[0] if kind is with_values else {})
            with children.keeping(recipe.digest):
                made = kind(*args, **kwargs)
                run_enter(made)
            _objects[recipe.digest] = recipe, made, values
        _, made, values = _objects[recipe.digest]
        values.set()
        return made


def any_kept() -> bool:
    """Returns whether this process keeps an object."""
    return bool(_objects)


def release(digest: str) -> bool:
    """Drops the object of a recipe, after its exit methods. Returns False where this process has none."""
    with _lock:
        found = _objects.pop(digest, None)
    if found is None:
        return False
    _, made, values = found
    try:
        with values.in_place():
            _run(made, EXIT)
    finally:
        children.release(digest)
    return True


def release_all() -> None:
    """Drops every object; prints what exit methods raise."""
    for digest in tuple(_objects):
        _drop(digest)


def _drop(digest: str) -> None:
    try:
        release(digest)
    except Exception:  # noqa: BLE001 - the user's code; what comes after it still runs
        traceback.print_exc()


def run_enter(made: object) -> None:
    """Calls the enter methods of an object that was made."""
    _run(made, ENTER)


def _run(target: object, mark: str) -> None:
    for method in marked(type(target), mark):
        getattr(target, method)()


def marked(kind: type[Any], mark: str) -> list[str]:
    """Returns the names of the methods of *kind* with the *mark*, those of bases first, in the order of definition."""
    names: dict[str, None] = {}
    for base in reversed(kind.__mro__):
        for name, value in vars(base).items():
            if getattr(value, mark, False) is True:
                names.setdefault(name)
    return [name for name in names if getattr(getattr(kind, name), mark, False) is True]
