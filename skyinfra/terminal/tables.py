"""Tables and sentences for a person, JSON for a program."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from rich.console import Console, ConsoleOptions, RenderResult
from rich.measure import Measurement
from rich.table import Table
from rich.text import Text

from skyinfra import folding
from skyinfra.console import console as clean_console
from skyinfra.errors.printable import LONGEST, printable
from skyinfra.terminal import screen

if TYPE_CHECKING:
    from skyinfra.mig import Placement
    from skyinfra.protocol.readings import Figures, Progress


# Of every document that ``--json`` prints. It changes where a field goes, or means something else.
SCHEMA_VERSION = 1


def print_json(value: object) -> None:
    """Prints *value* on stdout, indented by two spaces."""
    sys.stdout.write(json.dumps(value, indent=2) + "\n")


# As wide as anything that is printed, where no terminal sets a limit.
_UNLIMITED = 10_000
# Between two columns.
_GAP = 2
# The width that is asked for a column of sentences, which are folded, the least one, and that of an id that was cut.
_SENTENCE = 24
_NARROWEST = 8
# A column that is no wider is not folded.
_SHORT = 12
_ID = 17
# The longest text of a cell, unless tables are wide.
_LONGEST = 1000
# A command in a sentence.
_COMMAND = re.compile(r"`[^`\n]+`")
# A text, or one with its style.
Piece = str | tuple[str, str]


def print_document(document: Mapping[str, object]) -> None:
    """Prints a document of ``--json`` on stdout, with its version; docs/schemas has a schema for each."""
    print_json({"schema_version": SCHEMA_VERSION, **document})


def console(*, to_stderr: bool = False) -> Console:
    """Returns a console. It is as wide as its terminal; without one, or with ``--wide``, nothing is folded."""
    made = clean_console(to_stderr=to_stderr, highlight=False)
    if made.is_terminal and not screen.is_wide():
        return made
    return clean_console(to_stderr=to_stderr, highlight=False, width=_UNLIMITED)


def say(*pieces: Piece, to_stderr: bool = False) -> None:
    """Prints sentences, folded between words where a terminal shows them; commands in them stay whole."""
    out, text = console(to_stderr=to_stderr), Text()
    for piece, style in ((each, "") if isinstance(each, str) else each for each in pieces):
        # Programs read all of it.
        text.append(printable(piece, LONGEST if out.is_terminal else None), style)
    text.highlight_regex(_COMMAND, "cyan")
    folding.say(out, text)


class FittingTable(Table):
    """A table that fits its terminal: it cuts long ids in their middle, then leaves columns out, in a fixed order.

    leave_out: columns in the order in which they go, those that one needs last or never; before them go empty ones,
    whichever they are. ids: columns of long ids. sentences: columns that are folded before others go for them.
    """

    def __init__(
        self, columns: Sequence[str], leave_out: Sequence[str], ids: Collection[str], sentences: Collection[str]
    ) -> None:
        super().__init__(box=None, header_style="bold", pad_edge=False, padding=(0, _GAP, 0, 0))
        self.leave_out = leave_out
        self.ids = ids
        self.sentences = sentences
        for column in columns:
            self.add_column(column, overflow="fold")

    def add_row(self, *cells: Any, **options: Any) -> None:
        """Adds a row, whose texts are `printable` before they are measured."""
        longest = None if screen.is_wide() else _LONGEST
        super().add_row(*(printable(cell, longest) if isinstance(cell, str) else cell for cell in cells), **options)

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        """Yields the table, and a line that names what was left out or cut."""
        cells = {str(column.header): list(column.cells) for column in self.columns}
        widths = {name: self._width(console, name, found) for name, found in cells.items()}
        kept, hidden = list(cells), []
        if _sum(widths, kept) > options.max_width:
            for name in self.ids:
                texts = [str(cell) for cell in cells[name]]
                cells[name] = [screen.cut(text, _ID) for text in texts]
                if cells[name] != texts:
                    hidden.append(name)
                    widths[name] = min(widths[name], max(_ID, len(name)))
        empty = [name for name in cells if not any(map(str, cells[name]))]
        for name in [*empty, *(each for each in self.leave_out if each not in empty)]:
            if _sum(widths, kept) <= options.max_width:
                break
            kept.remove(name)
            hidden = [each for each in hidden if each != name] + ([] if name in empty else [name])
        headers = self._fold(cells, widths, kept, options.max_width)
        shown = Table(box=None, header_style="bold", pad_edge=False, padding=(0, _GAP, 0, 0))
        for name in kept:
            shown.add_column(headers.get(name, name), overflow="fold")
        for row in range(self.row_count):
            shown.add_row(*(cells[name][row] for name in kept))
        yield shown
        if hidden:
            note = Text(f"Left out or cut to fit: {', '.join(hidden)}. --wide shows all.", style="dim")
            yield from folding.sentences(note, options.max_width)

    def _fold(
        self, cells: dict[str, list[Any]], widths: Mapping[str, int], kept: Sequence[str], room: int
    ) -> dict[str, Text]:
        """Folds the cells of sentences, which share the room that the other columns leave; the narrow ones first.

        Returns their headers, folded too.
        """
        headers: dict[str, Text] = {}
        # Where the table is still too wide, names are folded as well, at their seams.
        narrow = _SHORT if _sum(widths, kept) > room else _UNLIMITED
        shared = [name for name in kept if name in self.sentences or widths[name] > narrow]
        texts = {name: [_text(each) for each in cells[name]] for name in shared}
        whole = {name: max(len(name), *(each.cell_len for each in texts[name]), 0) for name in shared}
        room -= _sum(widths, kept) - sum(widths[name] for name in shared)
        least = {name: max(map(folding.least, (Text(name), *texts[name]))) for name in shared}
        if sum(least.values()) > room:
            least = {name: max(_NARROWEST, folding.least(Text(name))) for name in shared}
        shared.sort(key=whole.__getitem__)
        for place, name in enumerate(shared):
            later = shared[place + 1 :]
            share = min(room // (len(later) + 1), room - sum(least[each] for each in later))
            width = max(min(whole[name], share), least[name])
            cells[name] = [folding.cell(each, width) for each in texts[name]]
            headers[name] = folding.cell(Text(name), width)
            room -= width
        return headers

    def _width(self, console: Console, name: str, cells: Sequence[object]) -> int:
        free = console.options.update(width=_UNLIMITED)
        widest = max((Measurement.get(console, free, cell).maximum for cell in cells), default=0)  # type: ignore[arg-type]
        return max(len(name), min(widest, _SENTENCE) if name in self.sentences else widest)


def _text(cell: Any) -> Text:
    return cell if isinstance(cell, Text) else Text.from_markup(str(cell))


def _sum(widths: Mapping[str, int], kept: Sequence[str]) -> int:
    return sum(widths[name] + _GAP for name in kept) - _GAP


def table(
    *columns: str, leave_out: Sequence[str] = (), ids: Collection[str] = (), sentences: Collection[str] = ()
) -> Table:
    """Returns an empty table in the look of all tables; see `FittingTable`."""
    return FittingTable(columns, leave_out, ids, sentences)


def place(placement: Placement) -> dict[str, object]:
    """Returns the place of a partition as JSON values."""
    where: dict[str, object] = {"profile": placement.profile, "start": placement.start, "size": placement.size}
    return where | ({"compute": [asdict(each) for each in placement.compute]} if placement.compute else {})


def simulated_mark(simulated: bool) -> str:
    """Returns the text that marks a simulated fleet."""
    return " (simulated)" if simulated else ""


def known(value: int | None) -> str:
    """Returns the number, or ``unknown``."""
    return "unknown" if value is None else str(value)


def node_range(least: int | None, nodes: int, scale: Sequence[int] | None = None) -> str:
    """Returns a number of nodes, or how many there may be: ``0 to 8``; for a *scale*, ``2 (of 1 to 8)``."""
    if scale is not None:
        return f"{nodes} (of {scale[0]} to {scale[1]})"
    return str(nodes) if least is None else f"{least} to {nodes}"


def span(seconds: float) -> str:
    """Returns a length of time in one word: ``12s``, ``5m``, ``3h``, ``2d``."""
    for unit, length in (("d", 86400), ("h", 3600), ("m", 60)):
        if seconds >= 2 * length:
            return f"{seconds / length:.0f}{unit}"
    return f"{max(0.0, seconds):.0f}s"


def steps(progress: Progress) -> str:
    """Returns how many steps a task has done, such as ``37 of 100``."""
    return f"{progress.done:.12g}" + (" steps" if progress.total is None else f" of {progress.total:.12g}")


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
