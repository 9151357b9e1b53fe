"""Pictures of GPUs as SVG, light or dark as the screen of the reader is. The same pictures give the same bytes."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from dataclasses import dataclass, field
from html import escape

from skyinfra.mig.drawing import Picture, Segment, facts, labels, mark, sharing, tone
from skyinfra.mig.geometry import Profile

_WIDTH = 760
_EDGE = 20
_LINE = 18
_BAR = 22
_COLUMNS = 88
_INDENT = 70

# The two bars alone, which are shown about as wide as on a telephone: pixels, and the width of a letter.
_SMALL = 340
_SMALL_BOX = 46
_SMALL_BAR = 14
_LETTER = 6.7

# Light and dark: fills with a contrast of 4.5 to the ink at least. "t": one for each size of profile on a GPU.
_COLOURS = {
    "ink": ("#1b1f24", "#e6edf3"),
    "pale": ("#59636e", "#9198a1"),
    "ground": ("#ffffff", "#0d1117"),
    "free": ("#ffffff", "#0d1117"),
    "out": ("#b3261e", "#ff8a80"),
    "t0": ("#a8dadc", "#1d5257"),
    "t1": ("#c7e9b0", "#2f5624"),
    "t2": ("#ffe08a", "#5f4b0b"),
    "t3": ("#f6c1a6", "#6b3a22"),
    "t4": ("#d9c2f0", "#4d3470"),
    "t5": ("#b5d0f7", "#234a7d"),
    "t6": ("#e3e3e3", "#464c54"),
}
# Where the colours around a picture are not known: partitions are light, with dark text.
_INHERITED = {"pale": "currentColor", "free": "none"}
_TONES = sum(name[0] == "t" and name[1:].isdigit() for name in _COLOURS)

# The colours of each element stand in its attributes, for readers without style sheets; this is for dark screens.
_RULES = [f".{name} {{ fill: {dark}; }}" for name, (_, dark) in _COLOURS.items()]
_RULES += [f".{name} {{ stroke: {_COLOURS[colour][1]}; }}" for name, colour in (("box", "pale"), ("crossed", "out"))]
STYLE = f"@media (prefers-color-scheme: dark) {{ {' '.join(_RULES)} }}"


@dataclass
class _Sheet:
    """The marks so far; `y` is the top of the next mark, in pixels from the top.

    inherits: what stands beside the partitions has the colour of the text around the picture.
    """

    width: int = _WIDTH
    edge: int = _EDGE
    y: int = _EDGE
    inherits: bool = False
    marks: list[str] = field(default_factory=list)

    def text(self, x: float, y: float, words: str, kind: str = "ink", *, bold: bool = False, end: bool = False) -> None:
        more = ' font-weight="bold"' * bold + ' text-anchor="end"' * end
        self.marks.append(f'<text x="{x:g}" y="{y:g}" {self._filled(kind)}{more}>{escape(words)}</text>')

    def box(self, x: float, width: float, height: int, kind: str) -> None:
        stroke = 'stroke="currentColor"' if self.inherits else f'stroke="{_COLOURS["ink"][0]}"'
        size = f'width="{width:g}" height="{height}"'
        self.marks.append(f'<rect x="{x:g}" y="{self.y}" {size} rx="3" {self._filled(kind, "box ")} {stroke}/>')

    def _filled(self, kind: str, also: str = "") -> str:
        if self.inherits:
            return f'fill="{_INHERITED.get(kind, _COLOURS[kind][0])}"'
        return f'class="{also}{kind}" fill="{_COLOURS[kind][0]}"'

    def crossed(self, x: float, width: float, height: int) -> None:
        """A box that stands nowhere: dashed, with a line across."""
        red = f'class="crossed" stroke="{_COLOURS["out"][0]}"'
        self.marks.append(
            f'<rect x="{x:g}" y="{self.y}" width="{width:g}" height="{height}" rx="3" {red} '
            'fill="none" stroke-dasharray="5 4"/>'
        )
        self.marks.append(f'<line x1="{x:g}" y1="{self.y + height}" x2="{x + width:g}" y2="{self.y}" {red}/>')

    def pill(self, x: float, y: float, words: str) -> None:
        """A word in the colours of the ground on ink."""
        width = len(words) * 7.3 + 10
        self.marks.append(
            f'<rect x="{x:g}" y="{y - 12:g}" width="{width:g}" height="16" rx="8" '
            f'class="ink" fill="{_COLOURS["ink"][0]}"/>'
        )
        self.text(x + 5, y, words, "ground")

    def line(self, words: str, *, at: int = _EDGE, bold: bool = False) -> None:
        self.text(at, self.y + _LINE - 5, words, bold=bold)
        self.y += _LINE

    def named(self, words: str, amount: str) -> None:
        """The name of the bar below, and how much of it is used."""
        self.text(self.edge, self.y + _LINE - 6, words, "pale")
        self.text(self.width - self.edge, self.y + _LINE - 6, amount, "pale", end=True)
        self.y += _LINE

    def fact(self, word: str, sentence: str) -> None:
        self.text(_EDGE, self.y + _LINE - 5, word, "pale")
        for words in textwrap.wrap(sentence, _COLUMNS):
            self.line(words, at=_EDGE + _INDENT)


def svg(pictures: Sequence[tuple[str, Picture, Sequence[tuple[str, str]]]]) -> str:
    """Returns an SVG document with one GPU below the other: for each its title, its picture, and notes below.

    Notes are pairs of a word and a sentence, as drawing.facts() returns them.
    """
    sheet = _Sheet()
    for title, shown, notes in pictures:
        for words in textwrap.wrap(title, _COLUMNS):
            sheet.line(words, bold=True)
        _memory(sheet, shown)
        _compute(sheet, shown, _BAR)
        _left_out(sheet, shown)
        for word, sentence in [*facts(shown), *notes]:
            sheet.fact(word, sentence)
        sheet.y += _LINE
    ground = f'<rect width="{_WIDTH}" height="{sheet.y}" class="ground" fill="{_COLOURS["ground"][0]}"/>'
    size = f'width="{_WIDTH}" height="{sheet.y}" viewBox="0 0 {_WIDTH} {sheet.y}"'
    head = f'<svg xmlns="http://www.w3.org/2000/svg" {size} font-family="monospace" font-size="12">'
    return "\n".join([head, f"<style>{STYLE}</style>", ground, *sheet.marks, "</svg>"]) + "\n"


def bars(shown: Picture, *, inherits: bool = False) -> str:
    """The two bars of a GPU alone, as an element of a page that has STYLE in its head; as wide as its place there.

    inherits: it needs no style, and what stands beside the partitions has the colour of the text around it.
    """
    sheet = _Sheet(width=_SMALL, edge=1, y=0, inherits=inherits)
    unit = (_SMALL - 2) / (shown.geometry.placement_units or 1)
    sheet.named(*_memory_name(shown))
    for segment in shown.segments:
        x, width = 1 + segment.start * unit, segment.size * unit
        sheet.box(x, width, _SMALL_BOX, _kind(segment, shown))
        for row, words in enumerate(_short(segment.profile, width)):
            kind = "ink" if segment.profile else "pale"
            sheet.text(x + 4, sheet.y + 13 + row * 14, words, kind, bold=bool(row == 0 and segment.profile))
    sheet.y += _SMALL_BOX + 2
    _compute(sheet, shown, _SMALL_BAR)
    # One by one, in their order: drawings of one set differ in that.
    words = "+".join(each.name for each in shown.layout)
    size = f'viewBox="0 0 {_SMALL} {sheet.y - 4}" role="img" aria-label="{escape(words)}"'
    return "\n".join([f'<svg {size} font-family="monospace" font-size="11">', *sheet.marks, "</svg>"])


def _memory(sheet: _Sheet, shown: Picture) -> None:
    """The grid, with a box for every segment."""
    unit = (_WIDTH - 2 * _EDGE) / (shown.geometry.placement_units or 1)
    sheet.named(*_memory_name(shown))
    sheet.y += _LINE - 4
    for index in range(shown.geometry.placement_units or 1):
        sheet.text(_EDGE + index * unit + 2, sheet.y - 5, str(index), "pale")
    columns = labels(shown)
    height = 12 + _LINE * max(4, len(columns[0]))
    for segment, column in zip(shown.segments, columns, strict=True):
        x = _EDGE + segment.start * unit
        sheet.box(x, segment.size * unit, height, _kind(segment, shown))
        for row, words in enumerate(column):
            y = sheet.y + 20 + row * _LINE
            if segment.profile and words and words in (mark(segment.profile), sharing(segment)):
                sheet.pill(x + 5, y, words)
            elif words:
                kind = "ink" if segment.profile else "pale"
                sheet.text(x + 7, y, words, kind, bold=bool(row == 0 and segment.profile))
    sheet.y += height + 4


def _compute(sheet: _Sheet, shown: Picture, height: int) -> None:
    """A bar of the compute slices, in the colours of the partitions that have them. They have no fixed places."""
    total = shown.geometry.compute_slices or 1
    width = (sheet.width - 2 * sheet.edge) / total
    sheet.named("compute slices", f"{shown.compute_used} of {total}")
    kinds = [_of(p, shown) for p in shown.placed for _ in range(p.compute_slices)]
    named = _compute_names(shown)
    for index in range(total):
        x = sheet.edge + index * width
        sheet.box(x, width, height, kinds[index] if index < len(kinds) else "free")
        if index in named:
            sheet.text(x + 5, sheet.y + height / 2 + 4, named[index], bold=True)
        if index >= len(kinds):
            sheet.text(x + 5, sheet.y + height / 2 + 4, "free", "pale")
    sheet.y += height + 6


def _compute_names(shown: Picture) -> dict[int, str]:
    """The names of the compute instances that share GPU instances, by the box of the bar in which each begins."""
    found: dict[int, str] = {}
    first = 0
    for segment in shown.segments:
        found |= {first + each.start: f"{each.size}c" for each in segment.compute}
        first += segment.profile.compute_slices if segment.profile else 0
    return found


def _left_out(sheet: _Sheet, shown: Picture) -> None:
    """The profiles that have no place, one below the other, as wide as they would be in the grid."""
    if not shown.missing:
        return
    unit = (_WIDTH - 2 * _EDGE) / (shown.geometry.placement_units or 1)
    sheet.text(_EDGE, sheet.y + _LINE - 6, "left out", "out", bold=True)
    sheet.y += _LINE
    for profile, count in shown.missing:
        width = (profile.size or 1) * unit
        sheet.crossed(_EDGE, width, _BAR)
        words = f"{profile.name}, {count} of them" if count > 1 else profile.name
        sheet.text(_EDGE + width + 8, sheet.y + 15, words, "out", bold=True)
        sheet.y += _BAR + 4
    sheet.y += 2


def _memory_name(shown: Picture) -> tuple[str, str]:
    units, slices = shown.geometry.placement_units, shown.geometry.memory_slices
    words = "memory slices" if units == slices else f"memory slices, {units} units of placement"
    return words, f"{shown.memory_used} of {slices}"


def _short(profile: Profile | None, width: float) -> list[str]:
    """Returns the name of the profile in lines of that width."""
    if profile is None:
        return ["free"]
    base = profile.name.removesuffix(profile.attributes)
    lines = [base] if len(base) * _LETTER + 6 <= width else base.split(".")
    return [*lines, *filter(None, [profile.attributes])]


def _kind(segment: Segment, shown: Picture) -> str:
    return "free" if segment.profile is None else _of(segment.profile, shown)


def _of(profile: Profile, shown: Picture) -> str:
    return f"t{tone(profile, shown.geometry) % _TONES}"
