"""Tells a slot that fails from a task that does.

The end of a task is one of three: it raised, its slot failed, or it was lost with its process or node. What the node
raises outside of the function of the task is of the slot: the task goes to another one, which counts as none of its
attempts, and the slot takes no others before the node passes the checks of `skyinfra.node.probe`
(`skyinfra.worker.process`). What the function itself raises is of the task, whatever it is; where it may come of a full
disk or the like, the node is checked before the slot takes the next task.
"""

from __future__ import annotations

import contextlib
import os
import sys
import traceback
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from skyinfra.errors import SkyinfraError, SlotFailed, StateDirectoryError
from skyinfra.node import device, probe
from skyinfra.protocol import failures
from skyinfra.protocol.calls import Outcome
from skyinfra.protocol.instance import NODE_DIRECTORY, instance_info

# Our own functions, which start programs: see `of_node`.
_OWN = "skyinfra.worker."
_PACKAGE = Path(__file__).parents[1]
_PROGRAM = _PACKAGE / "program"
_HINT = (
    "`skyinfra doctor` says what the node lacks; its slots take tasks again by themselves once it passes its checks."
)

# Since the last task ended: what the node raised, and whether a task raised what a sick node may have caused.
_noted: BaseException | None = None
_suspected = False
# The last one that `raised_by_node` has raised.
_raised: SlotFailed | None = None
# Tasks that the slot failed, without one between them that it ran.
_in_a_row = 0


def of_node(error: BaseException) -> bool:
    """Returns whether *error*, which was raised outside of the function of a task, is the fault of the node."""
    if isinstance(error, SlotFailed | StateDirectoryError):
        return True
    return isinstance(error, Exception) and not isinstance(error, SkyinfraError)


def of_own(function: object, error: BaseException) -> bool:
    """Returns whether *error* is the word of ours that the node cannot do what it is to do: that of *function*, where
    it is one of ours, or of `raised_by_node`."""
    ours = str(getattr(function, "__module__", "")).startswith(_OWN)
    return isinstance(error, SlotFailed) and (ours or error is _raised)


def of_loading(error: BaseException) -> SlotFailed | None:
    """Returns the fault of the node where *error*, which was raised as a call was loaded, is of it; else None.

    That is what `raised_by_node` has noticed, memory that ran out under no code of the user, a file of its modules that
    could not be opened, and a module of ours that cannot be imported.
    """
    if isinstance(error, SlotFailed):
        return error
    if isinstance(error, SkyinfraError):
        return None
    # Unpickling has no frame of its own.
    last = _last_file(error)
    importing = last.startswith("<frozen importlib") or Path(last).is_relative_to(_PROGRAM)
    if isinstance(error, MemoryError) and (importing or Path(last).is_relative_to(_PACKAGE)):
        return SlotFailed(_words(error))
    if isinstance(error, OSError) and importing and probe.lacks(error):
        return SlotFailed(_words(error))
    return _broken_python(error, last)


def _last_file(error: BaseException) -> str:
    """Returns the file of the code that raised *error*; empty where it has none."""
    return next((frame.f_code.co_filename for frame, _ in reversed([*traceback.walk_tb(error.__traceback__)])), "")


def _broken_python(error: BaseException, last: str) -> SlotFailed | None:
    """Returns the fault of the node where *error* says that a module of ours cannot be imported there; else None."""
    if not isinstance(error, ImportError | SyntaxError):
        return None
    missing = f"{getattr(error, 'name', None)}.".startswith(_OWN)
    file = error.filename if isinstance(error, SyntaxError) else last
    # A module that the task needs is missed in one of our files.
    root = (getattr(error, "name", None) or "skyinfra").partition(".")[0]
    of_node = root == "skyinfra" or root in sys.stdlib_module_names
    if missing or (of_node and Path(file or "").is_relative_to(_PACKAGE)):
        return SlotFailed(f"the Python of the node is broken: {probe.said(error)}")
    return None


@contextlib.contextmanager
def raised_by_node(*always: type[Exception]) -> Iterator[None]:
    """Makes what the body, which calls nothing of the user, raises of what the node lacks a `SlotFailed`; of the
    classes *always*, whatever they say."""
    global _raised
    kinds: tuple[type[Exception], ...] = (*always, OSError, MemoryError, RuntimeError)
    try:
        yield
    except kinds as error:
        if not (isinstance(error, always) or probe.lacks(error)):
            raise
        _raised = SlotFailed(_words(error))
        raise _raised from error


def note(error: BaseException) -> None:
    """Notes that the node raised *error*; the slot is taken out of service when the present task ends."""
    global _noted
    _noted = _noted or error


def suspect(error: BaseException) -> bool:
    """Has the node checked when the present task has ended, where *error*, which it raised, may come of a sick one.

    Returns whether later tasks in this process would meet it too. Raises `SlotFailed` where it came of a device for
    which the driver answers with errors: that does no task.
    """
    global _suspected
    text = None
    with contextlib.suppress(Exception):  # whatever an exception of others does when it is looked at
        _suspected = _suspected or probe.lacks(error)
        text = device.words(error)
    if text is None:
        return False
    try:
        device.check()
    except OSError as lost:
        raise SlotFailed(probe.said(lost)) from lost
    return device.stays(text)


def outcome(name: str, error: BaseException, *, below: str) -> Outcome:
    """Returns the outcome of the task *name*, which did not run to its end as the node raised *error*."""
    slot = instance_info().slot
    failed = SlotFailed(f"slot {slot} cannot run {name}: {_words(error)}", hint=_HINT)
    failed.__cause__ = error
    return Outcome(failure=failures.of(failed, below=below), slot_failed=slot)


def settle(worker: Any) -> None:
    """Is called when a task has ended, before anybody hears of it: a slot that failed takes no other one."""
    global _noted, _suspected, _raised, _in_a_row
    error, suspected = _noted, _suspected
    _noted, _suspected, _raised = None, False, None
    if error is None and suspected:
        error = check()
    if error is None:
        _in_a_row = 0
        return
    _in_a_row += 1
    worker.loop.asyncio_loop.call_soon_threadsafe(worker.fail, _words(error), probe.of_machine(error), _in_a_row)


def check() -> Exception | None:
    """Checks the node; returns what is wrong with it, or None."""
    try:
        probe.check(Path(os.environ[NODE_DIRECTORY]))
        device.check()
    except Exception as error:  # noqa: BLE001 - whatever it is, a task would meet it
        return error
    return None


def words_of_check() -> str | None:
    """As `check`, in words."""
    error = check()
    return None if error is None else probe.said(error)


def _words(error: BaseException) -> str:
    if not isinstance(error, SkyinfraError):
        return probe.said(error)
    # The file itself may be named after the task.
    return error.message + (f" ({os.path.dirname(error.field)})" if error.field else "")  # noqa: PTH120
