"""Classes whose objects live on the slots: ``@sky.cls``."""

from __future__ import annotations

import functools
import hashlib
import inspect
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Generic, NoReturn, TypeVar, overload

from skyinfra.errors import InvalidField, check_kind
from skyinfra.protocol import secrets
from skyinfra.protocol.instance import InstanceInfo
from skyinfra.protocol.secrets import Secret
from skyinfra.tasks.needs import InObject, Needs
from skyinfra.tasks.task import Compute, Decorated, Options, Task, decorated, is_local, on_node, options
from skyinfra.worker import stateful

if TYPE_CHECKING:
    from typing_extensions import Unpack

    from skyinfra.tasks.included import Code, Included
    from skyinfra.tasks.task import Given

C = TypeVar("C")


class Stateful(Decorated, Generic[C]):
    """A class that ``@sky.cls`` made shippable: calling it gives a `Handle`; `local` makes an object here."""

    def __init__(self, kind: type[C], settings: Options, keep: int) -> None:
        if not inspect.isclass(kind):
            raise TypeError(f"@sky.cls takes a class, not {type(kind).__name__}")
        check_kind("keep", keep, int, "a number from 1")
        if keep < 1:
            raise InvalidField("a number from 1", field="keep", given=keep)
        _check_names(kind)
        self.kind = kind
        self.settings = settings
        self.keep = keep
        functools.update_wrapper(self, kind, updated=())

    def __call__(self, *args: object, **kwargs: object) -> Handle[C]:
        if is_local():
            return self.local(*args, **kwargs)  # type: ignore[return-value]
        _check_arguments(self.kind, args, kwargs)
        return Handle(self, args, kwargs, self.settings)

    def local(self, *args: object, **kwargs: object) -> C:
        """Returns an object in this process, after what its class does when it is entered."""
        made = self.kind(*args, **kwargs)
        stateful.run_enter(made)
        return made

    @property
    def plain(self) -> type[C]:
        """The class itself."""
        return self.kind

    def __repr__(self) -> str:
        return f"<cls {self.kind.__qualname__}>"


@dataclass(frozen=True)
class _Made:
    """A recipe, for what was *included* then, with the secrets, own modules and code that its class needs."""

    included: Included | None
    recipe: stateful.Recipe
    secrets: dict[str, Secret]
    modules: set[str]
    code: Code


class Handle(Generic[C]):
    """An object that is made once in the process of each slot that runs a task of it.

    Its methods are as decorated functions are: ``model.predict(x) >> pool``, ``pool.map(model.predict, xs)``. The
    arguments of the constructor travel with each task: hand over the path of a model rather than the model.
    """

    def __init__(
        self, made_by: Stateful[C], args: tuple[object, ...], kwargs: dict[str, object], settings: Options
    ) -> None:
        self._made_by = made_by
        self._args = args
        self._kwargs = kwargs
        self._settings = settings
        self._made: _Made | None = None

    def __getattr__(self, name: str) -> Compute[..., Any]:
        if name.startswith("__"):
            raise AttributeError(name)
        kind = self._made_by.kind
        method = inspect.getattr_static(kind, name, None)
        if method is None or not callable(getattr(kind, name)):
            methods = [each for each, value in inspect.getmembers(kind, inspect.isfunction) if each[0] != "_"]
            raise AttributeError(f"{kind.__qualname__} has no method {name!r}; its methods: {', '.join(methods)}")
        if inspect.iscoroutinefunction(getattr(kind, name)):
            raise TypeError(f"{kind.__qualname__}.{name} is a coroutine; call asyncio.run() inside a plain method")

        return Compute(_Method(self, name), self._settings)

    def on(self, slot: str | InstanceInfo) -> Handle[C]:
        """Returns the object of one *slot* alone: ``counter = Counter().on("n1/0")``, or one of `Pool.slots`.

        Its methods run there, one call at a time, whoever calls: who names the same slot has the same object. Where
        the slot is lost, calls raise `SlotLost`; where its process ended, the object is made anew.
        """
        name = slot if isinstance(slot, str) else slot.slot
        return Handle(self._made_by, self._args, self._kwargs, replace(self._settings, slot=name))

    def release(self) -> Task[bool]:
        """A task that lets the object of one slot go: ``model.release() @ pool``. True where the slot had one."""
        return Task(stateful.release, (_Digest(self),), settings=Options(slot=self._settings.slot))

    def _recipe(self, needs: Needs | None = None) -> stateful.Recipe:
        """Returns the recipe of the object, which has another digest where code of its class has changed.

        *needs*: gets the own modules that the class needs. Raises `TaskNotPicklable`.
        """
        included = needs.included if needs is not None else None
        made = self._made
        if made is None or made.included is not included or not made.code.is_current:
            made = self._made = self._make(included)
        secrets.meet(made.secrets)
        if needs is not None:
            needs.modules |= made.modules
        return made.recipe

    def _make(self, included: Included | None) -> _Made:
        from skyinfra.tasks import pickling
        from skyinfra.tasks.included import code_of

        kind = self._made_by.kind
        needs = Needs(included)
        with secrets.met() as met:
            data = pickling.dump(Task(kind, self._args, self._kwargs), needs)
        code = code_of(needs.modules)
        name = f"{kind.__module__}.{kind.__qualname__}"
        version = [included.tree.code_name] if included is not None else []
        digest = hashlib.sha256("".join([*version, *code.digests]).encode() + data).hexdigest()
        recipe = stateful.Recipe(name, digest, self._made_by.keep, data)
        return _Made(included, recipe, met, needs.modules, code)

    def __reduce__(self) -> NoReturn:
        raise TypeError(f"{self!r} is known here alone; its methods can be sent: pass counter.add, not counter")

    def __repr__(self) -> str:
        return f"<handle of {self._made_by.kind.__qualname__}>"


class _Method(InObject):
    """A method of the object of *handle*, as a function."""

    def __init__(self, handle: Handle[Any], name: str) -> None:
        self._handle = handle
        self._name = name
        self.method = getattr(handle._made_by.kind, name)
        # As a function has it: names the task.
        self.__qualname__ = f"{handle._made_by.kind.__qualname__.rpartition('.')[2]}.{name}"

    def __call__(self, *args: object, **kwargs: object) -> object:
        return stateful.Method(self._handle._recipe(), self._name)(*args, **kwargs)

    def reduced(self, needs: Needs | None) -> tuple[Any, ...]:
        return stateful.Method, (self._handle._recipe(needs), self._name)


class _Digest(InObject):
    """Stands for the digest of the recipe of *handle*."""

    def __init__(self, handle: Handle[Any]) -> None:
        self._handle = handle

    def reduced(self, needs: Needs | None) -> tuple[Any, ...]:
        return str, (self._handle._recipe(needs).digest,)


def _check_names(kind: type[Any]) -> None:
    """Raises `InvalidField` where a method of *kind* could not be called: `Handle` has one of that name."""
    for name in ("on", "release"):
        method = vars(kind).get(name)
        if callable(method) and not stateful.is_marked(method):
            raise InvalidField(
                f"objects of @sky.cls have a method {name}() of ours, which would be called instead",
                field=f"{kind.__qualname__}.{name}",
                hint="Give it another name.",
            )


def _check_arguments(kind: type[Any], args: tuple[object, ...], kwargs: dict[str, object]) -> None:
    """Raises TypeError where the constructor does not take them: here rather than on a node."""
    try:
        signature = inspect.signature(kind)
    except ValueError:
        return
    signature.bind(*args, **kwargs)


@overload
def cls(kind: type[C], /) -> Stateful[C]: ...
@overload
def cls(*, keep: int = 1, **given: Unpack[Given]) -> Callable[[type[C]], Stateful[C]]: ...
def cls(kind: Any = None, /, *, keep: int = 1, **given: Unpack[Given]) -> Any:
    """Decorator for a class whose objects live on the slots and stay there between tasks.

        @sky.cls
        class Model:
            def __init__(self, path: str) -> None:
                self.path = path

            @sky.enter
            def load(self) -> None:
                self.net = load(self.path)          # once in the process of each slot

            def predict(self, x: float) -> float:
                return self.net(x)

        model = Model("weights.pt")
        model.predict(3.0) >> pool

    keep: how many objects of the class one process holds; one that was made from other arguments, or from code that has
    changed, takes the place of the one that was used longest ago. The other keywords are those of `Options`, for all
    methods. Raises `InvalidField`.
    """
    settings = options(given, of="@sky.cls", more=("keep",))
    if on_node():
        # In a module that was synced: the node's own import of it.
        return decorated(kind, lambda plain: plain)
    return decorated(kind, functools.partial(Stateful, settings=settings, keep=keep))
