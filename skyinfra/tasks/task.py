"""Tasks: what a decorated function gives when it is called. Nothing here runs or connects to anything."""

from __future__ import annotations

import contextvars
import functools
import inspect
import numbers
import os
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
    """Whether a function runs through `Compute.local`."""
    return _local.get()


@dataclass(frozen=True)
class Options:
    """The options of a task.

    timeout: seconds for which it may run on its slot; then it is stopped and `TaskTimeout` raised. None is for ever.
    retries: how often it is started again where it raises an exception. A worker process or a node that dies does not
    count: the task starts again in any case. profile: only on slots with this MIG profile or AMD partition mode.
    slots: how many slots of one node it takes. gpu_memory_gb: only on slots with at least that memory of their GPU.
    secrets: names of secrets, or each as a `skyinfra.Secret`, which the task has as variables of that name. env:
    variables that its process has while it runs, above those of the pool and of the image; no secrets. fresh: whether
    it runs in a new process, which has run no task before and runs none after it.

    Raises `InvalidField`.
    """

    timeout: float | None = None
    retries: int = 0
    profile: str | None = None
    slots: int = 1
    gpu_memory_gb: float | None = None
    secrets: Sequence[str | Secret] = ()
    env: Mapping[str, str] | None = None
    fresh: bool = False

    def __post_init__(self) -> None:
        object.__setattr__(self, "secrets", named(self.secrets))
        for name, (kind, words, may_lack) in _KINDS.items():
            if not (may_lack and getattr(self, name) is None):
                check_kind(name, getattr(self, name), kind, words)
        if self.env is not None:
            check_mapping("env", self.env)
        if self.timeout is not None and not 0 < self.timeout < float("inf"):
            raise InvalidField("seconds, more than 0", field="timeout", given=self.timeout)
        if self.retries < 0:
            raise InvalidField("a number from 0", field="retries", given=self.retries)
        if self.slots < 1:
            raise InvalidField("a number from 1", field="slots", given=self.slots)
        if self.gpu_memory_gb is not None and not 0 < self.gpu_memory_gb < float("inf"):
            raise InvalidField("GB, more than 0", field="gpu_memory_gb", given=self.gpu_memory_gb)


# By option: the type, its words, and whether it may be None.
_KINDS: dict[str, tuple[type[Any], str, bool]] = {
    "timeout": (numbers.Real, "seconds", True),
    "retries": (numbers.Integral, "a number from 0", False),
    "profile": (str, "the name of a profile, such as '3g.40gb'", True),
    "slots": (numbers.Integral, "a number from 1", False),
    "gpu_memory_gb": (numbers.Real, "GB, more than 0", True),
    "fresh": (bool, "True or False", False),
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

    def __reduce__(self) -> tuple[object, ...]:
        from skyinfra.worker.execute import plain

        return plain, (self.plain,)


def undecorated(value: Any) -> Any:
    """Returns the function or class of *value*, where that is a decorated one, else *value*."""
    return value.plain if isinstance(value, Decorated) else value


class Compute(Decorated, Generic[P, T]):
    """A function that ``@sky.compute`` made shippable: calling it gives a `Task`; `local` runs it here."""

    def __init__(self, function: Callable[P, T], settings: Options = _DEFAULT) -> None:
        if not callable(function):
            raise TypeError(f"@sky.compute takes a function, not {type(function).__name__}")
        if inspect.iscoroutinefunction(function):
            raise TypeError("@sky.compute takes a plain function; call asyncio.run() inside it")
        self.function = function
        self.settings = settings
        functools.update_wrapper(self, function)

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> Task[T]:
        if _local.get():
            return self.function(*args, **kwargs)  # type: ignore[return-value]
        return Task(self.function, args, kwargs, self.settings)

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
    if VARIABLE in os.environ:
        # In a module that was synced: the node's own import of it.
        return (lambda plain: plain) if target is None else target
    return make if target is None else make(target)


@overload
def compute(function: Callable[P, T], /) -> Compute[P, T]: ...
@overload
def compute(**given: Unpack[Given]) -> Callable[[Callable[P, T]], Compute[P, T]]: ...
def compute(function: Callable[P, T] | None = None, /, **given: Unpack[Given]) -> Any:
    """Decorator, as ``@sky.compute`` or ``@sky.compute(timeout=60)``: calling the function then gives a `Task` and
    runs nothing.

    The keywords are those of `Options`; ``task.options(...)`` says others for one call. On a node, and wherever another
    task uses it there, the function is the plain one. Raises `InvalidField`.
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
