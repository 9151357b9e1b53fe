"""The processes that tasks start: those that a task leaves are ended with it, also those in a session of their own.

This process adopts the descendants whose parent has ended. Those that an object of `skyinfra.cls` has started while it
was made belong to it, and stay for as long as it.
"""

from __future__ import annotations

import contextlib
import ctypes
import multiprocessing
import os
import signal
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from multiprocessing import forkserver, resource_tracker

from skyinfra.node import processes
from skyinfra.node.processes import Process

# See prctl(2).
_PR_SET_CHILD_SUBREAPER = 36
# Between SIGTERM and SIGKILL, and for the end after that.
_GRACE_S = 0.5
_POLL_S = 0.005
_NAMED = 3
_LONGEST = 60


# What libraries keep for their process as long as that lives, by a part of its command: the processes that compile for
# `torch.compile`, and are made once.
_OF_LIBRARIES = ("torch/_inductor/compile_worker/",)

# By the key of an object: its processes, each by its id and its start.
_kept: dict[str, set[tuple[int, int]]] = {}


@dataclass(frozen=True)
class Ended:
    """Says what was done with the processes that a task left, in words. *lost*: whether some could not be ended."""

    text: str
    lost: bool = False


def adopt() -> None:
    """Makes this process the parent of its descendants whose parent ends."""
    ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


@contextlib.contextmanager
def keeping(key: str) -> Iterator[None]:
    """Keeps the processes that are started in the body until `release`; none where it raises."""
    before = {each.id for each in _family()} if _any() else set()
    yield
    if _any() and (started := {each.id for each in _family()} - before):
        _kept[key] = started


def release(key: str) -> None:
    """Ends the processes that were started in `keeping`."""
    if mine := _kept.pop(key, None):
        _end(lambda: [each for each in _family() if each.id in mine])


def end_left() -> Ended | None:
    """Ends the descendants of this process that are not kept; None where none ran."""
    if not _any():
        return None
    # That of the pools of the task, which Python lets run on.
    server = getattr(forkserver._forkserver, "_forkserver_pid", None)
    ended = _end(_left)
    if left := [each for each in _left() if not each.ended]:
        return Ended(
            f"{_counted(len(left))} that the task left behind cannot be ended: {_list(map(_name, left))}", True
        )
    names = [name for (pid, _), name in ended.items() if pid != server]
    return Ended(f"ended {_counted(len(names))} that the task left behind: {_list(names)}") if names else None


def end_all() -> None:
    """Ends every descendant of this process, as that ends."""
    _kept.clear()
    _end(lambda: _left(libraries=False))


def _any() -> bool:
    """Returns whether this process has children, those included that have ended, by one system call."""
    try:
        os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
    except ChildProcessError:
        return False
    return True


def _family() -> list[Process]:
    return processes.descendants(os.getpid())


def _left(*, libraries: bool = True) -> list[Process]:
    """Returns the descendants that are not kept, *libraries*: nor by those, nor descend from such, parents first."""
    kept = set().union(*_kept.values())
    # It removes what tasks leave in shared memory when this process ends.
    spared = {getattr(resource_tracker._resource_tracker, "_pid", None)}
    found = []
    for each in _family():
        if each.id in kept or each.parent in spared or each.pid in spared or (libraries and _is_of_library(each)):
            spared.add(each.pid)
        else:
            found.append(each)
    return found


def _is_of_library(process: Process) -> bool:
    return any(part in processes.command(process.pid) for part in _OF_LIBRARIES)


def _end(which: Callable[[], list[Process]]) -> dict[tuple[int, int], str]:
    """Ends the processes *which*, and waits for those that are children of this one. Returns the names of those that
    ran, by their ids."""
    names: dict[tuple[int, int], str] = {}
    deadline = time.monotonic() + _GRACE_S
    number = signal.SIGTERM
    signalled: set[tuple[int, int]] = set()
    while found := which():
        for each in found:
            if each.ended:
                continue
            names.setdefault(each.id, _name(each))
            if each.id not in signalled or number == signal.SIGKILL:
                signalled.add(each.id)
                with contextlib.suppress(PermissionError):  # it has become another user's
                    each.send(number)
        _reap(found)
        if time.monotonic() > deadline:
            if number == signal.SIGKILL:
                break
            number, deadline = signal.SIGKILL, deadline + _GRACE_S
        time.sleep(_POLL_S)
    return names


def _reap(found: list[Process]) -> None:
    """Waits for those of *found* that have ended; first as those do that have started them."""
    # Its children know it then, and none is taken to run on.
    multiprocessing.active_children()
    server = forkserver._forkserver
    for each in [each for each in found if each.ended]:
        if each.pid == getattr(server, "_forkserver_pid", None):
            server._stop()  # type: ignore[attr-defined]
        else:
            with contextlib.suppress(ChildProcessError):
                os.waitpid(each.pid, os.WNOHANG)


def _name(process: Process) -> str:
    command = processes.command(process.pid)
    if command == processes.command(os.getpid()):
        return "a fork of the task"
    return command if len(command) <= _LONGEST else f"{command[:_LONGEST]}..."


def _list(names: Iterable[str]) -> str:
    first, more = (given := [*names])[:_NAMED], len(given) - _NAMED
    return ", ".join(first) + (f", and {more} more" if more > 0 else "")


def _counted(number: int) -> str:
    return "1 process" if number == 1 else f"{number} processes"
