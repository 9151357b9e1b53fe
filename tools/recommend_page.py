"""Writes the tables of docs/recommend.md: ``python -m tools.recommend_page``.

The first compares the recommendation with tables of other documents, by workload, model size and cost: what they say of
a GPU is asked of `recommend`. Where the answer differs, the reason stands beside it. The second shows models beside
published figures (tests/recommendation/published.json).
"""

from __future__ import annotations

import json
import statistics
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from skyinfra import NotOffered, offers
from skyinfra.accelerators import parse
from skyinfra.offers import Offer, Price, usd
from skyinfra.recommendation import Recommendation, find, recommend
from skyinfra.recommendation.memory import kv_bytes, weights

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs" / "recommend.md"
PUBLISHED = ROOT / "tests" / "recommendation" / "published.json"
BEGIN, END = "<!-- begin: python -m tools.recommend_page {} -->\n", "<!-- end -->\n"


@dataclass(frozen=True)
class Row:
    """A row of a table: what it is about, the GPUs that it names, and the question for `recommend`.

    fails: the GPUs of the row that do not carry it, with the reason in *why*.
    """

    about: str
    gpus: tuple[str, ...]
    asked: dict[str, Any]
    fails: tuple[str, ...] = ()
    why: str = ""


_TIGHT = "141 GB of weights leave nothing of 2 x 80 GB for a cache; fp8 fits on two, and on one H200"
_FULL = "Adam keeps 16 bytes a parameter"

ROWS = (
    Row("Inference (small)", ("T4", "L4"), {"model": "Llama 3.2 3B", "batch": 8}),
    Row(
        "Inference (large)",
        ("L40S", "A10G"),
        {"model": "Llama 2 13B"},
        fails=("A10G",),
        why="26 GB of weights in bf16; an A10G carries it in fp8 or int4",
    ),
    Row("Fine-tuning (LoRA)", ("A100-40GB",), {"model": "Llama 3.1 8B", "task": "lora"}),
    Row(
        "Full fine-tuning",
        ("A100", "H100"),
        {"model": "Llama 3.1 8B", "task": "finetune"},
        fails=("A100", "H100"),
        why=f"{_FULL}: 8B need two of 80 GB; one carries 3B",
    ),
    Row("Pre-training", ("H100:8",), {"model": "Llama 3.1 8B", "task": "pretrain"}),
    Row("Development", ("T4",), {"model": "Qwen2.5 1.5B"}),
    Row("< 1B parameters", ("T4",), {"model": "Qwen3 0.6B"}),
    Row("1-7B", ("A10G", "A100-40GB"), {"model": "Llama 2 7B"}),
    Row("7-13B", ("A100-40GB", "A100"), {"model": "Llama 2 13B"}),
    Row(
        "13-70B",
        ("A100", "H100:2"),
        {"model": "Llama 3.1 70B"},
        fails=("A100", "H100:2"),
        why=f"{_TIGHT}; one of 80 GB carries up to 32B in bf16",
    ),
    Row("70B+", ("H100:4", "H100:8"), {"model": "Qwen2.5 72B"}),
    Row(
        "70B+, the largest",
        ("H100:4", "H100:8"),
        {"model": "Llama 3.1 405B", "dtype": "fp8"},
        fails=("H100:4",),
        why="410 GB of weights in fp8",
    ),
    Row("<7B params", ("L4", "A10G", "T4"), {"model": "Llama 3.2 3B"}),
    Row("7B-13B", ("L40S", "A100-40GB"), {"model": "Llama 2 13B"}),
    Row("13B-70B", ("A100", "H100"), {"model": "Qwen2.5 32B"}),
    Row(
        "13B-70B, the largest",
        ("A100", "H100"),
        {"model": "Llama 3.1 70B"},
        fails=("A100", "H100"),
        why="141 GB of weights in bf16; in int4 one of 80 GB carries it",
    ),
    Row(
        "70B-405B",
        ("H100:4", "H100:8", "H200:4", "H200:8"),
        {"model": "Llama 3.1 405B", "dtype": "fp8"},
        fails=("H100:4",),
        why="410 GB of weights in fp8",
    ),
    Row("LLM fine-tuning (7B), QLoRA", ("A100-40GB",), {"model": "Llama 2 7B", "task": "lora", "dtype": "int4"}),
    Row(
        "LLM fine-tuning (7B), full, in 40 GB",
        ("A100-40GB",),
        {"model": "Llama 2 7B", "task": "finetune"},
        fails=("A100-40GB",),
        why=f"{_FULL}: 108 GB and the activations",
    ),
    Row(
        "LLM fine-tuning (70B)",
        ("A100:4",),
        {"model": "Llama 3.1 70B", "task": "finetune"},
        fails=("A100:4",),
        why=f"{_FULL}: 1.1 TB; four of 80 GB carry LoRA",
    ),
    Row("LLM fine-tuning (70B), LoRA", ("A100:4",), {"model": "Llama 3.1 70B", "task": "lora"}),
    Row("LLM inference (7B)", ("L4",), {"model": "Llama 2 7B"}),
    Row("LLM inference (70B)", ("H100:2",), {"model": "Llama 3.1 70B"}, fails=("H100:2",), why=_TIGHT),
    Row("LLM inference (70B), fp8", ("H100:2",), {"model": "Llama 3.1 70B", "dtype": "fp8"}),
    Row("Batch embedding", ("T4",), {"model": "BERT large", "batch": 256}),
    Row("Training CV models", ("A10G",), {"model": "ViT-L/16", "task": "finetune", "batch": 64}),
    Row("Research / max perf", ("H100",), {"model": "Llama 3.1 8B"}, why="named for its speed, which is not looked at"),
)


def carries(gpus: str, asked: dict[str, Any]) -> bool:
    """Whether one machine with *gpus*, such as "A100:4", carries what is asked."""
    wanted = parse(gpus)
    price = Price(1.0, "anywhere", "2026-01-01")
    offer = Offer("any", gpus, wanted.name, wanted.count or 1, wanted.memory_gb, wanted.form_factor, on_demand=price)
    try:
        return recommend(**asked, offers=[offer]).best.machines.nodes == 1
    except NotOffered:
        return False


def rows() -> str:
    """The table of workloads and model sizes."""
    head = ("row", "asked", "needs", "GPUs of the row", "cheapest whole GPUs", "cheapest partition, a copy", "why not")
    lines = [head, ("---",) * len(head)]
    for row in ROWS:
        found = recommend(**row.asked)
        verdicts = ", ".join(f"{gpus}: {'yes' if carries(gpus, row.asked) else 'no'}" for gpus in row.gpus)
        lines.append(
            (row.about, _asked(row.asked), f"{found.bytes / 1e9:.1f} GB", verdicts, *_cheapest(found), row.why)
        )
    return _table(lines)


def costs() -> str:
    """The table of savings."""
    pairs = [(offer.price(), offer.price(spot=True)) for offer in offers.load() if not offer.legacy]
    saved = sorted(1 - spot.usd_per_hour / full.usd_per_hour for full, spot in pairs if full and spot)
    low, _, high = statistics.quantiles(saved, n=4)
    small = recommend("Llama 3.1 8B", dtype="int4", provider="aws")
    part = small.partition
    assert part is not None  # noqa: S101 - 7 GB fit many
    share = 1 - part.cost_per_copy / (part.cost_per_hour / part.machines.offer.count)
    anywhere, on_aws = (tuple(min(_each(name, provider)) for name in ("T4", "A100")) for provider in (None, "aws"))
    lines = [
        ("row", "it says", "from the offers"),
        ("---",) * 3,
        ("Spot instances", "60-90%", f"{low:.0%}-{high:.0%} (the middle half of {len(saved)} machine types)"),
        (
            "MIG partitions",
            "50-85%",
            f"{share:.0%}: a copy on {part.slot} of {part.machines.accelerator}, against one on each whole GPU",
        ),
        (
            "T4 over A100",
            "90%",
            f"{_less(*anywhere)}; on AWS alone {_less(*on_aws)}: marketplaces sell A100 cheaply, and no T4",
        ),
    ]
    return _table(lines)


def figures() -> str:
    """The table of models beside published figures."""
    data = json.loads(PUBLISHED.read_text(encoding="utf-8"))
    lines = [("figure", "published", "ours", "source"), ("---",) * 4]
    for each in data["weights"]:
        said, unit = _said(each)
        ours = weights(find(each["model"]), each["dtype"]) / unit
        name = f"{each['model']}, weights in {each['dtype']}"
        lines.append((name, f"{said:g} {_name(unit)}", f"{ours:.1f}", _source(data, each)))
    for each in data["kv_cache"]:
        said, unit = _said(each)
        ours = kv_bytes(find(each["model"]), each["tokens"]) / unit
        name = f"{each['model']}, KV cache of {each['tokens']:,} tokens"
        lines.append((name, f"{said:g} {_name(unit)}", f"{ours:.2f}", _source(data, each)))
    for each in data["training"]:
        found = recommend(params=each["params"], task=each["task"], dtype=each["dtype"], context=2048)
        name = f"{each['params'] / 1e9:g}B, {each['task']} in {each['dtype']}"
        lines.append((name, f"{each['gb']} GB", f"{found.bytes / 1e9:.1f}", _source(data, each)))
    for each in data["carried"]:
        ours = each.get("ours", each["nodes"])
        name = f"{each['model']} in {each['dtype']}"
        said = f"{each['nodes']} x {each['accelerator']}:{each['count']}"
        lines.append((name, said, f"{ours} x {each['accelerator']}:{each['count']}", _source(data, each)))
    return _table(lines)


TABLES = {"rows": rows, "costs": costs, "figures": figures}


def written(page: str) -> str:
    """*page* with the tables as they are now."""
    for name, make in TABLES.items():
        before, _, rest = page.partition(BEGIN.format(name))
        page = before + BEGIN.format(name) + make() + END + rest.partition(END)[2]
    return page


def _asked(asked: dict[str, Any]) -> str:
    words = [f'"{asked["model"]}"', *(f"--{name} {value}" for name, value in asked.items() if name != "model")]
    return f"`{' '.join(words)}`"


def _cheapest(found: Recommendation) -> tuple[str, str]:
    best, part = found.best, found.partition
    times = f"{best.machines.nodes} x " if best.machines.nodes > 1 else ""
    whole = f"{times}{best.machines.accelerator} at {usd(best.cost_per_hour)} ({best.machines.offer.provider})"
    if part is None:
        return whole, ""
    return whole, f"{part.machines.accelerator} at {usd(round(part.cost_per_copy, 2))} ({part.machines.offer.provider})"


def _less(cheap: float, dear: float) -> str:
    return f"{1 - cheap / dear:.0%} ({usd(cheap)} against {usd(dear)} an hour)"


def _each(accelerator: str, provider: str | None) -> list[float]:
    """The prices of one GPU, of all offers of an accelerator."""
    found = [
        offer
        for offer in offers.load()
        if offer.accelerator == accelerator and offer.fraction == 1 and provider in (None, offer.provider)
    ]
    return [price.usd_per_hour / offer.count for offer in found if (price := offer.price()) is not None]


def _said(each: dict[str, Any]) -> tuple[float, float]:
    return (each["gb"], 1e9) if "gb" in each else (each["gib"], 2.0**30)


def _name(unit: float) -> str:
    return "GB" if unit == 1e9 else "GiB"


def _source(data: dict[str, Any], each: dict[str, Any]) -> str:
    return data["sources"][each["source"]] + (f": {each['why']}" if "why" in each else "")


def _table(lines: list[tuple[str, ...]]) -> str:
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


if __name__ == "__main__":
    PAGE.write_text(written(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
