"""SIGTERM and SIGHUP in a program that is a client: it ends as by Ctrl-C."""

from __future__ import annotations

import builtins
import os

from skyinfra.errors.signals import catch, default_in_forks, is_first
from skyinfra.protocol.instance import VARIABLE


class Terminated(KeyboardInterrupt, SystemExit):
    """The program is ended by a signal: as Ctrl-C ends it, without a traceback, with the exit status 143 or 129."""

    def __init__(self, number: int) -> None:
        SystemExit.__init__(self, 128 + number)


def leave_on_signals() -> None:
    """Makes SIGTERM and SIGHUP raise `Terminated` in the main thread of this program, so that its blocks close.

    A handler of the program's own stays. Does nothing in another thread, in a notebook, whose kernel goes on after an
    exception of a cell, and in a process of a slot.
    """
    if not hasattr(builtins, "__IPYTHON__") and VARIABLE not in os.environ:
        catch(_leave)


def _leave(number: int, _frame: object) -> None:
    if is_first(number):
        raise Terminated(number)


# The blocks of a forked process are its parent's.
default_in_forks(_leave)
