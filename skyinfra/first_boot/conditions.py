"""Operations that look at the machine: what has to hold on it before others can work."""

from __future__ import annotations

import contextlib
import time
from dataclasses import dataclass

from .programs import Failed, no_space, output


@dataclass(frozen=True)
class Clock:
    """The time, before which no certificate is good: not before *made*, a Unix time.

    A time service has *wait_s* to set it; then it is set to what the metadata service of EC2 says, where there is one.
    """

    made: int
    wait_s: float

    def done(self) -> bool:
        return time.time() >= self.made

    def do(self) -> None:
        from .fetch import metadata_time

        output("timedatectl", "set-ntp", "true")
        output("chronyc", "-a", "makestep")
        until = time.monotonic() + self.wait_s
        while not self.done() and time.monotonic() < until:
            time.sleep(0.5)
        if self.done():
            return
        answered = metadata_time()
        # Containers may not set it.
        with contextlib.suppress(OSError):
            if answered >= self.made:
                time.clock_settime(time.CLOCK_REALTIME, answered)
                return
        says, made = (time.strftime("%Y-%m-%d %H:%M", time.gmtime(each)) for each in (time.time(), self.made))
        raise Failed(
            f"the clock of this machine is wrong: it says {says}, and this version of skyinfra was made after {made}; "
            f"no time service has set it within {self.wait_s:g} s: see `timedatectl`"
        )


@dataclass(frozen=True)
class Space:
    """Space for the runner in *folder*."""

    folder: str

    def done(self) -> bool:
        return no_space(self.folder) is None

    def do(self) -> None:
        raise Failed(no_space(self.folder))
