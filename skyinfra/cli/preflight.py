"""``skyinfra preflight``: whether the cloud has, and gives, what a stack asks for."""

from __future__ import annotations

from rich.markup import escape

from skyinfra.cli import tables
from skyinfra.preflight import Report, Result, preflight
from skyinfra.terraform.project import SynthesizedStack

_COLOURS: dict[Result, str] = {"pass": "green", "warn": "yellow", "fail": "red"}


def check(stack: SynthesizedStack, *, as_json: bool) -> Report:
    """Looks, and prints what was found."""
    waiting = tables.console(to_stderr=True)
    with waiting.status(f"preflight {stack.name}: asking the providers ..."):
        report = preflight(stack)
    if as_json:
        tables.print_json(report.to_json())
    else:
        show_report(report)
    return report


def show_report(report: Report) -> None:
    """A line for each check, then what to do about those that did not pass."""
    out = tables.console()
    made = tables.table("POOL", "CHECK", "RESULT", "FOUND")
    for line in report.lines:
        made.add_row(line.pool, line.check, f"[{_COLOURS[line.result]}]{line.result}[/]", escape(line.found))
    out.print(made)
    # Below the table and not folded, so that commands can be copied.
    for line in report.lines:
        if line.to_do:
            out.print(f"{line.pool}, {line.check}: {escape(line.to_do)}", soft_wrap=True)
    counts = ", ".join(f"{report.count(result)} {result}" for result in _COLOURS if report.count(result))
    out.print(f"{report.stack}: {counts or 'no pools'}")
