"""SIGTERM in a program that is a client: batch systems, systemd, CI and `timeout` end programs with it."""

from __future__ import annotations

import builtins
import os
import signal
import threading

from skyinfra.errors.signals import is_first
from skyinfra.protocol.instance import VARIABLE


class Terminated(KeyboardInterrupt, SystemExit):
    """The program is ended by SIGTERM: as Ctrl-C ends it, without a traceback, with the exit status 143."""

    def __init__(self) -> None:
        SystemExit.__init__(self, 128 + signal.SIGTERM)


def leave_on_sigterm() -> None:
    """Makes SIGTERM raise `Terminated` in the main thread of this program, so that its ``with`` blocks close.

    A handler of the program's own stays. Does nothing in another thread, in a notebook, whose kernel goes on after an
    exception of a cell, and in a process of a slot.
    """
    if threading.current_thread() is not threading.main_thread() or signal.getsignal(signal.SIGTERM) != signal.SIG_DFL:
        return
    if hasattr(builtins, "__IPYTHON__") or VARIABLE in os.environ:
        return
    signal.signal(signal.SIGTERM, _leave)


def _leave(_number: int, _frame: object) -> None:
    if is_first():
        raise Terminated


def _in_child() -> None:
    # The blocks of a forked process are its parent's.
    if signal.getsignal(signal.SIGTERM) is _leave:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)


os.register_at_fork(after_in_child=_in_child)
