"""Recommendation: the memory that a model needs, by arithmetic, and the machines and MIG partitions that have it.

recommend("llama-3-70b", dtype="fp8", context=8192, batch=8)
recommend(params=13e9, task="lora")
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, get_args

from skyinfra import providers
from skyinfra.errors import InvalidField, NotOffered, did_you_mean
from skyinfra.offers import Offer, Query, ask, load
from skyinfra.packing.declare import sellers
from skyinfra.recommendation.memory import BITS, OVERHEAD, Part, Split, Task, Workload, kv_bytes, need, total, usable
from skyinfra.recommendation.models import Dtype, Model, custom, find
from skyinfra.recommendation.models import load as models
from skyinfra.recommendation.placing import Choice, able, choices

__all__ = [
    "BITS",
    "OVERHEAD",
    "Choice",
    "Dtype",
    "Model",
    "Part",
    "Recommendation",
    "Split",
    "Task",
    "Workload",
    "custom",
    "find",
    "kv_bytes",
    "left_out_text",
    "models",
    "need",
    "recommend",
    "total",
    "usable",
]

# Tokens of a sequence where nothing is said, as far as the model takes them.
_SERVED, _TRAINED = 8192, 4096


@dataclass(frozen=True, slots=True)
class Recommendation:
    """The memory that a model needs, and what carries it.

    model, workload: what was asked. need: the parts on one device, were the model undivided. choices: the cheapest of
    each GPU model, whole and in MIG partitions, cheapest first; never empty. left_out: how many offers were not looked
    at, by reason.
    """

    model: Model
    workload: Workload
    need: tuple[Part, ...]
    choices: tuple[Choice, ...]
    left_out: Mapping[str, int]

    @property
    def bytes(self) -> float:
        """The bytes of all parts."""
        return total(self.need)

    @property
    def best(self) -> Choice:
        """The cheapest machines with whole GPUs, or with partitions where no whole GPUs are offered."""
        return next((each for each in self.choices if each.slot is None), self.choices[0])

    @property
    def partition(self) -> Choice | None:
        """The MIG partition that costs least for each copy; None where none carries the model."""
        found = [each for each in self.choices if each.slot is not None]
        return min(found, key=lambda each: each.cost_per_copy, default=None)

    def source(self) -> str:
        """Python text that declares the cheapest machines."""
        return self.best.source()


def recommend(
    model: str | None = None,
    *,
    task: Task = "inference",
    dtype: Dtype | None = None,
    context: int | None = None,
    batch: int = 1,
    params: float | None = None,
    layers: int | None = None,
    hidden: int | None = None,
    kv_heads: int | None = None,
    provider: str | Sequence[str] | None = None,
    region: str | None = None,
    spot: bool = False,
    offers: Iterable[Offer] | None = None,
) -> Recommendation:
    """Returns the memory that a model needs, and the machines and MIG partitions that carry it, cheapest first.

    model: "llama-3-70b", in any spelling. params: of a model that is not known here, with *layers*, *hidden* and
    *kv_heads*; what is not given is that of the known model nearest in size.
    task: "inference"; "lora", adapters beside frozen weights (QLoRA with dtype="int4"); "finetune" and "pretrain", all
    weights with Adam in mixed precision. dtype: of the weights: "bf16", "fp16", "fp32", "fp8", "int8", "int4", "mxfp4";
    by default that in which the model is published, in training bf16.
    context: tokens of a sequence; 8192 by default, in training 4096, or as many as the model takes. batch: sequences
    that are served at once; in training, of one step on one device.
    provider, region, spot, offers: as of `pack`.

    Memory decides alone: speed is not looked at. Quotas and stock are not known here.

    Raises UnknownModel, with the nearest names; InvalidField for what cannot be asked; NotOffered where no machine
    carries it.
    """
    selected = _model(model, params, layers, hidden, kv_heads)
    work = _workload(selected, task, dtype, context, batch)
    names = (provider,) if isinstance(provider, str) else tuple(provider or ())
    query = ask(provider=names, region=region) if offers is None else Query(providers=names, region=region)
    found = query.run(load() if offers is None else offers)
    wanted, left_out = _supply(found, work, spot=spot, anybody=bool(names) or offers is not None)
    parts = need(selected, work)
    carried = choices(selected, work, wanted, spot=spot, region=region)
    if not carried:
        raise _nothing(selected, work, parts, left_out, names, region, spot)
    return Recommendation(selected, work, parts, tuple(carried), left_out)


def left_out_text(left_out: Mapping[str, int]) -> str:
    """Returns how many offers were not looked at, by reason, in words."""
    return ", ".join(f"{count} ({reason})" for reason, count in left_out.items())


def _model(
    name: str | None, params: float | None, layers: int | None, hidden: int | None, kv_heads: int | None
) -> Model:
    if name is not None and params is None and layers is hidden is kv_heads is None:
        return find(name)
    if name is not None:
        field = "params" if params is not None else "layers"
        raise InvalidField("a model that is named has its own size and shape", field=field, given=params or layers)
    if params is None:
        hint = 'Such as "llama-3-70b"; or its number of parameters, such as 13e9.'
        raise InvalidField("a model, or params, is needed", field="model", hint=hint)
    return custom(params, layers=layers, hidden=hidden, kv_heads=kv_heads)


def _workload(model: Model, task: Task, dtype: Dtype | None, context: int | None, batch: int) -> Workload:
    _one_of("task", task, get_args(Task))
    if dtype is not None:
        _one_of("dtype", dtype, get_args(Dtype))
    for field, value in (("context", context), ("batch", batch)):
        if value is not None and (isinstance(value, bool) or not isinstance(value, int) or value < 1):
            raise InvalidField("a whole number from 1", field=field, given=value)
    if context is not None and model.context is not None and context > model.context:
        raise InvalidField(f"{model.name} takes at most {model.context:,} tokens", field="context", given=context)
    if task in ("finetune", "pretrain") and dtype in ("int8", "int4", "mxfp4"):
        hint = 'Train adapters beside them: task="lora" (--task lora).'
        raise InvalidField(
            f"{task} changes all weights, and quantized ones cannot be", field="dtype", given=dtype, hint=hint
        )
    usual = _SERVED if task == "inference" else _TRAINED
    tokens = context or min(usual, model.context or usual)
    return Workload(task, dtype or (model.dtype if task == "inference" else "bf16"), tokens, batch)


def _one_of(field: str, given: Any, known: Sequence[str]) -> None:
    if given not in known:
        hint = f"{did_you_mean(str(given), known)} One of: {', '.join(known)}."
        raise InvalidField("not known", field=field, given=given, hint=hint.lstrip())


def _supply(found: Iterable[Offer], work: Workload, *, spot: bool, anybody: bool) -> tuple[list[Offer], dict[str, int]]:
    """Returns the offers to look at, and the number of others by reason."""
    open_to = sellers()
    reasons: dict[str, Callable[[Offer], bool]] = {
        "a provider that cannot be deployed to": lambda offer: not anybody and offer.provider not in open_to,
        "neither an NVIDIA nor an AMD GPU": lambda offer: offer.vendor not in ("nvidia", "amd"),
        "price not known": lambda offer: offer.price(spot=spot) is None,
        "not sold on demand": lambda offer: not spot and not providers.on_demand(offer),
        f"does not compute in {work.dtype}": lambda offer: not able(offer, work),
        "not deployed without an image of one's own": lambda offer: providers.refuses(offer) is not None,
    }
    kept, counts = [], dict.fromkeys(reasons, 0)
    for offer in found:
        why = next((reason for reason, applies in reasons.items() if applies(offer)), None)
        if why is None:
            kept.append(offer)
        else:
            counts[why] += 1
    return kept, {reason: count for reason, count in counts.items() if count}


def _nothing(
    model: Model,
    work: Workload,
    parts: tuple[Part, ...],
    left_out: Mapping[str, int],
    names: tuple[str, ...],
    region: str | None,
    spot: bool,
) -> NotOffered:
    whose = f"of {' or '.join(names)} " if names else ""
    place = f"in {region} " if region else ""
    purchase = "spot" if spot else "on-demand"
    message = (
        f"no machine {whose}{place}with a known {purchase} price carries {model.name} ({work.task}, {work.dtype}): it "
        f"needs {total(parts) / 1e9:.1f} GB"
    )
    largest = max(parts, key=lambda part: part.bytes)
    hints = [f"Most of it: {largest.name}, {largest.bytes / 1e9:.1f} GB."]
    if work.task == "inference" and not math.isclose(BITS[work.dtype], BITS["int4"]):
        hints.append("--dtype int4, a smaller --batch or a shorter --context need less.")
    if work.task in ("finetune", "pretrain"):
        hints.append("--task lora needs less.")
    if names or region or spot:
        hints.append("Other providers, regions or prices are not looked at.")
    if left_out:
        hints.append(f"Left out: {left_out_text(left_out)}.")
    return NotOffered(message, field="model", hint=" ".join(hints))
