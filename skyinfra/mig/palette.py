"""The colour and the pattern of each kind of profile, from palette.json: whatever draws a profile takes them from here.

The kind is the number of compute slices: a `3g` looks the same on every GPU model, in every picture and on every page.
A profile of one compute slice with twice the memory is a kind of its own. Attributes such as `+me` change nothing.
A terminal has no patterns: there, the colour and the name of the profile stand in each cell.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cache
from importlib import resources
from typing import Any

# "3g.40gb", and "1c.3g.40gb", which is a part of one.
_SLICES = re.compile(r"(?:\d+c\.)?(\d+)g\.")


@dataclass(frozen=True, slots=True)
class Tone:
    """The look of one kind: its name, the colour of its cells, and the lines or dots on them.

    lines: angles in degrees, clockwise from upright. compute: the compute slices of a profile of the kind; None for
    what is no profile. of: the size of such a profile and that of the GPU, in placement units, where they matter.
    """

    name: str
    colour: str
    lines: tuple[int, ...] = ()
    dots: bool = False
    compute: int | None = None
    of: tuple[int, int] | None = None

    @property
    def css_class(self) -> str:
        """The class that `css` and `svg_patterns` know the kind by."""
        return f"tone-{self.name}"


@cache
def _data() -> dict[str, Any]:
    found: dict[str, Any] = json.loads((resources.files(__package__) / "palette.json").read_text(encoding="utf-8"))
    return found


@cache
def tones() -> tuple[Tone, ...]:
    """Returns all kinds, in the order of their compute slices; the last is for what is no profile, as a whole GPU."""
    return tuple(_tone(**row) for row in _data()["tones"])


def _tone(*, lines: Iterable[int] = (), of: tuple[int, int] | None = None, **rest: Any) -> Tone:
    return Tone(lines=tuple(lines), of=of and (of[0], of[1]), **rest)


def ink() -> str:
    """Returns the colour of text on every tone, on light and on dark screens."""
    return str(_data()["ink"])


@cache
def tone(profile: str | None, size: int | None = None, units: int | None = None) -> Tone:
    """Returns the look of a profile, by its name. size, units: of its place and of the GPU, in placement units."""
    read = _SLICES.match(profile or "")
    alike = [each for each in tones() if read and each.compute == int(read[1])]
    exact = [each for each in alike if each.of == (size, units)]
    plain = [each for each in alike if each.of is None]
    return (exact or plain or [tones()[-1]])[0]


def css() -> str:
    """Returns rules of a style sheet: of the class of each tone, its colour, its pattern and the colour of its text."""
    gap, width, line = _drawn()
    rules = []
    for each in tones():
        images = [
            f"repeating-linear-gradient({angle + 90}deg, {line} 0 {width}px, transparent {width}px {gap}px)"
            for angle in each.lines
        ]
        if each.dots:
            images.append(f"radial-gradient(circle, {line} {width}px, transparent {width}px) 0 0 / {gap}px {gap}px")
        background = ", ".join([*images, each.colour]) if not images else f"{', '.join(images)}, {each.colour}"
        rules.append(f".{each.css_class} {{ background: {background}; color: {ink()}; print-color-adjust: exact; }}")
    return "\n".join(rules) + "\n"


def svg_patterns(shown: Iterable[Tone], prefix: str = "") -> str:
    """Returns the definitions of the patterns of these tones, without their colours; see `svg_pattern`.

    prefix: of their ids, where several pictures of a page have definitions of their own.
    """
    gap, width, _ = _drawn()
    made = []
    for each in dict.fromkeys(shown):
        marks = [f'<path d="M{gap / 2:g} 0V{gap}"{_turned(a - each.lines[0], gap)}/>' for a in each.lines]
        marks += [f'<circle cx="{gap / 2:g}" cy="{gap / 2:g}" r="{width}" fill="{ink()}" stroke="none"/>'] * each.dots
        if marks:
            turned = f' patternTransform="rotate({each.lines[0]})"' if each.lines and each.lines[0] else ""
            look = f'stroke="{ink()}" stroke-width="{width}" opacity="{_data()["pattern"]["opacity"]}"'
            made.append(
                f'<pattern id="{prefix}{each.css_class}" width="{gap}" height="{gap}" patternUnits="userSpaceOnUse"'
                f"{turned}><g {look}>{''.join(marks)}</g></pattern>"
            )
    return f"<defs>{''.join(made)}</defs>" if made else ""


def svg_pattern(shown: Tone, prefix: str = "") -> str | None:
    """Returns the fill that lays the pattern of a tone over its colour; None for a tone that has none."""
    return f"url(#{prefix}{shown.css_class})" if shown.lines or shown.dots else None


def _turned(angle: int, gap: int) -> str:
    return f' transform="rotate({angle} {gap / 2:g} {gap / 2:g})"' if angle else ""


def _drawn() -> tuple[int, float, str]:
    """The distance and the width of lines in pixels, and their colour for a style sheet."""
    pattern = _data()["pattern"]
    red, green, blue = (int(ink()[at : at + 2], 16) for at in (1, 3, 5))
    return pattern["gap"], pattern["width"], f"rgb({red} {green} {blue} / {pattern['opacity']})"
