"""The report of ``skyinfra preflight``."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rich.markup import escape

from skyinfra.terminal import tables

if TYPE_CHECKING:
    from skyinfra.preflight import Report, Result

_COLOURS: dict[Result, str] = {"pass": "green", "warn": "yellow", "fail": "red"}


def show_report(report: Report) -> None:
    """Prints a line for each check, then what to do about those that did not pass."""
    out = tables.console()
    made = tables.table("POOL", "CHECK", "RESULT", "FOUND", sentences=("FOUND",))
    for line in report.lines:
        made.add_row(line.pool, line.check, f"[{_COLOURS[line.result]}]{line.result}[/]", escape(line.found))
    out.print(made)
    # Below the table and not folded, so that commands can be copied.
    for line in report.lines:
        if line.to_do:
            tables.say(f"{line.pool}, {line.check}: {line.to_do}")
    counts = {result: report.count(result) for result in _COLOURS}
    text = ", ".join(f"{count} {result}" for result, count in counts.items() if count)
    out.print(f"{report.stack}: {text or 'no pools'}")
