"""The one palette: a kind of profile looks the same everywhere, also to the colour-blind and in print."""

from __future__ import annotations

import itertools
import json
import re
from collections.abc import Sequence

import pytest
from support import ROOT

from skyinfra import mig, page
from skyinfra.mig import gallery, palette
from skyinfra.mig.svg import bars
from skyinfra.terminal import drawing
from tools import pictures

# Machado, Oliveira and Fernandes, A Physiologically-based Model for Simulation of Color Vision Deficiency, 2009: the
# matrices of severity 1.0, for linear RGB.
SIGHTS = {
    "all cones": ((1, 0, 0), (0, 1, 0), (0, 0, 1)),
    "protanopia": (
        (0.152286, 1.052583, -0.204868),
        (0.114503, 0.786281, 0.099216),
        (-0.003882, -0.048116, 1.051998),
    ),
    "deuteranopia": (
        (0.367322, 0.860646, -0.227968),
        (0.280085, 0.672501, 0.047413),
        (-0.011820, 0.042940, 0.968881),
    ),
    "tritanopia": (
        (1.255528, -0.076749, -0.178779),
        (-0.078411, 0.930809, 0.147602),
        (0.004733, 0.691367, 0.303900),
    ),
}
# In CIELAB, where 2.3 is a difference that one just sees.
APART = 14.0
RGB_TO_XYZ = ((0.4124564, 0.3575761, 0.1804375), (0.2126729, 0.7151522, 0.0721750), (0.0193339, 0.1191920, 0.9503041))
WHITE = (0.95047, 1.0, 1.08883)


def rgb(colour: str) -> list[float]:
    return [int(colour[at : at + 2], 16) / 255 for at in (1, 3, 5)]


def linear(colour: Sequence[float]) -> list[float]:
    return [part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in colour]


def times(matrix: Sequence[Sequence[float]], vector: Sequence[float]) -> list[float]:
    return [sum(a * b for a, b in zip(row, vector, strict=True)) for row in matrix]


def lab(colour: str, sight: str) -> tuple[float, float, float]:
    seen = [min(1.0, max(0.0, part)) for part in times(SIGHTS[sight], linear(rgb(colour)))]
    xyz = [part / white for part, white in zip(times(RGB_TO_XYZ, seen), WHITE, strict=True)]
    x, y, z = (part ** (1 / 3) if part > 0.008856 else 7.787 * part + 16 / 116 for part in xyz)
    return 116 * y - 16, 500 * (x - y), 200 * (y - z)


def distance(one: str, other: str, sight: str) -> float:
    pairs = zip(lab(one, sight), lab(other, sight), strict=True)
    return float(sum((a - b) ** 2 for a, b in pairs) ** 0.5)


def contrast(one: Sequence[float], other: Sequence[float]) -> float:
    deep, bright = sorted(times(RGB_TO_XYZ, linear(colour))[1] for colour in (one, other))
    return (bright + 0.05) / (deep + 0.05)


@pytest.mark.parametrize("sight", SIGHTS)
def test_any_two_colours_are_told_apart(sight: str) -> None:
    for one, other in itertools.combinations(palette.tones(), 2):
        assert distance(one.colour, other.colour, sight) >= APART, (one.name, other.name)


def test_colours_that_the_colour_blind_take_for_one_another_are_seen() -> None:
    assert distance("#d9c2f0", "#b5d0f7", "protanopia") < 3, "two colours of profiles before this palette"


def test_any_two_patterns_are_told_apart_without_colour() -> None:
    patterns = [(each.lines, each.dots) for each in palette.tones()]
    assert len(set(patterns)) == len(patterns)
    data = json.loads((ROOT / "skyinfra" / "mig" / "palette.json").read_text())
    for each in palette.tones():
        if each.lines or each.dots:
            assert contrast(rgb(each.colour), over(each.colour, data)) >= 1.3, "the lines are seen on the colour"


def over(colour: str, data: dict) -> list[float]:
    share = data["pattern"]["opacity"]
    return [a * share + b * (1 - share) for a, b in zip(rgb(data["ink"]), rgb(colour), strict=True)]


def test_text_is_read_on_each_colour_and_on_the_lines_of_its_pattern() -> None:
    data = json.loads((ROOT / "skyinfra" / "mig" / "palette.json").read_text())
    for each in palette.tones():
        assert contrast(rgb(data["ink"]), over(each.colour, data)) >= 4.5, each.name


def test_a_kind_looks_the_same_on_every_gpu_and_two_kinds_of_one_gpu_differ() -> None:
    found: dict[str, set[str]] = {}
    for geometry in map(mig.geometry, mig.models()):
        kinds: dict[str, set[tuple[int, int | None]]] = {}
        for profile in geometry.profiles:
            tone = palette.tone(profile.name, profile.size, geometry.placement_units)
            found.setdefault(profile.name.split("g")[0] + "g", set()).add(tone.name)
            kinds.setdefault(tone.name, set()).add((profile.compute_slices, profile.memory_slices))
        assert all(len(sizes) == 1 for sizes in kinds.values()), geometry.model
    assert found == {name: {name} for name in ("2g", "3g", "4g", "7g")} | {"1g": {"1g", "1g-double"}}


def test_the_name_of_a_profile_says_its_tone() -> None:
    assert palette.tone("3g.40gb", 4, 8) is palette.tone("3g.20gb") is palette.tone("1c.3g.40gb")
    assert palette.tone("1g.20gb", 2, 8).name == "1g-double" != palette.tone("1g.10gb", 1, 8).name
    assert palette.tone("1g.10gb+me", 1, 8).name == "1g" == palette.tone("1g.24gb", 3, 12).name
    for other in (None, "", "CPX", "gpu", "6g.40gb"):
        assert palette.tone(other).name == "other"


def test_a_style_sheet_has_a_rule_for_each_and_an_svg_a_pattern() -> None:
    rules = palette.css()
    defined = palette.svg_patterns(palette.tones(), "x-")
    for each in palette.tones():
        rule = next(line for line in rules.splitlines() if line.startswith(f".{each.css_class} "))
        assert each.colour in rule and palette.ink() in rule
        assert "print-color-adjust: exact" in rule, "browsers print no grounds else"
        fill = palette.svg_pattern(each, "x-")
        assert (fill is None) == (each.name == "other") == ("gradient" not in rule)
        assert fill is None or f'id="{fill[5:-1]}"' in defined
    assert len({re.sub(r"#\w+", "", line.partition("{")[2]) for line in rules.splitlines()}) == len(palette.tones())


# What is drawn beside partitions: text, grounds, links, and the red of what is wrong.
BESIDE = {
    *("#1b1f24", "#e6edf3", "#59636e", "#9198a1", "#ffffff", "#0d1117", "#f6f8fa", "#010409", "#d1d9e0", "#3d444d"),
    *("#f0f2f5", "#21262d", "#0550ae", "#79b8ff", "#b3261e", "#ff8a80"),
}
DRAWN = (
    *("skyinfra/mig", "skyinfra/notebook", "skyinfra/page", "skyinfra/terminal", "skyinfra/cli", "skyinfra/deploy"),
    *("tools", "docs"),
)


def test_nothing_else_names_a_colour_of_a_profile() -> None:
    found = []
    for path in (path for folder in DRAWN for path in sorted((ROOT / folder).rglob("*"))):
        if path.suffix not in (".py", ".css", ".js", ".html"):
            continue
        text = path.read_text()
        colours = re.findall(r"#(?:[0-9a-fA-F]{3}){1,2}(?![\w-])|\b(?:rgb|hsl|oklch)a?\([\d\s][^)]*\)", text)
        named = [each for each in colours if each.lower() not in BESIDE] + re.findall(r"\bblack on \w+", text)
        found += [f"{path.relative_to(ROOT)}: {each}" for each in named]
    assert not found


def test_a_profile_has_its_colour_and_its_pattern_in_every_picture() -> None:
    geometry = mig.geometry("h100_80gb")
    layout = mig.place(["3g.40gb", "2g.20gb", "1g.10gb", "1g.10gb"], geometry)
    shown = mig.picture(layout, geometry)
    tones = {palette.tone(place.profile, place.size, 8) for place in layout}
    pages = {
        "mig show --svg": mig.svg([("t", shown, ())]),
        "gallery": gallery.page(geometry, ["3g.40gb", "2g.20gb", "1g.10gb"], "H100"),
        "notebook": bars(shown, inherits=True),
        "overview": pictures.overview(),
        "README": (ROOT / "docs" / "pictures" / "overview.svg").read_text(),
    }
    for name, text in pages.items():
        for each in tones:
            assert f'fill="{each.colour}"' in text, (name, each.name)
            used = re.findall(rf'fill="url\(#([\w-]*{each.css_class})\)"', text)
            assert used and all(f'<pattern id="{pattern}"' in text for pattern in used), (name, each.name)
    sheet = page.answer(None, "/fleet/fleet.css", {}).body.decode()  # type: ignore[arg-type]
    assert palette.css() in sheet
    terminal = drawing.layout_text("t", shown, ())
    styles = {str(span.style) for span in terminal.spans}
    assert {f"not bold {drawing.style(each)}" for each in tones} <= styles
