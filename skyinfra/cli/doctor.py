"""``skyinfra doctor``: what is wrong with the nodes of a fleet, and what to do about it."""

from __future__ import annotations

from rich.markup import escape

from skyinfra.cli import nodes, tables
from skyinfra.errors import NodeError
from skyinfra.protocol import questions
from skyinfra.protocol.findings import Finding

_WAIT_S = 60.0
_COLOURS = {"ok": "green", "wrong": "red", "unknown": "yellow"}


def examine(fleet: str, node: str | None, *, as_json: bool) -> bool:
    """Asks the nodes, or one, and prints what they find; whether nothing is wrong."""
    from skyinfra.client import connect

    with connect(fleet) as pool:
        answers = nodes.ask_all(pool, nodes.chosen(pool, node), questions.DOCTOR, wait_s=_WAIT_S)
    found = {name: _findings(answer) for name, answer in answers.items()}
    if as_json:
        tables.print_json({"nodes": {name: [each.to_json() for each in lines] for name, lines in found.items()}})
    else:
        _show(found)
    return not any(finding.result == "wrong" for lines in found.values() for finding in lines)


def _findings(answer: object) -> list[Finding]:
    if isinstance(answer, NodeError):
        todo = answer.hint or "`skyinfra status` shows whether it is there; `skyinfra ssh` opens a shell on it."
        return [Finding("node", "wrong", answer.message, "an answer", todo)]
    return [Finding.read(each) for each in answer] if isinstance(answer, list) else []


def _show(found: dict[str, list[Finding]]) -> None:
    out = tables.console()
    made = tables.table("NODE", "WHAT", "RESULT", "FOUND", "WANTED")
    for name, lines in found.items():
        for line in lines:
            result = f"[{_COLOURS[line.result]}]{line.result}[/]"
            made.add_row(name, escape(line.what), result, escape(line.found), escape(line.wanted))
    out.print(made)
    # Below the table and not folded, so that commands can be copied.
    for name, lines in found.items():
        for line in lines:
            if line.to_do:
                out.print(f"{name}, {escape(line.what)}: {escape(line.to_do)}", soft_wrap=True)
    wrong = sum(line.result == "wrong" for lines in found.values() for line in lines)
    out.print(f"{len(found)} nodes, {wrong} wrong")
