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
_HINT = (
    "`skyinfra doctor` says what the node lacks; its slots take tasks again by themselves once it passes its checks."
)

# Since the last task ended: what the node raised, and whether a task raised what a sick node may have caused.
_noted: BaseException | None = None
_suspected = False
# Tasks that the slot failed, without one between them that it ran.
_in_a_row = 0


def of_node(error: BaseException) -> bool:
    """Returns whether *error*, which was raised outside of the function of a task, is the fault of the node."""
    if isinstance(error, SlotFailed | StateDirectoryError):
        return True
    return isinstance(error, Exception) and not isinstance(error, SkyinfraError)


def of_own(function: object, error: BaseException) -> bool:
    """Returns whether *function* is one of ours, and *error* its word that the node cannot do what it is to do."""
    return isinstance(error, SlotFailed) and str(getattr(function, "__module__", "")).startswith(_OWN)


def broken_python(error: BaseException) -> SlotFailed | None:
    """Returns the fault of the node where *error* says that a module of ours cannot be imported there; else None."""
    if not isinstance(error, ImportError | SyntaxError) or isinstance(error, SkyinfraError):
        return None
    frames = traceback.extract_tb(error.__traceback__)
    missing = f"{getattr(error, 'name', None)}.".startswith(_OWN)
    file = error.filename if isinstance(error, SyntaxError) else frames[-1].filename if frames else ""
    # Unpickling has no frame of its own: a module that the task needs is missed in one of ours.
    root = (getattr(error, "name", None) or "skyinfra").partition(".")[0]
    of_node = root == "skyinfra" or root in sys.stdlib_module_names
    if missing or (of_node and Path(file or "").is_relative_to(_PACKAGE)):
        return SlotFailed(f"the Python of the node is broken: {probe.said(error)}")
    return None


@contextlib.contextmanager
def raised_by_node() -> Iterator[None]:
    """Makes what the body, which calls nothing of the user, raises of what the node lacks a `SlotFailed`."""
    try:
        yield
    except (OSError, MemoryError, StateDirectoryError) as error:
        if not isinstance(error, StateDirectoryError) and not probe.lacks(error):
            raise
        raise SlotFailed(_words(error)) from error


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
    global _noted, _suspected, _in_a_row
    error, suspected = _noted, _suspected
    _noted, _suspected = None, False
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
