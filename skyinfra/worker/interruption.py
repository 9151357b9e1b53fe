"""Interruption of tasks: a task learns that its node is drained, and reacts.

The runner of a drained or preempted node writes `FILE` in the node's folder. Every process of a task can read it: the
worker, its scripts and ranks. A file, not a message: a task that holds the GIL sees it as soon as it looks.
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
import threading
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TypeVar

from skyinfra.protocol.instance import NODE_DIRECTORY
from skyinfra.protocol.interruption import FILE, Interruption

C = TypeVar("C", bound=Callable[[], object])

# Between two looks of a process with callbacks.
_POLL_S = 0.25


def interruption() -> Interruption | None:
    """Returns why and when the node of this task is taken out of service; None while it is not, or in no task."""
    if not interrupted():
        return None
    with contextlib.suppress(OSError):  # the drain may end meanwhile
        return Interruption(**json.loads(Path(os.environ[NODE_DIRECTORY], FILE).read_text(encoding="utf-8")))
    return None


def interrupted() -> bool:
    """Returns whether the node of this task is being taken out of service: save what is needed to go on elsewhere.

    True from a spot notice or a `drain` on. The task may go on; what has not ended in time is ended with its process
    and starts again on another node. False outside of a task, so that the same function runs anywhere. It costs some
    microseconds, so that a loop may ask at every step.
    """
    folder = os.environ.get(NODE_DIRECTORY)
    return folder is not None and os.path.exists(f"{folder}/{FILE}")  # noqa: PTH110 - asked in inner loops


# Callbacks ----------------------------------------------------------------------------------------------------------

_changed = threading.Condition()
_callbacks: list[Callable[[], object]] = []
_watcher: threading.Thread | None = None
_running = False


def on_interrupt(callback: C) -> C:
    """Calls *callback* once, without arguments, when the node of this task is taken out of service.

    It runs in a thread of its own, beside the task, which ends no sooner than it; at once where the node is being taken
    already. What it raises is printed and ends nothing. It goes with the task that registered it. Gives *callback*
    back, so that it may stand as a decorator.
    """
    global _watcher
    with _changed:
        _callbacks.append(callback)
        if _watcher is None or not _watcher.is_alive():
            _watcher = threading.Thread(target=_watch, name="skyinfra-interruption", daemon=True)
            _watcher.start()
        _changed.notify_all()
    return callback


_endings: list[Callable[[], object]] = []


def at_end(callback: Callable[[], object]) -> None:
    """Calls *callback* when the task of this process has ended."""
    _endings.append(callback)


@contextlib.contextmanager
def task_scope() -> Iterator[None]:
    """Removes the callbacks of a task at its end, and waits for one that runs; calls what is to be called then."""
    try:
        yield
    finally:
        while _endings:
            _endings.pop()()
        with _changed:
            _callbacks.clear()
            _changed.wait_for(lambda: not _running)


def _watch() -> None:
    """Runs the callbacks when they are due. Ends with the last one, so that a process without any does not poll."""
    global _running, _watcher
    while True:
        with _changed:
            due = list(_callbacks) if interrupted() else []
            if due:
                _callbacks.clear()
                _running = True
            elif not _callbacks:
                _watcher = None
                return
            else:
                _changed.wait(_POLL_S)
                continue
        for callback in due:
            try:
                callback()
            except Exception:  # noqa: BLE001 - the user's code; the others still run
                traceback.print_exc(file=sys.stderr)
        with _changed:
            _running = False
            _changed.notify_all()


def _forget() -> None:
    """Resets the state in a forked process, which has no thread and must not run its parent's callbacks."""
    global _changed, _running, _watcher
    _changed = threading.Condition()
    _callbacks.clear()
    _running, _watcher = False, None


os.register_at_fork(after_in_child=_forget)
