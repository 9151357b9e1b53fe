"""The processes of this machine, from /proc: finding what a runner or a worker leaves behind."""

from __future__ import annotations

import contextlib
import os
import signal
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Process:
    """One process that runs (a zombie does not). ``started``: in clock ticks since boot, unique with ``pid``."""

    pid: int
    parent: int
    group: int
    started: int

    def kill(self) -> None:
        """Sends SIGKILL, unless the process has ended and its id may be another's."""
        now = _read(self.pid)
        if now is not None and now.started == self.started:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, signal.SIGKILL)


def running() -> list[Process]:
    """Every process that runs now."""
    numbers = [int(entry.name) for entry in Path("/proc").iterdir() if entry.name.isdigit()]
    return [process for process in map(_read, numbers) if process is not None]


def descendants(pid: int) -> list[Process]:
    """The children of *pid*, their children, and so on."""
    children: dict[int, list[Process]] = {}
    for process in running():
        children.setdefault(process.parent, []).append(process)
    found: list[Process] = []
    parents = [pid]
    while parents:
        below = children.get(parents.pop(), [])
        found.extend(below)
        parents.extend(process.pid for process in below)
    return found


def of_group(group: int) -> list[Process]:
    """The processes of the process group *group*."""
    return [process for process in running() if process.group == group]


def _read(pid: int) -> Process | None:
    try:
        text = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")
    except (FileNotFoundError, ProcessLookupError):
        return None
    # The name, in parentheses, may hold anything; what follows the last one is plain: see proc_pid_stat(5).
    fields = text.rpartition(")")[2].split()
    if fields[0] in "ZX":
        return None
    return Process(pid=pid, parent=int(fields[1]), group=int(fields[2]), started=int(fields[19]))
