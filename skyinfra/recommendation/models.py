"""Models: parameters and shape of well-known ones. Reads models.json on first use."""

from __future__ import annotations

import json
import math
import re
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any, Literal

from skyinfra.errors import InvalidField, UnknownModel, did_you_mean

Dtype = Literal["fp32", "bf16", "fp16", "fp8", "int8", "int4", "mxfp4"]

_DATA = Path(__file__).with_name("models.json")
# Words of a name that say how a model was trained further, or who keeps it, and change no size.
_WORDS = {"instruct", "chat", "it", "hf", "base", "meta", "preview", "thinking", "2507", "2407", "2409", "2501"}
_SHOWN = 5


@dataclass(frozen=True, slots=True)
class Model:
    """A model: its size and its shape. None stands for what is not known.

    params: all parameters. active: those that one token uses, of a mixture of experts; all of them are in memory.
    kind: "llm", or "encoder", "vision", "speech" and "diffusion", which have no KV cache.
    layers, hidden, heads, kv_heads, head_dim, ffn, vocab: the shape. ffn is the width of one expert. tied: the output
    uses the matrix of the input embeddings. kv_values: numbers that a layer keeps of a token, where they are not keys
    and values of all KV heads (multi-head latent attention). context: the most tokens of a sequence.
    experts, experts_used: of a layer, and of those one token's, shared ones included.
    window, global_layers: layers that see no more tokens than the window, and how many see all of them.
    unquantized: parameters that quantization leaves in 16 bits; None: the embeddings. dtype: of its published weights.
    """

    name: str
    params: int
    source: str
    kind: str = "llm"
    active: int | None = None
    layers: int | None = None
    hidden: int | None = None
    heads: int | None = None
    kv_heads: int | None = None
    head_dim: int | None = None
    kv_values: int | None = None
    ffn: int | None = None
    vocab: int | None = None
    tied: bool = False
    context: int | None = None
    experts: int | None = None
    experts_used: int | None = None
    window: int | None = None
    global_layers: int = 0
    unquantized: int | None = None
    dtype: Dtype = "bf16"
    aliases: tuple[str, ...] = ()

    @property
    def embeddings(self) -> int:
        """Parameters of the input and output embeddings; 0 where they are not known."""
        return (self.vocab or 0) * (self.hidden or 0) * (1 if self.tied else 2)

    @property
    def kept(self) -> int:
        """The parameters that quantization leaves in 16 bits."""
        return self.embeddings if self.unquantized is None else self.unquantized

    @property
    def said(self) -> str:
        """The model in a sentence: "Llama 3 70B: 70.6e9 parameters, 80 layers of 8192, 64 heads of 128, 8 KV heads"."""
        parts = [f"{self.params / 1e9:.3g}e9 parameters"]
        if self.active:
            parts.append(f"{self.active / 1e9:.3g}e9 active for a token (all are in memory)")
        if self.layers and self.hidden:
            parts.append(f"{self.layers} layers of {self.hidden}")
        if self.kv_values:
            parts.append(f"latent attention with {self.kv_values} values a token and layer")
        elif self.heads and self.kv_heads:
            parts.append(f"{self.heads} heads of {self.head_dim}, {self.kv_heads} KV heads")
        if self.window:
            parts.append(f"{(self.layers or 0) - self.global_layers} layers see {self.window} tokens")
        return f"{self.name}: {', '.join(parts)}"


@cache
def load() -> tuple[Model, ...]:
    """Returns all models, in the order of the file."""
    data = json.loads(_DATA.read_text(encoding="utf-8"))
    return tuple(_model(row, data["sources"]) for row in data["models"])


def find(name: str) -> Model:
    """The model of that name: any case and separators; who keeps it (``meta-llama/``) and "Instruct" say nothing.

    Raises UnknownModel, with the nearest names.
    """
    known = _by_key()
    for key in (_key(name), _key(name, without=_WORDS)):
        if key in known:
            return known[key]
    names = [model.name for model in load()]
    key = _key(name, without=_WORDS)
    same = [model.name for model in load() if key and _key(model.name).startswith(key)][:_SHOWN]
    near = f"Did you mean {', '.join(same)}?" if same else did_you_mean(name, names, limit=_SHOWN)
    hint = f"{near} Any other: --params 13e9 (params=13e9), with its layers, hidden size and KV heads where known."
    raise UnknownModel("no model of that name is known here", field="model", given=name, hint=hint.lstrip())


def custom(
    params: float, *, layers: int | None = None, hidden: int | None = None, kv_heads: int | None = None
) -> Model:
    """A dense language model with *params* parameters. What is not given is that of the known one nearest in size.

    Raises InvalidField for a number that cannot be.
    """
    for field, value in (("params", params), ("layers", layers), ("hidden", hidden), ("kv_heads", kv_heads)):
        if value is not None and not 0 < value < math.inf:
            raise InvalidField("must be more than 0", field=field, given=value)
    like = min(
        (model for model in load() if model.kind == "llm" and not model.experts and not model.window),
        key=lambda model: (abs(math.log(model.params / params)), model.name),
    )
    heads = like.heads or 1
    if hidden is not None and like.head_dim:
        heads = max(1, hidden // like.head_dim)
    shape = "given" if layers and hidden and kv_heads else f"shape of {like.name}, the nearest in size, where not given"
    return replace(
        like,
        name=f"{params / 1e9:.4g}e9 parameters",
        params=round(params),
        source=shape,
        layers=layers or like.layers,
        hidden=hidden or like.hidden,
        heads=heads,
        kv_heads=kv_heads or (like.kv_heads if hidden is None else heads),
        ffn=like.ffn if hidden is None else 4 * hidden,
        context=None,
        aliases=(),
    )


@cache
def _by_key() -> dict[str, Model]:
    found: dict[str, Model] = {}
    for model in load():
        for name in (model.name, *model.aliases):
            found[_key(name)] = model
    return found


def _key(name: str, *, without: set[str] | frozenset[str] = frozenset()) -> str:
    owner, _, own = name.lower().rpartition("/")
    words = re.split(r"[\s_/-]+", own if owner and re.search("[a-z]", own) else name.lower())
    return "".join(word for word in words if word not in without)


def _model(row: dict[str, Any], sources: dict[str, str]) -> Model:
    return Model(**row | {"source": sources[row["source"]], "aliases": tuple(row.get("aliases", ()))})
