"""The output of tasks: one file for each task, in the node's folder.

The streams of the process are redirected, so that the file also holds the output of native code and of programs that a
task runs. An error here fails no task: without a file, output goes to that of the runner, and what a full disk does not
take is lost.
"""

from __future__ import annotations

import contextlib
import errno
import io
import logging
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

FOLDER = "tasks"
# Limits for files of ended tasks, applied every 50 tasks.
_KEPT_FILES = 500
_KEPT_BYTES = 256 * 2**20
_PRUNE_EVERY = 50
_FLAGS = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC | os.O_NOFOLLOW

_count = 0


class _Stream(io.FileIO):
    """A standard stream that drops what a full disk does not take."""

    def write(self, data: Any, /) -> int:
        try:
            return super().write(data)
        except OSError as error:
            if error.errno not in (errno.ENOSPC, errno.EDQUOT):
                raise
            return memoryview(data).nbytes


def survive_full_disks() -> None:
    """Makes the standard streams of this process drop what a full disk does not take: no `print` raises for it."""
    flush()
    for name, number in (("stdout", 1), ("stderr", 2)):
        old = getattr(sys, name)
        if isinstance(old, io.TextIOWrapper):
            raw = _Stream(number, "w", closefd=False)
            raw.name = old.name
            at_once = old.write_through
            buffer: Any = raw if at_once else io.BufferedWriter(raw)
            # By the line at least: what native code writes comes after what was printed before.
            new = io.TextIOWrapper(buffer, old.encoding, old.errors, line_buffering=True, write_through=at_once)
            setattr(sys, name, new)


def keep_logging() -> None:
    """Keeps the log of this worker process out of the output of tasks. Is called before the first task."""
    stream = os.fdopen(os.dup(2), "w", buffering=1, errors="backslashreplace")
    for name in (None, *logging.root.manager.loggerDict):
        for handler in logging.getLogger(name).handlers:
            if isinstance(handler, logging.StreamHandler) and handler.stream is sys.stderr:
                handler.setStream(stream)


@contextlib.contextmanager
def captured(key: str, folder: Path) -> Iterator[str | None]:
    """Redirects the output of the task *key* to a file in *folder*; an empty file is removed at the end.

    Yields the file, or None where it could not be made.
    """
    global _count
    # Paths are strings, and system calls few: this is a part of every task's round trip.
    file = f"{folder}/{FOLDER}/{key}.log"
    try:
        if _count % _PRUNE_EVERY == 0:
            _prune(folder / FOLDER)
        _count += 1
        handle = os.open(file, _FLAGS, 0o644)
    except OSError:
        yield None
        return
    flush()
    before = os.dup(1), os.dup(2)
    try:
        for number in (1, 2):
            os.dup2(handle, number)
        yield file
    finally:
        flush()
        for number, old in zip((1, 2), before, strict=True):
            os.dup2(old, number)
            os.close(old)
        with contextlib.suppress(OSError):
            if os.stat(file).st_size == 0:  # noqa: PTH116 - see above
                os.unlink(file)  # noqa: PTH108
        os.close(handle)


def written(file: str) -> bool:
    """Whether *file*, that of `captured`, has output since it was made or cut."""
    flush()
    with contextlib.suppress(OSError):
        return os.stat(file).st_size > 0  # noqa: PTH116 - see above
    return False


def cut(file: str, key: str) -> None:
    """Makes the output in *file*, that of `captured`, that of the task *key*; later output goes to a new file."""
    with contextlib.suppress(OSError):
        os.rename(file, f"{os.path.dirname(file)}/{key}.log")  # noqa: PTH104, PTH120 - see above
        handle = os.open(file, _FLAGS, 0o644)
        for number in (1, 2):
            os.dup2(handle, number)
        os.close(handle)


def path_of(key: str, folder: Path) -> Path:
    """Returns the file for the output of the task *key*, which may not exist."""
    return folder / FOLDER / f"{key}.log"


def find(folder: Path, key: str) -> Path | None:
    """Returns the newest output of a task whose key begins with *key*, or None."""
    with contextlib.suppress(OSError):
        files = [file for file in (folder / FOLDER).iterdir() if file.name.startswith(key) and file.suffix == ".log"]
        return max(files, key=lambda file: file.stat().st_mtime_ns, default=None)
    return None


def last_lines(folder: Path, key: str, lines: int, most: int) -> list[str]:
    """Returns the last *lines* with text of the output of the task *key*, of at most *most* bytes."""
    with contextlib.suppress(OSError), path_of(key, folder).open("rb") as file:
        size = os.fstat(file.fileno()).st_size
        file.seek(max(0, size - most))
        found = [line.rstrip() for line in file.read(most).decode(errors="replace").splitlines()]
        return [line for line in found if line][-lines:]
    return []


def say(line: str) -> None:
    """Adds *line* to the output of the task, wherever its streams lead by now."""
    flush()
    os.write(2, f"{line}\n".encode(errors="replace"))


def flush() -> None:
    """Flushes the standard streams."""
    for stream in (sys.stdout, sys.stderr):
        # A task may have closed or replaced it.
        with contextlib.suppress(OSError, ValueError, AttributeError):
            stream.flush()


def _prune(folder: Path) -> None:
    """Makes the folder, and removes the oldest output from it."""
    folder.mkdir(exist_ok=True)
    found = sorted(((file.stat(), file) for file in folder.iterdir()), key=lambda item: -item[0].st_mtime_ns)
    total = 0
    for number, (stat, file) in enumerate(found):
        total += stat.st_size
        if number >= _KEPT_FILES or total > _KEPT_BYTES:
            file.unlink(missing_ok=True)
