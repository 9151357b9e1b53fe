"""Shows the output and the progress of running tasks. Bars where someone watches, else lines.

Its methods are called from the thread of the pool's event loop and from those of the user.
"""

from __future__ import annotations

import contextlib
import sys
import threading
import time
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rich.progress import Progress, TaskID

# Called with the slot, such as ``n0/1``, and a line that a task printed there, without its end.
OnOutput = Callable[[str, str], object]

# What is over sooner needs no bar.
_SHOW_AFTER_S = 1.0
# Where nobody watches, a line that often at most.
_LINE_EVERY_S = 10.0


class Watcher:
    """Shows the tasks of one pool. *output*: where their lines go; True is the standard output, False nowhere.

    progress: whether to show how far they are, on the standard error.
    """

    def __init__(self, output: bool | OnOutput, *, progress: bool) -> None:
        self.echoes = output is not False
        self._output = output if callable(output) else self._print
        self._progress = progress
        self._lock = threading.RLock()
        self._bars: Progress | None = None
        self._shown = 0
        self._rows: dict[str, TaskID] = {}
        self._said: dict[str, float] = {}

    def told(self, kind: str, key: str, content: tuple[str, str, Any]) -> None:
        """Takes a message of the task *key*: its slot, its name and what it says, see `skyinfra.worker.streaming`."""
        slot, name, what = content
        if kind == "output":
            for line in what:
                self._output(slot, line)
        elif kind == "progress" and self._progress:
            done, total, note = what
            self._step(key, f"{slot} {name}", done, total, note)

    def ended(self, key: str) -> None:
        """The task *key* is over."""
        with self._lock:
            self._said.pop(key, None)
            row = self._rows.pop(key, None)
            if row is not None and self._bars is not None:
                self._bars.remove_task(row)
                self._leave()

    @contextlib.contextmanager
    def counting(self, name: str, total: int | None) -> Iterator[Callable[[], None]]:
        """While many tasks run: gives what is to be called as each of them ends."""
        if not self._progress:
            yield lambda: None
            return
        count = _Count(self, name, total)
        try:
            yield count.advance
        finally:
            count.close()

    def row(self, description: str, total: float | None) -> TaskID | None:
        """A bar, where someone watches."""
        with self._lock:
            bars = self._enter()
            return None if bars is None else bars.add_task(description, total=total)

    def update(self, row: TaskID, done: float, total: float | None = None, description: str | None = None) -> None:
        """Moves a bar."""
        with self._lock:
            if self._bars is not None:
                self._bars.update(row, completed=done, total=total, description=description)

    def remove(self, row: TaskID) -> None:
        """Takes a bar away."""
        with self._lock:
            if self._bars is not None:
                self._bars.remove_task(row)
                self._leave()

    def say(self, key: str, line: str) -> None:
        """A line where nobody watches: the first ten seconds after the first call for *key*, then as often at most."""
        now = time.monotonic()
        with self._lock:
            due = now - self._said.setdefault(key, now) >= _LINE_EVERY_S
            if due:
                self._said[key] = now
        if due:
            sys.stderr.write(f"{line}\n")
            sys.stderr.flush()

    def _print(self, slot: str, line: str) -> None:
        with self._lock:
            text = f"{slot} | {line}"
            if self._bars is not None:
                self._bars.console.print(text, markup=False, highlight=False, soft_wrap=True)
            else:
                sys.stdout.write(f"{text}\n")
                sys.stdout.flush()

    def _step(self, key: str, name: str, done: float, total: float | None, note: str) -> None:
        described = f"{name} {note}".rstrip()
        with self._lock:
            if key not in self._rows and (row := self.row(described, total)) is not None:
                self._rows[key] = row
            if key in self._rows:
                self.update(self._rows[key], done, total, described)
                return
        self.say(key, f"{described}: {done:g} of {total:g}" if total is not None else f"{described}: {done:g}")

    def _enter(self) -> Progress | None:
        if not sys.stderr.isatty():
            return None
        if self._bars is None:
            from rich.console import Console
            from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

            self._bars = Progress(
                TextColumn("{task.description}", markup=False),
                BarColumn(),
                MofNCompleteColumn(),
                TimeElapsedColumn(),
                console=Console(stderr=True),
                transient=True,
            )
            self._bars.start()
        self._shown += 1
        return self._bars

    def _leave(self) -> None:
        self._shown -= 1
        if self._shown == 0 and self._bars is not None:
            self._bars.stop()
            self._bars = None


class _Count:
    """Counts the tasks of one map or gather that have ended."""

    def __init__(self, watcher: Watcher, name: str, total: int | None) -> None:
        self._watcher = watcher
        self._name = name
        self._total = total
        self._done = 0
        self._row: TaskID | None = None
        self._closed = False
        self._lock = threading.Lock()
        self._timer: threading.Timer | None = None
        if sys.stderr.isatty():
            self._timer = threading.Timer(_SHOW_AFTER_S, self._show)
            self._timer.daemon = True
            self._timer.start()

    def advance(self) -> None:
        self._done += 1
        if self._row is not None:
            self._watcher.update(self._row, self._done, self._total)
        elif self._timer is None:
            of = f" of {self._total}" if self._total is not None else ""
            self._watcher.say(f"{id(self)}", f"{self._name}: {self._done}{of} done")

    def close(self) -> None:
        with self._lock:
            self._closed = True
            if self._timer is not None:
                self._timer.cancel()
            if self._row is not None:
                self._watcher.remove(self._row)
                self._row = None
        self._watcher.ended(f"{id(self)}")

    def _show(self) -> None:
        with self._lock:
            if not self._closed:
                self._row = self._watcher.row(self._name, self._total)
                if self._row is not None:
                    self._watcher.update(self._row, self._done, self._total)
