"""The processes of this machine, from /proc: finding what a runner leaves behind, and what holds a GPU."""

from __future__ import annotations

import contextlib
import os
import pwd
import signal
import time
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Process:
    """One process that runs (a zombie does not). ``started``: in clock ticks since boot, unique with ``pid``."""

    pid: int
    session: int
    started: int

    @property
    def alive(self) -> bool:
        """Whether it still runs; another process with its id does not count."""
        now = _read(self.pid)
        return now is not None and now.started == self.started

    def kill(self) -> None:
        """Sends SIGKILL, unless the process has ended and its id may be another's."""
        self.send(signal.SIGKILL)

    def send(self, number: signal.Signals) -> None:
        """Sends the signal *number*, unless the process has ended and its id may be another's."""
        if self.alive:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, number)


def running() -> list[Process]:
    """Every process that runs now."""
    numbers = [int(entry.name) for entry in Path("/proc").iterdir() if entry.name.isdigit()]
    return [process for process in map(_read, numbers) if process is not None]


def of_session(session: int) -> list[Process]:
    """The processes of *session*: what a detached runner and its tasks started, unless it started a session."""
    return [process for process in running() if process.session == session]


def holding(prefix: str) -> list[int]:
    """The processes, without this one, that have a file open whose path begins with *prefix*. Root sees all."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit() and int(entry.name) != os.getpid() and _has_open(entry / "fd", prefix):
            found.append(int(entry.name))
    return sorted(found)


def describe(pid: int) -> str:
    """``PID (NAME, user NAME)`` as far as the system says it."""
    try:
        name = Path(f"/proc/{pid}/comm").read_text(encoding="utf-8", errors="replace").strip()
        owner = Path(f"/proc/{pid}").stat().st_uid
    except (FileNotFoundError, ProcessLookupError):
        return str(pid)
    try:
        user = pwd.getpwuid(owner).pw_name
    except KeyError:
        user = str(owner)
    return f"{pid} ({name}, user {user})"


def end(pids: Iterable[int], *, grace_s: float) -> None:
    """Ends these processes: SIGTERM, and SIGKILL for what is left after *grace_s* seconds."""
    found = [process for pid in pids if (process := _read(pid)) is not None]
    for number in (signal.SIGTERM, signal.SIGKILL):
        for process in found:
            process.send(number)
        deadline = time.monotonic() + grace_s
        while (found := [process for process in found if process.alive]) and time.monotonic() < deadline:
            time.sleep(0.05)


def _has_open(folder: Path, prefix: str) -> bool:
    # A process may end, or belong to somebody else, while it is looked at.
    with contextlib.suppress(OSError):
        for link in folder.iterdir():
            with contextlib.suppress(OSError):
                if os.readlink(link).startswith(prefix):  # noqa: PTH115 - the text, not a path
                    return True
    return False


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
