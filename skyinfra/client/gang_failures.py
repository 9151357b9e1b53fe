"""Why a gang failed: what its first rank that failed raised, or how it ended."""

from __future__ import annotations

import contextlib
import pickle
import signal
from typing import cast

from skyinfra.engine.executor import may_pass
from skyinfra.errors import GangFailed
from skyinfra.protocol.calls import Outcome
from skyinfra.protocol.gang import RankEnd
from skyinfra.protocol.instance import InstanceInfo
from skyinfra.tasks import pickling


def explain(name: str, rank: int, end: RankEnd | None, slot: InstanceInfo) -> tuple[BaseException, bool]:
    """The exception for the *rank* of *name* that failed first, and whether another start may not meet it.

    *end*: None where the rank was lost. A program that raised is a `GangFailed` because of what it raised.
    """
    where = f"rank {rank} of {name}, on slot {slot.slot} of node {slot.node}"
    if end is None or (end.outcome is None and end.code is None):
        lost = "Its worker process or its node ended; `skyinfra status` shows which nodes are there."
        return _failed(f"{where}, lost its slot", rank, None, lost), True
    if end.outcome is None:
        code = cast(int, end.code)
        hint = "Usual cause: the machine ran out of memory." if code == -signal.SIGKILL else None
        return _failed(f"{where}, {_how(code)}", rank, code, hint), True
    outcome = cast(Outcome, pickle.loads(end.outcome))  # noqa: S301 - the fleet's own, over mutual TLS
    error = cast(BaseException, pickling.exception(outcome, name))
    error.add_note(f"Raised by {where}.")
    if end.code is None:
        return error, may_pass(outcome)
    failed = _failed(f"{where}, {_how(end.code)}", rank, end.code, None)
    failed.__cause__ = error
    return failed, True


def exit_code(error: GangFailed) -> int:
    """What a shell gives for the program of the rank: 128 and the number of the signal that ended it."""
    if error.code is None:
        return error.exit_code
    return error.code if error.code >= 0 else 128 - error.code


def _failed(text: str, rank: int, code: int | None, hint: str | None) -> GangFailed:
    error = GangFailed(text, hint=hint)
    error.rank, error.code = rank, code
    return error


def _how(code: int) -> str:
    if code >= 0:
        return f"ended with exit code {code}"
    with contextlib.suppress(ValueError):
        return f"was ended by {signal.Signals(-code).name}"
    return f"was ended by signal {-code}"
