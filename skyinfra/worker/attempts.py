"""Counts the starts of tasks that have not ended on this node, and notes which one runs on each slot.

Where the process of a slot dies, the runner notes why, in a file for each task with a line for each death (`Death`).
The next start of the task says it.
"""

from __future__ import annotations

import contextlib
import json
import mmap
import os
import signal
import time
from collections.abc import Callable, Iterator, Sequence
from functools import cache
from pathlib import Path

from skyinfra.engine import deaths
from skyinfra.engine.deaths import Death
from skyinfra.errors import SkyinfraError, StateDirectoryError, TaskAttemptsExceeded
from skyinfra.node.kills import Kills
from skyinfra.protocol import failures, interruption
from skyinfra.protocol.calls import ATTEMPTS
from skyinfra.protocol.instance import NODE_DIRECTORY, instance_info
from skyinfra.worker import output

_FOLDER = "attempts"
_DEATHS = "deaths"
# Files of notes that are kept: a task that goes on at another node leaves its own here.
_MOST_NOTED = 200
# The runner notes a death within milliseconds; the task may start again elsewhere on the node before that.
_NOTED_S = 1.0
_POLL_S = 0.02
# Of the output of a task, in its error.
_LAST_LINES = 5
_LAST_BYTES = 2000
# A file for each slot: the process of its worker, and the key of the task that it runs, in one line.
_RUNNING = "running"
_LONGEST_LINE = 4096
# At the end of that file: how many bytes of its output the client of the task was sent, and before the last messages.
_SHOWN = b"%020d %020d"
_SHOWN_BYTES = len(_SHOWN % (0, 0))
_SHOWN_AT = _LONGEST_LINE - 64
_FLAGS = os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC
# A start: the uptime of the machine, in milliseconds.
_START = b"%015d\n"
_START_BYTES = 16


@contextlib.contextmanager
def counted(
    key: str,
    name: str,
    timeout: float | None = None,
    again: Callable[[Death | None], object] = lambda _: None,
    on_all: Sequence[Death] = (),
) -> Iterator[int]:
    """Counts the starts of a task that has not ended, a line each, in a file of the node; yields their number.

    A worker process that dies leaves the file behind, and Dask starts the task again elsewhere: without a limit, a
    task that ends its process would do so for ever, and with it the other tasks of its workers. A task whose last start
    is *timeout* seconds ago, or more, is over its time. *again*: called with what ended the process of the last start,
    where there was one on this node; None where that is not known. on_all: the deaths on all nodes, where they are as
    many as there may be. Raises `TaskAttemptsExceeded`, `TaskTimeout`.
    """
    # Plain text for paths, and no more system calls than are needed: this is a part of every task's round trip.
    path = f"{os.environ[NODE_DIRECTORY]}/{_FOLDER}/{key}"
    try:
        starts, before = _count_start(path)
    except OSError as error:
        raise StateDirectoryError(
            f"the node cannot keep count of its tasks: {error.strerror}",
            field=path,
            hint="Free space on the node's disk, or replace the node.",
        ) from None
    try:
        if starts > 1 or on_all:
            _check_earlier(key, name, starts, again, on_all)
        if timeout is not None and before is not None and before >= timeout:
            raise failures.late(name, timeout)
        with _noted(key):
            yield starts
    finally:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(path)  # noqa: PTH108 - see above
        if starts > 1:
            (_directory() / _DEATHS / key).unlink(missing_ok=True)


def _check_earlier(
    key: str, name: str, starts: int, again: Callable[[Death | None], object], on_all: Sequence[Death]
) -> None:
    """Looks at what ended the earlier starts of a task. Raises `TaskAttemptsExceeded`."""
    found = _earlier(_directory(), key, starts - 1)
    if starts > 1:
        again(found[-1] if found else None)
    if on_all or starts > ATTEMPTS:
        raise _exceeded(_directory(), key, name, max(len(on_all), ATTEMPTS), on_all or found)


def running(directory: Path) -> dict[int, str]:
    """Returns the keys of the tasks that run on the node in *directory*, by the index of their slot.

    A task whose process has died does not run.
    """
    found: dict[int, str] = {}
    for file in (directory / _RUNNING).glob("[0-9]*"):
        with contextlib.suppress(OSError, ValueError):
            line, end, _ = file.read_bytes()[:_LONGEST_LINE].partition(b"\n")
            pid, _, key = line.decode().partition(" ")
            if end and key and Path(f"/proc/{int(pid)}").exists():
                found[int(file.name)] = key
    return found


def note_shown(count: int, sure: int) -> None:
    """Notes, for the next start of the task of this process, that its client is sent *count* bytes of its output; that
    *sure* of them have arrived."""
    note = _note_of(os.environ.get(NODE_DIRECTORY, ""), os.getpid())
    if note is not None:
        note[_SHOWN_AT : _SHOWN_AT + _SHOWN_BYTES] = _SHOWN % (count, sure)


@contextlib.contextmanager
def _noted(key: str) -> Iterator[None]:
    """Notes for `running` that *key* runs on the slot of this process, in the body.

    A note is written to memory that is shared with the file: no system call is added to a task's round trip. Where that
    cannot be had, the task runs without.
    """
    note = _note_of(os.environ[NODE_DIRECTORY], os.getpid())
    if note is None:
        yield
        return
    note[_SHOWN_AT : _SHOWN_AT + _SHOWN_BYTES] = _SHOWN % (0, 0)
    _write(note, f"{os.getpid()} {key}\n")
    try:
        yield
    finally:
        _write(note, "\n")


def _write(note: mmap.mmap, line: str) -> None:
    data = line.encode()
    if len(data) <= _SHOWN_AT:
        note[: len(data)] = data


@cache
def _note_of(directory: str, pid: int) -> mmap.mmap | None:
    """The note of the process *pid*, which is this one; None where it cannot be made, or the process has no slot."""
    try:
        worker = instance_info().worker
        os.makedirs(f"{directory}/{_RUNNING}", exist_ok=True)  # noqa: PTH103
        handle = os.open(f"{directory}/{_RUNNING}/{worker}", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        try:
            # Written as a whole: a page that a full disk has no room for would end the process when it is touched.
            os.pwrite(handle, b"\n" * _LONGEST_LINE, 0)
            return mmap.mmap(handle, _LONGEST_LINE)
        finally:
            os.close(handle)
    except (OSError, ValueError, SkyinfraError):
        return None


def begun(key: str, directory: Path) -> bool:
    """Returns whether the task *key* was started on the node in *directory* and has not ended."""
    return _attempt_file(key, directory).exists()


def forgive(key: str, directory: Path | None = None) -> None:
    """Resets the starts of the task *key* on the node in *directory*, or on this one: it is ended on purpose."""
    _attempt_file(key, directory).unlink(missing_ok=True)


def _attempt_file(key: str, directory: Path | None = None) -> Path:
    return (directory or _directory()) / _FOLDER / key


def _directory() -> Path:
    return Path(os.environ[NODE_DIRECTORY])


def _count_start(path: str) -> tuple[int, float | None]:
    """Counts a start. Returns the number of starts, and the seconds since the one before."""
    try:
        handle = os.open(path, _FLAGS, 0o644)
    except FileNotFoundError:
        os.makedirs(os.path.dirname(path), exist_ok=True)  # noqa: PTH103, PTH120
        handle = os.open(path, _FLAGS, 0o644)
    try:
        before, now = os.fstat(handle), interruption.uptime()
        os.write(handle, _START % int(now * 1000))
        if not before.st_size:
            return 1, None
        last = os.pread(handle, _START_BYTES, before.st_size - _START_BYTES)
        # The clock may have been set since, and the machine booted: one of both is right.
        since = min(time.time() - before.st_mtime, now - int(last) / 1000 if last.strip().isdigit() else 0.0)
        return os.fstat(handle).st_size // _START_BYTES, since
    finally:
        os.close(handle)


# Processes that died -----------------------------------------------------------------------------------------------


class Watch:
    """Notes, in the runner, what ends worker processes of the slot with *index* of the node in *directory*.

    *group*: the folder of the slot's group of processes, where it has one.
    """

    def __init__(self, directory: Path, index: int, group: Path | None = None, root: Path = Path("/")) -> None:
        self._directory = directory
        self._index = index
        self._kills = Kills(group, root)

    def ended(self, code: int) -> tuple[str, Death] | None:
        """Notes that the process ended with *code*. Returns the key of the task that it ran, if it did and was not
        stopped, and how it ended."""
        killed = self._kills.any()
        found = _left_behind(self._directory, self._index)
        if found is None or not begun(found[0], self._directory):
            return None
        key, shown, sure = found
        death = Death(code, code == -signal.SIGKILL and killed, shown, sure)
        with contextlib.suppress(OSError):  # a full disk: the cause is not known then
            _note(self._directory, key, death)
        return key, death


def _left_behind(directory: Path, index: int) -> tuple[str, int, int] | None:
    """The task that ran on the slot with *index* when its process died, and what it had noted with `note_shown`.

    The note of it is removed: called in the runner, while the slot has no process.
    """
    try:
        with (directory / _RUNNING / str(index)).open("r+b") as file:
            note = file.read(_LONGEST_LINE)
            file.seek(0)
            file.write(b"\n")
        line, end, _ = note.partition(b"\n")
        key, noted = line.decode().partition(" ")[2], note[_SHOWN_AT : _SHOWN_AT + _SHOWN_BYTES].split()
        shown, sure = map(int, noted) if len(noted) == 2 else (0, 0)
        return (key, shown, sure) if end and key else None
    except (OSError, ValueError):
        return None


def _note(directory: Path, key: str, death: Death) -> None:
    """Notes a death under the task *key* of the node in *directory*. Raises OSError."""
    folder = directory / _DEATHS
    folder.mkdir(exist_ok=True)
    with (folder / key).open("a", encoding="utf-8") as file:
        file.write(json.dumps(death.to_json()) + "\n")
    for old in sorted(folder.iterdir(), key=_changed, reverse=True)[_MOST_NOTED:]:
        old.unlink(missing_ok=True)


def _changed(file: Path) -> int:
    try:
        return file.stat().st_mtime_ns
    except FileNotFoundError:  # its task has ended meanwhile
        return 0


def _earlier(directory: Path, key: str, number: int) -> list[Death]:
    """The last *number* deaths of worker processes under the task *key*, as far as they are noted within a second."""
    deadline = time.monotonic() + _NOTED_S
    while len(found := _read(directory / _DEATHS / key)) < number and time.monotonic() < deadline:
        time.sleep(_POLL_S)
    return found[-number:]


def _read(file: Path) -> list[Death]:
    with contextlib.suppress(OSError, ValueError, SkyinfraError):
        return [Death.read(json.loads(line)) for line in file.read_text(encoding="utf-8").splitlines()]
    return []


def _exceeded(directory: Path, key: str, name: str, times: int, found: Sequence[Death]) -> TaskAttemptsExceeded:
    """The error of a task that ended its worker process so many *times*: why, its last lines, and where all are."""
    cause = deaths.causes(found)
    fleet = "STACK/POOL"
    with contextlib.suppress(SkyinfraError):
        fleet = instance_info().fleet or fleet
    hint = [deaths.printed(fleet, key, _last_lines(directory, key))]
    if (usual := deaths.remedy([death.code for death in found])) and not any(each.out_of_memory for each in found):
        hint.append(usual)
    return TaskAttemptsExceeded(
        f"{name} ended its worker process {times} times{f': {cause}' if cause else ''}",
        hint="\n".join(hint),
    )


def last_lines(key: str) -> list[str]:
    """Returns the last lines of the output of the task *key*, for its error."""
    return _last_lines(_directory(), key)


def _last_lines(directory: Path, key: str) -> list[str]:
    return output.last_lines(directory, key, _LAST_LINES, _LAST_BYTES)
