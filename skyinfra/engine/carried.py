"""The attempts of jobs that this process of a slot carries: they go on while the head is away.

The worker registers with the next head under their keys, and that head takes them over or ends them. The outcome of an
attempt stays here until the head has it: one that ended while the head was away is not repeated.
"""

from __future__ import annotations

import threading
from dataclasses import dataclass

# Of what a worker sends when it registers: the keys of the attempts that it carries.
KEY = "skyinfra-carried"


@dataclass
class _Attempt:
    """outcome: None while it runs. lost: the head that it was for is gone, and no other one has taken it over yet."""

    outcome: bytes | None = None
    lost: bool = False


_lock = threading.Lock()
_attempts: dict[str, _Attempt] = {}


def begin(key: str) -> None:
    """Notes that the attempt *key* of a job begins in this process."""
    with _lock:
        _attempts[key] = _Attempt()


def end(key: str, outcome: bytes) -> None:
    """Keeps the *outcome* of the attempt *key* until `forget`."""
    with _lock:
        if (found := _attempts.get(key)) is not None:
            found.outcome = outcome


def take(key: str) -> bytes | None:
    """Returns the outcome of the attempt *key*, which the head takes over; None where there is none."""
    with _lock:
        if (found := _attempts.get(key)) is None or found.outcome is None:
            return None
        found.lost = False
        return found.outcome


def lose() -> None:
    """Notes that the head is gone."""
    with _lock:
        for found in _attempts.values():
            found.lost = True


def taken_over(key: str) -> None:
    """Notes that the head has taken over the attempt *key*, which runs."""
    with _lock:
        if (found := _attempts.get(key)) is not None:
            found.lost = False


def forget(key: str, *, lost: bool = True) -> None:
    """Drops the attempt *key*; *lost*: also one that no head has taken over yet."""
    with _lock:
        if (found := _attempts.get(key)) is not None and (lost or not found.lost):
            del _attempts[key]


def keys(*, lost: bool = False) -> list[str]:
    """Returns the keys of the attempts; *lost*: only of those that no head has taken over yet."""
    with _lock:
        return [key for key, found in _attempts.items() if found.lost or not lost]


def kept() -> int:
    """Returns the number of outcomes that the head does not have yet."""
    with _lock:
        return sum(found.outcome is not None for found in _attempts.values())
