"""Pictures of GPUs as SVG. The same pictures give the same bytes."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from dataclasses import dataclass, field
from html import escape

from skyinfra.mig.drawing import Picture, Segment, facts, labels, tone

_WIDTH = 760
_EDGE = 20
_LINE = 18
_BOX = 84
_BAR = 22
_COLUMNS = 88
_INDENT = 70

# One for each size of profile on a GPU, light enough for dark text; free room is white.
_TONES = ("#a8dadc", "#c7e9b0", "#ffe08a", "#f6c1a6", "#d9c2f0", "#b5d0f7", "#e3e3e3")
_INK = "#1b1f24"
_PALE = "#8c959f"


@dataclass
class _Sheet:
    """The marks so far; `y` is the top of the next mark, in pixels from the top."""

    y: int = _EDGE
    marks: list[str] = field(default_factory=list)

    def text(self, x: float, y: float, words: str, *, bold: bool = False, pale: bool = False) -> None:
        weight = ' font-weight="bold"' if bold else ""
        colour = _PALE if pale else _INK
        self.marks.append(f'<text x="{x:g}" y="{y:g}" fill="{colour}"{weight}>{escape(words)}</text>')

    def box(self, x: float, width: float, height: int, fill: str) -> None:
        self.marks.append(
            f'<rect x="{x:g}" y="{self.y}" width="{width:g}" height="{height}" rx="3" fill="{fill}" stroke="{_INK}"/>'
        )

    def line(self, words: str, *, at: int = _EDGE, bold: bool = False) -> None:
        self.text(at, self.y + _LINE - 5, words, bold=bold)
        self.y += _LINE

    def fact(self, word: str, sentence: str) -> None:
        self.text(_EDGE, self.y + _LINE - 5, word, pale=True)
        for words in textwrap.wrap(sentence, _COLUMNS):
            self.line(words, at=_EDGE + _INDENT)


def svg(pictures: Sequence[tuple[str, Picture, Sequence[tuple[str, str]]]]) -> str:
    """An SVG document with one GPU below the other: for each its title, its picture, and notes below.

    Notes are pairs of a word and a sentence, as drawing.facts() returns them.
    """
    sheet = _Sheet()
    for title, shown, notes in pictures:
        for words in textwrap.wrap(title, _COLUMNS):
            sheet.line(words, bold=True)
        _memory(sheet, shown)
        _compute(sheet, shown)
        for word, sentence in [*facts(shown), *notes]:
            sheet.fact(word, sentence)
        sheet.y += _LINE
    head = (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{_WIDTH}" height="{sheet.y}" '
        f'viewBox="0 0 {_WIDTH} {sheet.y}" font-family="monospace" font-size="12">'
    )
    ground = f'<rect width="{_WIDTH}" height="{sheet.y}" fill="#ffffff"/>'
    return "\n".join([head, ground, *sheet.marks, "</svg>"]) + "\n"


def _memory(sheet: _Sheet, shown: Picture) -> None:
    """The grid, with a box for every segment."""
    units = shown.geometry.placement_units or 1
    unit = (_WIDTH - 2 * _EDGE) / units
    sheet.y += _LINE
    for index in range(units):
        sheet.text(_EDGE + index * unit + 2, sheet.y - 5, str(index), pale=True)
    for segment in shown.segments:
        sheet.box(_EDGE + segment.start * unit, segment.size * unit, _BOX, _fill(segment, shown))
        for row, label in enumerate(labels(segment.profile)):
            x, y = _EDGE + segment.start * unit + 7, sheet.y + 20 + row * _LINE
            sheet.text(x, y, label, bold=row == 0 and segment.profile is not None, pale=segment.profile is None)
    sheet.y += _BOX + 8


def _compute(sheet: _Sheet, shown: Picture) -> None:
    """A bar of the compute slices, in the colours of the partitions that have them. They have no fixed places."""
    total = shown.geometry.compute_slices or 1
    width = (_WIDTH - 2 * _EDGE) / total
    fills = [_TONES[tone(p, shown.geometry) % len(_TONES)] for p in shown.placed for _ in range(p.compute_slices)]
    for index in range(total):
        sheet.box(_EDGE + index * width, width, _BAR, fills[index] if index < len(fills) else "#ffffff")
        if index >= len(fills):
            sheet.text(_EDGE + index * width + 7, sheet.y + 15, "free", pale=True)
    sheet.y += _BAR + 6


def _fill(segment: Segment, shown: Picture) -> str:
    return "#ffffff" if segment.profile is None else _TONES[tone(segment.profile, shown.geometry) % len(_TONES)]
