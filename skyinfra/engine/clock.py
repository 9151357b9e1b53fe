"""The clock by which Dask and Tornado measure time in a process of ours: one that nobody sets.

Both take the machine's. Where that is put forward, tasks seem to run for hours, and workers to be silent; where it is
put back, heartbeats and messages wait until it has caught up.
"""

from __future__ import annotations

import sys
import time

import distributed.metrics
from tornado.ioloop import IOLoop

from skyinfra.protocol.interruption import uptime

_theirs = distributed.metrics.time
_booted = time.time() - uptime()


def now(*_: object) -> float:
    """Returns the seconds since 1970, by the machine's clock as it was when this module was imported."""
    return _booted + uptime()


def install() -> None:
    """Makes Dask and Tornado measure time by `now` in this process."""
    IOLoop.time = now  # type: ignore[method-assign, assignment]
    for module in [module for name, module in sys.modules.items() if name.partition(".")[0] == "distributed"]:
        if getattr(module, "time", None) is _theirs:
            module.time = now  # type: ignore[attr-defined]
