"""A fence around each task: what it changes in its process is as before when the next one comes.

What can be put back is put back; where something cannot be, the process is replaced. Processes that a task leaves are
ended, see `children`; for its threads, see `output`; for its folder, `surroundings`.
"""

from __future__ import annotations

import asyncio
import contextlib
import faulthandler
import gc
import locale
import multiprocessing
import os
import resource
import signal
import socket
import sys
import tempfile
import time
import traceback
import warnings
from collections.abc import Callable, Iterator
from typing import Any

from skyinfra.engine import main_thread
from skyinfra.node import children
from skyinfra.worker import output
from skyinfra.worker.cancellation import SIGNALS

_LIMITS = tuple(getattr(resource, name) for name in dir(resource) if name.startswith("RLIMIT_"))
_NUMBERS = tuple(sorted(int(each) for each in signal.valid_signals() - {signal.SIGKILL, signal.SIGSTOP}))
_TIMERS = (signal.ITIMER_REAL, signal.ITIMER_VIRTUAL, signal.ITIMER_PROF)
# Python 3.14 warns of the public name.
_set_loop_policy: Callable[[None], None] = getattr(
    asyncio.events, "_set_event_loop_policy", asyncio.set_event_loop_policy
)


def _umask() -> int:
    # There is no call that only asks. Meanwhile, other threads make files for their user alone.
    before = os.umask(0o077)
    os.umask(before)
    return before


def _limits() -> tuple[tuple[int, int], ...]:
    return tuple(map(resource.getrlimit, _LIMITS))


def _set_limits(before: tuple[tuple[int, int], ...]) -> None:
    for number, pair in zip(_LIMITS, before, strict=True):
        if resource.getrlimit(number) != pair:
            resource.setrlimit(number, pair)


def _handlers() -> tuple[Any, ...]:
    return tuple(map(SIGNALS.getsignal, _NUMBERS))


def _set_handlers(before: tuple[Any, ...]) -> None:
    for number, handler in zip(_NUMBERS, before, strict=True):
        if SIGNALS.getsignal(number) != handler:
            SIGNALS.signal(number, handler)


# A task may put another object in its place.
_environ: Any = os.environ


def _variables() -> tuple[Any, dict[Any, Any]]:
    # Its copy as it lies there takes a microsecond; through its methods, thirty.
    return os.environ, _environ._data.copy()


def _set_variables(before: tuple[Any, dict[Any, Any]]) -> None:
    os.environ, wanted = before
    now = _environ._data.copy()
    for name in now.keys() - wanted.keys():
        os.environ.pop(os.fsdecode(name), None)
    for name, value in wanted.items():
        if now.get(name) != value:
            os.environ[os.fsdecode(name)] = os.fsdecode(value)


def _lists() -> tuple[list[str], list[str], list[str], list[str]]:
    return sys.path, sys.path[:], sys.argv, sys.argv[:]


def _set_lists(before: tuple[list[str], list[str], list[str], list[str]]) -> None:
    sys.path, path, sys.argv, argv = before
    sys.path[:], sys.argv[:] = path, argv


def _file(number: int) -> tuple[int, int] | None:
    try:
        stat = os.fstat(number)
    except OSError:  # it is closed
        return None
    return stat.st_dev, stat.st_ino


def _files() -> tuple[tuple[int, int] | None, ...]:
    return _file(0), _file(1), _file(2)


def _refuse(_: object) -> None:
    # Another file may have the number now, and close it at any time.
    raise OSError("another file")


def _set_tempdir(before: str | None) -> None:
    tempfile.tempdir = before


def _refused_warnings() -> list[Any]:
    return [each for each in warnings.filters if each[0] == "error"]


def _set_refused_warnings(before: list[Any]) -> None:
    # What else a task adds stays: imports add to it.
    new = [each for each in _refused_warnings() if each not in before]
    warnings.filters[:] = [each for each in warnings.filters if each not in new]  # type: ignore[index]


def _set_start_method(name: str | None) -> None:
    multiprocessing.set_start_method(name, force=True)


# What is looked at, how it is asked for, and how it is put back. Handlers first: those of a task may raise anything.
_STATE: tuple[tuple[str, Callable[[], Any], Callable[[Any], object]], ...] = (
    ("signal handlers", _handlers, _set_handlers),
    (
        "the signal mask",
        lambda: signal.pthread_sigmask(signal.SIG_BLOCK, ()),
        lambda mask: signal.pthread_sigmask(signal.SIG_SETMASK, mask),
    ),
    ("the standard streams", output.streams, output.put_back),
    ("files 0, 1 and 2", _files, _refuse),
    ("variables", _variables, _set_variables),
    ("sys.path", _lists, _set_lists),
    ("the umask", _umask, os.umask),
    ("limits", _limits, _set_limits),
    (
        "the priority",
        lambda: os.getpriority(os.PRIO_PROCESS, 0),
        lambda value: os.setpriority(os.PRIO_PROCESS, 0, value),
    ),
    ("the CPUs", lambda: os.sched_getaffinity(0), lambda cpus: os.sched_setaffinity(0, cpus)),
    ("the timeout of sockets", socket.getdefaulttimeout, socket.setdefaulttimeout),
    ("the recursion limit", sys.getrecursionlimit, sys.setrecursionlimit),
    ("the switch interval", sys.getswitchinterval, sys.setswitchinterval),
    ("garbage collection", gc.isenabled, lambda on: gc.enable() if on else gc.disable()),
    ("the thresholds of garbage collection", gc.get_threshold, lambda numbers: gc.set_threshold(*numbers)),
    ("tracing", sys.gettrace, sys.settrace),
    ("profiling", sys.getprofile, sys.setprofile),
    # That of its variable, which was put back above.
    ("the time zone", lambda: (time.tzname, time.timezone), lambda _: time.tzset()),
    ("the locale", lambda: locale.setlocale(locale.LC_ALL), lambda name: locale.setlocale(locale.LC_ALL, name)),
    ("how processes start", lambda: multiprocessing.get_start_method(allow_none=True), _set_start_method),
    ("warnings that are errors", _refused_warnings, _set_refused_warnings),
    ("the folder for temporary files", lambda: tempfile.tempdir, _set_tempdir),
)


@contextlib.contextmanager
def around() -> Iterator[None]:
    """Puts the state of this process back after the body, the call of a task; else has the process replaced.

    Ends the processes that the body leaves, and says so in the output of the task.
    """
    before = [ask() for _, ask, _ in _STATE]
    try:
        yield
    finally:
        _quiet(before[0])
        lost = _put_back(before)
        if (ended := children.end_left()) is not None:
            with contextlib.suppress(OSError):  # the task has closed it
                os.write(2, f"[{ended.text}]\n".encode())
        if lost or (ended is not None and ended.lost):
            main_thread.replace_after_task()


def _quiet(handlers: tuple[Any, ...]) -> None:
    """Stops the timers of the task, and takes its handlers of signals away: they might raise anything, at any time."""
    while True:
        try:
            for timer in _TIMERS:
                signal.setitimer(timer, 0)
            signal.set_wakeup_fd(-1)
            _set_handlers(handlers)
            return
        except (TypeError, ValueError):  # a handler that is not Python's; it is found again below
            return
        except BaseException:  # noqa: BLE001, S112 - of a handler of the task
            continue


def _put_back(before: list[Any]) -> list[str]:
    """Puts the state back as *before*; returns what cannot be."""
    lost = []
    # That of the task would end the process under another one. Ours is for its code alone, which has ended.
    faulthandler.cancel_dump_traceback_later()
    output.flush()
    _set_loop_policy(None)
    for (name, ask, put), was in zip(_STATE, before, strict=True):
        try:
            if ask() != was:
                put(was)
        except Exception:  # noqa: BLE001 - a task may leave anything there
            lost.append(name)
    return lost


class Call:
    """The call of a task, as the body. Its timers and handlers of signals end with it: they would hit what comes after,
    the keeping of its result or the description of what it raised. A process that it has forked, and that returns from
    it, ends as a program ends.

    A class, as `contextlib.contextmanager` assigns to the exception that leaves it, which some refuse.
    """

    def __init__(self) -> None:
        self._process = os.getpid()
        self._handlers = _handlers()

    def __enter__(self) -> None:
        """The call begins."""

    def __exit__(self, _kind: object, error: BaseException | None, _traceback: object) -> None:
        if os.getpid() != self._process:
            _end_fork(error)
        self.quiet()

    def quiet(self) -> None:
        """Ends timers and handlers; once more where one of them has raised meanwhile."""
        _quiet(self._handlers)


def _end_fork(error: BaseException | None) -> None:
    code = 0 if error is None else 1
    if isinstance(error, SystemExit):
        if isinstance(error.code, str):
            print(error.code, file=sys.stderr)
        code = error.code & 0xFF if isinstance(error.code, int) else int(error.code is not None)
    elif error is not None:
        traceback.print_exception(error)
    output.flush()
    os._exit(code)
