"""``skyinfra logs``: what nodes and tasks have logged, by way of the head."""

from __future__ import annotations

import sys
import time
from typing import TYPE_CHECKING, Any

from skyinfra.cli import nodes, tables
from skyinfra.errors import InvalidField, NodeError
from skyinfra.protocol import questions

if TYPE_CHECKING:
    from skyinfra.client import Pool

_POLL_S = 1.0


def show(fleet: str, node: str | None, *, source: str, task: str, lines: int, follow: bool, as_json: bool) -> bool:
    """Prints a log of each node, or of one; whether all of them could be read. *follow*: and what is added to it."""
    from skyinfra.client import connect

    with connect(fleet) as pool:
        names = nodes.chosen(pool, node)
        answers = nodes.ask_all(pool, names, questions.LOG, source=source, task=task, lines=lines)
        if source == "task":
            answers = _of_task(answers, task)
        if as_json:
            tables.print_json({"nodes": [{"name": name, **_plain(answer)} for name, answer in answers.items()]})
        else:
            _print(answers, alone=len(names) == 1 or source == "task")
        while follow:
            time.sleep(_POLL_S)
            answers = _more(pool, answers, source, task)
            _print(answers, alone=len(names) == 1 or source == "task")
    return not any(isinstance(answer, NodeError) for answer in answers.values())


def _of_task(answers: dict[str, Any], task: str) -> dict[str, Any]:
    """Those of the nodes on which the task ran. Raises `InvalidField` where it ran nowhere, or printed nothing."""
    found = {name: answer for name, answer in answers.items() if isinstance(answer, dict)}
    if not found:
        raise InvalidField(
            "no node has output of such a task",
            field="--task",
            given=task,
            hint="`skyinfra top --json` has the keys of tasks that run, and Future.key that of yours. A task that "
            "printed nothing has no output; that of old tasks is removed.",
        )
    return found


def _more(pool: Pool, before: dict[str, Any], source: str, task: str) -> dict[str, Any]:
    """What was added since *before*; a node that does not answer is asked again from where it was."""
    found = dict(before)
    for name, last in before.items():
        offset = last["offset"] if isinstance(last, dict) else None
        try:
            found[name] = pool.ask(name, questions.LOG, source=source, task=task, offset=offset)
        except NodeError as error:
            if isinstance(last, dict):
                found[name] = {**last, "text": ""}
            elif str(last) == str(error):
                found[name] = last
    return found


def _plain(answer: Any) -> dict[str, Any]:
    if isinstance(answer, NodeError):
        return {"problem": answer.message, "text": ""}
    return {"problem": None, "path": answer["path"], "text": answer["text"]}


def _print(answers: dict[str, Any], *, alone: bool) -> None:
    for name, answer in answers.items():
        if isinstance(answer, NodeError):
            sys.stderr.write(f"{name}: {answer.message}\n")
            continue
        for line in answer["text"].splitlines():
            sys.stdout.write(f"{line}\n" if alone else f"{name}: {line}\n")
    sys.stdout.flush()
