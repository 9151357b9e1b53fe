"""The signals that end a program from outside, and what they must not end: what the first of them has begun."""

from __future__ import annotations

import atexit
import os
import select
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

# Batch systems, systemd, CI and `timeout` send the first; the second comes when a terminal closes, or the link to it.
ENDING = (signal.SIGTERM, signal.SIGHUP)
# `timeout` sends it twice, to the program and to its group; a batch system repeats it, and so does a shell.
_ONCE_S = 5.0
_last = float("-inf")
_put_off = False
_missed: int | None = None

Handler = Callable[[int, object], None]


def catch(handler: Handler) -> dict[int, Any]:
    """Sets *handler* for those of `ENDING` that have none; returns the handlers of before, for `restore`.

    A handler of the program's own stays, and a signal that is ignored, as `nohup` has it. Only the main thread may set
    any.
    """
    if threading.current_thread() is not threading.main_thread():
        return {}
    free = [number for number in ENDING if signal.getsignal(number) is signal.SIG_DFL]
    return {number: signal.signal(number, handler) for number in free}


def default_in_forks(handler: Handler) -> None:
    """Makes signals of `ENDING` that *handler* takes in this process end the processes that are forked from it."""

    def reset() -> None:
        for number in ENDING:
            if signal.getsignal(number) is handler:
                signal.signal(number, signal.SIG_DFL)

    os.register_at_fork(after_in_child=reset)


def restore(before: dict[int, Any]) -> None:
    """Sets the handlers that `catch` returned."""
    for number, handler in before.items():
        signal.signal(number, handler)


def is_first(number: int) -> bool:
    """Returns whether the signal that a handler is called for is to end the program: it repeats no other one.

    A repeated one must not end what the first one has begun: a destroy, a Terraform that saves its state. Python takes
    handlers away before it ends; from then on both are ignored.
    """
    global _last, _missed
    if number == signal.SIGHUP:
        _leave_terminal()
    now = time.monotonic()
    if now - _last <= _ONCE_S:
        return False
    _last = now
    if _put_off:
        _missed = number
        return False
    for each in ENDING:
        atexit.register(signal.signal, each, signal.SIG_IGN)
    return True


@contextmanager
def putting_off() -> Iterator[None]:
    """Finishes the body first: a signal that comes meanwhile, to a handler of ours, is raised again after it."""
    global _last, _put_off, _missed
    before, _put_off = _put_off, True
    try:
        yield
    finally:
        _put_off = before
        if _missed is not None and not _put_off:
            number, _missed, _last = _missed, None, float("-inf")
            signal.raise_signal(number)


def _leave_terminal() -> None:
    """Has what is printed from now on go nowhere, where the terminal is gone: a print that fails would end the rest."""
    for stream in (1, 2):
        poll = select.poll()
        poll.register(stream, 0)
        if any(events & select.POLLHUP for _, events in poll.poll(0)):
            nowhere = os.open(os.devnull, os.O_WRONLY)
            os.dup2(nowhere, stream)
            os.close(nowhere)
