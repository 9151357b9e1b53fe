"""Turning a task into bytes before anything is sent, and an outcome back into a result or an exception."""

from __future__ import annotations

import contextlib
import functools
import inspect
import io
import operator
import os
import pickle
import re
import site
import sys
import sysconfig
import threading
import time
import types
import uuid
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import cloudpickle

from skyinfra.blobs import payload, unpicklable
from skyinfra.blobs.payload import Payload
from skyinfra.errors import TaskFailed, TaskNotPicklable, UnsafeAnswer
from skyinfra.protocol.calls import Header, Outcome, Part, SecretUse
from skyinfra.protocol.failures import Failure
from skyinfra.protocol.secrets import met
from skyinfra.tasks import missing, tracebacks
from skyinfra.tasks.included import Included
from skyinfra.tasks.secrets import Secrets
from skyinfra.tasks.task import Compute, Decorated, InObject, Task
from skyinfra.worker.execute import named


class Shipment:
    """A task as bytes. ``key`` is unique; ``name`` is by default the function's, for messages.

    A large call stays where it lies: ``call`` is empty then, and ``parcels`` has to be at the head before the task is
    sent; not so where call and result are to be *whole*. included: what the client has synced, which the task is to
    see. echo: whether the client wants what the task prints. env: variables of the pool; those of the task count above
    them. workdir: see `Header`. came: when it was there to be run (``time.monotonic``). secrets: those of the client,
    of which the task gets what its options, its function and its arguments name; uses: those, where they are known.
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
    ) -> None:
        """*key*: unique; where it is not given, one is made. Raises `TaskNotPicklable`, `SecretNotFound`."""
        self.came = time.monotonic()
        self.name = name or task.name
        self.key = key or _key(self.name)
        self.settings = task.settings
        self.included = included
        self.secrets = secrets
        with met() as found:
            packed = _pack_call(task, included, whole=whole)
        if uses is None:
            uses = secrets.uses([*task.settings.secrets, *found.values()]) if secrets is not None else ()
        self.uses = uses
        small = whole or packed.small
        self.brought = small and (secrets is None or secrets.at_head(self.uses))
        self.parcels = [] if small else packed.blobs()
        self.call = packed.joined() if small else b""
        self._header = Header(
            self.key,
            self.name,
            topic,
            task.settings.timeout,
            echo,
            tree=included.tree.name if included is not None else None,
            parts=() if small else packed.parts,
            whole=whole,
            secrets=self.uses,
            env={**(env or {}), **(task.settings.env or {})} or None,
            workdir=workdir,
        )

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


def dump_call(task: Task[Any], included: Included | None = None) -> bytes:
    """The function of *task* with its arguments, pickled in one piece. Raises `TaskNotPicklable`."""
    return _pack_call(task, included, whole=True).joined()


def _pack_call(task: Task[Any], included: Included | None, *, whole: bool = False) -> Payload:
    with _by_value(included):
        try:
            return _pack((task.function, task.args, dict(task.kwargs)), included, whole=whole)
        except TaskNotPicklable:  # of what the object of a method is made from
            raise
        except Exception as error:
            what, why = _culprit(task, included) or (task.name, f"{type(error).__name__}: {error}")
            raise TaskNotPicklable(
                f"{what} cannot be pickled: {why}",
                hint="Create it inside the function, or pass what it is made from.",
            ) from error


class _Pickler(cloudpickle.Pickler):  # type: ignore[misc]
    """Pickles functions and classes that a decorator replaced in a synced module by reference all the same."""

    def __init__(self, *arguments: Any, included: Included, **keywords: Any) -> None:
        super().__init__(*arguments, **keywords)
        self._included = included

    def reducer_override(self, obj: Any) -> Any:
        """As `pickle.Pickler.reducer_override`."""
        if isinstance(obj, types.FunctionType | type | Decorated):
            found = _reference(obj, self._included)
            if found is not None:
                return named, found
        elif isinstance(obj, InObject):
            return obj.reduced(self._included)
        return super().reducer_override(obj)


def _pack(value: object, included: Included | None, *, whole: bool = False) -> Payload:
    if included is None:
        return payload.pack(value, whole=whole)
    return payload.pack(value, functools.partial(_Pickler, included=included), whole=whole)


def _reference(decorated: object, included: Included) -> tuple[str, str] | None:
    """Module and name of a function or class, where a decorator stands in its place in a synced module."""
    plain = _undecorated(decorated)
    module = sys.modules.get(getattr(plain, "__module__", None) or "")
    name = getattr(plain, "__qualname__", "")
    if module is None or "<locals>" in name or included.module_name(module) is None:
        return None
    try:
        found = operator.attrgetter(name)(module)
    except AttributeError:
        return None
    return (module.__name__, name) if _undecorated(found) is plain else None


def _undecorated(value: object) -> object:
    return value.plain if isinstance(value, Decorated) else value


def _culprit(task: Task[Any], included: Included | None) -> tuple[str, str] | None:
    """Names the part of *task* that cannot be pickled, and why."""
    pack = functools.partial(_pack, included=included)
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


# Functions by value -------------------------------------------------------------------------------------------------

# What is pickled may pickle something itself.
_lock = threading.RLock()
_seen: set[str] = set()
_own: list[types.ModuleType] = []


@contextlib.contextmanager
def _by_value(included: Included | None) -> Iterator[None]:
    """While it lasts, functions and classes of the user's own modules are pickled by value: nodes lack those files,
    unless they are *included*."""
    with _lock:
        own = [each for each in _own_modules() if included is None or included.module_name(each) is None]
        registry = cloudpickle.list_registry_pickle_by_value()
        registered = [module for module in own if module.__name__ not in registry]
        for module in registered:
            cloudpickle.register_pickle_by_value(module)
        try:
            yield
        finally:
            for module in registered:
                cloudpickle.unregister_pickle_by_value(module)


def _own_modules() -> list[types.ModuleType]:
    """The imported modules that are neither of the standard library nor installed nor this package."""
    for name in set(sys.modules) - _seen:
        _seen.add(name)
        module = sys.modules.get(name)
        if module is not None and _is_own(name, getattr(module, "__file__", None)):
            _own.append(module)
    # A module that was imported again, or removed, is another object now.
    return [module for module in _own if sys.modules.get(module.__name__) is module]


def _is_own(name: str, file: str | None) -> bool:
    if file is None or not file.endswith(".py") or name == "__main__" or name.split(".")[0] == "skyinfra":
        return False
    path = Path(file)
    if {"site-packages", "dist-packages"} & set(path.parts):
        return False
    return not any(path.is_relative_to(folder) for folder in library_folders())


@functools.cache
def library_folders() -> tuple[Path, ...]:
    """The folders of the standard library and of installed packages."""
    paths = sysconfig.get_paths()
    folders = {paths[kind] for kind in ("stdlib", "platstdlib", "purelib", "platlib")}
    return tuple(Path(folder) for folder in folders | {*site.getsitepackages(), site.getusersitepackages()})


def import_folders() -> list[Path]:
    """Returns the folders from which Python imports here, without installed packages."""
    folders = [Path(os.path.abspath(path)) for path in sys.path if not path.endswith(".zip")]  # noqa: PTH100
    return [folder for folder in dict.fromkeys(folders) if not any(map(folder.is_relative_to, library_folders()))]


def as_task(function: object, args: tuple[object, ...], kwargs: dict[str, object]) -> Task[Any]:
    """A task of a plain or decorated function."""
    if isinstance(function, Compute):
        return Task(function.function, args, kwargs, function.settings)
    if not callable(function):
        raise TypeError(f"a task is made from a function, not from {type(function).__name__}")
    return Task(function, args, kwargs)


# Outcomes -----------------------------------------------------------------------------------------------------------


_KINDS = {(kind.__module__, kind.__qualname__): kind for kind in (Outcome, Part, Failure)}


class _Reader(pickle.Unpickler):
    """Makes outcomes, and nothing else: what the task gave is bytes in them."""

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) not in _KINDS:
            raise pickle.UnpicklingError(f"it holds a {module}.{name}")
        return _KINDS[module, name]


def read_outcome(data: bytes) -> Outcome:
    """The outcome in a `calls.Ending`; no code of others runs here before `result` or `exception`. Raises
    `UnsafeAnswer`."""
    try:
        # That of an earlier version is the outcome alone.
        found = _Reader(io.BytesIO(data[data.index(b"\n") + 1 :] if data.startswith(b"{") else data)).load()
    except Exception as error:  # noqa: BLE001 - pickle raises whatever it likes for what is no pickle
        raise UnsafeAnswer(f"what the head keeps of the job is no outcome, and was not read: {error}") from None
    if not isinstance(found, Outcome):
        raise UnsafeAnswer("what the head keeps of the job is no outcome", given=type(found).__name__)
    return found


def result(outcome: Outcome, name: str) -> Any:
    """The result of the task *name*; raises what it raised, with the traceback of the node."""
    __tracebackhide__ = True  # in notebooks
    raised = exception(outcome, name)
    if raised is not None:
        raise raised
    try:
        # Over mutual TLS, from the fleet itself.
        return pickle.loads(outcome.result or b"", buffers=outcome.buffers)  # noqa: S301
    except ModuleNotFoundError as error:
        error.add_note(f"The result of {name} needs the module {error.name!r} here as well.")
        raise


def exception(outcome: Outcome, name: str) -> BaseException | None:
    """The exception that ended the task *name*, with the traceback of the node, or None."""
    if outcome.failure is None:
        return None
    error = _error(outcome.failure, name)
    if outcome.failure.advice:
        error.add_note(outcome.failure.advice)
    if isinstance(error, SystemExit):
        # As itself it would end the client's program, without a word.
        failed = TaskFailed(f"{name} called sys.exit({error.code!r})", hint="Let it return, or raise an exception.")
        failed.__cause__ = error
        return failed
    if isinstance(error, ModuleNotFoundError) and error.name:
        error.add_note(missing.remedy(error.name, import_folders(), 'sky.connect(..., includes=["{}"]) takes it along'))
    return error


def _error(failure: Failure, name: str) -> BaseException:
    error = _load_error(failure)
    if error is None:
        error = TaskFailed(f"{name} raised an exception that cannot be shipped:\n{failure.text}")
    error.__cause__ = _error(failure.cause, name) if failure.cause else None
    error.__context__ = _error(failure.context, name) if failure.context else error.__cause__
    error.__suppress_context__ = failure.suppress_context
    if failure.traceback is None:
        return error
    return error.with_traceback(tracebacks.readable(pickle.loads(failure.traceback)))  # noqa: S301


def _load_error(failure: Failure) -> BaseException | None:
    """The exception itself, or None where it cannot be made here, its module being missing for example."""
    if failure.error is None:
        return None
    with contextlib.suppress(Exception):
        error = pickle.loads(failure.error)  # noqa: S301
        return error if isinstance(error, BaseException) else None
    return None
