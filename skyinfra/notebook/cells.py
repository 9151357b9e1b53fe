"""Progress bars in the cell of a notebook: one display of IPython for each cell, which is updated in place.

Every front end that shows displays shows it, and a saved notebook has its last state. Which cell a display belongs to
stands in context variables of ipykernel (6.29 and later, `OutStream` and `ZMQDisplayPublisher`).
"""

from __future__ import annotations

import contextvars
import sys
import threading
import time
import uuid
from dataclasses import dataclass
from html import escape

from skyinfra.errors.printable import printable

# Seconds between two updates of a display.
_EVERY_S = 0.2
# More bars than that are counted.
_MOST_ROWS = 12


def current() -> str | None:
    """Returns the identity of the run of a cell whose context this is; None outside of notebooks."""
    find = getattr(sys.modules.get("IPython"), "get_ipython", None)
    shell = find() if find is not None else None
    if shell is None or getattr(shell, "kernel", None) is None:
        return None
    parent = getattr(shell.display_pub, "parent_header", None) or {}
    return str(parent["msg_id"]) if "msg_id" in parent else None


@dataclass(frozen=True)
class _Row:
    """A bar. line: its text, with the numbers."""

    line: str
    done: float
    total: float | None


class CellBars:
    """The bars of the cell whose context this is. Use it from any thread."""

    def __init__(self) -> None:
        self._context = contextvars.copy_context()
        self._display = uuid.uuid4().hex
        self._rows: dict[str, _Row] = {}
        self._over = False
        self._lock = threading.RLock()
        self._later: threading.Timer | None = None
        self._drawn_at: float | None = None

    def show(self, key: str, described: str, done: float, total: float | None, line: str) -> None:
        """Moves the bar of *key*. described: its text without numbers."""
        line = printable(line)
        with self._lock:
            if self._over:
                self._rows, self._over = {}, False
            self._rows[key] = _Row(line, done, total)
            self._draw_in_time()

    def remove(self, key: str) -> bool:
        """Removes the bar of *key*. The last one stays, as it is in the end, until the cell shows another."""
        with self._lock:
            if list(self._rows) != [key]:
                self._rows.pop(key, None)
                self._draw_in_time()
            else:
                self._over = True
                if self._later is not None:
                    self._later.cancel()
                    self._draw()
            return False

    def _draw_in_time(self) -> None:
        wait = 0.0 if self._drawn_at is None else self._drawn_at + _EVERY_S - time.monotonic()
        if wait <= 0:
            self._draw()
        elif self._later is None:
            self._later = threading.Timer(wait, self._draw)
            self._later.daemon = True
            self._later.start()

    def _draw(self) -> None:
        with self._lock:
            self._later = None
            first, self._drawn_at = self._drawn_at is None, time.monotonic()
            # A context is entered by one thread at a time, and by none twice.
            self._context.copy().run(self._publish, update=not first)

    def _publish(self, *, update: bool) -> None:
        from IPython.display import display

        rows = list(self._rows.values())
        data = {"text/plain": "\n".join(_lines(rows)), "text/html": _html(rows)}
        display(data, raw=True, display_id=self._display, update=update)


def _lines(rows: list[_Row]) -> list[str]:
    left = len(rows) - _MOST_ROWS
    return [row.line for row in rows[:_MOST_ROWS]] + ([f"and {left} more"] if left > 0 else [])


def _html(rows: list[_Row]) -> str:
    bars = [
        f'<progress max="{row.total:g}" value="{row.done:g}" aria-label="{escape(row.line)}" '
        'style="vertical-align: middle; margin-right: .75em"></progress>'
        if row.total
        else ""
        for row in rows[:_MOST_ROWS]
    ]
    bars += [""] * (len(rows) > _MOST_ROWS)
    made = (f"<div>{bar}{escape(line)}</div>" for bar, line in zip(bars, _lines(rows), strict=True))
    return f'<div style="font-family: monospace; font-size: 13px; padding: 0 .5em">{"".join(made)}</div>'
