"""Turning a task into bytes before anything is sent, and an outcome back into a result or an exception."""

from __future__ import annotations

import contextlib
import functools
import inspect
import pickle
import re
import site
import sys
import sysconfig
import threading
import types
import uuid
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import cloudpickle

from skyinfra._errors import TaskAttemptsExceeded, TaskFailed, TaskNotPicklable, TaskTooLarge
from skyinfra.client.task import Compute, Task
from skyinfra.protocol.calls import Header, Outcome
from skyinfra.protocol.failures import Failure


class Shipment:
    """A task as bytes. ``key`` is unique; ``name`` is the function's name, for messages."""

    def __init__(self, task: Task[Any], *, topic: str, echo: bool = False, key: str | None = None) -> None:
        """*key*: unique; where it is not given, one is made. Raises `TaskNotPicklable`."""
        self.name = task.name
        self.key = key or f"{re.sub(r'[^A-Za-z0-9_.]', '_', task.name)[-60:]}-{uuid.uuid4().hex}"
        self.settings = task.settings
        self.call = dump_call(task)
        self._header = Header(self.key, self.name, topic, task.settings.timeout, echo)

    def attempt(self, number: int) -> tuple[str, bytes]:
        """Key and header of the attempt *number*, from 0. `logs --task` finds all of them by the key of the first."""
        header = self._header if number == 0 else replace(self._header, key=f"{self.key}.{number}")
        return header.key, header.dumps()


def dump_call(task: Task[Any]) -> bytes:
    """The function of *task* with its arguments, pickled. Raises `TaskNotPicklable`."""
    with _by_value():
        try:
            return _dumps((task.function, task.args, dict(task.kwargs)))
        except Exception as error:
            what, cause = _culprit(task) or (task.name, error)
            raise TaskNotPicklable(
                f"{what} cannot be pickled: {type(cause).__name__}: {cause}",
                hint="Create it inside the function, or pass what it is made from.",
            ) from error


def _dumps(value: object) -> bytes:
    data: bytes = cloudpickle.dumps(value, protocol=pickle.HIGHEST_PROTOCOL)
    return data


def _culprit(task: Task[Any]) -> tuple[str, Exception] | None:
    """Which part of *task* cannot be pickled, in words, and why."""
    for label, value in _parts(task):
        try:
            _dumps(value)
        except Exception as error:  # noqa: BLE001 - as above
            return label, error
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

_lock = threading.Lock()
_seen: set[str] = set()
_own: list[types.ModuleType] = []


@contextlib.contextmanager
def _by_value() -> Iterator[None]:
    """While it lasts, functions and classes of the user's own modules are pickled by value: nodes lack those files."""
    with _lock:
        registered = [module for module in _own_modules() if module.__name__ not in _registry()]
        for module in registered:
            cloudpickle.register_pickle_by_value(module)
        try:
            yield
        finally:
            for module in registered:
                cloudpickle.unregister_pickle_by_value(module)


def _registry() -> set[str]:
    names: set[str] = cloudpickle.list_registry_pickle_by_value()
    return names


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
    return not any(path.is_relative_to(folder) for folder in _library_folders())


@functools.cache
def _library_folders() -> tuple[Path, ...]:
    paths = sysconfig.get_paths()
    folders = {paths[kind] for kind in ("stdlib", "platstdlib", "purelib", "platlib")}
    return tuple(Path(folder) for folder in folders | {*site.getsitepackages(), site.getusersitepackages()})


def as_task(function: object, args: tuple[object, ...], kwargs: dict[str, object]) -> Task[Any]:
    """A task of a plain or decorated function."""
    if isinstance(function, Compute):
        return Task(function.function, args, kwargs, function.settings)
    plain = function
    if not callable(plain):
        raise TypeError(f"a task is made from a function, not from {type(plain).__name__}")
    return Task(plain, args, kwargs)


# Outcomes -----------------------------------------------------------------------------------------------------------


def result(outcome: Outcome, name: str) -> Any:
    """The result of the task *name*; raises what it raised, with the traceback of the node."""
    raised = exception(outcome, name)
    if raised is not None:
        raise raised
    try:
        return pickle.loads(outcome.result or b"")  # noqa: S301 - the fleet's own, over mutual TLS
    except ModuleNotFoundError as error:
        error.add_note(f"The result of {name} needs the module {error.name!r} here as well.")
        raise


def exception(outcome: Outcome, name: str) -> BaseException | None:
    """The exception that ended the task *name*, with the traceback of the node, or None."""
    return None if outcome.failure is None else _error(outcome.failure, name)


def may_pass(outcome: Outcome) -> bool:
    """Whether the task failed with something that another attempt may not meet."""
    if outcome.failure is None:
        return False
    return not isinstance(_load_error(outcome.failure), (TaskNotPicklable, TaskTooLarge, TaskAttemptsExceeded))


def _error(failure: Failure, name: str) -> BaseException:
    error = _load_error(failure)
    if error is None:
        error = TaskFailed(f"{name} raised an exception that cannot be shipped:\n{failure.text}")
    error.__cause__ = _error(failure.cause, name) if failure.cause else None
    error.__context__ = _error(failure.context, name) if failure.context else error.__cause__
    error.__suppress_context__ = failure.suppress_context
    if failure.traceback is None:
        return error
    return error.with_traceback(pickle.loads(failure.traceback))  # noqa: S301


def _load_error(failure: Failure) -> BaseException | None:
    """The exception itself, or None where it cannot be made here, its module being missing for example."""
    if failure.error is None:
        return None
    with contextlib.suppress(Exception):
        error = pickle.loads(failure.error)  # noqa: S301
        return error if isinstance(error, BaseException) else None
    return None
