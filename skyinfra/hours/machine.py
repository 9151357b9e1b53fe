"""The hours of one machine: the runner of every node measures how long it runs, also while no head answers.

A machine bills whether or not anybody listens. What it has measured lies in its own folder, and the head hears all of
it whenever they are connected: a head that was away, or is another one, misses no hour.
"""

from __future__ import annotations

import json
import logging
import os
import time
import uuid
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NamedTuple

from skyinfra.drain.request import this_boot
from skyinfra.errors import NodeError, SkyinfraError, StateDirectoryError
from skyinfra.node.folder import replace_file
from skyinfra.protocol import _schema
from skyinfra.protocol.readings import HOURS_VERSION, MachineRun

logger = logging.getLogger("skyinfra.runner")

# The file in the folder of a node.
FILE = "hours.json"
# Between two measurements: so much is lost of a machine whose disk goes with it.
INTERVAL_S = 60.0
# A machine that is back within that long was rebooted, which bills; one that is away for longer was stopped.
_REBOOT_S = 900.0
# A machine that runs other things besides began before the fleet did.
_SHARED = ("local", "ssh")
_FIRST_PROCESS = Path("/proc/1/stat")
# systemd writes it inside of a container.
_CONTAINER = Path("/run/systemd/container")


class Moment(NamedTuple):
    """The time on a machine. wall: UNIX seconds. up: seconds by the clock that counts from the boot, which nobody sets;
    booted: when the machine, or the container, began, by the same clock; None where that is not known. boot: its id."""

    wall: float
    up: float
    booted: float | None
    boot: str | None

    @classmethod
    def now(cls) -> Moment:
        """Returns the present one."""
        return cls(time.time(), time.clock_gettime(time.CLOCK_BOOTTIME), _booted(), this_boot())


def _booted() -> float | None:
    """Returns when the first process began, which on a machine is 0. A container has the clock of its host."""
    try:
        # After the name of the program, which may hold anything, the 20th field is the 22nd of all.
        ticks = _FIRST_PROCESS.read_text(encoding="utf-8", errors="replace").rpartition(")")[2].split()[19]
        return int(ticks) / os.sysconf("SC_CLK_TCK")
    except (OSError, IndexError, ValueError):  # the unit of the runner hides the processes of others
        return None if _CONTAINER.exists() else 0.0


@dataclass(frozen=True)
class _Measured(_schema.Document, error=NodeError, source=FILE, version=HOURS_VERSION):
    """The content of the file: up, boot and booted of the last measurement, and all runs, the last one goes on."""

    version: int
    machine: str
    up: float
    boot: str | None
    booted: float | None
    runs: tuple[MachineRun, ...]

    def _check(self, source: str) -> None:
        self._refuse(not self.runs, "has no run", f"{source}.runs")


class MachineClock:
    """Measures the machine of a node, and keeps that in its *folder*; one at a time, as one runner has a folder."""

    def __init__(self, folder: Path) -> None:
        self._file = folder / FILE
        self._measured: _Measured | None = None
        self._due = 0.0

    def due(self) -> bool:
        """Returns whether it is time to measure again."""
        return time.monotonic() >= self._due

    def measure(self, node: str, provider: str, *, given: bool = False, now: Moment | None = None) -> list[MachineRun]:
        """Returns the runs of the machine up to *now*, and keeps them.

        provider: of the node. given: by a batch system, which has run the machine before.
        """
        self._due = time.monotonic() + INTERVAL_S
        now, own = now or Moment.now(), provider not in _SHARED and not given
        since = now.up - now.booted if own and now.booted is not None else 0.0
        known = self._measured or self._load(now, since)
        runs = _longer(known, replace(known.runs[-1], node=node), now, since)
        self._measured = replace(known, up=now.up, boot=now.boot, booted=now.booted, runs=runs)
        try:
            replace_file(self._file, json.dumps(self._measured.to_json()) + "\n")
        except StateDirectoryError as error:  # tasks go on, and the memory has it
            logger.warning("%s", error)
        return list(runs)

    def _load(self, now: Moment, since: float) -> _Measured:
        if self._file.exists():
            try:
                return _Measured.load(self._file)
            except SkyinfraError as error:
                logger.warning("the hours of this machine begin anew: %s", error)
            since = 0.0  # the head has heard of it
        machine = uuid.uuid4().hex[:12]
        run = MachineRun("", machine, now.wall - since, since)
        return _Measured(HOURS_VERSION, machine, now.up, now.boot, now.booted, (run,))


def _longer(known: _Measured, last: MachineRun, now: Moment, since: float) -> tuple[MachineRun, ...]:
    """Returns the runs of a machine that was measured before. since: for how long it has been up."""
    before = known.runs[:-1]
    if (known.boot, known.booted) == (now.boot, now.booted) and now.up >= known.up:
        seconds = last.seconds + now.up - known.up
        return (*before, replace(last, began=now.wall - seconds, seconds=seconds))
    pause = now.wall - since - last.ended
    if 0 <= pause <= _REBOOT_S:
        seconds = last.seconds + pause + since
        return (*before, replace(last, began=now.wall - seconds, seconds=seconds))
    return (*known.runs, replace(last, began=now.wall - since, seconds=since))
