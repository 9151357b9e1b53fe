"""Ends running tasks: cancelled ones, and those that are over their time.

A task is executed in the main thread, and is ended as Ctrl-C ends a program: SIGINT wakes it wherever it waits. It gets
that signal only while the code of its user runs: never while a node prepares it or cleans up after it.
"""

from __future__ import annotations

import contextlib
import faulthandler
import importlib
import os
import signal
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from skyinfra.protocol.calls import PROGRAM_GRACE_S
from skyinfra.worker import attempts

# A function has so long to clean up after KeyboardInterrupt: its slot is to be free in under a second.
GRACE_S = 0.5
# The last message of the process is sent within that time.
_SPEAK_S = 0.1
# After the time of a task, and its grace.
_WATCHDOG_S = PROGRAM_GRACE_S + 1.0
# What the module `signal` calls: it makes enumerations of the answers, which takes twenty times as long.
SIGNALS: Any = importlib.import_module("_signal")


@dataclass
class _Running:
    """A task of this process. group: of the processes of the program that it runs, if any.

    asked: whether it was asked to stop. told: whether it got its KeyboardInterrupt.
    """

    group: int | None = None
    asked: bool = False
    interrupted: bool = False


_lock = threading.Lock()
_running: dict[str, _Running] = {}
# The task of the main thread, and whether code of its user runs there.
_present: _Running | None = None
_reachable = False
# Stopped before they started: Dask may still start them.
_stopped: deque[str] = deque(maxlen=1000)


def ignore_interrupts() -> None:
    """Makes SIGINT do nothing but to a task. Is called in the main thread, before the first one."""
    signal.signal(signal.SIGINT, _ignore)


def _ignore(_number: int, _frame: object) -> None:
    """A handler, and not SIG_IGN, which the programs that tasks start would inherit."""


@contextlib.contextmanager
def stoppable(key: str) -> Iterator[None]:
    """Makes `stop` able to end the task *key* of this thread. Raises KeyboardInterrupt where it was stopped before."""
    global _present
    with _lock:
        if key in _stopped:
            raise KeyboardInterrupt
        _running[key] = _present = _Running()
    try:
        yield
    finally:
        with _lock:
            _running.pop(key, None)
            _present = None


@contextlib.contextmanager
def reachable() -> Iterator[None]:
    """While the code of a user runs, in the body: KeyboardInterrupt is raised there once where its task is stopped.

    Does nothing in another thread than the main one, and within another such body.
    """
    if _reachable or threading.current_thread() is not threading.main_thread():
        yield
        return
    before = SIGNALS.getsignal(signal.SIGINT)
    # That of Python itself: with another one, asyncio.run does not end its coroutines in order.
    SIGNALS.signal(signal.SIGINT, signal.default_int_handler)
    try:
        _open()
        yield
    finally:
        _shut(before)


def _open() -> None:
    global _reachable
    with _lock:
        if _present is not None and _present.asked and not _present.interrupted and _present.group is None:
            _present.interrupted = True
            raise KeyboardInterrupt
        _reachable = True


def _shut(handler: Any) -> None:
    """Takes no interrupts any more. What was sent before arrives here at the latest: nothing that comes after this, and
    no other task, is interrupted for it."""
    global _reachable
    while True:
        try:
            with _lock:
                _reachable = False
            SIGNALS.signal(signal.SIGINT, handler)
            return
        except BaseException:  # noqa: BLE001, S112 - an interrupt, or what a handler of the task's own raises for it
            continue


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
    """Stops the task *key* of this process: KeyboardInterrupt in its code, or SIGTERM to the program it runs.

    After `GRACE_S` or `PROGRAM_GRACE_S` this process, which its Nanny starts again, or the program is killed.
    """
    with _lock:
        _stopped.append(key)
    abandon(key)


def abandon(key: str) -> None:
    """Stops the task *key* as `stop` does, where it runs; one that begins later is not stopped."""
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
        elif _in_code(task) and not task.interrupted:
            task.interrupted = True
            # To this thread: only so are calls that wait in it woken.
            signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)
        grace = GRACE_S if task.group is None else PROGRAM_GRACE_S
    later(grace, lambda: _kill(key, last_words))


def _in_code(task: _Running | None) -> bool:
    """Returns whether code of the user of *task* runs. What the node does for the task ends by itself."""
    return _reachable and task is not None and task is _present


def _kill(key: str, last_words: Callable[[], object]) -> None:
    with _lock:
        task = _running.get(key)
        if task is not None and task.group is not None:
            signal_group(task.group, signal.SIGKILL)
            return
        if not _in_code(task):
            return
    last_words()
    time.sleep(_SPEAK_S)
    with _lock:
        if _in_code(_running.get(key)):
            os.kill(os.getpid(), signal.SIGKILL)
