"""Shows the output and the progress of running tasks: bars where someone watches, in a terminal or in the cell of a
notebook, else lines.

Its methods are called from the thread of the pool's event loop and from those of the user.
"""

from __future__ import annotations

import atexit
import contextlib
import contextvars
import os
import queue
import signal
import sys
import threading
import time
import traceback
import uuid
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from typing import Any, Protocol, TextIO

from skyinfra.console import console, is_one_terminal
from skyinfra.errors.printable import printable
from skyinfra.errors.streams import write_output
from skyinfra.notebook import cells

# Called with the slot, such as ``n0/1``, and a line that a task printed there, without its end.
OnOutput = Callable[[str, str], object]

# A node sends so many of the last messages of a process that has died again, and one more.
_DOUBTFUL = 4
# What is over sooner needs no bar.
_SHOW_AFTER_S = 1.0
# Where nobody watches, a line that often at most.
_LINE_EVERY_S = 10.0
# A stream is waited for that long; the head gives a connection up after 15 seconds without an answer.
_STUCK_S = 5.0


def _begin_of(lines: Sequence[str], messages: Sequence[Sequence[str]]) -> int:
    """Returns how many of *lines* the last of *messages* had, as many of these as *lines* may begin with."""
    for first in range(len(messages)):
        had = [line for message in messages[first:] for line in message]
        if list(lines[: len(had)]) == had:
            return len(had)
    return 0


class _Bars(Protocol):
    """Bars in one place, by key."""

    def show(self, key: str, described: str, done: float, total: float | None, line: str) -> None:
        """Moves the bar of *key*. line: its text with the numbers, for a place that draws none."""

    def remove(self, key: str) -> bool:
        """Removes the bar of *key*; returns whether nothing will be shown by these bars any more."""


class _Writer:
    """Writes to one of the standard streams, in a thread of its own: a terminal may take nothing (Ctrl-S, ``| less``),
    and the thread of the connection must answer the head. Who writes waits for it all the same, a while.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._todo: queue.SimpleQueue[tuple[Callable[[], object], threading.Event]] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        # Whether what is being written was waited for in vain; the lines that were left out since, and how to say so.
        self._stuck = False
        self._left = 0
        self._show: Callable[[str], object] = str

    def write(self, show: Callable[[str], object], text: str) -> None:
        """Calls *show*, in the present context, with the lines *text*; leaves them out while nobody takes any."""
        context = contextvars.copy_context()
        with self._lock:
            if self._stuck:
                if lines := text.count("\n"):
                    self._left, self._show = self._left + lines, lambda text: context.run(show, text)
                return
        self.do(lambda: context.run(show, text))

    def do(self, action: Callable[[], object]) -> None:
        """Runs *action* after all before it, also where nobody waits for it any more."""
        done = threading.Event()
        with self._lock:
            if self._thread is None:
                # No thread of a pool: Python would wait for it before anything else at its end.
                thread = threading.Thread(target=self._work, name="skyinfra-writer", daemon=True)
                with contextlib.suppress(RuntimeError):  # Python ends, or the machine has no room for a thread
                    thread.start()
                    self._thread = thread
            started, stuck = self._thread is not None, self._stuck
            if started:
                self._todo.put((action, done))
        if not started:
            with contextlib.suppress(Exception):
                action()
            return
        if not stuck and not done.wait(_STUCK_S):
            with self._lock:
                self._stuck = self._stuck or not done.is_set()

    def settle(self) -> None:
        """Waits until all is written, as Python does at its end for what is printed."""
        if self._thread is None:
            return
        # The last line may be that about those that were left out.
        for _ in range(2):
            done = threading.Event()
            with self._lock:
                self._todo.put((str, done))
            # After a signal that ends the program nobody can end this but by another kind.
            done.wait(_STUCK_S if signal.getsignal(signal.SIGTERM) is signal.SIG_IGN else None)

    def _work(self) -> None:
        while True:
            action, done = self._todo.get()
            # Of a stream that is closed, for instance: no task fails for that.
            with contextlib.suppress(Exception):
                action()
            with self._lock:
                done.set()
                if not self._stuck or not self._todo.empty():
                    continue
                self._stuck, left, self._left = False, self._left, 0
                if left:
                    lines = "1 line" if left == 1 else f"{left} lines"
                    text = f"[{lines} left out here: nobody took them]\n"
                    self._todo.put((partial(self._show, text), threading.Event()))


_stdout, _stderr = _Writer(), _Writer()


def _settle() -> None:
    _stdout.settle()
    _stderr.settle()


def _forget() -> None:
    """Resets a forked process: it has no threads, and its parent writes."""
    global _stdout, _stderr
    _stdout, _stderr = _Writer(), _Writer()


atexit.register(_settle)
os.register_at_fork(after_in_child=_forget)


class Watcher:
    """Shows the tasks of one pool. *output*: where their lines go; True is the standard output, False nowhere.

    progress: whether to show how far they are, on the standard error. In a notebook both stand in the cell that
    submitted the task, whichever runs by then: a task is shown in the context of its caller.
    """

    def __init__(self, output: bool | OnOutput, *, progress: bool) -> None:
        self.echoes = output is not False
        self._output = output if callable(output) else None
        self._progress = progress
        self._lock = threading.RLock()
        self._contexts: dict[str, contextvars.Context] = {}
        # By the cell; None is the terminal.
        self._bars: dict[str | None, _Bars] = {}
        self._rows: dict[str, _Bars] = {}
        self._said: dict[str, float] = {}
        # The lines of the last messages of each task.
        self._got: dict[str, tuple[tuple[str, ...], ...]] = {}
        self._warned = False
        # Whether an exception of `output=` was said.
        self._failed = False

    def warn_of_end(self, fleet: str, stops: dict[str, str]) -> None:
        """Says once on the standard error that nodes of *fleet* end themselves soon; again where that was put off."""
        if stops and not self._warned:
            node, text = min(stops.items())
            _say(printable(f"{fleet}: {node} {text}; `skyinfra keep {fleet} 2h` keeps an idle one\n", None))
        self._warned = bool(stops)

    def begins(self, keys: Iterable[str]) -> contextvars.Context:
        """The tasks *keys* are sent. What they say is shown in the present context, which it returns, until `ended`."""
        context = contextvars.copy_context()
        self._contexts.update(dict.fromkeys(keys, context))
        return context

    def handle(self, kind: str, key: str, content: tuple[str, str, Any]) -> None:
        """Takes a message of the task *key*: its slot, its name and what it says, see `skyinfra.worker.streaming`."""
        context = self._contexts.get(key) or contextvars.copy_context()
        slot, name, what = content
        if kind in ("output", "again"):
            # What is sent again begins with the last messages, which may have been lost with their process.
            got = self._got.get(key, ())
            known = _begin_of(what, got) if kind == "again" else 0
            if key in self._contexts:
                self._got[key] = (*got[1 - _DOUBTFUL :], tuple(what)) if kind == "output" else (tuple(what),)
            context.run(self._show_lines, slot, what[known:])
        elif kind == "progress" and self._progress:
            context.run(self._step, key, f"{slot} {name}", *what)

    def ended(self, key: str, context: contextvars.Context | None = None) -> None:
        """The task *key* is over; with *context*, that of `begins`, unless it was sent again meanwhile."""
        with self._lock:
            if context is not None and self._contexts.get(key) is not context:
                return
            self._contexts.pop(key, None)
            self._said.pop(key, None)
            self._got.pop(key, None)
            bars = self._rows.pop(key, None)
            if bars is not None and bars.remove(key):
                self._bars = {place: each for place, each in self._bars.items() if each is not bars}

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
            if key in self._rows or not watched:
                show()

        watched = _watched()
        timer = threading.Timer(_SHOW_AFTER_S, contextvars.copy_context().run, (show,))
        timer.daemon = True
        if watched:
            timer.start()
        try:
            yield advance
        finally:
            timer.cancel()
            with self._lock:
                over = True
                self.ended(key)

    def _show_lines(self, slot: str, lines: list[str]) -> None:
        if self._output is not None:
            for line in lines:
                try:
                    self._output(slot, line)
                except Exception:  # noqa: BLE001 - of the user's function: no task fails for it
                    self._say_failed(slot)
            return
        text = "".join(f"{slot} | {line}\n" for line in lines)
        with self._lock:
            bars = self._bars.get(None)
        text = _printable(text)
        if isinstance(bars, _TerminalBars) and is_one_terminal():
            _stderr.write(bars.print, text)
        else:
            _stdout.write(partial(write_output, sys.stdout), text)

    def _say_failed(self, slot: str) -> None:
        """Says the exception of the user's function that is being handled: the first one, others are as it is."""
        if not self._failed:
            self._failed = True
            text = f"output= raised an exception for a line of {slot}:\n{traceback.format_exc()}"
            _say(printable(text, None))

    def _step(self, key: str, name: str, done: float, total: float | None, note: str) -> None:
        described = f"{name} {note}".rstrip()
        of = f" of {total:g}" if total is not None else ""
        self._show(key, described, done, total, f"{described}: {done:g}{of}")

    def _show(self, key: str, described: str, done: float, total: float | None, line: str) -> None:
        """Moves the bar of *key*; where nobody watches, writes *line*: from ten seconds after the first call on."""
        with self._lock:
            if key not in self._rows and _watched():
                cell = cells.current()
                if cell not in self._bars:
                    self._bars = {place: each for place, each in self._bars.items() if each in self._rows.values()}
                    self._bars[cell] = _TerminalBars() if cell is None else cells.CellBars()
                self._rows[key] = self._bars[cell]
            if key in self._rows:
                self._rows[key].show(key, described, done, total, line)
                return
            now = time.monotonic()
            if now - self._said.setdefault(key, now) >= _LINE_EVERY_S:
                self._said[key] = now
                _say(f"{printable(line)}\n")


def _watched() -> bool:
    return sys.stderr.isatty() or cells.current() is not None


def _say(text: str) -> None:
    _stderr.write(partial(_write, sys.stderr), text)


def _write(stream: TextIO, text: str) -> None:
    stream.write(text)
    stream.flush()


def _printable(text: str) -> str:
    """Returns *text* with ``?`` for what the standard output cannot encode: no task fails for a terminal of ASCII."""
    encoding = getattr(sys.stdout, "encoding", None) or "utf-8"
    return text.encode(encoding, "replace").decode(encoding)


class _TerminalBars:
    """The bars below the lines of a terminal."""

    def __init__(self) -> None:
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeElapsedColumn

        self._keys: set[str] = set()
        # Of the writer alone.
        self._rows: dict[str, TaskID] = {}
        self._bars = Progress(
            TextColumn("{task.description}", markup=False),
            BarColumn(),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            console=console(to_stderr=True),
            transient=True,
            redirect_stdout=is_one_terminal(),
        )
        _stderr.do(self._bars.start)

    def show(self, key: str, described: str, done: float, total: float | None, line: str) -> None:
        """See `_Bars.show`."""
        action = partial(self._move, key, described, done, total)
        if key in self._keys:
            _stderr.write(lambda _: action(), "")
        else:
            self._keys.add(key)
            _stderr.do(action)

    def _move(self, key: str, described: str, done: float, total: float | None) -> None:
        if key not in self._rows:
            self._rows[key] = self._bars.add_task(described, total=total)
        self._bars.update(self._rows[key], completed=done, total=total, description=described)

    def remove(self, key: str) -> bool:
        """See `_Bars.remove`."""
        self._keys.remove(key)
        _stderr.do(lambda: self._bars.remove_task(self._rows.pop(key)))
        if not self._keys:
            _stderr.do(self._bars.stop)
        return not self._keys

    def print(self, text: str) -> None:
        """Prints lines above the bars."""
        self._bars.console.print(text, end="", markup=False, highlight=False, soft_wrap=True)
