"""The processes of this machine, from /proc: finding what a runner leaves behind."""

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
    session: int
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


def of_session(session: int) -> list[Process]:
    """The processes of *session*: what a detached runner and its tasks started, unless it started a session."""
    return [process for process in running() if process.session == session]


def _read(pid: int) -> Process | None:
    try:
        text = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")
    except (FileNotFoundError, ProcessLookupError):
        return None
    # The name, in parentheses, may hold anything; what follows the last one is plain: see proc_pid_stat(5).
    fields = text.rpartition(")")[2].split()
    if fields[0] in "ZX":
        return None
    return Process(pid=pid, session=int(fields[3]), started=int(fields[19]))
