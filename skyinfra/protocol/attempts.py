"""How often a task was started on this node without having ended. Travels to nodes: standard library only."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Iterator
from pathlib import Path

from skyinfra._errors import StateDirectoryError, TaskAttemptsExceeded
from skyinfra.protocol import failures
from skyinfra.protocol.instance import NODE_DIRECTORY

# A task that was started that often and never ended is not started again on this node.
ATTEMPTS = 3


@contextlib.contextmanager
def counted(key: str, name: str, timeout: float | None = None) -> Iterator[None]:
    """Counts the starts of a task that has not ended yet, one byte each, in a file of the node.

    A worker process that dies leaves the file behind, and Dask starts the task again elsewhere: without a limit a
    task that ends its process does so for ever, and takes down whatever else its next workers were given. One whose
    last start was *timeout* seconds ago, or more, was ended for that.
    """
    path = _attempt_file(key)
    try:
        before = path.stat().st_mtime if timeout is not None and path.exists() else None
        starts = _count_start(path)
    except OSError as error:
        raise StateDirectoryError(
            f"the node cannot keep count of its tasks: {error.strerror}",
            field=str(path),
            hint="Free space on the node's disk, or replace the node.",
        ) from None
    try:
        if timeout is not None and before is not None and time.time() - before >= timeout:
            raise failures.late(name, timeout)
        if starts > ATTEMPTS:
            raise TaskAttemptsExceeded(
                f"{name} ended its worker process {ATTEMPTS} times and is not tried again",
                hint="Usual causes: the machine ran out of memory, a crash in native code, or os._exit().",
            )
        yield
    finally:
        path.unlink(missing_ok=True)


def begun(key: str, directory: Path) -> bool:
    """Whether the task *key* was started on the node in *directory* and has not ended."""
    return _attempt_file(key, directory).exists()


def forgive(key: str, directory: Path | None = None) -> None:
    """The task *key* is ended on purpose: its starts on the node in *directory*, or on this one, do not count."""
    _attempt_file(key, directory).unlink(missing_ok=True)


def _attempt_file(key: str, directory: Path | None = None) -> Path:
    return (directory or Path(os.environ[NODE_DIRECTORY])) / "attempts" / key


def _count_start(path: Path) -> int:
    path.parent.mkdir(exist_ok=True)
    with path.open("ab") as file:
        file.write(b".")
        return file.tell()
