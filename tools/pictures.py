"""Draw the pictures of the documents: ``python -m tools.pictures``; with ``--check`` say which are stale.

The lives of a task, of a layout change and of a node, and the way of the data, are read from docs/architecture.md: the
text is their one source; performance.svg is drawn from benchmarks/history.csv. Pictures are light or dark as the screen
of the reader is.
"""

from __future__ import annotations

import itertools
import math
import re
import sys
import textwrap
from collections.abc import Sequence
from html import escape
from pathlib import Path

from benchmarks import report
from skyinfra import mig
from skyinfra.deploy.transitions import GpuChange, Transition
from skyinfra.mig import palette
from skyinfra.terminal.drawing import transition_svg

ROOT = Path(__file__).resolve().parents[1]
FOLDER = ROOT / "docs" / "pictures"
ARCHITECTURE = ROOT / "docs" / "architecture.md"
# Light and dark, of what is no partition: the colours of profiles are in the palette.
COLOURS = {
    "ink": ("#1b1f24", "#e6edf3"),
    "pale": ("#59636e", "#9198a1"),
    "ground": ("#ffffff", "#0d1117"),
    "step": ("#f0f2f5", "#21262d"),
}
STYLE = "@media (prefers-color-scheme: dark) {{ {} }}".format(
    " ".join([f".{name} {{ fill: {dark}; }}" for name, (_, dark) in COLOURS.items()] + [".line { stroke: #9198a1; }"])
)
# The lane of a step is that of the first file that it names.
LANES = {
    "you": ("tasks", "client", "sync", "compiler.py", "engine"),
    "Terraform": ("deploy", "bootstrap", "modules", "terraform"),
    "head": ("head",),
    "node": ("first_boot", "runner", "gpu", "node", "worker", "drain"),
}
SECTIONS = {
    "task": "The life of a task",
    "layout": "The life of a layout change",
    "node": "The life of a node",
}
WIDTH = 760
_LETTER = 7.2


class Sheet:
    """Marks of one picture; its height is what they need."""

    def __init__(self, title: str, width: int = WIDTH) -> None:
        self.title, self.width, self.bottom = title, width, 0
        self.marks: list[str] = []
        self.tones: list[palette.Tone] = []

    def text(self, x: float, y: float, words: str, *, kind: str = "ink", more: str = "") -> None:
        """Writes *words* with their base line at *y*."""
        fill = palette.ink() if kind == "label" else COLOURS[kind][0]
        self.marks.append(f'<text x="{x:g}" y="{y:g}" class="{kind}" fill="{fill}" {more}>{escape(words)}</text>')
        self.bottom = max(self.bottom, round(y) + 6)

    def box(self, x: float, y: float, width: float, height: float, kind: str = "ground") -> None:
        """Draws a box with a border."""
        self.marks.append(
            f'<rect x="{x:g}" y="{y:g}" width="{width:g}" height="{height:g}" rx="5" class="{kind} line" '
            f'fill="{COLOURS[kind][0]}" stroke="#59636e"/>'
        )
        self.bottom = max(self.bottom, round(y + height))

    def partition(self, x: float, y: float, width: float, height: float, tone: palette.Tone) -> None:
        """Draws a partition in the look of its profile."""
        place = f'<rect x="{x:g}" y="{y:g}" width="{width:g}" height="{height:g}" rx="5"'
        self.marks.append(f'{place} class="line" fill="{tone.colour}" stroke="#59636e"/>')
        if pattern := palette.svg_pattern(tone):
            self.marks.append(f'{place} fill="{pattern}"/>')
        self.tones.append(tone)

    def arrow(self, x1: float, y1: float, x2: float, y2: float) -> None:
        """Draws an arrow from one point to another."""
        self.line(x1, y1, x2, y2, 'marker-end="url(#end)"')

    def line(self, x1: float, y1: float, x2: float, y2: float, more: str = 'stroke-dasharray="2 4"') -> None:
        """Draws a line from one point to another, dashed unless *more* says what else."""
        path = f"M{x1:g} {y1:g} L{x2:g} {y2:g}"
        self.marks.append(f'<path d="{path}" class="line" stroke="#59636e" fill="none" {more}/>')

    def svg(self) -> str:
        """Returns the picture."""
        height = self.bottom + 16
        body = "\n".join(self.marks)
        return (
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {self.width} {height}" width="{self.width}" '
            f'height="{height}" role="img" aria-label="{escape(self.title, quote=True)}" '
            f'font-family="system-ui, sans-serif" font-size="13">\n<title>{escape(self.title)}</title>\n'
            f"<style>{STYLE}</style>\n"
            '<defs><marker id="end" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="8" markerHeight="8" orient="auto">'
            '<path d="M0 0 L8 4 L0 8 z" fill="#59636e" class="pale"/></marker></defs>\n'
            f"{palette.svg_patterns(self.tones)}"
            f'<rect width="{self.width}" height="{height}" class="ground" fill="#ffffff"/>\n{body}\n</svg>\n'
        )


def steps(section: str, text: str) -> list[str]:
    """Returns the numbered steps of *section* of docs/architecture.md, in one line each."""
    part = text.split(f"## {section}\n", 1)[1].split("\n## ", 1)[0]
    found = re.split(r"^\d+\. ", part, flags=re.MULTILINE)[1:]
    return [" ".join(step.split("\n\n")[0].split()) for step in found]


def lane(step: str, before: str) -> str:
    """Returns the lane of *step*: that of the first file it names, else the one *before*."""
    for named in re.findall(r"`([\w/.]+)`", step):
        for name, rooms in LANES.items():
            if named.split("/")[0] in rooms and ("/" in named or named in rooms):
                return name
    return before


def life(name: str, text: str) -> str:
    """Returns the picture of one life: a lane for each place, a box for each step, from top to bottom."""
    sheet = Sheet(SECTIONS[name])
    found = steps(SECTIONS[name], text)
    places: list[str] = []
    for step in found:
        places.append(lane(step, places[-1] if places else "you"))
    lanes = [each for each in LANES if each in places]
    room = (WIDTH - 24) / len(lanes)
    middles = {each: 12 + room * (number + 0.5) for number, each in enumerate(lanes)}
    width = room * 1.6 if len(lanes) > 2 else room - 16
    wrapped = [_wrapped(f"{number}. {step}", width) for number, step in enumerate(found, start=1)]
    tops = [40 + sum(30 + 17 * len(lines) for lines in wrapped[:number]) for number in range(len(found) + 1)]
    for each, middle in middles.items():
        sheet.text(middle, 26, each, more='font-weight="bold" text-anchor="middle"')
        sheet.line(middle, 34, middle, tops[-1] - 18)
    for number, (place, lines) in enumerate(zip(places, wrapped, strict=True)):
        middle, top, height = middles[place], tops[number], 12 + 17 * len(lines)
        left = min(max(middle - width / 2, 12), WIDTH - 12 - width)
        sheet.box(left, top, width, height, "step")
        for index, line in enumerate(lines):
            sheet.text(left + 10, top + 19 + 17 * index, line)
        if number + 1 < len(found):
            sheet.arrow(middle, top + height, middles[places[number + 1]], tops[number + 1])
    return sheet.svg()


def _wrapped(step: str, width: float) -> list[str]:
    """Returns the lines of a step in a box of *width*, without the files in brackets."""
    return textwrap.wrap(re.sub(r"\s*\([^()]*`[^()]*\)", "", step).replace("`", ""), int((width - 20) / _LETTER))


def way(text: str) -> str:
    """Returns the picture of the way of the data, from the flowchart of docs/architecture.md."""
    sheet = Sheet("The way of the data: declare, select, compile, synth, apply, boot, partition, serve, submit")
    chart = text.split("```mermaid\n", 1)[1].split("```", 1)[0]
    boxes = {name: label.split("<br>") for name, label in re.findall(r'(\w+)\["([^"]+)"\]', chart)}
    at: dict[str, tuple[float, float]] = {}
    across, width, height = 4, 160, 50
    straight = [name for name in boxes if name != "client"]
    for number, name in enumerate(straight):
        row, column = divmod(number, across)
        at[name] = (16 + column * 186, 20 + row * 96)
    x, y = at[straight[-1]]
    at["client"] = (x, y + 96)
    for name, (x, y) in at.items():
        sheet.box(x, y, width, height, "step")
        sheet.text(x + 10, y + 20, boxes[name][0], more='font-weight="bold"')
        sheet.text(x + 10, y + 38, boxes[name][1], kind="pale", more='font-size="12"')
    for one, other in [*itertools.pairwise(straight), ("client", straight[-1])]:
        (x1, y1), (x2, y2) = at[one], at[other]
        if y1 == y2:
            sheet.arrow(x1 + width, y1 + height / 2, x2, y2 + height / 2)
        elif one == "client":
            sheet.arrow(x1 + width / 2, y1, x2 + width / 2, y2 + height)
        else:
            sheet.arrow(x1 + width / 2, y1 + height, x2 + width / 2, y2)
    return sheet.svg()


def _gpu(sheet: Sheet, x: float, y: float, width: float, layout: str) -> None:
    """Draws the memory of an H100 with *layout*, a task in each partition."""
    geometry = mig.geometry("h100_80gb")
    slice_width = width / (geometry.placement_units or 1)
    for placement in mig.place(mig.parse(layout, geometry), geometry):
        tone = palette.tone(placement.profile, placement.size, geometry.placement_units)
        left, wide = x + placement.start * slice_width, placement.size * slice_width
        sheet.partition(left + 1, y, wide - 2, 30, tone)
        name = placement.profile.partition(".")[0]
        sheet.text(left + wide / 2, y + 19, name, kind="label", more='text-anchor="middle" font-size="12"')


LAYOUTS = ("3g.40gb*2", "3g.40gb+2g.20gb+1g.10gb*2", "1g.10gb*7")


def overview() -> str:
    """Returns the picture of the README."""
    sheet = Sheet("A declaration becomes Terraform, nodes, partitions, and a place for each task")
    code = ["sky.ComputePool(", "  nodes=3,", "  provider=sky.AWS(),", '  accelerator="H100/…",', ")"]
    sheet.text(16, 26, "Declare, in Python", more='font-weight="bold"')
    sheet.box(16, 38, 196, 112)
    for number, line in enumerate(code):
        sheet.text(
            26, 60 + 19 * number, line, more='font-family="ui-monospace, monospace" font-size="12" xml:space="preserve"'
        )
    for number, line in enumerate(("layout checked, price said,", "before anything is created")):
        sheet.text(16, 174 + 17 * number, line, kind="pale", more='font-size="12"')
    sheet.text(262, 26, "Apply, with Terraform", more='font-weight="bold"')
    places = (
        "AWS, Google Cloud, Azure, OCI",
        "Lambda, Nebius, Crusoe …",
        "RunPod, Vast.ai",
        "hosts over SSH, containers",
        "Slurm, Kubernetes",
    )
    sheet.box(262, 38, 206, 112)
    for number, place in enumerate(places):
        sheet.text(272, 60 + 19 * number, place, more='font-size="12"')
    sheet.arrow(216, 94, 258, 94)
    sheet.arrow(472, 94, 514, 94)
    sheet.text(518, 26, "Run, on every partition", more='font-weight="bold"')
    for number, layout in enumerate(LAYOUTS):
        _gpu(sheet, 518, 38 + 41 * number, 226, layout)
    sheet.text(518, 174, "train(0) >> pool", more='font-family="ui-monospace, monospace" font-size="12"')
    sheet.text(518, 191, "layouts change while tasks run", kind="pale", more='font-size="12"')
    return sheet.svg()


def transition() -> str:
    """Returns a change of layout in place, before and after, as ``skyinfra mig plan --svg`` draws it."""
    h100 = mig.geometry("h100_80gb")
    before = mig.place(["3g.40gb", "3g.40gb"], h100)
    after = mig.rearranged(mig.place(["3g.40gb", "2g.20gb", "1g.10gb", "1g.10gb"], h100), before, h100)
    change = GpuChange("mig-0", 0, h100.model, before, after, (("mig-0/0", ("train",)),))
    return transition_svg(Transition("inference/mig", (change,), 0, 600))


# The rows of the benchmarks that are drawn, of those that are compared with another program.
COMPARED = ("engine",)
_RATIOS = (0.1, 0.2, 0.5, 1, 2, 5, 10)


def speed(rows: Sequence[report.Row]) -> str:
    """Returns the ratios of the benchmarks to their baselines: the latest, and those of earlier runs in pale."""
    sheet = Sheet("How fast, against plain Dask and Ray in the same run")
    left, width = 400, WIDTH - 420
    end = math.log(_RATIOS[-1])

    def at(ratio: float) -> float:
        return left + width * (min(max(math.log(ratio), -end), end) + end) / (2 * end)

    drawn = [row for row in report.latest(rows) if row.benchmark in COMPARED and float(row.ratio) > 0]
    for ratio in _RATIOS:
        sheet.text(at(ratio), 26, f"{ratio:g}x", kind="pale", more='text-anchor="middle" font-size="12"')
        sheet.line(at(ratio), 34, at(ratio), 44 + 20 * len(drawn), "" if ratio == 1 else 'stroke-dasharray="2 4"')
    for number, row in enumerate(drawn):
        y, baseline = 54 + 20 * number, row.baseline.partition(":")[0]
        sheet.text(12, y, textwrap.shorten(f"{row.what}: {baseline}", 64, placeholder=" …"), more='font-size="11"')
        same = [each for each in rows if (each.what, each.baseline.partition(":")[0]) == (row.what, baseline)]
        for each in same:
            latest = each is same[-1]
            kind = "ink" if latest else "pale"
            sheet.marks.append(
                f'<circle cx="{at(float(each.ratio)):.1f}" cy="{y - 4}" r="{4 if latest else 2.5}" class="{kind}" '
                f'fill="{COLOURS[kind][0]}"/>'
            )
    return sheet.svg()


def pictures() -> dict[str, str]:
    """Returns the text of each picture, by the name of its file."""
    text = ARCHITECTURE.read_text(encoding="utf-8")
    drawn = {f"life-of-a-{name}.svg": life(name, text) for name in SECTIONS}
    drawn["performance.svg"] = speed(report.history())
    return {"overview.svg": overview(), "transition.svg": transition(), "way-of-the-data.svg": way(text), **drawn}


def stale(folder: Path = FOLDER) -> list[str]:
    """Returns the names of the pictures that are not as they would be drawn now."""
    return [
        name
        for name, svg in pictures().items()
        if not (folder / name).is_file() or (folder / name).read_text(encoding="utf-8") != svg
    ]


def main(arguments: Sequence[str]) -> None:
    """Writes the pictures, or with --check names those that are stale; exit code 1 where there is one."""
    old = stale()
    if "--check" in arguments:
        sys.exit("".join(f"{name} is stale: python -m tools.pictures\n" for name in old) or 0)
    FOLDER.mkdir(parents=True, exist_ok=True)
    for name in old:
        (FOLDER / name).write_text(pictures()[name], encoding="utf-8")
        print(f"written: docs/pictures/{name}")


if __name__ == "__main__":
    main(sys.argv[1:])
