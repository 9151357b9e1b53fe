"""The node's part of a task: what a worker process executes for a client.

A client ships a task as two byte strings: a header (`Header`, JSON) and the pickled call. `run` executes it and gives
an `Outcome` back: the result or the exception, pickled on the node, so that whatever a task does arrives as its own
and not as a failure of the engine. A large call, and a large result, are blobs of the head instead, see
`skyinfra.blobs.payload`; so is the tree that the task is to see.

Travels to nodes: standard library, ``distributed`` and ``cloudpickle`` only.
"""

from __future__ import annotations

import importlib
import operator
import os
import pickle
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar, cast

from skyinfra.blobs import payload, unpicklable
from skyinfra.blobs.payload import Cargo
from skyinfra.blobs.transfer import BlobsMissing
from skyinfra.errors import TaskNotPicklable, TaskTimeout, TaskTooLarge
from skyinfra.protocol import failures, instance
from skyinfra.protocol.calls import SMALL_OUTCOME, Header, Outcome
from skyinfra.worker import attempts, cancellation, inputs, interruption, output, streaming

if TYPE_CHECKING:
    from distributed import Scheduler

F = TypeVar("F")


def plain(function: F) -> F:
    """The function itself: what a decorated function is on a node, where the client package is not installed."""
    return function


def named(module: str, name: str) -> object:
    """What is called *name* in a module that was synced: how its functions and classes travel, by reference."""
    return operator.attrgetter(name)(importlib.import_module(module))


def run(header: bytes, call: bytes) -> Outcome | list[tuple[str, Outcome]] | None:
    """Executes the pickled *call* ``(function, args, kwargs)`` in this thread. Never raises what the task raises.

    A small outcome travels as an event of the task's topic, ``["outcome", key, pickled Outcome]``, ahead of the news
    that the task has ended, and None is the result. A client that fetched it afterwards would make two more ways, and
    would wait for a connection to this process in vain when the next task ends the process. Of a chunk, the outcomes
    that are not small are the result.
    """
    # Here, because the process of a rank needs the rest of this module alone.
    from distributed import get_worker

    task = Header.loads(header)
    worker = get_worker()

    def tell_of(kind: str, key: str, content: object) -> None:
        worker.log_event(task.topic, [kind, key, content])

    def tell(kind: str, content: object) -> None:
        tell_of(kind, task.key, content)

    def say(kind: str, content: object) -> None:
        tell(kind, [worker.name, task.name, content])

    if task.chunk:
        from skyinfra.worker import chunks  # it is made of what is here

        return chunks.run(task, call, tell_of, str(worker.name))
    outcome = _execute(task, call, tell, say if task.echo else None)
    data = pickle.dumps(outcome)
    if len(data) > SMALL_OUTCOME or not task.topic:
        return outcome
    tell("outcome", data)
    return None


def forget(topic: str, dask_scheduler: Scheduler) -> None:
    """Runs on the head: drops the last events of a *topic* that nobody listens to any more."""
    from skyinfra.engine import dask_private

    dask_private.drop_events(dask_scheduler, topic)


def _execute(task: Header, call: bytes, tell: streaming.Send, say: streaming.Send | None) -> Outcome:
    def last_words() -> None:
        if task.topic:
            tell("outcome", pickle.dumps(Outcome(failure=failures.of(_late(task), below=__file__))))

    late = False
    try:
        with (
            attempts.counted(task.key, task.name, task.timeout),
            output.captured(task.key, Path(os.environ[instance.NODE_DIRECTORY])) as file,
            streaming.telling(file, say),
            cancellation.stoppable(task.key),
            cancellation.limited(task.key, task.timeout, last_words) as is_late,
            interruption.task_scope(),
        ):
            try:
                outcome = perform(task, call)
            finally:
                late = is_late()
            if late:  # it ran a program, or caught what was to end it
                raise KeyboardInterrupt
            return outcome
    except BaseException as error:  # noqa: BLE001 - a task may raise anything, sys.exit and Ctrl-C included
        if late and isinstance(error, KeyboardInterrupt):
            error = _late(task).with_traceback(error.__traceback__)
        return failed(error)


def perform(task: Header, call: bytes) -> Outcome:
    """Makes the pickled *call*, and keeps its result. Raises what the task raises."""
    start = time.perf_counter()
    inputs.use_tree(task.tree)
    function, args, kwargs = load(task, call)
    result = function(*args, **kwargs)
    return _keep_result(task, result, start)


def failed(error: BaseException) -> Outcome:
    """The outcome of a task that raised *error*."""
    if isinstance(error, BlobsMissing):
        return Outcome(missing=error.digests)
    return Outcome(failure=failures.of(error, below=__file__))


def _late(task: Header) -> TaskTimeout:
    return failures.late(task.name, task.timeout or 0)


def load(task: Header, call: bytes) -> tuple[Callable[..., object], tuple[object, ...], dict[str, object]]:
    """The function of the pickled *call* with its arguments. Raises what unpickling raises."""
    try:
        loaded = inputs.load(task.parts) if task.parts else pickle.loads(call)  # noqa: S301
    except ModuleNotFoundError as error:
        error.add_note(
            f"The node has no module {error.name!r}, which {task.name} needs: name its package in "
            "sky.Image(pip=[...]), or its files in sky.connect(..., includes=[...])."
        )
        raise
    return cast(tuple[Callable[..., object], tuple[object, ...], dict[str, object]], loaded)


def dump_result(task: Header, result: object) -> bytes:
    """*result*, pickled in one piece. Raises `TaskNotPicklable`."""
    return _pack_result(task, result, whole=True).joined()


def _keep_result(task: Header, result: object, start: float) -> Outcome:
    packed = _pack_result(task, result, whole=task.whole)
    if packed.small or task.whole:
        return Outcome(result=packed.joined(), seconds=time.perf_counter() - start)
    try:
        inputs.keep(packed)
    except TaskTooLarge as error:
        raise TaskTooLarge(f"the result of {task.name}: {error.message}", field=error.field, hint=error.hint) from None
    return Outcome(parts=packed.parts, seconds=time.perf_counter() - start)


def _pack_result(task: Header, result: object, *, whole: bool) -> Cargo:
    try:
        return payload.pack(result, whole=whole)
    except Exception as error:  # noqa: BLE001 - __reduce__ and __getstate__ of a result may raise anything
        raise TaskNotPicklable(
            f"the result of {task.name} cannot be pickled: {unpicklable.described(result, payload.pack, error)}",
            given=type(result).__qualname__,
            hint="Return plain values, arrays, or the path of a file.",
        ) from None
