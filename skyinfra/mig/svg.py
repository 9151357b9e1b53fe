"""Pictures of GPUs as SVG, light or dark as the screen of the reader is. The same pictures give the same bytes."""

from __future__ import annotations

import textwrap
import zlib
from collections.abc import Sequence
from dataclasses import dataclass, field
from html import escape

from skyinfra.mig import palette
from skyinfra.mig.drawing import Picture, Segment, facts, labels, mark, sharing, tone
from skyinfra.mig.geometry import Profile
from skyinfra.mig.palette import Tone

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

# Light and dark, of what stands beside the partitions; those of partitions are in the palette, the same on both.
_COLOURS = {
    "ink": ("#1b1f24", "#e6edf3"),
    "pale": ("#59636e", "#9198a1"),
    "ground": ("#ffffff", "#0d1117"),
    "free": ("#ffffff", "#0d1117"),
    "out": ("#b3261e", "#ff8a80"),
    "pill": ("#ffffff", "#ffffff"),
}
# Where the colours around a picture are not known.
_INHERITED = {"ink": "currentColor", "pale": "currentColor", "free": "none"}

# The colours of each element stand in its attributes, for readers without style sheets; this is for dark screens.
_RULES = [f".{name} {{ fill: {dark}; }}" for name, (_, dark) in _COLOURS.items()]
_RULES += [f".{name} {{ stroke: {_COLOURS[colour][1]}; }}" for name, colour in (("box", "pale"), ("crossed", "out"))]
STYLE = f"@media (prefers-color-scheme: dark) {{ {' '.join(_RULES)} }}"


@dataclass
class _Sheet:
    """The marks so far; `y` is the top of the next mark, in pixels from the top.

    inherits: what stands beside the partitions has the colour of the text around the picture. prefix: of the ids of
    patterns. tones: those that were drawn.
    """

    width: int = _WIDTH
    edge: int = _EDGE
    y: int = _EDGE
    inherits: bool = False
    prefix: str = ""
    marks: list[str] = field(default_factory=list)
    tones: list[Tone] = field(default_factory=list)

    def text(self, x: float, y: float, words: str, kind: str = "ink", *, bold: bool = False, end: bool = False) -> None:
        more = ' font-weight="bold"' * bold + ' text-anchor="end"' * end
        self.marks.append(f'<text x="{x:g}" y="{y:g}" {self._filled(kind)}{more}>{escape(words)}</text>')

    def box(self, x: float, width: float, height: int, kind: Tone | None) -> None:
        """A box in the look of its kind; free room where that is None."""
        stroke = 'stroke="currentColor"' if self.inherits else f'stroke="{_COLOURS["ink"][0]}"'
        place = f'<rect x="{x:g}" y="{self.y}" width="{width:g}" height="{height}" rx="3"'
        if kind is None:
            self.marks.append(f"{place} {self._filled('free', 'box ')} {stroke}/>")
            return
        self.tones.append(kind)
        box = "" if self.inherits else 'class="box" '
        self.marks.append(f'{place} {box}fill="{kind.colour}" {stroke}/>')
        if pattern := palette.svg_pattern(kind, self.prefix):
            self.marks.append(f'{place} fill="{pattern}"/>')

    def _filled(self, kind: str, also: str = "") -> str:
        # On a partition colours are the same on light and on dark screens.
        colour = palette.ink() if kind == "label" else _COLOURS[kind][0]
        return f'fill="{_INHERITED.get(kind, colour)}"' if self.inherits else f'class="{also}{kind}" fill="{colour}"'

    def crossed(self, x: float, width: float, height: int) -> None:
        """A box that stands nowhere: dashed, with a line across."""
        red = f'class="crossed" stroke="{_COLOURS["out"][0]}"'
        self.marks.append(
            f'<rect x="{x:g}" y="{self.y}" width="{width:g}" height="{height}" rx="3" {red} '
            'fill="none" stroke-dasharray="5 4"/>'
        )
        self.marks.append(f'<line x1="{x:g}" y1="{self.y + height}" x2="{x + width:g}" y2="{self.y}" {red}/>')

    def pill(self, x: float, y: float, words: str) -> None:
        """A word on a partition, light on dark."""
        width = len(words) * 7.3 + 10
        self.marks.append(
            f'<rect x="{x:g}" y="{y - 12:g}" width="{width:g}" height="16" rx="8" fill="{palette.ink()}"/>'
        )
        self.text(x + 5, y, words, "pill")

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
    defined = palette.svg_patterns(sheet.tones)
    return "\n".join(filter(None, [head, f"<style>{STYLE}</style>", defined, ground, *sheet.marks, "</svg>"])) + "\n"


def bars(shown: Picture, *, inherits: bool = False) -> str:
    """The two bars of a GPU alone, as wide as their place: an element of a page that has STYLE and `patterns()`.

    inherits: it needs neither, and what stands beside the partitions has the colour of the text around it.
    """
    # One by one, in their order: drawings of one set differ in that.
    words = "+".join(each.name for each in shown.layout)
    prefix = f"mig-{zlib.crc32(words.encode()):08x}-" if inherits else ""
    sheet = _Sheet(width=_SMALL, edge=1, y=0, inherits=inherits, prefix=prefix)
    unit = (_SMALL - 2) / (shown.geometry.placement_units or 1)
    sheet.named(*_memory_name(shown))
    for segment in shown.segments:
        x, width = 1 + segment.start * unit, segment.size * unit
        sheet.box(x, width, _SMALL_BOX, _kind(segment, shown))
        for row, words_of in enumerate(_short(segment.profile, width)):
            kind = "label" if segment.profile else "pale"
            sheet.text(x + 4, sheet.y + 13 + row * 14, words_of, kind, bold=bool(row == 0 and segment.profile))
    sheet.y += _SMALL_BOX + 2
    _compute(sheet, shown, _SMALL_BAR)
    size = f'viewBox="0 0 {_SMALL} {sheet.y - 4}" role="img" aria-label="{escape(words)}"'
    defined = palette.svg_patterns(sheet.tones, prefix) if inherits else ""
    opened = f'<svg {size} font-family="monospace" font-size="11">'
    return "\n".join(filter(None, [opened, defined, *sheet.marks, "</svg>"]))


def patterns() -> str:
    """Returns an element without size that defines the patterns for all drawings of a page."""
    hidden = 'width="0" height="0" style="position: absolute" aria-hidden="true"'
    return f"<svg {hidden}>{palette.svg_patterns(palette.tones())}</svg>"


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
                kind = "label" if segment.profile else "pale"
                sheet.text(x + 7, y, words, kind, bold=bool(row == 0 and segment.profile))
    sheet.y += height + 4


def _compute(sheet: _Sheet, shown: Picture, height: int) -> None:
    """A bar of the compute slices, in the colours of the partitions that have them. They have no fixed places."""
    total = shown.geometry.compute_slices or 1
    width = (sheet.width - 2 * sheet.edge) / total
    sheet.named("compute slices", f"{shown.compute_used} of {total}")
    kinds = [tone(p, shown.geometry) for p in shown.placed for _ in range(p.compute_slices)]
    named = _compute_names(shown)
    for index in range(total):
        x = sheet.edge + index * width
        sheet.box(x, width, height, kinds[index] if index < len(kinds) else None)
        if index in named:
            sheet.text(x + 5, sheet.y + height / 2 + 4, named[index], "label", bold=True)
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


def _kind(segment: Segment, shown: Picture) -> Tone | None:
    return None if segment.profile is None else tone(segment.profile, shown.geometry)
