"""The processes of this machine, from /proc."""

from __future__ import annotations

import contextlib
import os
import pwd
import signal
import time
from collections.abc import Callable, Container, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

_POLL_S = 0.05
_PROC = Path("/proc")


@dataclass(frozen=True)
class Process:
    """A process. ``started``: in clock ticks since boot, unique with ``pid``. ``ended``: it is a zombie."""

    pid: int
    session: int
    started: int
    parent: int = 0
    ended: bool = False

    @property
    def id(self) -> tuple[int, int]:
        """Identifies it among all processes since boot."""
        return self.pid, self.started

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
    """Returns every running process."""
    return [process for pid in _pids() if (process := _read(pid)) is not None]


def descendants(pid: int) -> list[Process]:
    """Returns the processes that come from *pid*, parents first; those too that have ended, until they are waited
    for."""
    children: dict[int, list[Process]] = {}
    for number in _pids():
        if (process := _read(number, zombies=True)) is not None:
            children.setdefault(process.parent, []).append(process)
    found = children.get(pid, [])
    for each in found:  # it grows
        found += children.get(each.pid, [])
    return found


def marked(variables: Mapping[str, str]) -> list[Process]:
    """Returns the running processes that were started with these environment variables, as far as they can be read.

    This one and its parent are none of them.
    """
    marks = {os.fsencode(f"{name}={value}") for name, value in variables.items()}
    found = []
    for pid in _pids():
        with contextlib.suppress(OSError):  # it has ended, or is another user's
            if marks <= {*Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")}:
                found.append(_read(pid))
    return [each for each in found if each is not None and each.pid not in (os.getpid(), os.getppid())]


def command(pid: int) -> str:
    """Returns the command of a process, or its name where it has none to show."""
    with contextlib.suppress(OSError):
        words = Path(f"/proc/{pid}/cmdline").read_text(encoding="utf-8", errors="replace").split("\0")
        return (
            " ".join(words).strip() or Path(f"/proc/{pid}/comm").read_text(encoding="utf-8", errors="replace").strip()
        )
    return str(pid)


def of_session(session: int) -> list[Process]:
    """Returns the processes of *session*: what a detached runner and its tasks started, unless in a new session."""
    return [process for process in running() if process.session == session]


def holding(files: Container[str], *, proc: Path = _PROC) -> list[int]:
    """Returns the processes, without this one, with one of *files* open. Root sees all."""
    return [pid for pid in _pids(proc) if pid != os.getpid() and any(file in files for file in open_files(pid, proc))]


def named(program: str, *, proc: Path = _PROC) -> list[int]:
    """Returns the processes whose program has this name, also in containers."""
    found = []
    for pid in _pids(proc):
        with contextlib.suppress(OSError):  # it has ended
            first = (proc / str(pid) / "cmdline").read_bytes().split(b"\0")[0]
            if os.path.basename(os.fsdecode(first)) == program:  # noqa: PTH119 - the text, not a path
                found.append(pid)
    return found


def open_files(pid: int | Literal["self"], proc: Path = _PROC) -> list[str]:
    """Returns the open files of a process, as far as they can be read; also those that have been deleted."""
    found = []
    # A process may end meanwhile, or belong to another user.
    with contextlib.suppress(OSError):
        for link in (proc / str(pid) / "fd").iterdir():
            with contextlib.suppress(OSError):
                # The text, not a path.
                found.append(os.readlink(link).removesuffix(" (deleted)"))  # noqa: PTH115
    return found


def unit(pid: int, *, proc: Path = _PROC) -> str | None:
    """Returns the unit of systemd that a process is in: a service, or a scope, such as that of a session or container.

    None where it is in neither, and for services of users, which have a systemd of their own.
    """
    try:
        lines = (proc / str(pid) / "cgroup").read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:  # it has ended
        return None
    # See cgroups(7): "0::PATH", or in the older hierarchy "NUMBER:name=systemd:PATH".
    groups = [line.split(":", 2) for line in lines]
    path = next((group[2] for group in groups if group[1] == "name=systemd"), None)
    path = path or next((group[2] for group in groups if not group[1]), "")
    names = [name for name in path.split("/") if name.endswith((".service", ".scope"))]
    if not names or (names[-1].endswith(".service") and path.startswith("/user.slice/")):
        return None
    return names[-1]


def poll(condition: Callable[[], bool], seconds: float) -> bool:
    """Waits until *condition*, at most *seconds*; returns whether it was met."""
    deadline = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > deadline:
            return False
        time.sleep(_POLL_S)
    return True


def _pids(proc: Path = _PROC) -> list[int]:
    return sorted(int(entry.name) for entry in proc.iterdir() if entry.name.isdigit())


def describe(pid: int) -> str:
    """Returns ``PID (NAME, user NAME)``, as far as the system knows them."""
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


def owner(pid: int) -> int | None:
    """Returns the user id of a process; None where it has ended."""
    try:
        status = Path(f"/proc/{pid}/status").read_text(encoding="utf-8", errors="replace")
    except (FileNotFoundError, ProcessLookupError):
        return None
    # See proc_pid_status(5).
    return next(int(line.split()[1]) for line in status.splitlines() if line.startswith("Uid:"))


def exists(pid: int) -> bool:
    """Returns whether there is a process *pid*, as far as this one sees, that has not ended."""
    return _read(pid) is not None


def end(pids: Iterable[int], *, grace_s: float) -> None:
    """Ends these processes: SIGTERM, and SIGKILL for what is left after *grace_s* seconds."""
    found = [process for pid in pids if (process := _read(pid)) is not None]
    for number in (signal.SIGTERM, signal.SIGKILL):
        for process in found:
            process.send(number)
        poll(lambda: not any(process.alive for process in found), grace_s)


def _read(pid: int, *, zombies: bool = False) -> Process | None:
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:  # noqa: PTH123 - for each of hundreds
            data = file.read()
    except (FileNotFoundError, ProcessLookupError):
        return None
    # The name, in parentheses, may hold anything; what follows the last one is plain: see proc_pid_stat(5).
    fields = data.rpartition(b")")[2].split()
    ended = fields[0] in b"ZX"
    if ended and not zombies:
        return None
    return Process(pid=pid, session=int(fields[3]), started=int(fields[19]), parent=int(fields[1]), ended=ended)
