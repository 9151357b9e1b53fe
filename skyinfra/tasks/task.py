"""Tasks: what a decorated function gives when it is called. Nothing here runs or connects to anything."""

from __future__ import annotations

import contextvars
import functools
import inspect
import numbers
import os
import sys
import types
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import (
    Any,
    Generic,
    Literal,
    NoReturn,
    ParamSpec,
    TypedDict,
    TypeVar,
    Unpack,
    overload,
)

from skyinfra.errors import InvalidField, check_kind, check_mapping, check_options
from skyinfra.protocol.instance import VARIABLE
from skyinfra.protocol.secrets import Secret, named

P = ParamSpec("P")
T = TypeVar("T")
T1 = TypeVar("T1")
T2 = TypeVar("T2")
T3 = TypeVar("T3")
T4 = TypeVar("T4")
R_co = TypeVar("R_co", covariant=True)

# True while a function runs through `Compute.local`: on a node, decorated functions call each other plainly.
_local: contextvars.ContextVar[bool] = contextvars.ContextVar("skyinfra_local", default=False)


def is_local() -> bool:
    """Returns whether a function runs through `Compute.local`."""
    return _local.get()


def on_node() -> bool:
    """Returns whether this process runs tasks, or was started by one."""
    return VARIABLE in os.environ


# How an option holds: it chooses the slot, it travels to the node with the call, or who sends the task heeds it.
Part = Literal["place", "node", "sender"]


def _option(default: Any, part: Part, kind: type[Any], words: str) -> Any:
    """A field of `Options`: its default, its part, its type, and the words for that. With None, it may be left out."""
    return field(default=default, metadata={"part": part, "kind": kind, "words": words})


@dataclass(frozen=True)
class Options:
    """The options of a task, which hold in every way to run it.

    timeout: seconds for which it may run on its slot; then it is stopped and `TaskTimeout` raised. None is for ever.
    retries: how often it is started again where it raises an exception. A worker process or a node that dies does not
    count: the task starts again in any case. profile: only on slots with this MIG profile or AMD partition mode.
    slots: how many slots of one node it takes. gpu_memory_gb: only on slots with at least that memory of their GPU.
    secrets: names of secrets, or each as a `skyinfra.Secret`, which the task has as variables of that name. env:
    variables that its process has while it runs, above those of the pool and of the image; no secrets. slot: only on
    the slot of that name, ``NODE/INDEX``. fresh: whether it runs in a new process, which has run no task before and
    runs none after it.

    Raises `InvalidField`.
    """

    timeout: float | None = _option(None, "node", numbers.Real, "seconds")
    retries: int = _option(0, "sender", numbers.Integral, "a number from 0")
    profile: str | None = _option(None, "place", str, "the name of a profile, such as '3g.40gb'")
    slots: int = _option(1, "sender", numbers.Integral, "a number from 1")
    gpu_memory_gb: float | None = _option(None, "place", numbers.Real, "GB, more than 0")
    secrets: Sequence[str | Secret] = _option((), "sender", tuple, "names of secrets")
    env: Mapping[str, str] | None = _option(None, "sender", Mapping, "variables, such as {'NAME': 'value'}")
    slot: str | None = _option(None, "place", str, "the name of a slot, such as 'n1/0'")
    fresh: bool = _option(False, "node", bool, "True or False")

    def __post_init__(self) -> None:
        object.__setattr__(self, "secrets", named(self.secrets))
        for each in fields(self):
            value, words = getattr(self, each.name), each.metadata["words"]
            if value is not None or each.default is not None:
                check_kind(each.name, value, each.metadata["kind"], words)
        check_mapping("env", self.env or {})
        for name, (words, fits) in _RANGES.items():
            value = getattr(self, name)
            if value is not None and not fits(value):
                raise InvalidField(words, field=name, given=value)

    def of(self, part: Part) -> dict[str, Any]:
        """Returns the options of *part* by name: all who place, send or run a task take them from here."""
        return {each.name: getattr(self, each.name) for each in fields(self) if each.metadata["part"] == part}


_RANGES: dict[str, tuple[str, Callable[[Any], bool]]] = {
    "timeout": ("seconds, more than 0", lambda seconds: 0 < seconds < float("inf")),
    "retries": ("a number from 0", lambda number: number >= 0),
    "slots": ("a number from 1", lambda number: number >= 1),
    "gpu_memory_gb": ("GB, more than 0", lambda size: 0 < size < float("inf")),
}
_DEFAULT = Options()


def options(given: Mapping[str, Any], before: Options = _DEFAULT, *, of: str, more: Sequence[str] = ()) -> Options:
    """Returns *before* with the *given* options. *of*: the decorator or method that takes them, besides *more*.

    Raises `InvalidField`.
    """
    check_options(given, [*(each.name for each in fields(Options)), *more], of=of)
    return replace(before, **given)


class Given(TypedDict, total=False):
    """The keywords that make `Options`."""

    timeout: float | None
    retries: int
    profile: str | None
    slots: int
    gpu_memory_gb: float | None
    secrets: Sequence[str | Secret]
    env: Mapping[str, str] | None
    slot: str | None
    fresh: bool


@dataclass(frozen=True)
class Task(Generic[T]):
    """A function with its arguments, to be shipped to a slot. Making one runs nothing.

    ``task >> pool`` runs it on one slot and gives its result. ``task @ pool`` runs it on every slot of the fleet and
    gives one result per slot, in slot order. Both raise what the function raises, with its remote traceback.
    A task may run more than once: when its worker process or its node dies, it starts again on another slot.
    """

    function: Callable[..., T]
    args: tuple[object, ...] = ()
    kwargs: Mapping[str, object] = field(default_factory=dict)
    settings: Options = _DEFAULT

    def options(self, **given: Unpack[Given]) -> Task[T]:
        """The same task with other `Options`: ``train(0).options(timeout=60) >> pool``. Raises `InvalidField`."""
        return replace(self, settings=options(given, self.settings, of="Task.options"))

    @property
    def name(self) -> str:
        """The function's name, for messages."""
        return str(getattr(self.function, "__qualname__", None) or type(self.function).__qualname__)


class Decorated(ABC):
    """A function or a class that a decorator of ours has made shippable."""

    @property
    @abstractmethod
    def plain(self) -> object:
        """The function or class itself."""

    def shipped(self) -> tuple[Any, ...]:
        """Returns what makes it on a node, as ``__reduce__`` gives it: the function or class itself."""
        from skyinfra.worker.execute import plain

        return plain, (self.plain,)

    def __reduce__(self) -> str | tuple[Any, ...]:
        """By its name, where its module has it; tasks have a pickler of their own, which does not ask here."""
        name = str(getattr(self, "__qualname__", ""))
        module = sys.modules.get(str(getattr(self, "__module__", "")))
        found: object = module
        for part in name.split("."):
            found = getattr(found, part, None)
        known = found is self and (on_node() or module is not sys.modules.get("__main__"))
        return name if known else self.shipped()


def undecorated(value: Any) -> Any:
    """Returns the function or class of *value*, where that is a decorated one, else *value*."""
    # A class method is one that is bound to the class, from Python 3.13 on outside of the decorated one.
    inner = value.__func__ if isinstance(value, types.MethodType) else value
    if not isinstance(inner, Decorated):
        return value
    return inner.plain.__func__ if isinstance(inner.plain, types.MethodType) else inner.plain


def undecorated_in(module: str, name: str) -> object:
    """Returns the function or class *name* of a *module* of this process, which a decorator may have replaced."""
    from skyinfra.worker.execute import named

    return undecorated(named(module, name))


class Compute(Decorated, Generic[P, T]):
    """A function that ``@sky.compute`` made shippable: calling it gives a `Task`; `local` runs it here.

    On a node calling it runs it there. It has its options there too, for who submits it from a task.
    """

    def __init__(self, function: Callable[P, T], settings: Options = _DEFAULT) -> None:
        if not callable(function):
            raise TypeError(f"@sky.compute takes a function, not {type(function).__name__}")
        if inspect.iscoroutinefunction(function):
            raise TypeError("@sky.compute takes a plain function; call asyncio.run() inside it")
        if isinstance(function, Compute):
            function = function.plain
        # First: what another decorator has made may have attributes of these names.
        functools.update_wrapper(self, function)
        self.function = function
        self.settings = settings

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> Task[T]:
        if _local.get() or on_node():
            return self.function(*args, **kwargs)  # type: ignore[return-value]
        return self.task(args, kwargs)

    def task(self, args: tuple[object, ...], kwargs: Mapping[str, object]) -> Task[T]:
        """Returns the task of a call. The object of a method is its first argument."""
        function = self.function
        if isinstance(function, types.MethodType):
            return Task(function.__func__, (function.__self__, *args), kwargs, self.settings)
        return Task(function, args, kwargs, self.settings)

    def options(self, **given: Unpack[Given]) -> Compute[P, T]:
        """Returns the same function with other `Options`: ``pool.map(train.options(retries=2), seeds)``. Raises
        `InvalidField`."""
        return Compute(self.function, options(given, self.settings, of="Compute.options"))

    def local(self, *args: P.args, **kwargs: P.kwargs) -> T:
        """Runs the function here, and the decorated functions that it calls with it, as they would on a node."""
        before = _local.set(True)
        try:
            return self.function(*args, **kwargs)
        finally:
            _local.reset(before)

    @property
    def plain(self) -> Callable[P, T]:
        """The function itself."""
        return self.function

    def shipped(self) -> tuple[Any, ...]:
        """Returns what makes it on a node: the function with its options."""
        return Compute, (self.function, self.settings) if self.settings != _DEFAULT else (self.function,)

    def __get__(self, owner: object, kind: type[Any] | None = None) -> Any:
        """As a method of a class: bound, as a function is, with its options."""
        return self if owner is None else Compute(types.MethodType(self.function, owner), self.settings)

    def __rshift__(self, pool: object) -> NoReturn:
        raise TypeError(f"{self!r} is a function: call it to make a task, as in {self._name}(...) >> pool")

    def __matmul__(self, pool: object) -> NoReturn:
        raise TypeError(f"{self!r} is a function: call it to make a task, as in {self._name}(...) @ pool")

    @property
    def _name(self) -> str:
        return str(getattr(self.function, "__name__", "function"))

    def __repr__(self) -> str:
        return f"<compute {getattr(self.function, '__qualname__', self.function)}>"


def decorated(target: Any, make: Callable[[Any], Any]) -> Any:
    """Returns what *make* makes of *target*, or the decorator that does it where there is no target yet."""
    return make if target is None else make(target)


@overload
def compute(function: Callable[P, T], /) -> Compute[P, T]: ...
@overload
def compute(**given: Unpack[Given]) -> Callable[[Callable[P, T]], Compute[P, T]]: ...
def compute(function: Callable[P, T] | None = None, /, **given: Unpack[Given]) -> Any:
    """Decorator, as ``@sky.compute`` or ``@sky.compute(timeout=60)``: calling the function then gives a `Task` and
    runs nothing.

    The keywords are those of `Options`; ``task.options(...)`` says others for one call. On a node, and wherever another
    task uses it there, calling the function runs it. Raises `InvalidField`.
    """
    return decorated(function, functools.partial(Compute, settings=options(given, of="@sky.compute")))


@dataclass(frozen=True)
class Gather(Generic[R_co]):
    """Several tasks to be run together; ``gather >> pool`` gives their results.

    stream: give an iterator instead of a tuple. ordered: of the stream, results in the order of the tasks rather than
    in the order in which they complete.
    """

    tasks: tuple[Task[Any], ...]
    stream: bool = False
    ordered: bool = True


@overload
def gather(t1: Task[T1], /) -> Gather[tuple[T1]]: ...
@overload
def gather(t1: Task[T1], t2: Task[T2], /) -> Gather[tuple[T1, T2]]: ...
@overload
def gather(t1: Task[T1], t2: Task[T2], t3: Task[T3], /) -> Gather[tuple[T1, T2, T3]]: ...
@overload
def gather(t1: Task[T1], t2: Task[T2], t3: Task[T3], t4: Task[T4], /) -> Gather[tuple[T1, T2, T3, T4]]: ...
@overload
def gather(*tasks: Task[T], stream: Literal[False] = False) -> Gather[tuple[T, ...]]: ...
@overload
def gather(*tasks: Task[T], stream: Literal[True], ordered: bool = True) -> Gather[Iterator[T]]: ...
def gather(*tasks: Task[Any], stream: bool = False, ordered: bool = True) -> Gather[Any]:
    """Tasks to be run together: ``a, b = sky.gather(f(1), g(2)) >> pool``. At most one per slot is in flight.

    stream=True gives an iterator that yields each result as soon as its turn has come; with ordered=False, in the
    order in which tasks complete. The first task that raises ends it: its exception is raised, the rest is cancelled.
    """
    for position, task in enumerate(tasks):
        if not isinstance(task, Task):
            raise TypeError(
                f"gather() takes tasks, and argument {position} is {type(task).__name__}: "
                "decorate the function with @sky.compute and call it"
            )
    return Gather(tasks, stream, ordered)
