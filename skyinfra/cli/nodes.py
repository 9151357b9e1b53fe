"""``skyinfra doctor | top | dashboard | logs``: commands that ask the nodes of a running fleet."""

from __future__ import annotations

import sys
import time
from functools import partial
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.live import Live
from rich.markup import escape
from rich.table import Table

from skyinfra.cli.options import Fleet, Json, Lines, NodeName, Wide, write
from skyinfra.declared import seconds_of
from skyinfra.deploy.cost import FREE, running_cost
from skyinfra.deploy.kept import GONE, kept_jobs, kept_spent, why_gone
from skyinfra.deploy.spending import fleet_spent
from skyinfra.errors import InvalidField, NodeError, SkyinfraError, counted
from skyinfra.errors.printable import printable
from skyinfra.protocol import questions
from skyinfra.protocol.findings import Finding
from skyinfra.protocol.readings import Progress, SlotReading
from skyinfra.terminal import tables
from skyinfra.terminal.progress import asked, working
from skyinfra.terraform.project import Project

if TYPE_CHECKING:
    from skyinfra.client import Questions
    from skyinfra.submission.fleet import RunningTask

_DOCTOR_S = 60.0
_TOP_S = 5.0
_POLL_S = 1.0
_GIB = 2**30
_NONE = "-"
# Beside the multiprocessors, of what a slot's device measures.
_UNITS = ("tensor", "dram")
_COLOURS = {"ok": "green", "wrong": "red", "unknown": "yellow"}

Answers = dict[str, list[SlotReading] | NodeError]
Tasks = dict[str, list["RunningTask"]]


app = typer.Typer()


@app.command()
def doctor(fleet: Fleet, node: NodeName = None, as_json: Json = False, wide: Wide = False) -> None:
    """Look for what is wrong on the nodes, and say what to do. Exit code 1 where something is."""
    with asked(fleet) as pool, working(f"doctor {fleet}: asking the nodes"):
        answers = pool.ask_all(pool.named(node, "NODE"), questions.DOCTOR, wait_s=_DOCTOR_S)
    found = {name: _findings(answer) for name, answer in answers.items()}
    if as_json:
        tables.print_document({"nodes": {name: [each.to_json() for each in lines] for name, lines in found.items()}})
    else:
        _show_findings(found)
    if any(finding.result == "wrong" for lines in found.values() for finding in lines):
        raise typer.Exit(1)


def _findings(answer: object) -> list[Finding]:
    if isinstance(answer, NodeError):
        todo = answer.hint or "`skyinfra status` shows whether it is there; `skyinfra ssh` opens a shell on it."
        return [Finding("node", "wrong", answer.message, "an answer", todo)]
    return [Finding.read(each) for each in answer] if isinstance(answer, list) else []


def _show_findings(found: dict[str, list[Finding]]) -> None:
    out = tables.console()
    made = tables.table(
        "NODE", "WHAT", "RESULT", "FOUND", "WANTED", leave_out=("WANTED",), sentences=("WHAT", "FOUND", "WANTED")
    )
    for name, lines in found.items():
        for line in lines:
            result = f"[{_COLOURS[line.result]}]{line.result}[/]"
            made.add_row(name, escape(line.what), result, escape(line.found), escape(line.wanted))
    out.print(made)
    # Below the table and not folded, so that commands can be copied.
    for name, lines in found.items():
        for line in lines:
            if line.to_do:
                tables.say(f"{name}, {line.what}: {line.to_do}")
    wrong = sum(line.result == "wrong" for lines in found.values() for line in lines)
    out.print(f"{counted(len(found), 'node')}, {wrong} wrong")


@app.command()
def keep(
    fleet: Fleet, length: Annotated[str, typer.Argument(metavar="TIME", help="Such as 45m or 2h; 0 ends it.")] = "2h"
) -> None:
    """Keep a fleet from being idle for a time from now on. Its max_lifetime counts on."""
    try:
        seconds = 0.0 if length == "0" else seconds_of(length)
    except ValueError as error:
        message, _, hint = str(error).partition("\n")
        raise InvalidField(message, field="TIME", given=length, hint=hint) from None
    with asked(fleet) as pool:
        state = pool.look().state
        pool.keep(seconds)
    if not seconds:
        tables.say(f"{fleet} is kept no longer: it is idle from its last use on.")
    else:
        ends = (
            ""
            if state is None or state.ends
            else " No node of it ends itself: that holds off `skyinfra destroy --when-idle`."
        )
        tables.say(f"{fleet} is not idle for {length}.{ends}")


@app.command()
def top(
    fleet: Fleet,
    node: NodeName = None,
    interval: Annotated[float, typer.Option(min=0.2, metavar="SECONDS", help="Between two looks.")] = 2.0,
    as_json: Json = False,
    wide: Wide = False,
) -> None:
    """Show what each slot uses, the task on it and what that has used. Where nobody watches, and as JSON, once."""
    out = tables.console()
    with asked(fleet) as pool:
        names = pool.named(node, "NODE")
        if as_json:
            tables.print_document(_usage_document(*_usage(pool, names)))
        elif not out.is_terminal:
            out.print(_usage_table(*_usage(pool, names)))
        else:
            with Live(_usage_table(*_usage(pool, names)), console=out, screen=True, auto_refresh=False) as live:
                while True:
                    time.sleep(interval)
                    live.update(_usage_table(*_usage(pool, names)), refresh=True)


def _usage(pool: Questions, names: list[str]) -> tuple[Answers, Tasks, dict[str, Progress]]:
    answers: Answers = {}
    for name, answer in pool.ask_all(names, questions.METRICS, wait_s=_TOP_S).items():
        answers[name] = answer if isinstance(answer, NodeError) else [SlotReading.read(each) for each in answer]
    work = pool.work()
    return answers, pool.running(), work.progress if work is not None else {}


def _usage_document(answers: Answers, tasks: Tasks, progress: dict[str, Progress]) -> dict[str, Any]:
    found: list[dict[str, object]] = []
    documents = {slot: each.to_json() for slot, each in progress.items()}
    for name, answer in answers.items():
        if isinstance(answer, NodeError):
            found.append({"name": name, "problem": answer.message, "slots": []})
            continue
        slots: list[dict[str, object]] = [
            {
                **reading.slot.to_json(),
                **{key: value for key, value in reading.to_json().items() if key != "slot"},
                "tasks": [
                    {"key": t.key, "name": t.name, "seconds": t.seconds, "progress": documents.get(reading.slot.slot)}
                    for t in tasks.get(reading.slot.slot, ())
                ],
            }
            for reading in answer
        ]
        found.append({"name": name, "problem": None, "slots": slots})
    return {"nodes": found}


def _usage_table(answers: Answers, tasks: Tasks, progress: dict[str, Progress]) -> Table:
    readings = [each for answer in answers.values() if not isinstance(answer, NodeError) for each in answer]
    # A simulation has no such figures, or some of them.
    made_up = bool(readings) and all(each.slot.simulated for each in readings)
    shown = {title: show for title, show in _FIGURES.items() if not made_up or {*map(show, readings)} != {_NONE}}
    made = tables.table(
        *("NODE", "SLOT", "DEVICE", *shown, "TASK"),
        leave_out=[title for title in ("GPU POWER", "GPU TEMP", "DEVICE") if title in ("DEVICE", *shown)],
        sentences=[title for title in ("USE", "TASK") if title in ("TASK", *shown)],
    )
    for name, answer in answers.items():
        if isinstance(answer, NodeError):
            made.add_row(name, "", f"[red]{escape(answer.message)}[/]")
            continue
        for reading in answer:
            slot = reading.slot
            device = " ".join(filter(None, (slot.accelerator or slot.kind, slot.profile)))
            made.add_row(
                name,
                str(slot.worker),
                escape(device + tables.simulated_mark(slot.simulated)),
                *(show(reading) for show in shown.values()),
                escape(", ".join(_task(t, reading, progress.get(slot.slot)) for t in tasks.get(slot.slot, ()))),
            )
    return made


def _use(reading: SlotReading) -> str:
    if reading.utilization is None:
        return _NONE
    units = [f"{name} {reading.activity[name]:.0f} %" for name in _UNITS if name in reading.activity]
    return ", ".join([f"{reading.utilization:.0f} %", *units])


def _task(task: RunningTask, reading: SlotReading, progress: Progress | None) -> str:
    used = tables.used(reading.figures) if reading.task == task.key else ""
    used += used and tables.simulated_mark(reading.slot.simulated)
    done = ", ".join(filter(None, (tables.steps(progress), progress.note))) if progress is not None else ""
    return f"{task.name} {task.seconds:.0f} s{done and f', {done}'}{used and f' ({used})'}"


def _memory(reading: SlotReading) -> str:
    if reading.memory_used is None or reading.memory_total is None:
        # The driver of a simulated device tells what the catalog does.
        return f"{reading.slot.memory_gb:g} GB" if reading.slot.simulated and reading.slot.memory_gb else _NONE
    shared = f", shared by {count}" if (count := reading.slot.shared_by or 1) > 1 else ""
    return f"{reading.memory_used / _GIB:.1f} of {reading.memory_total / _GIB:.1f} GiB{shared}"


def _temperature(reading: SlotReading) -> str:
    return _NONE if reading.temperature is None else f"{reading.temperature} °C"


def _power(reading: SlotReading) -> str:
    return _NONE if reading.power is None else f"{reading.power:.0f} W"


# By the title of their column.
_FIGURES = {"USE": _use, "MEMORY": _memory, "GPU TEMP": _temperature, "GPU POWER": _power}


@app.command()
def dashboard(
    fleet: Fleet,
    port: Annotated[int, typer.Option(min=0, max=65535, help="Of this machine, on which to listen; 0 is any.")] = 0,
    browser: Annotated[bool, typer.Option(help="Open it, where a person watches.")] = True,
) -> None:
    """Show the fleet in the browser. Nodes, GPUs, tasks, jobs and logs; of one that is gone, its kept jobs."""
    try:
        pool = asked(fleet)
    except GONE as error:
        _show_kept(fleet, error, port, browser=browser)
        return
    with pool:
        # A head that does not answer, or that is not to be trusted, ends the command, not the page.
        pool.running()
        price, usd_per_hour = _price(fleet, pool.manifest.provider)
        shown, spent = browser and sys.stdout.isatty(), partial(_spent, pool, _choices(fleet))
        url = pool.dashboard(port, browser=shown, price=price, usd_per_hour=usd_per_hour, spent=spent)
        _say_url(pool.manifest.fleet, url)


def _say_url(fleet: str, url: str) -> None:
    """Prints the address of the page, and waits until the command is interrupted."""
    tables.say(f"The page of {fleet} is at {url} until you press Ctrl-C.")
    while True:
        time.sleep(_POLL_S)


def _show_kept(fleet: str, error: SkyinfraError, port: int, *, browser: bool) -> None:
    """Shows what is kept of a fleet that is not there for *error*, which is raised where nothing is."""
    from skyinfra import page
    from skyinfra.client.dashboard import serving

    found = kept_jobs(fleet)
    if not found:
        raise error
    source = page.KeptFleet(fleet, found, why_gone(error), _spent_of_gone(fleet))
    tables.say(
        f"{source.why}: the page shows its {counted(len(found), 'job')} kept in {found[-1].where}", to_stderr=True
    )
    with serving(partial(page.answer, source), port) as dashboard:
        if browser and sys.stdout.isatty():
            dashboard.show()
        _say_url(fleet, dashboard.url)


def _spent_of_gone(fleet: str) -> dict[str, Any] | None:
    """Returns what is kept of what a fleet has cost; None where nothing is, or it cannot be read, which it says."""
    try:
        return kept_spent(fleet)
    except SkyinfraError as error:
        tables.say(f"what {fleet} has cost is not shown: {printable(str(error))}", to_stderr=True)
        return None


def _price(fleet: str, provider: str) -> tuple[str, float | None]:
    """Returns the cost of the pool's machines in words, and in USD per hour, from the state.

    Empty and None where a manifest alone is known, None where the price of some machine is not known.
    """
    if provider in FREE:
        return "costs nothing", 0.0
    if fleet.endswith(".json"):
        return "", None
    stack, _, name = fleet.partition("/")
    found = Project.find().stack(stack)
    pool = name or found.only_pool
    cost = running_cost(each for each in found.resources() if each.module == pool)
    return str(cost), cost.usd_per_hour if cost.machines and not cost.unknown else None


def _choices(fleet: str) -> dict[str, Any] | None:
    """Returns the choices for the pool in the synthesized stack; None where a manifest alone is known."""
    if fleet.endswith(".json"):
        return None
    stack, _, name = fleet.partition("/")
    found = Project.find().stack(stack)
    return next((each for each in found.pools if each["name"] == (name or found.only_pool)), None)


def _spent(pool: Questions, choices: dict[str, Any] | None) -> dict[str, Any] | None:
    """Returns what the fleet has cost, see `fleet_spent`; None where nobody knows."""
    hours = pool.hours(uses=False) if choices else None
    return fleet_spent(pool.manifest, choices, hours) if hours and choices else None


@app.command()
def logs(
    fleet: Fleet,
    node: NodeName = None,
    boot: Annotated[bool, typer.Option("--boot", help="Of the node's first boot.")] = False,
    runner: Annotated[bool, typer.Option("--runner", help="Of the runner; this is the default.")] = False,
    task: Annotated[str, typer.Option(metavar="KEY", help="What this task printed; the key may be cut short.")] = "",
    lines: Lines = 100,
    follow: Annotated[bool, typer.Option("--follow", "-f", help="Go on with what is added.")] = False,
    as_json: Json = False,
) -> None:
    """Show logs of the nodes, or what a task printed."""
    if boot + runner + bool(task) > 1:
        raise typer.BadParameter("--boot, --runner and --task are different logs")
    if follow and as_json:
        raise typer.BadParameter("--json is printed once, and --follow does not end")
    source = "boot" if boot else "task" if task else "runner"
    with asked(fleet) as pool:
        names = pool.named(node, "NODE")
        answers = pool.ask_all(names, questions.LOG, source=source, task=task, lines=lines)
        if source == "task":
            answers = _of_task(answers, task)
        answers = {name: _whole(pool, name, answer, lines, source, task) for name, answer in answers.items()}
        alone = len(names) == 1 or source == "task"
        if as_json:
            tables.print_document({"nodes": [{"name": name, **_log_document(each)} for name, each in answers.items()]})
        else:
            _print_logs(answers, alone=alone)
        while follow:
            time.sleep(_POLL_S)
            answers = _more(pool, answers, source, task)
            _print_logs(answers, alone=alone)
    if any(isinstance(answer, NodeError) for answer in answers.values()):
        raise typer.Exit(1)


def _of_task(answers: dict[str, Any], task: str) -> dict[str, Any]:
    """Returns the answers of the nodes that have output of the task. Raises `InvalidField` where no node has."""
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


def _whole(pool: Questions, name: str, first: Any, lines: int, source: str, task: str) -> Any:
    """Returns the answer of a node, of which *first* is the first part, with all of its last *lines*."""
    if not isinstance(first, dict):
        return first
    try:
        ask = partial(pool.ask, name, questions.LOG, source=source, task=task)
        return questions.rest_of_lines(ask, lines, first)
    except NodeError as error:
        return error


def _more(pool: Questions, before: dict[str, Any], source: str, task: str) -> dict[str, Any]:
    """Returns the text that was added since *before*; after an error, the next call continues at the same offset."""
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


def _log_document(answer: Any) -> dict[str, Any]:
    if isinstance(answer, NodeError):
        return {"problem": answer.message, "text": ""}
    return {"problem": None, "path": answer["path"], "text": answer["text"]}


def _print_logs(answers: dict[str, Any], *, alone: bool) -> None:
    for name, answer in answers.items():
        if isinstance(answer, NodeError):
            tables.say(f"{name}: {answer.message}", to_stderr=True)
            continue
        for line in answer["text"].splitlines():
            write("stdout", f"{line}\n" if alone else f"{printable(name)}: {line}\n")
