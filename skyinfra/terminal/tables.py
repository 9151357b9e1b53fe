"""Tables for a person, JSON for a program."""

from __future__ import annotations

import json
import sys
from dataclasses import asdict
from typing import TYPE_CHECKING

from rich.console import Console
from rich.table import Table

if TYPE_CHECKING:
    from skyinfra.mig import Placement
    from skyinfra.protocol.readings import Figures


def print_json(value: object) -> None:
    """Prints *value* on stdout, indented by two spaces."""
    sys.stdout.write(json.dumps(value, indent=2) + "\n")


def console(*, to_stderr: bool = False) -> Console:
    """Returns a console, 200 columns wide where the output is no terminal."""
    made = Console(stderr=to_stderr, highlight=False)
    return made if made.is_terminal else Console(stderr=to_stderr, highlight=False, width=200)


def table(*columns: str) -> Table:
    """Returns an empty table in the look of all tables."""
    made = Table(box=None, header_style="bold", pad_edge=False, padding=(0, 2, 0, 0))
    for column in columns:
        made.add_column(column, overflow="fold")
    return made


def place(placement: Placement) -> dict[str, object]:
    """Returns the place of a partition as JSON values."""
    where: dict[str, object] = {"profile": placement.profile, "start": placement.start, "size": placement.size}
    return where | ({"compute": [asdict(each) for each in placement.compute]} if placement.compute else {})


def simulated_mark(simulated: bool) -> str:
    """Returns the text that marks a simulated fleet."""
    return " (simulated)" if simulated else ""


def counted(number: int, noun: str) -> str:
    """Returns the number with its noun: ``1 node``, ``2 nodes``."""
    return f"{number} {noun}{'' if number == 1 else 's'}"


def known(value: int | None) -> str:
    """Returns the number, or ``unknown``."""
    return "unknown" if value is None else str(value)


def span(seconds: float) -> str:
    """Returns a length of time in one word: ``12s``, ``5m``, ``3h``, ``2d``."""
    for unit, length in (("d", 86400), ("h", 3600), ("m", 60)):
        if seconds >= 2 * length:
            return f"{seconds / length:.0f}{unit}"
    return f"{max(0.0, seconds):.0f}s"


def used(figures: Figures | None) -> str:
    """Returns what a task has used: its memory high-water, its energy, and how busy the multiprocessors were."""
    if figures is None:
        return ""
    memory, energy, busy = figures.memory_peak, figures.energy, figures.activity.get("sm")
    parts = (
        None if memory is None else f"peak {memory / 2**30:.1f} GiB",
        None if energy is None else f"{energy / 1000:.1f} kJ",
        None if busy is None else f"busy {busy:.0f} %",
    )
    return ", ".join(part for part in parts if part is not None)
