"""SIGTERM, with which batch systems, systemd, CI and `timeout` end programs: once or several times."""

from __future__ import annotations

import atexit
import signal
import time

# `timeout` sends it twice, to the program and to its group; a batch system repeats it.
_ONCE_S = 5.0
_last = float("-inf")


def is_first() -> bool:
    """Returns whether the SIGTERM that a handler is called for repeats no other one.

    A repeated one must not end what the first one has begun: a destroy, a Terraform that saves its state. Python takes
    handlers away before it ends; from then on it is ignored.
    """
    global _last
    now = time.monotonic()
    if now - _last <= _ONCE_S:
        return False
    _last = now
    atexit.register(signal.signal, signal.SIGTERM, signal.SIG_IGN)
    return True
