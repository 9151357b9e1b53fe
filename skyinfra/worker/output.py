"""What tasks print: one file for each task, in the node's folder.

The streams are those of the process, so that what native code and the programs of a task print is there too. Nothing of
it fails a task: a node whose disk is full runs tasks whose output goes where that of the runner goes.

Travels to nodes: standard library only.
"""

from __future__ import annotations

import contextlib
import logging
import os
import sys
from collections.abc import Iterator
from pathlib import Path

FOLDER = "tasks"
# What is kept of tasks that have ended; looked at once in a while.
_KEPT_FILES = 500
_KEPT_BYTES = 256 * 2**20
_PRUNE_EVERY = 50
_FLAGS = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC | os.O_NOFOLLOW

_count = 0


def keep_logging() -> None:
    """In a worker process, before its first task: what is logged goes on to where it went, whatever tasks print to."""
    stream = os.fdopen(os.dup(2), "w", buffering=1, errors="backslashreplace")
    for name in (None, *logging.root.manager.loggerDict):
        for handler in logging.getLogger(name).handlers:
            if isinstance(handler, logging.StreamHandler) and handler.stream is sys.stderr:
                handler.setStream(stream)


@contextlib.contextmanager
def captured(key: str, folder: Path) -> Iterator[str | None]:
    """Around the task *key*: its output goes to a file in *folder*, which is removed again where there was none.

    Gives the file; None where it could not be made.
    """
    global _count
    # Plain text for paths, and no more system calls than are needed: this is a part of every task's round trip.
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
    """Whether anything was printed to *file*, that of `captured`, since it was made or cut."""
    flush()
    with contextlib.suppress(OSError):
        return os.stat(file).st_size > 0  # noqa: PTH116 - see above
    return False


def cut(file: str, key: str) -> None:
    """What was printed to *file*, that of `captured`, is the output of the task *key*; what follows is not."""
    with contextlib.suppress(OSError):
        os.rename(file, f"{os.path.dirname(file)}/{key}.log")  # noqa: PTH104, PTH120 - see above
        handle = os.open(file, _FLAGS, 0o644)
        for number in (1, 2):
            os.dup2(handle, number)
        os.close(handle)


def find(folder: Path, key: str) -> Path | None:
    """The output of the task whose key is *key* or begins so, the newest where several do; None where there is none."""
    with contextlib.suppress(OSError):
        files = [file for file in (folder / FOLDER).iterdir() if file.name.startswith(key) and file.suffix == ".log"]
        return max(files, key=lambda file: file.stat().st_mtime_ns, default=None)
    return None


def flush() -> None:
    """Hands on what Python still holds of the standard streams."""
    for stream in (sys.stdout, sys.stderr):
        # A task may have closed it, or put something of its own there.
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
