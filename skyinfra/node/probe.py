"""Does on a node what each task needs there, to see whether it can: files, descriptors, a thread, a process.

`doctor` and the processes of slots do so. What fails is why the node would fail any task.
"""

from __future__ import annotations

import errno
import os
import subprocess
import threading
from pathlib import Path

# The folders of a node's directory in which files are made for each task, or for a large one.
_FOLDERS = (".", "attempts", "tasks", "running", "work", "blobs/incoming")
_BYTES = 64 * 2**10
_DESCRIPTORS = 16
_PROCESS_S = 30.0
# Of a chain of exceptions.
_DEEP = 10
# Errors that are of the machine: another process meets them as well.
_OF_MACHINE = frozenset(
    {errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EIO, errno.ENFILE, errno.ESTALE, errno.ENOTDIR, errno.EACCES}
)
# Errors of which a new process may be free: it has other descriptors, threads and memory.
_OF_PROCESS = frozenset({errno.EMFILE, errno.ENOMEM, errno.EAGAIN, errno.ENOBUFS})
# Of the RuntimeError with which Python says so.
_NO_THREAD = "can't start new thread"


def check(directory: Path) -> None:
    """Checks the node in *directory*. Raises OSError, or RuntimeError where no thread can be started."""
    for name in _FOLDERS:
        _check_folder(directory / name)
    opened: list[int] = []
    try:
        for _ in range(_DESCRIPTORS):
            opened.append(os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC))
    finally:
        for number in opened:
            os.close(number)
    thread = threading.Thread(target=_nothing, name="skyinfra-probe")
    thread.start()
    thread.join()
    subprocess.run(["/bin/sh", "-c", ":"], stdin=subprocess.DEVNULL, timeout=_PROCESS_S, check=True)


def of_machine(error: BaseException) -> bool:
    """Returns whether *error*, or one before it, is one that another process of the machine would meet as well."""
    return _has(error, _OF_MACHINE)


def lacks(error: BaseException) -> bool:
    """Returns whether *error*, or one before it, says that the machine or this process lacks something."""
    no_thread = isinstance(error, RuntimeError) and str(error) == _NO_THREAD
    return isinstance(error, MemoryError) or no_thread or _has(error, _OF_MACHINE | _OF_PROCESS)


def _has(error: BaseException | None, numbers: frozenset[int]) -> bool:
    for _ in range(_DEEP):
        if error is None:
            break
        if isinstance(error, OSError) and error.errno in numbers:
            return True
        error = error.__cause__ or error.__context__
    return False


def said(error: BaseException) -> str:
    """Returns *error* in one line, with the file that it is about."""
    if isinstance(error, OSError) and error.strerror:
        return f"{error.strerror}: {error.filename}" if error.filename else error.strerror
    text = " ".join(str(error).split())[:300]
    return f"{type(error).__name__}: {text}" if text else type(error).__name__


def _check_folder(folder: Path) -> None:
    file = folder / f".probe-{os.getpid()}"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        try:
            file.write_bytes(bytes(_BYTES))
        finally:
            file.unlink(missing_ok=True)
    except OSError as error:
        raise OSError(error.errno, error.strerror, str(folder)) from None


def _nothing() -> None:
    """The work of a thread that is only to start."""
