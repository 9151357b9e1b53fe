"""The memory that a model needs on one device, part by part, each with its arithmetic.

Sources of the formulas:

- weights in 4 bits with a scale and a zero point for each 128 (AWQ, GPTQ), or with a scale for each 32 (MXFP4); the
  embeddings stay in 16 bits.
- KV cache: two values of each KV head, layer and token, in 16 bits (vLLM's default). Grouped-query attention has fewer
  KV heads than heads; layers with a window keep no more tokens than that.
- fine-tuning with Adam in mixed precision: 16 bytes a parameter (ZeRO, arXiv 1910.02054, section 3.1); pre-training
  with gradients that are summed in 32 bits: 18 (Megatron Core, "Distributed Optimizer").
- activations of training: 34 s b h bytes a layer with attention recomputed, 2 s b h and one whole layer with all of it
  recomputed; logits 4 s b v (Korthikanti et al., arXiv 2205.05198, sections 4 and 5).
- overhead: vLLM leaves 10 % of a device free (gpu_memory_utilization 0.9); CUDA and its kernels take 1.3 GB (Hugging
  Face, "Model training anatomy").
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from skyinfra.recommendation.models import Dtype, Model

Task = Literal["inference", "lora", "finetune", "pretrain"]

# Bits of a parameter in memory, scales included.
BITS: dict[Dtype, float] = {
    "fp32": 32,
    "bf16": 16,
    "fp16": 16,
    "fp8": 8,
    "int8": 8,
    "int4": 4 + 20 / 128,
    "mxfp4": 4 + 8 / 32,
}
# Tokens that an inference server works on at once, at most: longer prompts are cut into chunks of that.
CHUNK = 2048
# Rank of the adapters of LoRA.
RANK = 16
_FREE = 0.1
_CONTEXT_BYTES = 1.3e9
OVERHEAD = "10 % of a device stay free, 1.3 GB at least: CUDA, kernels, communication, fragments"


@dataclass(frozen=True, slots=True)
class Workload:
    """The use of a model: the task, the type of the weights, tokens of a sequence, and sequences at once.

    batch: sequences that are served at once, or, in training, of one step on one device.
    """

    task: Task
    dtype: Dtype
    context: int
    batch: int

    @property
    def tokens(self) -> int:
        """Tokens of all sequences."""
        return self.context * self.batch


@dataclass(frozen=True, slots=True)
class Split:
    """The division of a model among devices.

    tensor: devices that share each layer. pipeline: stages of layers, one after the other. shards: devices that each
    keep a part of all parameters and their states and fetch the others layer by layer (ZeRO-3, FSDP).
    """

    tensor: int = 1
    pipeline: int = 1
    shards: int = 1


@dataclass(frozen=True, slots=True)
class Part:
    """A part of the memory of one device: its name, its bytes, and the arithmetic in words."""

    name: str
    bytes: float
    how: str


WHOLE = Split()


def need(model: Model, work: Workload, split: Split = WHOLE) -> tuple[Part, ...]:
    """Returns the parts of the memory that each device needs; the undivided model on one, by default."""
    parts: tuple[Part, ...]
    if work.task == "inference":
        parts = (_weights(model, work, split), _kv_cache(model, work, split), _step(model, work))
    elif work.task == "lora":
        parts = (_weights(model, work, split), _adapters(model, split), _activations(model, work), _logits(model, work))
    else:
        parts = (*_states(model, work, split), _activations(model, work), _logits(model, work))
    if split.shards > 1:
        parts = (*parts, _gathered(model))
    return tuple(part for part in parts if part.bytes or part.name == "activations")


def total(parts: tuple[Part, ...]) -> float:
    """Returns the bytes of all parts."""
    return sum(part.bytes for part in parts)


def usable(memory_gb: float) -> float:
    """Returns the bytes of a device, or partition, with that much nominal memory, that a model may have."""
    return memory_gb * 1e9 - max(_FREE * memory_gb * 1e9, _CONTEXT_BYTES)


def weights(model: Model, dtype: Dtype) -> float:
    """Returns the bytes of all weights."""
    bits = BITS[dtype]
    kept = model.kept if bits < 16 else 0
    return (model.params - kept) * bits / 8 + kept * 2


def kv_bytes(model: Model, tokens: int) -> float:
    """Returns the bytes of the KV cache of one sequence with that many tokens; 0 for a model without one."""
    if model.kind != "llm" or not model.layers:
        return 0.0
    seen = tokens * model.layers
    if model.window:
        seen = tokens * model.global_layers + min(tokens, model.window) * (model.layers - model.global_layers)
    return 2.0 * _kv_values(model) * seen


def adapter_params(model: Model) -> float:
    """The parameters of adapters of rank 16 on all linear layers; of a mixture of experts, on its attention alone.

    One hundredth of the parameters where the shape is not known.
    """
    if not (model.layers and model.hidden and model.heads and model.head_dim):
        return model.params / 100
    queries, keys = model.heads * model.head_dim, (model.kv_heads or model.heads) * model.head_dim
    edges = 2 * (model.hidden + queries) + 2 * (model.hidden + keys)
    if model.ffn and not model.experts:
        edges += (3 if model.kind == "llm" else 2) * (model.hidden + model.ffn)
    return float(RANK * model.layers * edges)


def _kv_values(model: Model) -> int:
    return model.kv_values or 2 * (model.kv_heads or 0) * (model.head_dim or 0)


def _weights(model: Model, work: Workload, split: Split) -> Part:
    layers = model.layers or 1
    # The stage with most layers.
    share = -(-layers // split.pipeline) / layers / split.tensor / split.shards
    text = f"{model.params / 1e9:.4g}e9 parameters x {BITS[work.dtype] / 8:.4g} bytes ({work.dtype})"
    if BITS[work.dtype] < 16 and model.kept:
        text += f", {model.kept / 1e9:.3g}e9 of them x 2"
    return Part("weights", weights(model, work.dtype) * share, text)


def _kv_cache(model: Model, work: Workload, split: Split) -> Part:
    # Devices beyond the number of KV heads keep copies.
    share = 1 / (min(split.tensor, model.kv_heads or 1) * split.pipeline)
    what = f"{model.kv_values} values" if model.kv_values else f"2 x {model.kv_heads} KV heads x {model.head_dim}"
    text = f"{what} x {model.layers} layers x 2 bytes x {work.context:,} tokens x {work.batch}"
    if model.window and work.context > model.window:
        text += f", in {(model.layers or 0) - model.global_layers} layers {model.window:,} tokens"
    return Part("KV cache", kv_bytes(model, work.context) * work.batch * share, text)


def _step(model: Model, work: Workload) -> Part:
    if not model.hidden:
        return _uncounted()
    tokens = min(work.tokens, CHUNK) if model.kind == "llm" else work.tokens
    wide = 2 * (model.ffn or 4 * model.hidden) * (model.experts_used or 1)
    queries = (model.heads or 1) * (model.head_dim or 1) + _kv_values(model)
    logits = 4.0 * work.batch * (model.vocab or 0) if model.kind == "llm" else 0.0
    text = f"{tokens:,} tokens at once x {2 * model.hidden + queries + wide:,} values x 2 bytes"
    text += f", logits {work.batch} x {model.vocab:,} x 4" if logits else ""
    return Part("activations", 2.0 * tokens * (2 * model.hidden + queries + wide) + logits, text)


def _states(model: Model, work: Workload, split: Split) -> tuple[Part, ...]:
    params = model.params / split.shards
    said = f"{model.params / 1e9:.4g}e9 parameters"
    summed = 4 if work.task == "pretrain" else 2
    return (
        Part("weights", 2.0 * params, f"{said} x 2 bytes"),
        Part("gradients", float(summed * params), f"{said} x {summed} bytes"),
        Part("optimizer", 12.0 * params, f"{said} x 12 bytes (Adam: weights, momentum and variance in 32 bits)"),
    )


def _adapters(model: Model, split: Split) -> Part:
    params = adapter_params(model)
    text = f"{params / 1e6:.4g}e6 parameters of rank {RANK} x 16 bytes, with gradients and Adam"
    return Part("adapters", 16 * params / split.shards, text)


def _activations(model: Model, work: Workload) -> Part:
    if not (model.layers and model.hidden):
        return _uncounted()
    each = work.tokens * model.hidden
    said = f"{work.tokens:,} tokens x {model.hidden}"
    if work.task == "pretrain":
        return Part("activations", 34.0 * each * model.layers, f"34 bytes x {said} x {model.layers} layers")
    text = f"2 bytes x {said} x {model.layers} layers, and 34 for the layer that is recomputed"
    return Part("activations", 2.0 * each * model.layers + 34.0 * each, text)


def _logits(model: Model, work: Workload) -> Part:
    vocab = model.vocab or 0
    return Part("logits", 4.0 * work.tokens * vocab, f"{work.tokens:,} tokens x {vocab:,} x 4 bytes")


def _gathered(model: Model) -> Part:
    layers = model.layers or 1
    size = 2 * 2.0 * (model.params - model.embeddings) / layers
    return Part("gathered", size, f"2 of {layers} layers in 16 bits, as they are fetched from the others")


def _uncounted() -> Part:
    return Part("activations", 0.0, "not counted: they follow from the size of the images or the sound")
