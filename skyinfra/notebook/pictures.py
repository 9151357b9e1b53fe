"""A fleet as HTML for the cell of a notebook: its nodes, slots and tasks, and the layouts of its GPUs drawn.

It has no script and no style sheet, and the colours of the text around it, light or dark. All that is not of this file
is escaped.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from html import escape as html_escape

from skyinfra.accelerators import catalog
from skyinfra.errors import SkyinfraError
from skyinfra.errors.printable import printable
from skyinfra.mig.drawing import Picture, picture
from skyinfra.mig.geometry import geometry
from skyinfra.mig.grid import Layout, layout_text, together
from skyinfra.mig.svg import bars
from skyinfra.protocol.instance import InstanceInfo
from skyinfra.protocol.manifest import Manifest

# More nodes than that are folded.
_MOST_NODES = 10
_CELL = 'style="text-align: left; padding: .2em 1.2em .2em 0"'
# The partitions of one GPU.
_Divided = tuple[str, Layout]


def fleet(
    manifest: Manifest,
    nodes: Sequence[str],
    slots: Sequence[InstanceInfo],
    running: Mapping[str, Sequence[str]],
    note: str = "",
) -> str:
    """Returns the HTML of a fleet. running: the names of the tasks on each slot. note: a sentence above the nodes."""
    counted = f"{_of(len(nodes), 'node')}, {_of(len(slots), 'slot')}"
    facts = [manifest.provider, counted, *(["simulated"] if manifest.simulated else []), *([note] if note else [])]
    heads = {node.name for node in manifest.nodes if node.head}
    rows = [_row(name, name in heads, [s for s in slots if s.node == name], running) for name in nodes]
    parts = [f"<div><strong>{escape(manifest.fleet)}</strong> &nbsp;{escape(' · '.join(facts))}</div>"]
    if rows:
        parts.append(_table(rows[:_MOST_NODES]))
    if rows[_MOST_NODES:]:
        summary = f"<summary>{_of(len(rows) - _MOST_NODES, 'more node')}</summary>"
        parts.append(f"<details>{summary}{_table(rows[_MOST_NODES:])}</details>")
    figures = [_figure(found, gpus) for found, gpus in _layouts(slots).items()]
    parts += [f'<div style="display: flex; flex-wrap: wrap; gap: 1em 2em">{"".join(figures)}</div>'] if figures else []
    return f'<div role="group" aria-label="fleet {escape(manifest.fleet)}">{"".join(parts)}</div>'


def _row(name: str, head: bool, slots: Sequence[InstanceInfo], running: Mapping[str, Sequence[str]]) -> list[str]:
    kinds = Counter(_kind(slot) for slot in slots)
    tasks = Counter(task for slot in slots for task in running.get(slot.slot, ()))
    return [f"{name} (head)" if head else name, _counted(kinds) or "none", _counted(tasks) or "-"]


def _kind(slot: InstanceInfo) -> str:
    words = (slot.accelerator, slot.profile or (slot.kind if slot.kind not in ("gpu", "partition") else None))
    return " ".join(word for word in words if word) or slot.kind


def _table(rows: Iterable[Sequence[str]]) -> str:
    head = "".join(f'<th scope="col" {_CELL}>{word}</th>' for word in ("node", "slots", "runs"))
    lines = ("".join(f"<td {_CELL}>{escape(cell)}</td>" for cell in row) for row in rows)
    body = "".join(f"<tr>{line}</tr>" for line in lines)
    return f'<table style="margin: .5em 0"><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>'


def _layouts(slots: Iterable[InstanceInfo]) -> dict[_Divided, list[tuple[str, int]]]:
    """Returns the nodes and GPUs of each layout that stands."""
    gpus: dict[tuple[str, int], list[InstanceInfo]] = {}
    for slot in slots:
        if slot.gpu is not None and slot.profile and slot.size and slot.accelerator:
            gpus.setdefault((slot.node, slot.gpu), []).append(slot)
    found: dict[_Divided, list[tuple[str, int]]] = {}
    for gpu, parts in gpus.items():
        places = together(slot.placement for slot in parts)
        found.setdefault((parts[0].accelerator or "", places), []).append(gpu)
    return found


def _figure(layout: _Divided, gpus: Sequence[tuple[str, int]]) -> str:
    """Returns the drawing of a layout; its text alone where the GPU's geometry is not known, as those of AMD."""
    drawn = _drawn(*layout)
    by_node: dict[str, list[str]] = {}
    for node, gpu in gpus:
        by_node.setdefault(node, []).append(str(gpu))
    where = "; ".join(f"{node} GPU {', '.join(numbers)}" for node, numbers in list(by_node.items())[:_MOST_NODES])
    where += f"; and {_of(len(by_node) - _MOST_NODES, 'more node')}" if len(by_node) > _MOST_NODES else ""
    names = "" if drawn is not None else f" {layout_text(layout[1])}"
    caption = f"<figcaption>{escape(f'{layout[0]}{names}: {where}')}</figcaption>"
    svg = bars(drawn, inherits=True) if drawn is not None else ""
    return f'<figure style="width: 21em; max-width: 100%; margin: .5em 0">{caption}{svg}</figure>'


def _drawn(accelerator: str, places: Layout) -> Picture | None:
    """Returns the picture of a GPU: of the one of that name whose profiles these are."""
    try:
        models = [row.mig_model for row in catalog.variants(accelerator) if row.mig_model]
    except SkyinfraError:  # an accelerator of the user's own
        return None
    for model in dict.fromkeys(models):
        try:
            return picture(places, geometry(model))
        except SkyinfraError:
            continue
    return None


def _counted(words: Counter[str]) -> str:
    return ", ".join(word if count == 1 else f"{word}*{count}" for word, count in sorted(words.items()))


def _of(count: int, noun: str) -> str:
    return f"{count:,} {noun}{'' if count == 1 else 's'}"


def escape(text: str) -> str:
    """Returns *text*, which a node may have sent, for HTML."""
    return html_escape(printable(text))
