"""The node's part of a task: what a worker process executes for a client.

A client ships a task as two byte strings: a header (`Header`, JSON) and the pickled call. `run` executes it and gives
an `Outcome` back: the result or the exception, pickled on the node, so that whatever a task does arrives as its own
and not as a failure of the engine. `script` is the task that runs a file as a program; `stop` ends a running task.

Travels to nodes: standard library, ``distributed`` and ``cloudpickle`` only.
"""

from __future__ import annotations

import codecs
import contextlib
import ctypes
import io
import json
import os
import pickle
import selectors
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO, TypeVar, cast

import cloudpickle
from distributed import get_worker

from skyinfra._errors import StateDirectoryError, TaskAttemptsExceeded, TaskNotPicklable
from skyinfra.protocol import failures, instance, interruption, output

if TYPE_CHECKING:
    from distributed import Scheduler

F = TypeVar("F")

NODE_DIRECTORY = instance.NODE_DIRECTORY
# A task that was started that often and never ended is not started again on this node.
ATTEMPTS = 3
# A task that is asked to stop has that long to clean up.
STOP_GRACE_S = 5.0
# Outcomes of at most that many bytes travel as events, of which the head keeps the last thousand of each client.
SMALL_OUTCOME = 8192
# Lines of a script are sent together when they come faster than this, in seconds.
_FLUSH_S = 0.05
_FLUSH_LINES = 500
# How often a silent script is looked at, in seconds.
_ENDED_S = 0.5


@dataclass(frozen=True)
class Header:
    """What a node knows about a task before it unpickles it.

    key: unique. name: of the function. topic: the scheduler's topic that its client listens to.
    """

    key: str
    name: str
    topic: str

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
    task = Header.loads(header)
    outcome = _execute(task, call)
    data = pickle.dumps(outcome)
    if len(data) > SMALL_OUTCOME:
        return outcome
    get_worker().log_event(task.topic, ["outcome", task.key, data])
    return None


def forget(topic: str, dask_scheduler: Scheduler) -> None:
    """Runs on the head: drops the last events of a *topic* that nobody listens to any more."""
    dask_scheduler._broker.truncate(topic)


def _execute(task: Header, call: bytes) -> Outcome:
    try:
        with _attempt(task), _captured(task), _stoppable(task.key), interruption.task_scope():
            function, args, kwargs = _load(task, call)
            return Outcome(result=_dump_result(task, function(*args, **kwargs)))
    except BaseException as error:  # noqa: BLE001 - a task may raise anything, sys.exit and Ctrl-C included
        return Outcome(failure=failures.of(error, below=__file__))


def _captured(task: Header) -> contextlib.AbstractContextManager[None]:
    return output.captured(task.key, Path(os.environ[NODE_DIRECTORY]))


def _load(task: Header, call: bytes) -> tuple[Callable[..., object], tuple[object, ...], dict[str, object]]:
    try:
        return cast(tuple[Callable[..., object], tuple[object, ...], dict[str, object]], pickle.loads(call))  # noqa: S301
    except ModuleNotFoundError as error:
        error.add_note(
            f"The node has no module {error.name!r}, which {task.name} needs: name its package in sky.Image(pip=[...])."
        )
        raise


def _dump_result(task: Header, result: object) -> bytes:
    try:
        return cast(bytes, cloudpickle.dumps(result))
    except Exception as error:  # noqa: BLE001 - __reduce__ and __getstate__ of a result may raise anything
        raise TaskNotPicklable(
            f"the result of {task.name} cannot be pickled: {type(error).__name__}: {error}",
            given=type(result).__qualname__,
            hint="Return plain values, arrays, or the path of a file.",
        ) from None


# Attempts -----------------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def _attempt(task: Header) -> Iterator[None]:
    """Counts the starts of a task that has not ended yet, one byte each, in a file of the node.

    A worker process that dies leaves the file behind, and Dask starts the task again elsewhere: without a limit a
    task that ends its process does so for ever, and takes down whatever else its next workers were given.
    """
    path = _attempt_file(task.key)
    try:
        starts = _count_start(path)
    except OSError as error:
        raise StateDirectoryError(
            f"the node cannot keep count of its tasks: {error.strerror}",
            field=str(path),
            hint="Free space on the node's disk, or replace the node.",
        ) from None
    try:
        if starts > ATTEMPTS:
            raise TaskAttemptsExceeded(
                f"{task.name} ended its worker process {ATTEMPTS} times and is not tried again",
                hint="Usual causes: the machine ran out of memory, a crash in native code, or os._exit().",
            )
        yield
    finally:
        path.unlink(missing_ok=True)


def forgive(key: str, directory: Path) -> None:
    """The node in *directory* ends the task *key* for reasons of its own: its starts so far do not count."""
    _attempt_file(key, directory).unlink(missing_ok=True)


def _attempt_file(key: str, directory: Path | None = None) -> Path:
    return (directory or Path(os.environ[NODE_DIRECTORY])) / "attempts" / key


def _count_start(path: Path) -> int:
    path.parent.mkdir(exist_ok=True)
    with path.open("ab") as file:
        file.write(b".")
        return file.tell()


# Stopping -----------------------------------------------------------------------------------------------------------


@dataclass
class _Running:
    """A task of this process: the thread that executes it, and the process group of the script it runs, if any."""

    thread: int
    group: int | None = None


_lock = threading.Lock()
_running: dict[str, _Running] = {}
# Asked to stop before they started: the engine may still start them.
_stopped: deque[str] = deque(maxlen=1000)


@contextlib.contextmanager
def _stoppable(key: str) -> Iterator[None]:
    thread = threading.get_ident()
    with _lock:
        if key in _stopped:
            raise KeyboardInterrupt
        _running[key] = _Running(thread)
    try:
        yield
    finally:
        with _lock:
            _running.pop(key, None)
            # An interrupt that was asked for but not delivered yet must not hit the next task of this thread.
            ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(thread), None)


def stop(key: str) -> None:
    """Stops the task *key* of this process: KeyboardInterrupt in its thread, or SIGTERM to the script it runs.

    What still runs after `STOP_GRACE_S` is killed: the script, or this process, which its Nanny starts again.
    """
    with _lock:
        _stopped.append(key)
        task = _running.get(key)
        if task is None:
            return
        if task.group is not None:
            _signal_group(task.group, signal.SIGTERM)
        else:
            interrupt = ctypes.py_object(KeyboardInterrupt)
            ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(task.thread), interrupt)
    timer = threading.Timer(STOP_GRACE_S, _kill, [key])
    timer.daemon = True
    timer.start()


def _kill(key: str) -> None:
    with _lock:
        task = _running.get(key)
        if task is None:
            return
        if task.group is not None:
            _signal_group(task.group, signal.SIGKILL)
            return
        _attempt_file(key).unlink(missing_ok=True)
        os.kill(os.getpid(), signal.SIGKILL)


def _signal_group(group: int, number: signal.Signals) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(group, number)


# Scripts ------------------------------------------------------------------------------------------------------------


def script(source: bytes, name: str, args: list[str], env: dict[str, str], topic: str, run_id: str) -> int:
    """Runs the program *source* as ``python -u NAME ARGS`` in a new folder; the exit code, negative for a signal.

    Its lines go to the *topic* of the scheduler as ``["lines", run_id, [[stream, text], ...]]`` while it
    runs, stream being ``stdout`` or ``stderr``, without line ends. Carriage returns end lines too: progress bars move.
    """
    worker = get_worker()
    key = str(worker.get_current_task())
    with _folder() as folder, _group() as group:
        path = Path(folder) / name
        path.write_bytes(source)
        process = subprocess.Popen(
            [sys.executable, "-u", str(path), *args],
            cwd=folder,
            env={**os.environ, **env},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            process_group=group,
        )
        with process:
            _set_group(key, group)
            try:
                _stream(process, lambda lines: worker.log_event(topic, ["lines", run_id, lines]))
                return process.wait()
            finally:
                _set_group(key, None)
                # What the program started and left behind would keep the slot's memory.
                _signal_group(group, signal.SIGKILL)


def _folder() -> tempfile.TemporaryDirectory[str]:
    """Of a script: below the node's own, with which it goes even where this process could not remove it."""
    return tempfile.TemporaryDirectory(prefix="script-", dir=os.environ[NODE_DIRECTORY])


# Its input ends when this process does, however it does: the task starts again elsewhere, and must not run twice.
_GUARD = "trap '' HUP INT TERM; read -r _; kill -KILL 0"


@contextlib.contextmanager
def _group() -> Iterator[int]:
    """A process group for a script, which is killed with this process. Its leader is a shell that waits for that."""
    command = ["/bin/sh", "-c", _GUARD]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.DEVNULL, process_group=0) as guard:
        try:
            yield guard.pid
        finally:
            _signal_group(guard.pid, signal.SIGKILL)


def _set_group(key: str, group: int | None) -> None:
    with _lock:
        if key in _running:
            _running[key].group = group
        if group is not None and key in _stopped:
            _signal_group(group, signal.SIGTERM)


class _Lines:
    """Cuts the bytes of one stream into lines."""

    def __init__(self, stream: str) -> None:
        self._stream = stream
        decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
        self._decoder = io.IncrementalNewlineDecoder(decoder, translate=True)
        self._rest = ""

    def feed(self, data: bytes) -> list[list[str]]:
        """The lines that *data* completes; no data means the end of the stream."""
        text = self._rest + self._decoder.decode(data, final=not data)
        *lines, self._rest = text.split("\n")
        if not data and self._rest:
            lines.append(self._rest)
            self._rest = ""
        return [[self._stream, line] for line in lines]


def _stream(process: subprocess.Popen[bytes], send: Callable[[list[list[str]]], None]) -> None:
    """Hands the lines of both streams to *send* in the order in which they are read, until both have ended."""
    pending: list[list[str]] = []
    flushed = time.monotonic()
    with selectors.DefaultSelector() as selector:
        for stream, file in (("stdout", process.stdout), ("stderr", process.stderr)):
            selector.register(cast(BinaryIO, file), selectors.EVENT_READ, _Lines(stream))
        while selector.get_map():
            ready = selector.select(timeout=_FLUSH_S if pending else _ENDED_S)
            if not ready and not pending and process.poll() is not None:
                break  # it ended, and something that it left behind holds its streams open
            for item, _ in ready:
                data = os.read(item.fd, 65536)
                pending += cast(_Lines, item.data).feed(data)
                if not data:
                    selector.unregister(item.fileobj)
            now = time.monotonic()
            if pending and (not ready or now - flushed >= _FLUSH_S or len(pending) >= _FLUSH_LINES):
                send(pending)
                pending, flushed = [], now
    if pending:
        send(pending)
