"""Ends running tasks: cancelled ones, and those that are over their time."""

from __future__ import annotations

import contextlib
import ctypes
import faulthandler
import os
import signal
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from skyinfra.worker import attempts

# A function has so long to clean up after KeyboardInterrupt: its slot is to be free in under a second.
GRACE_S = 0.5
# Between SIGTERM and SIGKILL of a program.
PROGRAM_GRACE_S = 5.0
# The last message of the process is sent within that time.
_SPEAK_S = 0.1
# After the time of a task, and its grace.
_WATCHDOG_S = PROGRAM_GRACE_S + 1.0


@dataclass
class _Running:
    """A task of this process: the thread that executes it, and the process group of the program it runs, if any.

    asked: whether it was asked to stop.
    """

    thread: int
    group: int | None = None
    asked: bool = False


_lock = threading.Lock()
_running: dict[str, _Running] = {}
# Stopped before they started: Dask may still start them.
_stopped: deque[str] = deque(maxlen=1000)


@contextlib.contextmanager
def stoppable(key: str) -> Iterator[None]:
    """Makes `stop` able to end the task *key* of this thread. Raises KeyboardInterrupt where it was stopped before."""
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


@contextlib.contextmanager
def limited(
    key: str, seconds: float | None, last_words: Callable[[], object], output: int = 2
) -> Iterator[Callable[[], bool]]:
    """Stops the task *key* after *seconds*. Yields a function that returns whether that was done.

    *last_words*: called in another thread before the process is killed, where the task does not end by itself. Where
    native code holds the interpreter, no thread of Python runs: a watchdog of faulthandler ends the process then, and
    leaves the stacks of all threads in the output of the task, the open file *output*.
    """
    if seconds is None:
        yield lambda: False
        return
    over = threading.Event()

    def end() -> None:
        over.set()
        _ask(key, last_words)

    timer = later(seconds, end)
    faulthandler.dump_traceback_later(seconds + _WATCHDOG_S, exit=True, file=output)
    try:
        yield over.is_set
    finally:
        faulthandler.cancel_dump_traceback_later()
        timer.cancel()


def stop(key: str) -> None:
    """Stops the task *key* of this process: KeyboardInterrupt in its thread, or SIGTERM to the program it runs.

    After `GRACE_S` or `PROGRAM_GRACE_S` this process, which its Nanny starts again, or the program is killed.
    """
    with _lock:
        _stopped.append(key)
    # Its starts so far do not count: its client may send it again.
    _ask(key, lambda: attempts.forgive(key))


def interrupt(key: str) -> None:
    """Sends SIGINT to the program that the task *key* of this process runs, as Ctrl-C does at its terminal."""
    with _lock:
        task = _running.get(key)
        if task is not None and task.group is not None:
            signal_group(task.group, signal.SIGINT)


def set_group(key: str, group: int | None) -> None:
    """Sets the process group of the program that the task *key* runs; None: it has ended."""
    with _lock:
        task = _running.get(key)
        if task is None:
            return
        task.group = group
        if group is not None and (task.asked or key in _stopped):
            signal_group(group, signal.SIGTERM)


def signal_group(group: int, number: signal.Signals) -> None:
    """Sends a signal to a process group that may have ended."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(group, number)


def later(seconds: float, action: Callable[[], object]) -> threading.Timer:
    """Calls *action* after *seconds*, in a thread that the process does not wait for."""
    timer = threading.Timer(seconds, action)
    timer.daemon = True
    timer.start()
    return timer


def _ask(key: str, last_words: Callable[[], object]) -> None:
    with _lock:
        task = _running.get(key)
        if task is None:
            return
        task.asked = True
        if task.group is not None:
            signal_group(task.group, signal.SIGTERM)
        else:
            interrupt = ctypes.py_object(KeyboardInterrupt)
            ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(task.thread), interrupt)
        grace = GRACE_S if task.group is None else PROGRAM_GRACE_S
    later(grace, lambda: _kill(key, last_words))


def _kill(key: str, last_words: Callable[[], object]) -> None:
    with _lock:
        task = _running.get(key)
        if task is None:
            return
        if task.group is not None:
            signal_group(task.group, signal.SIGKILL)
            return
    last_words()
    time.sleep(_SPEAK_S)
    with _lock:
        if key in _running:
            os.kill(os.getpid(), signal.SIGKILL)
