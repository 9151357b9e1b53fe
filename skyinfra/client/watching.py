"""Shows the output and the progress of running tasks. Bars where someone watches, else lines.

Its methods are called from the thread of the pool's event loop and from those of the user.
"""

from __future__ import annotations

import contextlib
import sys
import threading
import time
import uuid
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
                if not self._rows:
                    self._bars.stop()
                    self._bars = None

    @contextlib.contextmanager
    def counting(self, name: str, total: int | None) -> Iterator[Callable[[], None]]:
        """While many tasks run: gives what is to be called as each of them ends."""
        if not self._progress:
            yield lambda: None
            return
        key = uuid.uuid4().hex
        of = f" of {total}" if total is not None else ""
        done, over = 0, False

        def show() -> None:
            with self._lock:
                if not over:
                    self._show(key, name, done, total, f"{name}: {done}{of} done")

        def advance() -> None:
            nonlocal done
            done += 1
            if key in self._rows or not sys.stderr.isatty():
                show()

        timer = threading.Timer(_SHOW_AFTER_S, show)
        timer.daemon = True
        if sys.stderr.isatty():
            timer.start()
        try:
            yield advance
        finally:
            timer.cancel()
            with self._lock:
                over = True
                self.ended(key)

    def _print(self, slot: str, line: str) -> None:
        with self._lock:
            text = _printable(f"{slot} | {line}")
            if self._bars is not None:
                self._bars.console.print(text, markup=False, highlight=False, soft_wrap=True)
            else:
                sys.stdout.write(f"{text}\n")
                sys.stdout.flush()

    def _step(self, key: str, name: str, done: float, total: float | None, note: str) -> None:
        described = f"{name} {note}".rstrip()
        of = f" of {total:g}" if total is not None else ""
        self._show(key, described, done, total, f"{described}: {done:g}{of}")

    def _show(self, key: str, described: str, done: float, total: float | None, line: str) -> None:
        """Moves the bar of *key*; where nobody watches, writes *line*: from ten seconds after the first call on."""
        with self._lock:
            if sys.stderr.isatty():
                bars = self._bars = self._bars or _started_bars()
                if key not in self._rows:
                    self._rows[key] = bars.add_task(described, total=total)
                bars.update(self._rows[key], completed=done, total=total, description=described)
                return
            now = time.monotonic()
            if now - self._said.setdefault(key, now) >= _LINE_EVERY_S:
                self._said[key] = now
                sys.stderr.write(f"{line}\n")
                sys.stderr.flush()


def _printable(text: str) -> str:
    """Returns *text* with ``?`` for what the standard output cannot encode: no task fails for a terminal of ASCII."""
    encoding = getattr(sys.stdout, "encoding", None) or "utf-8"
    return text.encode(encoding, "replace").decode(encoding)


def _started_bars() -> Progress:
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    bars = Progress(
        TextColumn("{task.description}", markup=False),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        console=Console(stderr=True),
        transient=True,
    )
    bars.start()
    return bars
