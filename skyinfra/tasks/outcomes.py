"""Turning the outcome of a task back into its result, or into the exception that it raised."""

from __future__ import annotations

import contextlib
import functools
import io
import pickle
import re
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from skyinfra.errors import TaskFailed, UnsafeAnswer
from skyinfra.program import views
from skyinfra.protocol.calls import Outcome, Part
from skyinfra.protocol.failures import Failure
from skyinfra.tasks import missing, tracebacks
from skyinfra.tasks.modules import import_folders

# What PyTorch and CuPy say on a machine without a GPU.
_NO_DEVICE = re.compile(
    r"deserialize object on (a )?(CUDA|HIP|XPU|MPS) device|[Nn]o CUDA GPUs are available|Found no NVIDIA driver"
    r"|cudaError(NoDevice|InsufficientDriver)|no CUDA-capable device"
)
_KINDS = {(kind.__module__, kind.__qualname__): kind for kind in (Outcome, Part, Failure)}


class _Reader(pickle.Unpickler):
    """Makes outcomes, and nothing else: what the task gave is bytes in them."""

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) not in _KINDS:
            raise pickle.UnpicklingError(f"it holds a {module}.{name}")
        return _KINDS[module, name]


def read_outcome(data: bytes) -> Outcome:
    """Returns the outcome in a `calls.Ending`; no code of others runs here before `result` or `exception`. Raises
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
    """Returns the result of the task *name*; raises what it raised, with the traceback of the node."""
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
    except Exception as error:
        if _NO_DEVICE.search(str(error)):
            text = f"The result of {name} is on a device of its slot, and this machine has none for it: "
            note(error, f"{text}return tensor.cpu(), model.cpu() or array.get().")
        raise


def exception(outcome: Outcome, name: str) -> BaseException | None:
    """Returns the exception that ended the task *name*, with the traceback of the node, or None.

    It is an `Exception`: what would act on the program here, as Ctrl-C, sys.exit(), the end of an iterator or a
    cancelled coroutine do, is the cause of a `TaskFailed`.
    """
    failure = outcome.failure
    if failure is None:
        return None
    if outcome.result is not None:  # a large one, which was fetched
        failure = replace(_Reader(io.BytesIO(outcome.result)).load(), advice=failure.advice)
    error = _error(failure, name)
    if failure.left_out:
        note(error, f"It has {failure.left_out} more exceptions before it or in it, which are left out.")
    if failure.advice:
        note(error, failure.advice)
    if not isinstance(error, Exception) or isinstance(error, StopIteration | StopAsyncIteration):
        failed = _failed(error, failure, name)
        failed.__cause__ = error
        return failed
    # Python says so too of a distribution whose version is asked for.
    if type(error) is ModuleNotFoundError and error.name:
        way = 'sky.connect(..., includes=["{}"]) takes it along'
        note(error, missing.remedy(error.name, import_folders(), way))
    if isinstance(error, FileNotFoundError) and isinstance(error.filename, str):
        name = error.filename
        if (remedy := missing.file_remedy(name, views.below_modules(name), import_folders())) is not None:
            note(error, remedy)
    return error


def _failed(error: BaseException, failure: Failure, name: str) -> TaskFailed:
    """Returns the error for a task that raised *error*, which would act on the program here."""
    if isinstance(error, SystemExit):
        return TaskFailed(f"{name} called sys.exit({error.code!r})", hint="Let it return, or raise an exception.")
    return TaskFailed(f"{name} raised {failure.summary}", hint="It is the cause of this error, with its traceback.")


def note(error: BaseException, text: str) -> None:
    """Adds a note to *error*, whose class may refuse to set attributes."""
    BaseException.__setattr__(error, "__notes__", [*getattr(error, "__notes__", ()), text])


def _error(failure: Failure, name: str) -> BaseException:
    members = [_error(each, name) for each in failure.members]
    error = _load_error(failure, members)
    if error is None:
        error = TaskFailed(f"{name} raised an exception that cannot be shipped:\n{tracebacks.text(failure)}")
    cause = _error(failure.cause, name) if failure.cause else None
    links = {
        "__cause__": cause,
        "__context__": _error(failure.context, name) if failure.context else cause,
        "__suppress_context__": failure.suppress_context,
    }
    for link, value in links.items():
        BaseException.__setattr__(error, link, value)
    return error.with_traceback(tracebacks.made(failure))


def _load_error(failure: Failure, members: Sequence[BaseException]) -> BaseException | None:
    """Returns the exception itself, or None where it cannot be made here, its module being missing for example."""
    if failure.error is None:
        return None
    with contextlib.suppress(Exception):
        error = pickle.loads(failure.error)  # noqa: S301
        if isinstance(error, functools.partial):  # a group
            error = error(members)
        return error if isinstance(error, BaseException) else None
    return None
