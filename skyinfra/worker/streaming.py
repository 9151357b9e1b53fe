"""Sends the lines that a task prints, its progress, and the items of a generator, to its client while it runs.

Lines come from the file that holds the output of the task (`skyinfra.worker.output`), so that those of native code
and of the programs that it starts are among them.

The client says how many items it has taken. A generator that is ahead of it waits, so that neither the head nor the
client keeps more than a stated number of items and bytes.
"""

from __future__ import annotations

import contextlib
import functools
import os
import re
import threading
import time
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator
from pathlib import Path
from typing import Any, BinaryIO

from skyinfra.engine.deaths import Death
from skyinfra.errors import SkyinfraError
from skyinfra.errors.printable import printable
from skyinfra.program.bars import Bars
from skyinfra.protocol import instance
from skyinfra.protocol.calls import MOST_ITEMS
from skyinfra.protocol.readings import Progress
from skyinfra.worker import attempts, output
from skyinfra.worker.secrets import Masker

# Sends a message to the client: its kind and its content.
Send = Callable[[str, object], object]

# Seconds between two reads of the output of a running task.
_EVERY_S = 0.1
# At most that many bytes are sent per read; all of them are on the node. The head keeps the last thousand messages of a
# client.
_MOST = 32 * 1024
# Of more than that, the first lines are sent as well.
_FIRST = 8 * 1024
# So many of the last messages may not have left a process that has died: another thread writes them.
_DOUBTFUL = 3
# Seconds between two messages of `progress`, which may be called at every step.
_PROGRESS_S = 0.2
# Characters of a note that heartbeats carry.
_NOTE = 200
# Of items that the client has not taken, at most so many bytes.
_MOST_ITEM_BYTES = 64 * 2**20
# What the client says may be lost with its connection. The last item is sent again that often: the client answers.
_AGAIN_S = 2.0

_END = re.compile("\r\n|\r|\n")

# By the keys of the tasks that run here.
_taken: dict[str, int] = {}
_took = threading.Condition()


class Lines:
    """Cuts bytes into lines. Carriage returns end lines too: progress bars move."""

    def __init__(self) -> None:
        self._rest = b""

    @property
    def held(self) -> int:
        """How many bytes of an incomplete line are held back."""
        return len(self._rest)

    def feed(self, data: bytes, *, final: bool = False) -> list[str]:
        """Returns the lines that *data* completes; *final*: with the last, incomplete one."""
        data = self._rest + data
        # A carriage return at the end may be half of a line's end.
        end = len(data) if final else max(data.rfind(b"\n"), data.rfind(b"\r", 0, -1)) + 1
        self._rest = data[end:]
        *lines, last = _END.split(data[:end].decode("utf-8", "replace"))
        return [*lines, last] if last else lines


class _Tail:
    """Passes what is added to *file* to *send*, in whole lines. *key*: returns that of the task.

    send: None where nobody listens, as to a job: its bars alone are read, of this start of the task.
    """

    def __init__(self, file: str, send: Callable[[list[str]], object] | None, key: Callable[[], str]) -> None:
        self._file = file
        self._send = send
        self._key = key
        if send is None:
            self.restart(os.stat(file).st_size)  # noqa: PTH116 - as below
            return
        self.restart(*_begins.pop(file, (0, ())))
        if self._offset:
            self._note(self._offset)

    def restart(self, offset: int = 0, begins: Iterable[int] = ()) -> None:
        """Goes on at *offset*. begins: where the last messages began; what was before them has arrived."""
        self._offset, self._lines, self._bars = offset, Lines(), Bars(progress)
        self._last = deque(begins, maxlen=_DOUBTFUL)

    def again(self, shown: int, send: Send) -> tuple[int, Iterable[int]]:
        """Sends the lines of the last messages once more, which ended at *shown*, and then all that came after them.

        They may be lost with this process, as those were. Returns where they end, and where both begin.
        """
        self._last.append(self._offset)
        lines = [*self._added(shown), *self._lines.feed(b"", final=True)]
        self._last.append(self._offset)
        rest = [*self._added(), *self._lines.feed(b"", final=True)]
        self._note(self._offset)
        send("again", self._bars.kept(lines))
        # Clients of before know this kind alone.
        send("output", self._bars.kept(rest, final=True))
        return self._offset, self._last

    def advance(self, *, final: bool = False) -> None:
        """Sends the new lines; *final*: with the last, incomplete one."""
        begin = self._offset - self._lines.held
        lines = [*self._added(), *(self._lines.feed(b"", final=True) if final else ())]
        shown = self._bars.kept(lines, final=final)
        if self._send is None:
            return
        if shown:
            self._last.append(begin)
        if lines:
            # Before it is sent: the process may end before it leaves it. A line that is not whole comes again then.
            self._note(self._offset - self._lines.held)
        if shown:
            self._send(shown)

    def _note(self, end: int) -> None:
        attempts.note_shown(end, self._last[0] if self._last else end)

    def _added(self, until: int | None = None) -> Iterator[str]:
        """Yields the lines that were added. until: no more than up to there."""
        try:
            size = os.stat(self._file).st_size if until is None else until  # noqa: PTH116 - of every task's round trip
            if size <= self._offset:
                return
            with open(self._file, "rb") as file:  # noqa: PTH123 - as above
                file.seek(self._offset)
                if until is None and size - self._offset > _MOST:
                    yield from self._first_and_last(file, size)
                data = file.read(_MOST if until is None else until - self._offset)
        except OSError:
            return
        self._offset += len(data)
        yield from self._lines.feed(data)

    def _first_and_last(self, file: BinaryIO, size: int) -> Iterator[str]:
        """Yields the first lines of a lot of output, and a line for those that are left out; the last ones are next."""
        first = file.read(_FIRST)
        first = first[: first.rfind(b"\n") + 1]
        yield from self._lines.feed(first)
        yield from self._lines.feed(b"", final=True)
        self._offset += len(first)
        file.seek(size - _MOST + _FIRST)
        file.readline()
        whole = f"skyinfra logs {_fleet()} --task {self._key()}"
        yield f"[{file.tell() - self._offset} bytes of output are left out here; `{whole}` has all of it]"
        self._offset = file.tell()


_changed = threading.Condition()
_tail: _Tail | None = None
_watcher: threading.Thread | None = None
_send: Send | None = None
_masker: Masker | None = None
_sent_at = 0.0
# Whether a task runs, and what it reported of its progress last.
_runs = False
_last_progress: Progress | None = None
# How much of an output an earlier start of its task has printed, and was sent; and where the last messages of it began.
_begins: dict[str, tuple[int, Iterable[int]]] = {}


def _fleet() -> str:
    """Returns the fleet of this slot, for commands."""
    with contextlib.suppress(SkyinfraError):
        return instance.instance_info().fleet
    return "STACK/POOL"


@contextlib.contextmanager
def sending_output(
    file: str | None, send: Send | None, key: Callable[[], str], masker: Masker | None = None
) -> Iterator[None]:
    """Sends the lines in *file*, the output of a task, as ``("output", lines)`` while it runs. None: to nobody, and its
    progress bars are read all the same.

    *key*: returns that of the task that prints. *masker*: of the secrets of the task, for what `progress` sends.
    """
    global _masker, _runs, _send, _tail, _sent_at, _last_progress, _watcher
    tail = None
    if file is not None:
        tail = _Tail(file, functools.partial(send, "output") if send is not None else None, key)
    with _changed:
        _runs, _send, _tail, _sent_at, _masker, _last_progress = True, send, tail, 0.0, masker, None
        if tail is not None and _watcher is None:
            _watcher = threading.Thread(target=_watch, name="skyinfra-output", daemon=True)
            _watcher.start()
        _changed.notify()
    try:
        yield
    finally:
        if send is not None:
            output.flush()
        with _changed:
            _send = _tail = _masker = _last_progress = None
            _runs = False
            if tail is not None and send is not None:
                tail.advance(final=True)


def send_rest(key: str, folder: Path, send: Send | None, death: Death | None) -> None:
    """Sends what the task *key* had printed when its process died, and its client had not got, before it starts again.

    The last messages may have been lost with the process. They are sent again, as ``("again", lines)``: the client
    knows which of them it has. *death*: says how much was sent; None where nobody knows: the client gets all of it
    again then.
    """
    file = output.file_of(key, folder)
    if send is None or death is None or not os.path.exists(file):  # noqa: PTH110 - as above
        return
    # Of a flood, parts are left out anyway.
    sure = death.sure if death.shown - death.sure <= _DOUBTFUL * _MOST else death.shown
    _begins[file] = sure, ()
    _begins[file] = _Tail(file, functools.partial(send, "output"), lambda: key).again(death.shown, send)


def progress(done: float, total: float | None = None, note: str = "") -> None:
    """Tells the client of this task its progress, and the fleet page: *done* of *total* steps. Does nothing outside of
    a task.

    It may be called at every step: it costs some microseconds, and sends five messages a second at most.
    """
    global _sent_at
    now = time.monotonic()
    if _runs and (now - _sent_at >= _PROGRESS_S or done == total):
        _sent_at = now
        # Numbers of arrays are no data: the head reads nothing else.
        said = printable(_masker.text(str(note)) if _masker is not None else str(note), None)
        relay_progress(float(done), None if total is None else float(total), said)


def relay_progress(done: float, total: float | None, note: str) -> None:
    """Tells the client, and who asks the head, what the running task has reported, also from a process of its own."""
    note_progress(done, total, note)
    if (send := _send) is not None:
        send("progress", [done, total, note])


def note_progress(done: float, total: float | None, note: str) -> None:
    """Notes the progress of the running task for who asks its head; its client hears of it otherwise."""
    global _last_progress
    if _runs:
        _last_progress = Progress(float(done), None if total is None else float(total), note[:_NOTE])


def forget_progress() -> None:
    """Forgets the progress of a task: the next one of its message runs."""
    global _last_progress
    _last_progress = None


def last_progress() -> Progress | None:
    """Returns the progress that the running task reported last; None where it reported none."""
    return _last_progress


@contextlib.contextmanager
def cutting() -> Iterator[None]:
    """Sends the last lines of a task that has ended, around `output.cut`."""
    with _changed:
        if _tail is not None:
            _tail.advance(final=True)
        yield
        if _tail is not None:
            _tail.restart()


def allow(taken: int, key: str) -> None:
    """Notes that the client of the task *key* has taken so many of its items. The client calls it, in any thread."""
    with _took:
        if key in _taken:
            _taken[key] = max(taken, _taken[key])
            _took.notify_all()


class ItemSender:
    """Sends items of the task *key*: *send* is called with the number of each one, from 0, and its bytes."""

    def __init__(self, key: str, send: Callable[[int, bytes], object]) -> None:
        self._key = key
        self._send = send

    def all(self, given: Generator[Any, Any, Any], pack: Callable[[object], tuple[bytes, int]]) -> int:
        """Sends what *given* yields; returns the number of items. Raises what *given* and *pack* raise.

        pack: returns the bytes that are sent for an item, and how many bytes it has in all.
        """
        sizes: deque[int] = deque()
        sent, last = 0, b""
        with _took:
            _taken[self._key] = 0
        try:
            for item in given:
                data, size = pack(item)
                self._wait(sizes, sent, last)
                self._send(sent, data)
                sizes.append(size)
                sent, last = sent + 1, data
        finally:
            with _took:
                del _taken[self._key]
            given.close()
        return sent

    def _wait(self, sizes: deque[int], sent: int, last: bytes) -> None:
        """Waits while the client is too far behind. *sizes*: of the items that it has not taken, as far as is known."""
        with _took:
            while True:
                while sizes and len(sizes) > sent - _taken[self._key]:
                    sizes.popleft()
                if len(sizes) < MOST_ITEMS and sum(sizes) < _MOST_ITEM_BYTES:
                    return
                if not _took.wait(_AGAIN_S):
                    self._send(sent - 1, last)


def _watch() -> None:
    while True:
        with _changed:
            _changed.wait_for(lambda: _tail is not None)
            mine = _tail
        time.sleep(_EVERY_S)
        with _changed:
            # Not that of the next task, which has not been running for as long.
            if mine is not None and mine is _tail:
                mine.advance()


def _forget() -> None:
    """Resets a forked process: it has no watcher thread, and its parent sends the lines."""
    global _changed, _masker, _runs, _send, _tail, _last_progress, _watcher
    _changed = threading.Condition()
    _masker = _send = _tail = _last_progress = _watcher = None
    _runs = False


os.register_at_fork(after_in_child=_forget)
