"""``skyinfra top``: what each slot of a fleet uses, and the task on it."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

from rich.live import Live
from rich.markup import escape
from rich.table import Table

from skyinfra.cli import nodes, tables
from skyinfra.errors import NodeError
from skyinfra.protocol import questions
from skyinfra.protocol.readings import SlotReading

if TYPE_CHECKING:
    from skyinfra.client import Pool
    from skyinfra.client.fleet import RunningTask

_WAIT_S = 5.0
_GIB = 2**30
_NONE = "-"


def show(fleet: str, node: str | None, *, interval: float, as_json: bool) -> None:
    """Prints it, again and again where a person watches; once elsewhere and as JSON."""
    from skyinfra.client import connect

    out = tables.console()
    with connect(fleet) as pool:
        names = nodes.chosen(pool, node)
        if as_json:
            tables.print_json(_plain(*_look(pool, names)))
        elif not out.is_terminal:
            out.print(_table(*_look(pool, names)))
        else:
            with Live(_table(*_look(pool, names)), console=out, screen=True, auto_refresh=False) as live:
                while True:
                    time.sleep(interval)
                    live.update(_table(*_look(pool, names)), refresh=True)


Answers = dict[str, list[SlotReading] | NodeError]
Tasks = dict[str, list["RunningTask"]]


def _look(pool: Pool, names: list[str]) -> tuple[Answers, Tasks]:
    answers: Answers = {}
    for name, answer in nodes.ask_all(pool, names, questions.METRICS, wait_s=_WAIT_S).items():
        answers[name] = answer if isinstance(answer, NodeError) else [SlotReading.read(each) for each in answer]
    return answers, pool.running()


def _plain(answers: Answers, tasks: Tasks) -> dict[str, Any]:
    found: list[dict[str, object]] = []
    for name, answer in answers.items():
        if isinstance(answer, NodeError):
            found.append({"name": name, "problem": answer.message, "slots": []})
            continue
        slots: list[dict[str, object]] = [
            {
                **reading.slot.to_json(),
                **{key: value for key, value in reading.to_json().items() if key != "slot"},
                "tasks": [
                    {"key": t.key, "name": t.name, "seconds": t.seconds} for t in tasks.get(reading.slot.slot, ())
                ],
            }
            for reading in answer
        ]
        found.append({"name": name, "problem": None, "slots": slots})
    return {"nodes": found}


def _table(answers: Answers, tasks: Tasks) -> Table:
    made = tables.table("NODE", "SLOT", "DEVICE", "USE", "MEMORY", "GPU TEMP", "GPU POWER", "TASK")
    for name, answer in answers.items():
        if isinstance(answer, NodeError):
            made.add_row(name, "", f"[red]{escape(answer.message)}[/]")
            continue
        for reading in answer:
            slot = reading.slot
            made.add_row(
                name,
                str(slot.worker),
                escape(" ".join(filter(None, (slot.accelerator or slot.kind, slot.profile)))),
                _NONE if reading.utilization is None else f"{reading.utilization:.0f} %",
                _memory(reading),
                _NONE if reading.temperature is None else f"{reading.temperature} °C",
                _NONE if reading.power is None else f"{reading.power:.0f} W",
                escape(", ".join(f"{t.name} {t.seconds:.0f} s" for t in tasks.get(slot.slot, ()))),
            )
    return made


def _memory(reading: SlotReading) -> str:
    if reading.memory_used is None or reading.memory_total is None:
        return _NONE
    return f"{reading.memory_used / _GIB:.1f} of {reading.memory_total / _GIB:.1f} GiB"
