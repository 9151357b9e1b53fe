"""The advice on a fleet's layout: what was seen, what waits how long under which layout, and the line to declare."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from skyinfra.errors import counted
from skyinfra.mig.layout import OFF
from skyinfra.mig.simulation import WHOLE
from skyinfra.terminal import tables

if TYPE_CHECKING:
    from skyinfra.deploy.advice import FleetAdvice
    from skyinfra.mig import Advice
    from skyinfra.mig.advice import Trial


def show(found: FleetAdvice) -> None:
    """Prints *found*."""
    out, result = tables.console(), found.advice
    for line in _seen(found):
        tables.say(line)
    out.print()
    compared = tables.table("LAYOUT", "OF EACH NODE", "MEAN WAIT", "95 OF 100", "USED", "NEVER RUN")
    rows = {"advised": result.advised, "declared": result.declared, "whole GPUs": result.whole}
    for name, trial in rows.items():
        compared.add_row(
            name, _written(trial), f"{trial.wait:.1f} s", f"{trial.p95:.1f} s", f"{trial.utilization:.0%}",
            str(trial.never) if trial.never else "",
        )  # fmt: skip
    out.print(compared)
    out.print()
    carried = tables.table("PROFILE", "PARTITIONS", "TASKS", "BUSY")
    for each in result.carried:
        name = "whole GPU" if each.profile == WHOLE else each.profile
        carried.add_row(name, str(each.count), f"{each.tasks:.0%}", f"{each.busy:.0%}")
    out.print(carried)
    out.print()
    for line in _verdict(result):
        tables.say(line)
    for line in _notes(found):
        tables.say(line)


def _seen(found: FleetAdvice) -> list[str]:
    result, total = found.advice, len(found.trace)
    since, until = (time.strftime("%Y-%m-%d %H:%M", time.localtime(at)) for at in (found.first, found.last))
    lines = [
        f"{found.fleet}: {counted(total, 'task')} in {tables.span(found.last - found.first)}, "
        f"{since} to {until}; the memory of {found.measured} was measured"
    ]
    if result.tasks < total:
        lines.append(f"The last {result.tasks} of them count, submitted within {tables.span(result.seconds)}.")
    if result.unknown:
        what = (
            "task was not measured and asks for nothing, and is"
            if result.unknown == 1
            else ("tasks were not measured and ask for nothing, and are")
        )
        lines.append(f"{result.unknown} {what} taken to fit every slot.")
    return lines


def _verdict(result: Advice) -> list[str]:
    if result.tried >= result.possible:
        tried = f"All {result.possible} combinations of layouts were tried."
    else:
        tried = f"{result.tried} of {result.possible} combinations of layouts were tried."
    if result.keeps:
        return [f"Keep what is declared: no other layout makes tasks wait noticeably less. {tried}"]
    return [f"{tried} Declare:", f"    {result.declaration}"]


def _notes(found: FleetAdvice) -> list[str]:
    lines = ["A task is taken to run as long as it did, longer only where it kept more multiprocessors busy."]
    if found.reserved:
        lines.append(
            f"{counted(found.reserved, 'task')} had nine tenths of their slot's memory or more: frameworks such "
            "as JAX and vLLM reserve it whatever they need, unless they are configured otherwise."
        )
    if found.silent:
        lines.append(
            f"{counted(found.silent, 'task')} asked for nothing and need more than the smallest partition: say "
            "it, or they are sent there: @sky.compute(gpu_memory_gb=...)."
        )
    return lines


def _written(trial: Trial) -> str:
    """Returns the layouts of a node's GPUs, those alike together."""
    parts = []
    for layout in dict.fromkeys(trial.layouts):
        count = trial.layouts.count(layout)
        name = "whole" if layout == OFF else layout
        parts.append(f"{count}x {name}" if len(trial.layouts) > 1 else name)
    return ", ".join(parts)
