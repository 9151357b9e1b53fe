"""Progress bars of tqdm in what a task prints: each is one bar at the client, not a line for every step.

They are found in the text, so that those of programs that a task starts are found too. Nothing is imported or patched.
"""

from __future__ import annotations

import math
import re
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress

# How tqdm draws one: ``train:  37%|███▋      | 37/100 [00:03<00:06, 10.0it/s, loss=0.3]``.
_BAR = re.compile(
    r"(?:(?P<name>.*?): *)? *(?P<percent>\d{1,3})%\|[^|]*\| *(?P<done>[\d.]+[kMGTP]?)/(?P<total>[\d.]+[kMGTP]?)\S* "
    r"\[(?P<rest>[^\]]*)\]? *"
)
# The same without a known end: ``37it [00:03, 10.0it/s]``. Other lines have no time there: ``took: 3s [train]``.
_COUNT = re.compile(r"(?:(?P<name>.*?): *)? *(?P<done>[\d.]+[kMGTP]?)[A-Za-z]+ \[(?P<rest>\d+:\d\d[^\]]*)\]? *")
# The cursor goes up: to another bar.
_UP = re.compile(r"(?:\x1b\[A)+")
_SCALES = {"k": 1e3, "M": 1e6, "G": 1e9, "T": 1e12, "P": 1e15}
# Seconds between two lines of one bar that ends again and again.
_EVERY_S = 1.0

# Takes steps done, their number if known, and a note.
Report = Callable[[float, float | None, str], object]


class Bars:
    """Takes the bars out of the lines of one task, and tells of the outermost one that goes on.

    A bar is a line when it has come to its end, or, as it is then, when the task has. every_s: seconds after which it
    is one all the same while it goes on.
    """

    def __init__(self, report: Report | None = None, every_s: float = math.inf) -> None:
        self._report, self._every_s = report, every_s
        self._shown = time.monotonic()
        # By name and number of steps, in the order of their begin: the last text of those that go on.
        self._open: dict[tuple[str, str], tuple[float, float | None, str, str]] = {}
        self._ended: dict[tuple[str, str], float] = {}
        self._moving = False
        # The bar that was drawn last, if nothing was printed since.
        self._last: tuple[str, str] | None = None
        # Empty lines that may belong to a bar that begins.
        self._blank = 0

    def kept(self, lines: Sequence[str], *, final: bool = False) -> list[str]:
        """Returns the *lines* without the steps of bars; *final*: with those that have not come to their end."""
        found = [each for line in lines for each in self._line(line)]
        if final:
            found += [""] * self._blank + [text for *_, text in self._open.values()]
            self._blank = 0
            self._open.clear()
        return found

    def _line(self, line: str) -> Iterator[str]:
        text = _UP.sub("", line)
        bar = _BAR.fullmatch(text) if "%|" in text else _COUNT.fullmatch(text) if "[" in text else None
        if bar is not None:
            # It begins with a carriage return, and in another line where others go on.
            self._blank = 0
            yield from self._step(bar, text.rstrip())
        elif not line and not self._moving:
            self._blank += 1
        elif text.strip():
            self._moving, self._last = False, None
            yield from [""] * self._blank
            self._blank = 0
            yield line
        elif self._last is not None:  # it clears its line
            if text:
                self._open.pop(self._last, None)
        elif text == line:
            yield line

    def _step(self, bar: re.Match[str], text: str) -> Iterator[str]:
        name, rest = bar["name"] or "", bar["rest"].partition(", ")[2]
        total = bar.groupdict().get("total")
        key, done = (name, total or ""), _number(bar["done"])
        finished = total is not None and (bar["done"] == total or bar["percent"] == "100")
        self._moving = not finished
        was_open, self._last = key in self._open, key
        self._open[key] = done, None if total is None else _number(total), f"{name} {rest}".strip(), text
        self._show(key)
        now = time.monotonic()
        if not finished:
            if now - self._shown >= self._every_s:
                self._shown = now
                yield text
            return
        del self._open[key]
        # It is drawn once more when it is closed, and those within others end again and again.
        if (was_open or key not in self._ended) and now - self._ended.get(key, -_EVERY_S) >= _EVERY_S:
            self._ended[key] = now
            yield text

    def _show(self, key: tuple[str, str]) -> None:
        """Tells of the outermost bar, with how far the one of *key* is."""
        if self._report is None:
            return
        outer = next(iter(self._open))
        done, total, note, _ = self._open[outer]
        if outer != key and (inner := self._open[key])[1]:
            note = f"{note} ({key[0]} {inner[0]:g} of {inner[1]:g})".strip().replace("( ", "(")
        self._report(done, total, note)


def _number(text: str) -> float:
    with suppress(ValueError):
        return float(text[:-1]) * _SCALES[text[-1]] if text[-1] in _SCALES else float(text)
    return 0.0
