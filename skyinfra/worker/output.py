"""The output of tasks: one file for each task, in the node's folder.

The streams of the process are redirected, so that the file also holds the output of native code and of programs that a
task runs. An error here fails no task: without a file, output goes to that of the runner, and what a full disk does not
take is lost.
"""

from __future__ import annotations

import contextlib
import errno
import functools
import io
import logging
import os
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Set
from pathlib import Path
from typing import Any

FOLDER = "tasks"
# Limits for files of ended tasks, applied every 50 tasks; the newest stays, however large it is.
_KEPT_FILES = 500
_KEPT_BYTES = 256 * 2**20
_PRUNE_EVERY = 50
_FLAGS = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC | os.O_NOFOLLOW

_count = 0
_STREAMS = (("stdout", 1), ("stderr", 2))


class Log:
    """The output of a task as its threads have it that go on after its end. *mask*: what hides its secrets, if any."""

    def __init__(self, file: str, mask: Callable[[str], str] | None = None) -> None:
        self._file = file
        self._mask = mask

    def write(self, text: str) -> int:
        """Adds *text*; the task is over, and nobody waits for it any more."""
        shown = self._mask(text) if self._mask is not None else text
        with contextlib.suppress(OSError):
            handle = os.open(self._file, _FLAGS, 0o644)
            try:
                os.write(handle, shown.encode("utf-8", "backslashreplace"))
            finally:
                os.close(handle)
        return len(text)


class _LogBuffer(io.RawIOBase):
    """The bytes of a `Log`."""

    def __init__(self, log: Log) -> None:
        self._log = log

    def write(self, data: Any, /) -> int:
        self._log.write(bytes(data).decode("utf-8", "surrogateescape"))
        return memoryview(data).nbytes


# The log of the task whose code runs in the main thread.
_present: Log | None = None


@contextlib.contextmanager
def logging_to(log: Log) -> Iterator[None]:
    """While the code of a task runs, in the body: the threads that it starts, and those that these start, are its own.

    What they print after it goes to *log*, and not into the output of the task that runs then.
    """
    global _present
    _present = log
    try:
        yield
    finally:
        _present = None


def follow_threads() -> None:
    """Makes each new thread of this process know the task that it belongs to."""
    start = threading.Thread.start

    @functools.wraps(start)
    def started(thread: threading.Thread) -> None:
        of_main = threading.current_thread() is threading.main_thread()
        thread.log_of_task = _present if of_main else _own_log()  # type: ignore[attr-defined]
        start(thread)

    threading.Thread.start = started  # type: ignore[assignment,method-assign]


def _own_log() -> Log | None:
    log: Log | None = getattr(threading.current_thread(), "log_of_task", None)
    return log


def _left() -> Log | None:
    """Returns the log of this thread, where its task is over; None for all other threads."""
    log = _own_log()
    return log if log is not _present else None


class _Raw(io.FileIO):
    """A standard stream that drops what a full disk does not take."""

    def write(self, data: Any, /) -> int:
        try:
            return super().write(data)
        except OSError as error:
            if error.errno not in (errno.ENOSPC, errno.EDQUOT):
                raise
            return memoryview(data).nbytes


class _Stream(io.TextIOWrapper):
    """A standard stream, in which threads of ended tasks do not write."""

    def write(self, text: str, /) -> int:
        log = _left()
        return super().write(text) if log is None else log.write(text)

    @property
    def buffer(self) -> Any:
        log = _left()
        return super().buffer if log is None else _LogBuffer(log)


def own_streams() -> None:
    """Makes the standard streams of this process drop what a full disk does not take: no `print` raises for it."""
    flush()
    for name, number in _STREAMS:
        old = getattr(sys, name)
        if isinstance(old, io.TextIOWrapper):
            new = _stream(number, old.name, old.encoding, old.errors, old.write_through)
            # Programs that have replaced a stream put this one in its place.
            setattr(sys, f"__{name}__", new)
            setattr(sys, name, new)


def _stream(number: int, name: str, encoding: str, errors: str | None, at_once: bool) -> _Stream:
    raw = _Raw(number, "w", closefd=False)
    raw.name = name
    buffer: Any = raw if at_once else io.BufferedWriter(raw)
    # By the line at least: what native code writes comes after what was printed before.
    return _Stream(buffer, encoding, errors, line_buffering=True, write_through=at_once)


# What `reconfigure` can change.
_Settings = tuple[str, str | None, bool, bool]


def streams() -> tuple[tuple[Any, _Settings | None], ...]:
    """Returns the standard streams, each with its settings; None for those of a closed one."""
    return tuple((stream, _settings(stream)) for stream in (sys.stdin, sys.stdout, sys.stderr))


def _settings(stream: Any) -> _Settings | None:
    try:
        if not stream.closed:
            return stream.encoding, stream.errors, stream.line_buffering, stream.write_through
    except (AttributeError, ValueError):  # it is none, or was detached
        pass
    return None


def put_back(before: tuple[tuple[Any, _Settings | None], ...]) -> None:
    """Makes the standard streams those of *before*; in place of one that was closed, there is a new one like it."""
    for (number, name), (stream, settings) in zip(enumerate(("stdin", "stdout", "stderr")), before, strict=True):
        now = _settings(stream)
        if settings is not None and now is None:
            new = _open(number, settings)
            _hand_over(stream, new)
            setattr(sys, f"__{name}__", new)
            stream = new
        elif settings is not None and now != settings:
            encoding, errors, by_line, at_once = settings
            stream.reconfigure(encoding=encoding, errors=errors, line_buffering=by_line, write_through=at_once)
        setattr(sys, name, stream)


def _open(number: int, settings: _Settings) -> io.TextIOWrapper:
    encoding, errors, _, at_once = settings
    if number:
        return _stream(number, ("", "<stdout>", "<stderr>")[number], encoding, errors, at_once)
    return open(number, encoding=encoding, errors=errors, closefd=False)


def _hand_over(old: Any, new: Any) -> None:
    """Makes the handlers of logging that wrote to *old* write to *new*."""
    for handler in _handlers():
        if handler.stream is old:
            handler.stream = new


def _handlers() -> Iterator[logging.StreamHandler[Any]]:
    for name in (None, *logging.root.manager.loggerDict):
        for handler in logging.getLogger(name).handlers:
            if isinstance(handler, logging.StreamHandler):
                yield handler


def keep_logging() -> None:
    """Keeps the log of this worker process out of the output of tasks. Is called before the first task."""
    stream = os.fdopen(os.dup(2), "w", buffering=1, errors="backslashreplace")
    for handler in _handlers():
        if handler.stream is sys.stderr:
            handler.setStream(stream)


def end_line(file: str) -> None:
    """Ends the last line of *file*, the output of a task that starts again."""
    with contextlib.suppress(OSError), open(file, "r+b") as stream:  # noqa: PTH123 - as below
        if stream.seek(0, os.SEEK_END):
            stream.seek(-1, os.SEEK_END)
            if stream.read(1) not in b"\r\n":
                stream.write(b"\n")


def file_of(key: str, folder: Path | str) -> str:
    """Returns the file with the output of the task *key*, in the *folder* of the node; it may not exist."""
    return f"{folder}/{FOLDER}/{key}.log"


@contextlib.contextmanager
def captured(
    key: str, folder: Path, *, empty: bool = False, running: Callable[[Path], Mapping[int, str]] = lambda _: {}
) -> Iterator[str | None]:
    """Redirects the output of the task *key* to a file in *folder*. Yields the file, or None where none could be made.

    It is removed at the end where it is empty. *empty*: it stays, which tells a task without output from one whose
    output is gone. *running*: returns the keys of the tasks that run on the node in that folder; their files stay.
    """
    global _count
    # Paths are strings, and system calls few: this is a part of every task's round trip.
    file = file_of(key, folder)
    try:
        if _count % _PRUNE_EVERY == 0:
            _prune(folder / FOLDER, {f"{each}.log" for each in running(folder).values()})
        _count += 1
        handle = os.open(file, _FLAGS, 0o644)
    except OSError:
        yield None
        return
    try:
        with redirected(handle):
            yield file
    finally:
        with contextlib.suppress(OSError):
            if not empty and os.stat(file).st_size == 0:  # noqa: PTH116 - see above
                os.unlink(file)  # noqa: PTH108
        os.close(handle)


@contextlib.contextmanager
def redirected(handle: int) -> Iterator[None]:
    """Makes the open file *handle* the standard output and error of this process in the body."""
    flush()
    before = os.dup(1), os.dup(2)
    try:
        for number in (1, 2):
            os.dup2(handle, number)
        yield
    finally:
        flush()
        for number, old in zip((1, 2), before, strict=True):
            os.dup2(old, number)
            os.close(old)


def written(file: str) -> bool:
    """Returns whether *file*, that of `captured`, has output since it was made or cut."""
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


def find(folder: Path, key: str) -> Path | None:
    """Returns the newest output of a task whose key begins with *key*, or None."""
    with contextlib.suppress(OSError):
        found = (file for _, file in _newest_first(folder / FOLDER))
        return next((file for file in found if file.name.startswith(key) and file.suffix == ".log"), None)
    return None


def last_lines(folder: Path, key: str, lines: int, most: int) -> list[str]:
    """Returns the last *lines* with text of the output of the task *key*, of at most *most* bytes."""
    with contextlib.suppress(OSError), Path(file_of(key, folder)).open("rb") as file:
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


def _newest_first(folder: Path) -> list[tuple[os.stat_result, Path]]:
    """Returns the files in *folder*, without those that tasks of other slots remove or rename meanwhile."""
    found = []
    for file in folder.iterdir():
        with contextlib.suppress(FileNotFoundError):
            found.append((file.stat(), file))
    return sorted(found, key=lambda item: -item[0].st_mtime_ns)


def _prune(folder: Path, in_use: Set[str]) -> None:
    """Makes the folder, and removes the oldest output from it, but files *in_use*."""
    folder.mkdir(exist_ok=True)
    total = 0
    for number, (stat, file) in enumerate(_newest_first(folder)):
        total += stat.st_size
        if number and file.name not in in_use and (number >= _KEPT_FILES or total > _KEPT_BYTES):
            file.unlink(missing_ok=True)
