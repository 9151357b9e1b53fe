"""The notice to the tasks of a node that is taken out of service: a file in the node's folder."""

from __future__ import annotations

import json
import time
from dataclasses import asdict, dataclass

# In the node's folder, for as long as tasks are to end.
FILE = "interrupted.json"


# Of Linux, with the time in which the machine slept.
_CLOCK = getattr(time, "CLOCK_BOOTTIME", time.CLOCK_MONOTONIC)


def uptime() -> float:
    """Returns the seconds since this machine was booted, by a clock that nobody sets."""
    return time.clock_gettime(_CLOCK)


@dataclass(frozen=True)
class Interruption:
    """Why the node of this task is taken out of service, in words, and when what still runs there is ended.

    until: Unix time in seconds; None where running tasks may end by themselves. ends: the same in `uptime` of the node.
    """

    why: str
    until: float | None = None
    ends: float | None = None

    @classmethod
    def now(cls, why: str, until: float | None) -> Interruption:
        """Returns the notice that is given now."""
        return cls(why, until, None if until is None else uptime() + until - time.time())

    @property
    def seconds_left(self) -> float | None:
        """Until running tasks are ended, at least 0; None where they are not."""
        if self.ends is not None:
            return max(0.0, self.ends - uptime())
        return None if self.until is None else max(0.0, self.until - time.time())

    def dumps(self) -> str:
        """Returns the text of `FILE`."""
        return json.dumps(asdict(self)) + "\n"
