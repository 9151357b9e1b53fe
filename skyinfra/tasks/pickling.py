"""Turning a task into bytes before anything is sent. `skyinfra.tasks.outcomes` reads what comes back."""

from __future__ import annotations

import functools
import inspect
import operator
import re
import sys
import time
import types
import typing
import uuid
from collections.abc import Collection, Iterator, Mapping
from dataclasses import replace
from typing import Any

import cloudpickle

from skyinfra.blobs import payload, unpicklable
from skyinfra.blobs.payload import Payload
from skyinfra.errors import TaskNotPicklable
from skyinfra.errors.printable import printable
from skyinfra.program import main as program
from skyinfra.protocol.calls import Header, SecretUse
from skyinfra.protocol.pickles import Pickler
from skyinfra.protocol.secrets import met
from skyinfra.tasks import large, modules, script
from skyinfra.tasks.included import Included
from skyinfra.tasks.needs import InObject, Needs
from skyinfra.tasks.secrets import Secrets
from skyinfra.tasks.task import Compute, Decorated, Task, undecorated, undecorated_in
from skyinfra.worker.execute import named


class Shipment:
    """A task as bytes. ``key`` is unique; ``name`` is by default the function's, for messages.

    A large call stays where it lies: ``call`` is empty then, and ``parcels`` has to be at the head before the task is
    sent; not so where call and result are to be *whole*. included: what the client has synced, which the task is to
    see. echo: whether the client wants what the task prints. env: variables of the pool; those of the task count above
    them. workdir: see `Header`. came: when it was there to be run (``time.monotonic``). secrets: those of the client,
    of which the task gets what its options, its function and its arguments name; uses: those, where they are known.
    ``stream``: whether it is a generator, whose items come one by one.
    """

    def __init__(
        self,
        task: Task[Any],
        *,
        topic: str,
        echo: bool = False,
        name: str | None = None,
        key: str | None = None,
        included: Included | None = None,
        whole: bool = False,
        secrets: Secrets | None = None,
        uses: tuple[SecretUse, ...] | None = None,
        env: Mapping[str, str] | None = None,
        workdir: str | None = None,
        at_head: Collection[str] = (),
    ) -> None:
        """*key*: unique; where it is not given, one is made. at_head: the trees that the head has.

        Raises `TaskNotPicklable`, `SecretNotFound`.
        """
        self.came = time.monotonic()
        self.name = printable(name or task.name)
        self.key = key or _key(self.name)
        self.settings = task.settings
        self.secrets = secrets
        needs = Needs(included)
        with met() as found:
            packed = _pack_call(task, needs, whole=whole)
        if whole:
            large.notice_whole(self.name, packed, _parts(task), functools.partial(_pack, needs=needs))
        if uses is None:
            uses = secrets.uses([*task.settings.secrets, *found.values()]) if secrets is not None else ()
        self.uses = uses
        self.included = needs.files()
        self.tree = self.included.tree.name if self.included is not None else None
        small = whole or packed.small
        self.brought = (
            small and (secrets is None or secrets.at_head(self.uses)) and (self.tree is None or self.tree in at_head)
        )
        self.parcels = [] if small else packed.blobs()
        self.call = packed.joined() if small else b""
        self.stream = _is_generator(task)
        self._header = Header(
            self.key,
            self.name,
            topic,
            echo=echo,
            tree=self.tree,
            parts=() if small else packed.parts,
            whole=whole,
            secrets=self.uses,
            env={**(env or {}), **(task.settings.env or {})} or None,
            workdir=workdir,
            stream=self.stream,
            **task.settings.of("node"),
        )

    @property
    def fresh(self) -> bool:
        """Whether it runs in a process that has run no task before; may be set between two attempts."""
        return self._header.fresh

    @fresh.setter
    def fresh(self, fresh: bool) -> None:
        self._header = replace(self._header, fresh=fresh)

    def attempt(self, number: int) -> tuple[str, bytes]:
        """Key and header of the attempt *number*, from 0. `logs --task` finds all of them by the key of the first."""
        header = self._header if number == 0 else replace(self._header, key=f"{self.key}.{number}")
        return header.key, header.dumps()

    def chunk(self) -> tuple[str, str, bytes]:
        """Key, name and header of a chunk that begins with this task; see `skyinfra.worker.execute`."""
        header = Header(_key(self.name), self.name, self._header.topic, echo=self._header.echo, chunk=True)
        return header.key, header.name, header.dumps()


def _key(name: str) -> str:
    return f"{re.sub(r'[^A-Za-z0-9_.]', '_', name)[-60:]}-{uuid.uuid4().hex}"


def dump_call(task: Task[Any], included: Included | None = None) -> tuple[bytes, Included | None]:
    """The function of *task* with its arguments, pickled in one piece, and *included* with the modules that it needs.

    Raises `TaskNotPicklable`.
    """
    needs = Needs(included)
    return dump(task, needs), needs.files()


def dump(task: Task[Any], needs: Needs) -> bytes:
    """Returns the function of *task* with its arguments, pickled in one piece. Raises `TaskNotPicklable`."""
    return _pack_call(task, needs, whole=True).joined()


def _is_generator(task: Task[Any]) -> bool:
    function = task.function.method if isinstance(task.function, InObject) else task.function
    return inspect.isgeneratorfunction(undecorated(function))


def _pack_call(task: Task[Any], needs: Needs, *, whole: bool = False) -> Payload:
    if whole and _is_generator(task):
        raise TaskNotPicklable(
            f"{task.name} is a generator, whose items come to a client that waits for them: the result of a job, of a "
            "rank, and of a task that takes several slots, is one value",
            given=task.name,
            hint="Return list(...); or run it as a task of one slot: for item in task >> pool.",
        )
    pack = functools.partial(_pack, needs=needs)
    try:
        known = -1
        while known < len(needs.values):  # values may be functions that use others
            known = len(needs.values)
            if whole:
                packed = pack(large.call(task.function, task.args, task.kwargs, needs.values), whole=True)
            else:
                packed = large.packed(task, needs.values, pack)
    except TaskNotPicklable:  # of what the object of a method is made from
        raise
    except Exception as error:
        what, why = _culprit(task, needs) or (task.name, f"{type(error).__name__}: {error}")
        raise TaskNotPicklable(
            f"{what} cannot be pickled: {why}",
            hint="Create it inside the function, or pass what it is made from.",
        ) from error
    if not whole:
        large.notice(task.name, packed, _parts(task), pack)
    return packed


class _Pickler(Pickler):
    """Pickles what stands in own modules by name, and notes which these are."""

    def __init__(self, *arguments: Any, needs: Needs, **keywords: Any) -> None:
        super().__init__(*arguments, **keywords)
        self._needs = needs

    def reducer_override(self, obj: Any) -> Any:
        """As `pickle.Pickler.reducer_override`."""
        if isinstance(obj, types.FunctionType | type | Decorated | functools._lru_cache_wrapper):
            return self._of_module(obj)
        if isinstance(obj, InObject):
            return obj.reduced(self._needs)
        if isinstance(obj, typing.NewType) and obj.__module__ == script.NAME and not self._of_script(obj):
            return typing.NewType, (obj.__name__, obj.__supertype__)
        # Of an instance the class is pickled, too; one that is pickled as a name, as a NewType is, has a module.
        is_module = isinstance(obj, types.ModuleType)
        for module in [obj.__name__] if is_module else {type(obj).__module__, str(getattr(obj, "__module__", ""))}:
            self._needs.take(module)
        return super().reducer_override(obj)

    def _of_module(self, obj: Any) -> Any:
        plain = undecorated(obj)
        module = getattr(plain, "__module__", None) or ""
        if isinstance(plain, types.FunctionType | type | functools._lru_cache_wrapper):
            self._needs.take_used(plain)
        if module == script.NAME:
            importable = self._of_script(plain) and self._needs.take(module)
        else:
            importable = _defined_in(plain, module) and (
                self._needs.take(module) or self._is_included(module) or _is_installed(module)
            )
        if not importable and isinstance(obj, functools._lru_cache_wrapper):
            return program.cached, (obj.__wrapped__, obj.cache_parameters())
        if not importable:
            return obj.shipped() if isinstance(obj, Decorated) else super().reducer_override(obj)
        found = operator.attrgetter(plain.__qualname__)(sys.modules[module])
        if isinstance(obj, Decorated):  # it may have options of its own
            return (named, (module, plain.__qualname__)) if found is obj else obj.shipped()
        # By name, as any function; or what a decorator has replaced there.
        return NotImplemented if found is obj else (undecorated_in, (module, plain.__qualname__))

    def _of_script(self, value: Any) -> bool:
        return self._needs.script is not None and self._needs.script.has(value)

    def _is_included(self, module: str) -> bool:
        included = self._needs.included
        return included is not None and included.module_name(sys.modules[module]) is not None

    def _dynamic_function_reduce(self, func: Any) -> Any:
        """Returns a function without a name that finds it. On a node it has the variables of its module, as here."""
        function, arguments, state, *rest = super()._dynamic_function_reduce(func)
        space = func.__globals__
        module = str(space.get("__name__"))
        plain = state[1]["__globals__"]
        if vars(sys.modules.get(module, types)) is not space or not _needs_space(plain) or not self._needs.take(module):
            return function, arguments, state, *rest
        code, _, *others = arguments
        kept: dict[str, object] = {"__globals__": {}, "_cloudpickle_submodules": ()}
        return function, (code, _Globals(module), *others), (state[0], {**state[1], **kept}), *rest


class _Globals:
    """Stands for the variables of *module*, which a node has."""

    def __init__(self, module: str) -> None:
        self._module = module

    def __reduce__(self) -> tuple[Any, ...]:
        return program.globals_of, (self._module,)


def _needs_space(values: Mapping[str, object]) -> bool:
    """Returns whether one of *values* is more than an installed module; a function without such ones needs none."""
    return any(not isinstance(each, types.ModuleType) or modules.is_own(each.__name__) for each in values.values())


def _defined_in(plain: Any, module: str) -> bool:
    """Returns whether *plain*, or what a decorator made of it, has its own name in *module*."""
    name = getattr(plain, "__qualname__", "")
    if module not in sys.modules or not name or "<locals>" in name:
        return False
    try:
        return undecorated(operator.attrgetter(name)(sys.modules[module])) is plain
    except AttributeError:
        return False


def _is_installed(module: str) -> bool:
    """Returns whether nodes import *module* from Python or an installed package, as they do for plain functions."""
    by_value = cloudpickle.list_registry_pickle_by_value()
    registered = any(f"{module}.".startswith(f"{each}.") for each in by_value)
    found = sys.modules[module]
    file = getattr(found, "__file__", None)
    # Also where it is no module that travels: a notebook that was imported, a module without its source.
    here = module == "__mp_main__" or (isinstance(file, str) and modules.in_own_place(file))
    return getattr(found, "__spec__", None) is not None and not here and not registered


def _pack(value: object, needs: Needs, *, whole: bool = False) -> Payload:
    return payload.pack(value, functools.partial(_Pickler, needs=needs), whole=whole, again=True)


def _culprit(task: Task[Any], needs: Needs) -> tuple[str, str] | None:
    """Names the part of *task* that cannot be pickled, and why."""
    pack = functools.partial(_pack, needs=needs)
    for label, value in _parts(task):
        try:
            pack(value)
        except Exception as error:  # noqa: BLE001 - as above
            return label, unpicklable.described(value, pack, error)
    return None


def _parts(task: Task[Any]) -> Iterator[tuple[str, object]]:
    for name, value in _named_arguments(task):
        yield f"argument {name!r} of {task.name}", value
    function = inspect.unwrap(task.function)
    if inspect.isfunction(function):
        used = inspect.getclosurevars(function)
        for name, value in {**used.nonlocals, **used.globals}.items():
            if value is not task.function:
                yield f"{name!r}, which {task.name} uses,", value
    yield f"function {task.name}", task.function


def _named_arguments(task: Task[Any]) -> list[tuple[str, object]]:
    try:
        bound = inspect.signature(task.function).bind(*task.args, **task.kwargs)
    except (TypeError, ValueError):
        positional = [(str(index), value) for index, value in enumerate(task.args)]
        return positional + list(task.kwargs.items())
    return list(bound.arguments.items())


def as_task(function: object, args: tuple[object, ...], kwargs: dict[str, object]) -> Task[Any]:
    """A task of a plain or decorated function, of a partial one, with the options of that; or *function*, a task."""
    if isinstance(function, Task):
        if args or kwargs:
            raise TypeError("a task has its arguments already; submit the function to give others")
        return function
    if isinstance(function, types.MethodType) and isinstance(function.__func__, Compute):  # see `undecorated`
        function = function.__func__.__get__(function.__self__)
    if isinstance(function, Compute):
        return function.task(args, kwargs)
    if not callable(function):
        raise TypeError(f"a task is made from a function, not from {type(function).__name__}")
    if isinstance(function, functools.partial) and isinstance(function.func, Compute):
        return as_task(function.func, (*function.args, *args), {**function.keywords, **kwargs})
    return Task(function, args, kwargs)
