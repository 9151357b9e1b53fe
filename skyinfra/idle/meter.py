"""The meter of a node: for how long nothing has used its fleet, and for how long it has lived.

It advances by the clock that counts from the boot of the machine. The time of day, which may jump, is never read.
"""

from __future__ import annotations

import json
import time
from dataclasses import dataclass, field, replace
from pathlib import Path

from skyinfra.drain.request import this_boot
from skyinfra.errors import InvalidNodeConfig
from skyinfra.protocol._schema import Document
from skyinfra.protocol.nodeconfig import SETUP_S

VERSION = 1
FILE = "idle.json"
_LATER = {"later": True}


def since_boot() -> float:
    """Returns the seconds since the boot of the machine, those asleep included."""
    return time.clock_gettime(time.CLOCK_BOOTTIME)


@dataclass(frozen=True)
class Meter(Document, error=InvalidNodeConfig, source=FILE, version=VERSION):
    """The content of ``idle.json``.

    boot, at: when it was read last, by the id of the boot and the seconds since that. idle_s: since the last use of the
    fleet, as far as the node knows; boot, and setup for a day, do not count. unused_s: since the last task of the node
    itself. lived_s: of the node. keep_s: for how long it is kept (`skyinfra keep`). served: whether the node was ready
    in this boot. begun: whether anything has used the fleet since then. config: the hash of the configuration that it
    counts for. ended: why the node has ended itself, or asked for its end; one that is started again after that begins
    anew. budget_s: for how long the budget of the fleet lasts, as the head said last. setup_s: for how long the node
    has not been ready in this boot.
    """

    version: int = VERSION
    boot: str | None = None
    at: float = 0.0
    idle_s: float = 0.0
    lived_s: float = 0.0
    keep_s: float = 0.0
    served: bool = False
    begun: bool = False
    config: str = ""
    ended: str | None = field(default=None, metadata=_LATER)
    budget_s: float | None = field(default=None, metadata=_LATER)
    unused_s: float = field(default=0.0, metadata=_LATER)
    setup_s: float = field(default=0.0, metadata=_LATER)

    @classmethod
    def find(cls, folder: Path, *, machine: bool = False) -> Meter:
        """Returns the meter in *folder*; a new one where there is none, none that can be read, or the node has ended.

        machine: whether the end of the node is that of its boot, and not of its runner.
        """
        try:
            found = cls.load(folder / FILE)
        except InvalidNodeConfig:
            return cls(boot=this_boot(), at=since_boot())
        same = found.ended is None or (machine and found.boot == this_boot())
        return found if same else cls(boot=this_boot(), at=since_boot())

    def dumps(self) -> str:
        """Returns the text of the file."""
        return json.dumps(self.to_json()) + "\n"

    def advanced(self, *, boot: str | None, now: float, ready: bool, config: str = "") -> Meter:
        """Returns the meter as it is *now* (seconds since *boot*), with no use since.

        ready: whether the node is set up. A configuration that has changed is a use.
        """
        again, changed = boot != self.boot, config != self.config
        passed = max(0.0, now - (0.0 if again else self.at))
        served = (self.served and not again) or ready
        # One that does not become ready is unused in the end: it costs money, and nobody may know of it.
        used = again or changed or served is not self.served or not (served or self.setup_s >= SETUP_S)
        return replace(
            self,
            boot=boot,
            at=now,
            idle_s=0.0 if used else self.idle_s + passed,
            unused_s=0.0 if used else self.unused_s + passed,
            lived_s=self.lived_s + passed,
            keep_s=max(0.0, self.keep_s - passed),
            budget_s=None if self.budget_s is None else max(0.0, self.budget_s - passed),
            served=served,
            setup_s=0.0 if again or changed or served else self.setup_s + passed,
            begun=self.begun and not again,
            config=config,
        )

    def heard(self, idle_s: float, keep_s: float, begun: bool, budget_s: float | None = None) -> Meter:
        """Returns the meter after the head has said for how long it knows of no use, and keeps the fleet; whether there
        was a use at all; and for how long the budget lasts, where it knows."""
        least, left_s = min(self.idle_s, max(0.0, idle_s)), self.budget_s if budget_s is None else budget_s
        return replace(self, idle_s=least, keep_s=keep_s, begun=self.begun or begun, budget_s=left_s)

    def used(self) -> Meter:
        """Returns the meter after a use."""
        return replace(self, idle_s=0.0, unused_s=0.0, begun=True)


def span(seconds: float) -> str:
    """Returns a length of time as it is declared: ``30m``, ``1h 30m``, ``12h``, ``45s``."""
    rest, parts = round(max(0.0, seconds)), []
    for unit, length in (("d", 86_400), ("h", 3600), ("m", 60), ("s", 1)):
        count, rest = divmod(rest, length)
        if count:
            parts.append(f"{count}{unit}")
    return " ".join(parts[:2]) or "0s"
