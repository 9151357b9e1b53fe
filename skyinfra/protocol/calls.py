"""The node's part of a task: what a worker process executes for a client.

A client ships a task as two byte strings: a header (`Header`, JSON) and the pickled call. `run` executes it and gives
an `Outcome` back: the result or the exception, pickled on the node, so that whatever a task does arrives as its own
and not as a failure of the engine.

Travels to nodes: standard library, ``distributed`` and ``cloudpickle`` only.
"""

from __future__ import annotations

import json
import os
import pickle
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar, cast

import cloudpickle

from skyinfra._errors import TaskNotPicklable, TaskTimeout
from skyinfra.protocol import attempts, failures, instance, interruption, output, stopping, telling

if TYPE_CHECKING:
    from distributed import Scheduler

F = TypeVar("F")

# The topics of our clients begin so: the head keeps nothing of them once their client is gone.
TOPIC = "skyinfra-"
# The first event of a topic, from a head that takes tasks as `TASK_MESSAGE` instead of a graph.
TAKES_TASKS = "takes tasks"
# A client's message on its stream to such a head, with ``key``, ``header``, ``call`` and ``resources``.
TASK_MESSAGE = "skyinfra-task"
# Outcomes of at most that many bytes travel as events, of which the head keeps the last thousand of each client.
SMALL_OUTCOME = 8192


@dataclass(frozen=True)
class Header:
    """What a node knows about a task before it unpickles it.

    key: unique. name: of the function. topic: the scheduler's topic that its client listens to; empty where nobody
    does. timeout: for how many seconds the task may run, None for ever. echo: whether the client wants what it prints.
    """

    key: str
    name: str
    topic: str
    timeout: float | None = None
    echo: bool = False

    def dumps(self) -> bytes:
        """One line of JSON."""
        return json.dumps(asdict(self)).encode()

    @classmethod
    def loads(cls, data: bytes) -> Header:
        """The inverse of `dumps`."""
        return cls(**json.loads(data))


@dataclass(frozen=True)
class Outcome:
    """How a task ended: with a pickled ``result``, or with a ``failure``."""

    result: bytes | None = None
    failure: failures.Failure | None = None


def plain(function: F) -> F:
    """The function itself: what a decorated function is on a node, where the client package is not installed."""
    return function


def run(header: bytes, call: bytes) -> Outcome | None:
    """Executes the pickled *call* ``(function, args, kwargs)`` in this thread. Never raises what the task raises.

    A small outcome travels as an event of the task's topic, ``["outcome", key, pickled Outcome]``, ahead of the news
    that the task has ended, and None is the result. A client that fetched it afterwards would make two more ways, and
    would wait for a connection to this process in vain when the next task ends the process.
    """
    # Here, because the process of a rank needs the rest of this module alone.
    from distributed import get_worker

    task = Header.loads(header)
    worker = get_worker()

    def tell(kind: str, content: object) -> None:
        worker.log_event(task.topic, [kind, task.key, content])

    def say(kind: str, content: object) -> None:
        tell(kind, [worker.name, task.name, content])

    outcome = _execute(task, call, tell, say if task.echo else None)
    data = pickle.dumps(outcome)
    if len(data) > SMALL_OUTCOME or not task.topic:
        return outcome
    tell("outcome", data)
    return None


def forget(topic: str, dask_scheduler: Scheduler) -> None:
    """Runs on the head: drops the last events of a *topic* that nobody listens to any more."""
    dask_scheduler._broker.truncate(topic)


def _execute(task: Header, call: bytes, tell: telling.Send, say: telling.Send | None) -> Outcome:
    def last_words() -> None:
        if task.topic:
            tell("outcome", pickle.dumps(Outcome(failure=failures.of(_late(task), below=__file__))))

    late = False
    try:
        with (
            attempts.counted(task.key, task.name, task.timeout),
            output.captured(task.key, Path(os.environ[instance.NODE_DIRECTORY])) as file,
            telling.telling(file, say),
            stopping.stoppable(task.key),
            stopping.limited(task.key, task.timeout, last_words) as is_late,
            interruption.task_scope(),
        ):
            try:
                function, args, kwargs = load(task, call)
                result = dump_result(task, function(*args, **kwargs))
            finally:
                late = is_late()
            if late:  # it ran a program, or caught what was to end it
                raise KeyboardInterrupt
            return Outcome(result=result)
    except BaseException as error:  # noqa: BLE001 - a task may raise anything, sys.exit and Ctrl-C included
        if late and isinstance(error, KeyboardInterrupt):
            error = _late(task).with_traceback(error.__traceback__)
        return Outcome(failure=failures.of(error, below=__file__))


def _late(task: Header) -> TaskTimeout:
    return failures.late(task.name, task.timeout or 0)


def load(task: Header, call: bytes) -> tuple[Callable[..., object], tuple[object, ...], dict[str, object]]:
    """The function of the pickled *call* with its arguments. Raises what unpickling raises."""
    try:
        return cast(tuple[Callable[..., object], tuple[object, ...], dict[str, object]], pickle.loads(call))  # noqa: S301
    except ModuleNotFoundError as error:
        error.add_note(
            f"The node has no module {error.name!r}, which {task.name} needs: name its package in sky.Image(pip=[...])."
        )
        raise


def dump_result(task: Header, result: object) -> bytes:
    """*result*, pickled. Raises `TaskNotPicklable`."""
    try:
        return cast(bytes, cloudpickle.dumps(result))
    except Exception as error:  # noqa: BLE001 - __reduce__ and __getstate__ of a result may raise anything
        raise TaskNotPicklable(
            f"the result of {task.name} cannot be pickled: {type(error).__name__}: {error}",
            given=type(result).__qualname__,
            hint="Return plain values, arrays, or the path of a file.",
        ) from None
