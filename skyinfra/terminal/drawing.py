"""Drawings of GPUs for a terminal: the partitions of live GPUs, MIG layouts, and changes from one to another."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Iterable, Sequence
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING

from rich.text import Text

from skyinfra import folding, mig
from skyinfra.errors import InvalidField, counted, written
from skyinfra.mig import palette
from skyinfra.mig.drawing import Picture, boxes, compute_bar, facts, left_out, strip, tone
from skyinfra.terminal import tables

if TYPE_CHECKING:
    from skyinfra.deploy.fleet_status import GpuStrip
    from skyinfra.deploy.transitions import GpuChange, Transition
    from skyinfra.mig.palette import Tone

# The width of the word before a sentence: of a change, and of a layout.
_WORD = 10
_FACT = 9
# Words beside it have that room at least.
_NARROWEST = 24


def style(tone: Tone) -> str:
    """Returns the style of a cell of this look: a terminal without its colour shows the nearest that it has."""
    return f"{palette.ink()} on {tone.colour}"


def lines(nodes: Iterable[tuple[str, Sequence[GpuStrip]]], width: int | None = None) -> list[Text]:
    """Returns the drawing: a line for the GPUs of a node that are alike, and one for their tasks, if there are any.

    *nodes*: names, and their GPUs. width: of the terminal; names of profiles are cut where it is short.
    """
    grouped = [(node, list(alike)) for node, found in nodes for alike in _alike(found)]
    heads = [(node, f"GPU {ranges([gpu.gpu for gpu in alike])}", alike[0].accelerator) for node, alike in grouped]
    widths = [max((len(head[column]) for head in heads), default=0) for column in range(3)]
    made = []
    for head, (_, alike) in zip(heads, grouped, strict=True):
        line = Text("  ".join(part.ljust(width) for part, width in zip(head, widths, strict=True)) + "  ")
        margin, layout = len(line), alike[0].layout
        cells = strip(layout, alike[0].units, width and width - margin)
        for text, index in cells:
            line.append(text, style="" if index is None else _style(layout[index], alike[0].units))
        if alike[0].missing:
            line.append(f"  {alike[0].missing} missing", style="red")
        made.append(line)
        if alike[0].doing:
            made.append(Text(" " * margin + _below(cells, alike[0].doing), style="dim"))
    return made


def _style(place: mig.Placement, units: int | None) -> str:
    return style(palette.tone(place.profile, place.size, units))


def _below(cells: Sequence[tuple[str, int | None]], doing: Sequence[str]) -> str:
    """Returns the line below *cells*: the tasks, each in the width of its partition."""
    names = ["" if index is None else doing[index] for _, index in cells]
    cut = [
        name if len(name) <= len(text) else f"{name[: len(text) - 1]}…"
        for name, (text, _) in zip(names, cells, strict=True)
    ]
    return "".join(name.ljust(len(text)) for name, (text, _) in zip(cut, cells, strict=True)).rstrip()


def _alike(gpus: Sequence[GpuStrip]) -> list[list[GpuStrip]]:
    """GPUs with the same partitions and the same tasks together, in the order of the first of them."""
    found: dict[tuple[object, ...], list[GpuStrip]] = {}
    for gpu in gpus:
        found.setdefault((gpu.accelerator, gpu.units, gpu.layout, gpu.missing, gpu.doing), []).append(gpu)
    return list(found.values())


def ranges(numbers: Sequence[int]) -> str:
    """``0-3, 6`` for 0, 1, 2, 3 and 6."""
    runs = [[number for _, number in run] for _, run in groupby(enumerate(numbers), key=lambda each: each[1] - each[0])]
    return ", ".join(str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in runs)


def layout_text(title: str, picture: Picture, notes: Sequence[tuple[str, str]], width: int | None = None) -> Text:
    """Returns the drawing of the MIG layout of one GPU. *notes*: pairs of a word and a sentence, for the last lines.

    width: of the terminal; where it is short, what stands in the boxes is cut, and sentences are folded.
    """
    room = width or sys.maxsize
    made = Text(f"{_folded(title, room)}\n", style="bold")
    for line in [*boxes(picture, width), *compute_bar(picture, width)]:
        for piece, index in line:
            profile = None if index is None else picture.segments[index].profile
            look = "not bold"
            if profile is not None:
                look += " " + style(tone(profile, picture.geometry))
            made.append(piece, style=look)
        made.append("\n")
    if picture.missing:
        made.append(f"{left_out(picture)}\n", style="not bold red")
    for word, sentence in [*facts(picture), *notes]:
        beside = _folded(sentence, room, _FACT)
        made.append(f"{word:<{_FACT}}{beside}\n", style="bold red" if word == "missing" else "not bold")
    made.rstrip()
    return made


def show_transition(found: Transition, *, to_stderr: bool = False) -> None:
    """Prints each kind of change once, with the GPUs that it is about, and a line that counts."""
    out = tables.console(to_stderr=to_stderr)
    for alike in _same_changes(found.changes):
        out.print(_change_text(alike, out.width), soft_wrap=True)
    tables.say(f"{found.fleet}: {_summary(found)}", to_stderr=to_stderr)


def transition_svg(found: Transition) -> str:
    """Returns a drawing of each kind of change, before and after. Raises `InvalidField` for GPUs without MIG."""
    pictures = []
    for alike in _same_changes(found.changes):
        first, title = alike[0], _changed(alike)
        if first.model is None:
            raise InvalidField("only MIG layouts are drawn", field="--svg", given=title)
        geometry = mig.geometry(first.model)
        pictures += [
            (f"{title}: before", mig.picture(first.before, geometry), [*_change_facts(alike)[:2]]),
            (f"{title}: after", mig.picture(first.after, geometry), [*_change_facts(alike)[2:]]),
        ]
    return mig.svg(pictures)


def write_svg(file: Path, found: Transition) -> None:
    """Writes `transition_svg` to *file*. Raises `InvalidField` where that is not possible."""
    text = transition_svg(found)
    with written(InvalidField, "--svg", str(file)):
        file.write_text(text, encoding="utf-8")


def _change_text(alike: Sequence[GpuChange], width: int) -> Text:
    first = alike[0]
    made = Text(f"{_changed(alike)}\n", style="bold")
    for word, layout in (("before", first.before), ("after", first.after)):
        made.append(f"{word:<{_WORD}}", style="not bold")
        if not layout:
            made.append("a whole GPU", style="not bold")
        units = mig.geometry(first.model).placement_units if first.model else None
        units = units or sum(place.size for place in layout)
        for piece, index in strip(layout, units, width - _WORD) if layout else ():
            made.append(piece, style="not bold" if index is None else f"not bold {_style(layout[index], units)}")
        made.append("\n")
    for word, sentence in _change_facts(alike):
        beside = _folded(sentence, width, _WORD)
        made.append(f"{word:<{_WORD}}{beside}\n", style="not bold red" if word == "ends" else "not bold")
    made.rstrip()
    return made


def _folded(sentence: str, width: int, margin: int = 0) -> str:
    """Returns *sentence* in lines of *width*, the later ones behind a *margin*."""
    lines = folding.sentences(Text(sentence), max(_NARROWEST, width - margin))
    return f"\n{'':<{margin}}".join(line.plain for line in lines)


def _change_facts(alike: Sequence[GpuChange]) -> list[tuple[str, str]]:
    """Returns pairs of a word and a sentence: what is kept, destroyed and created, and the tasks that end."""
    first = alike[0]
    tasks = Counter(task for change in alike for task in change.tasks)
    ends = ", ".join(name if count == 1 else f"{name} ({count} times)" for name, count in tasks.items())
    destroyed = _places(first.destroyed) if first.before else "the whole GPU"
    created = _places(first.created) if first.after else "the whole GPU"
    kept = _places(first.kept)
    return [("kept", kept), ("destroyed", destroyed), ("created", created), ("ends", ends or "no task")]


def _summary(found: Transition) -> str:
    if not found.changes:
        return f"nothing changes on {counted(found.unchanged, 'GPU')}"
    destroyed = sum(len(change.destroyed) or len(change.ends) for change in found.changes)
    created = sum(len(change.created) or 1 for change in found.changes)
    kept = sum(len(change.kept) for change in found.changes)
    tasks = sum(len(change.tasks) for change in found.changes)
    gpus = counted(len(found.changes), "GPU")
    text = f"on {gpus} {counted(destroyed, 'slot')} destroyed, {created} created, {kept} kept"
    text += f"; {counted(found.unchanged, 'GPU')} stay as they are" if found.unchanged else ""
    if tasks:
        has = "has" if tasks == 1 else "have"
        text += f"; {counted(tasks, 'task')} {has} {tables.span(found.drain_seconds)} to end (drain_seconds)"
    return text


def _places(layout: Iterable[mig.Placement]) -> str:
    return ", ".join(map(str, layout)) or "nothing"


def _changed(alike: Sequence[GpuChange]) -> str:
    by_node: dict[str, list[int]] = {}
    for change in alike:
        by_node.setdefault(change.node, []).append(change.gpu)
    return "; ".join(f"{node} GPU {ranges(gpus)}" for node, gpus in by_node.items())


def _same_changes(changes: Sequence[GpuChange]) -> list[list[GpuChange]]:
    found: dict[tuple[object, ...], list[GpuChange]] = {}
    for change in changes:
        found.setdefault((change.before, change.after), []).append(change)
    return list(found.values())
