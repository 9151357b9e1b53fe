"""The rows of a run as a table of docs/performance.md, and their history in benchmarks/history.csv.

``python -m benchmarks report [NAME ...] [--quick]`` runs the benchmarks, adds their rows to the history, and writes the
table and the picture of them anew. A ratio compares two programs in one run on one machine; figures of two machines, or
of one that did something else besides, are not compared.
"""

from __future__ import annotations

import csv
import importlib.metadata
import os
import platform
import re
import subprocess
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from benchmarks.measure import Result

ROOT = Path(__file__).resolve().parent.parent
HISTORY = ROOT / "benchmarks" / "history.csv"
PAGE = ROOT / "docs" / "performance.md"
BEGIN, END = "<!-- written by python -m benchmarks report -->", "<!-- end -->"
COLUMNS = (
    "date",
    "commit",
    "machine",
    "versions",
    "benchmark",
    "what",
    "baseline",
    "seconds",
    "figure",
    "ratio",
    "aim",
)


@dataclass(frozen=True)
class Row:
    """A row of the history; its fields are the columns of the file."""

    date: str
    commit: str
    machine: str
    versions: str
    benchmark: str
    what: str
    baseline: str
    seconds: str
    figure: str
    ratio: str
    aim: str


def machine() -> str:
    """Returns the processors and the memory of this machine."""
    names = re.findall(r"^model name\s*: (.+)$", Path("/proc/cpuinfo").read_text(encoding="utf-8"), re.MULTILINE)
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
    return f"{os.cpu_count()} CPUs ({names[0] if names else platform.machine()}), {memory:.0f} GiB"


def versions() -> str:
    """Returns the versions of what is compared, as far as it is installed."""
    found = [f"Python {platform.python_version()}"]
    for name in ("distributed", "ray"):
        try:
            found.append(f"{name} {importlib.metadata.version(name)}")
        except importlib.metadata.PackageNotFoundError:
            continue
    return ", ".join(found)


def commit() -> str:
    """Returns the commit that is measured, with a ``+`` where files were changed since."""
    command = ["git", "describe", "--always", "--dirty=+"]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False).stdout.strip() or "unknown"


def noted(rows: Iterable[tuple[str, Result]]) -> Iterator[Result]:
    """Passes *rows*, each with the name of its benchmark, on; adds them to the history and to the page at their end."""
    head = (time.strftime("%Y-%m-%d %H:%M", time.gmtime()), commit(), machine(), versions())
    new = []
    for name, each in rows:
        new.append(
            Row(
                *head,
                name,
                each.what.strip(),
                each.baseline,
                f"{each.seconds:.6f}",
                each.shown,
                f"{each.ratio:.2f}",
                each.aim,
            )
        )
        yield each
    if not HISTORY.exists():
        HISTORY.write_text(",".join(COLUMNS) + "\n", encoding="utf-8")
    with HISTORY.open("a", encoding="utf-8", newline="") as file:
        csv.writer(file, lineterminator="\n").writerows(vars(row).values() for row in new)
    write_page()


def history() -> list[Row]:
    """Returns all rows, the oldest first."""
    if not HISTORY.exists():
        return []
    with HISTORY.open(encoding="utf-8", newline="") as file:
        return [Row(**row) for row in csv.DictReader(file)]


def latest(rows: Iterable[Row]) -> list[Row]:
    """Returns the newest row of each figure, in the order of their benchmarks."""
    found = {(row.benchmark, row.what, row.baseline.partition(":")[0]): row for row in rows}
    # What a benchmark does not have any more is only history.
    last = {row.benchmark: row.date for row in found.values()}
    return [row for row in found.values() if row.date == last[row.benchmark]]


def tables(rows: Iterable[Row]) -> str:
    """Returns the tables of the page, one for each benchmark."""
    groups: dict[str, list[Row]] = {}
    for row in rows:
        groups.setdefault(row.benchmark, []).append(row)
    lines = []
    for name, group in groups.items():
        first = group[0]
        lines += [f"### {name}", "", f"{first.date} UTC, commit {first.commit}; {first.machine}; {first.versions}.", ""]
        lines += ["| what | figure | baseline | ratio | aim |", "|---|---|---|---|---|"]
        lines += [f"| {row.what} | {row.figure} | {row.baseline} | {row.ratio} | {row.aim} |" for row in group]
        lines.append("")
    return "\n".join(lines)


def write_page() -> None:
    """Writes the tables of the newest rows into the page, and the picture of the history."""
    from tools import pictures

    text = PAGE.read_text(encoding="utf-8")
    before, _, rest = text.partition(BEGIN)
    after = rest.partition(END)[2]
    PAGE.write_text(f"{before}{BEGIN}\n\n{tables(latest(history()))}\n{END}{after}", encoding="utf-8")
    pictures.main([])
