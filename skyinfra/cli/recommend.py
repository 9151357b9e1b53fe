"""``skyinfra recommend``: the memory that a model needs, and what carries it."""

from __future__ import annotations

import sys
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from typing import Annotated, Any

import typer
from rich.markup import escape
from rich.table import Table

from skyinfra.cli.options import InRegion, Json, OfProviders, Wide, errors_name_options, takes_records
from skyinfra.offers import usd
from skyinfra.recommendation import OVERHEAD, Choice, Recommendation, left_out_text, recommend
from skyinfra.terminal import tables
from skyinfra.terminal.packings import bought

# Rows of each table, without --all.
_ROWS = 8


app = typer.Typer()


@dataclass(frozen=True)
class Asked:
    """The options that say what the model is and does, and which machines there are; see `recommendation.recommend`."""

    task: Annotated[str, typer.Option(help="inference, lora, finetune or pretrain.")] = "inference"
    dtype: Annotated[
        str | None,
        typer.Option(help="Of the weights: bf16, fp16, fp32, fp8, int8, int4 or mxfp4; if not given, as published."),
    ] = None
    context: Annotated[int | None, typer.Option(metavar="TOKENS", help="Of a sequence.")] = None
    batch: Annotated[
        int, typer.Option(metavar="N", help="Sequences served at once; in training, of a step on one device.")
    ] = 1
    params: Annotated[
        float | None, typer.Option(metavar="N", help="Parameters of a model that is not known here, such as 13e9.")
    ] = None
    layers: Annotated[int | None, typer.Option(metavar="N", help="Of that model.")] = None
    hidden: Annotated[int | None, typer.Option(metavar="N", help="Its hidden size.")] = None
    kv_heads: Annotated[int | None, typer.Option(metavar="N", help="Its heads of keys and values.")] = None
    provider: OfProviders = None
    region: InRegion = None
    spot: Annotated[bool, typer.Option("--spot", help="Sort by the spot price.")] = False


@app.command("recommend")
@takes_records
def show_recommendation(
    asked: Asked,
    model: Annotated[str | None, typer.Argument(metavar="MODEL", help='Such as "llama-3-70b".')] = None,
    everything: Annotated[bool, typer.Option("--all", help="Show every GPU model.")] = False,
    as_json: Json = False,
    wide: Wide = False,
) -> None:
    """Say how much memory a model needs, and which GPUs carry it. Or which MIG partitions; cheapest first."""
    with errors_name_options():
        found = recommend(model, **vars(asked))
    if as_json:
        tables.print_document(document(found))
        return
    _show(found, _ROWS if not everything else len(found.choices), spot=asked.spot)


def document(found: Recommendation) -> dict[str, Any]:
    """Returns the recommendation as JSON."""
    return {
        "model": {name: value for name, value in asdict(found.model).items() if value not in (None, ())},
        "workload": asdict(found.workload),
        "need": [asdict(part) for part in found.need],
        "bytes": found.bytes,
        "choices": [_choice(each) for each in found.choices],
        "left_out": dict(found.left_out),
        "notes": notes(found),
    }


def notes(found: Recommendation) -> list[str]:
    """Returns remarks on the overhead, the prices, and what was not looked at."""
    lines = [
        f"{OVERHEAD}.",
        "Memory decides alone: how fast a machine is, and how its GPUs are connected, is not looked at.",
    ]
    for note in sorted({each.note for each in found.choices if each.note}):
        gpus = sorted({each.gpu for each in found.choices if each.note == note})
        lines.append(f"{', '.join(gpus)}: {note}.")
    if any(each.machines.price.basis == "estimated" for each in found.choices):
        lines.append("~ is an estimate, not a quote.")
    if found.left_out:
        lines.append(f"Left out: {left_out_text(found.left_out)}.")
    lines.append("The quotas of your account are not known here.")
    return lines


def _choice(choice: Choice) -> dict[str, Any]:
    return {
        **bought(choice.machines),
        "slot": choice.slot,
        "memory_gb": choice.memory_gb,
        "needs": choice.needs,
        "split": asdict(choice.split),
        "how": choice.how,
        "copies": choice.copies,
        "spot": choice.spot_price and asdict(choice.spot_price),
        "cost_per_hour": choice.cost_per_hour,
        "cost_per_copy": choice.cost_per_copy,
        "note": choice.note,
        "source": choice.source(),
    }


def _show(found: Recommendation, rows: int, *, spot: bool) -> None:
    out = tables.console()
    work = found.workload
    tables.say((found.model.said, "bold"))
    tables.say(f"source: {found.model.source}")
    about = f", {work.context:,} tokens x {work.batch}" if found.model.hidden else f", batch {work.batch}"
    tables.say(f"{work.task}, weights in {work.dtype}{about}\n")
    arithmetic = tables.table("MEMORY", "GB", "", sentences=("",))
    for part in found.need:
        arithmetic.add_row(part.name, f"{part.bytes / 1e9:.2f}", escape(part.how))
    arithmetic.add_row("sum", f"{found.bytes / 1e9:.2f}", "on one device; divided among several, each has its part")
    out.print(arithmetic)
    whole = [each for each in found.choices if each.slot is None]
    parts = sorted((each for each in found.choices if each.slot), key=lambda each: each.cost_per_copy)
    for title, choices in (("whole GPUs", whole), ("MIG partitions, a copy on each", parts)):
        if choices:
            out.print(f"\n{title}, cheapest first:")
            out.print(_table(choices[:rows], spot=spot))
            if len(choices) > rows:
                out.print(f"and {len(choices) - rows} more; --all shows them.")
    out.print()
    for line in notes(found):
        tables.say(line)
    for each in (found.best, found.partition):
        if each is not None and (each is found.best or each.slot):
            sys.stdout.write(f"\n{each.source()}")


def _table(choices: Iterable[Choice], *, spot: bool) -> Table:
    other = "ON DEMAND" if spot else "SPOT"
    made = tables.table(
        *("PER HOUR", "EACH COPY", other, "PROVIDER", "MACHINE", "ACCELERATOR", "COPIES", "GB", "HOW"),
        leave_out=(other, "GB", "EACH COPY", "HOW", "COPIES"),
        sentences=("MACHINE", "ACCELERATOR", "HOW"),
    )
    for each in choices:
        machines = each.machines
        price = machines.offer.price(spot=not spot)
        times = f"{machines.nodes} x " if machines.nodes > 1 else ""
        made.add_row(
            machines.price.marked() if machines.nodes == 1 else usd(each.cost_per_hour),
            usd(round(each.cost_per_copy, 2)),
            "" if price is None else usd(machines.nodes * price.usd_per_hour),
            machines.offer.provider,
            escape(f"{times}{machines.offer.machine_type}"),
            escape(machines.accelerator),
            str(each.copies),
            f"{each.needs / 1e9:.1f} of {each.memory_gb:g}",
            each.how,
        )
    return made
