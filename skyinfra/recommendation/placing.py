"""Machines and MIG partitions that have the memory a model needs, cheapest first."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from skyinfra import mig, providers
from skyinfra.accelerators import catalog
from skyinfra.offers import Offer, Price
from skyinfra.packing import Machines, declare
from skyinfra.packing.supply import Gpu
from skyinfra.pool import ComputePool
from skyinfra.providers import Provider
from skyinfra.recommendation.memory import Split, Workload, need, total, usable
from skyinfra.recommendation.models import Dtype, Model

# Stages of a pipeline, and machines of one training, at most.
_STAGES = 8
_NODES = 128

_OLD = ("Volta", "Turing")
# NVIDIA's architectures from which on PyTorch and vLLM know it ("Quantization", docs.vllm.ai, read 2026-11-24): 16 bits
# since Volta, in fp16 before Ampere; AWQ since Turing; fp8 since Turing, for the weights alone before Ada Lovelace.
_NVIDIA = ("Volta", "Turing", "Ampere", "Ada Lovelace", "Hopper", "Blackwell", "Blackwell Ultra")
_SINCE: dict[Dtype, str] = {
    "fp32": "Volta",
    "bf16": "Volta",
    "fp16": "Volta",
    "int8": "Turing",
    "int4": "Turing",
    "fp8": "Turing",
    "mxfp4": "Ampere",
}
_AMD: dict[Dtype, tuple[str, ...]] = {
    "fp32": ("CDNA 2", "CDNA 3", "CDNA 4"),
    "bf16": ("CDNA 2", "CDNA 3", "CDNA 4"),
    "fp16": ("CDNA 2", "CDNA 3", "CDNA 4"),
    "fp8": ("CDNA 3", "CDNA 4"),
    "mxfp4": ("CDNA 3", "CDNA 4"),
}


@dataclass(frozen=True, slots=True)
class Choice:
    """Machines that carry the model.

    machines: what to declare, see `skyinfra.packing`. gpu: such as "A100-40GB". slot: the MIG profile of each copy;
    None is whole GPUs. memory_gb: nominal, of one slot. needs: the bytes that each device of a copy needs. split: the
    division of one copy. copies: how many the machines have room for. spot: whether its price is that of spot.
    note: what to know of the GPU for this type of weights.
    """

    machines: Machines
    gpu: str
    slot: str | None
    memory_gb: float
    needs: float
    split: Split
    copies: int
    spot: bool
    note: str = ""

    @property
    def cost_per_hour(self) -> float:
        """USD per hour of all machines."""
        return self.machines.nodes * self.machines.price.usd_per_hour

    @property
    def cost_per_copy(self) -> float:
        """USD per hour for each copy that there is room for."""
        return self.cost_per_hour / self.copies

    @property
    def spot_price(self) -> Price | None:
        """The spot price of one machine, as far as it is known."""
        return self.machines.offer.price(spot=True)

    @property
    def how(self) -> str:
        """The division in words: "tensor parallel 8, pipeline parallel 2"."""
        if self.split.shards > 1:
            return f"ZeRO-3 over {self.split.shards}"
        parts = [f"tensor parallel {self.split.tensor}"] if self.split.tensor > 1 else []
        parts += [f"pipeline parallel {self.split.pipeline}"] if self.split.pipeline > 1 else []
        return ", ".join(parts) or "undivided"

    def pools(self, *given: Provider) -> list[ComputePool]:
        """Returns the pool that declares it; *given* as in `Packing.pools`. Raises NotSupported, and InvalidField."""
        return declare.pools((self.machines,), given, spot=self.spot)

    def source(self) -> str:
        """Python text that declares it."""
        return declare.source((self.machines,), spot=self.spot)


def choices(model: Model, work: Workload, supply: Iterable[Offer], *, spot: bool, region: str | None) -> list[Choice]:
    """The cheapest choice of each GPU model, whole and in partitions, cheapest first; equal ones by their names."""
    best: dict[tuple[str, str | None], Choice] = {}
    for offer in supply:
        price = offer.price(spot=spot)
        if price is None:
            continue
        for each in _of(model, work, offer, price, spot=spot, region=region):
            key = (each.gpu, each.slot and "partition")
            if key not in best or _order(each) < _order(best[key]):
                best[key] = each
    return sorted(best.values(), key=_order)


def able(offer: Offer, work: Workload) -> bool:
    """Returns whether the accelerators of *offer* compute in the type of the workload, by common software."""
    architecture = catalog.choose(offer.accelerator, offer.memory_gb, offer.form_factor).architecture or ""
    if offer.vendor == "amd":
        return architecture in _AMD.get(work.dtype, ())
    if architecture not in _NVIDIA:
        return False
    least = "Ada Lovelace" if work.dtype == "fp8" and work.task != "inference" else _SINCE[work.dtype]
    return _NVIDIA.index(architecture) >= _NVIDIA.index(least)


def _order(choice: Choice) -> tuple[float, float, str, str]:
    offer = choice.machines.offer
    return choice.cost_per_hour, choice.cost_per_copy, offer.provider, offer.machine_type


def _of(
    model: Model, work: Workload, offer: Offer, price: Price, *, spot: bool, region: str | None
) -> Iterator[Choice]:
    gpu = Gpu.of(offer)
    where = region or declare.region_of(offer, price)
    note = _note(offer, work)

    def selected(nodes: int, layout: str | None, memory_gb: float, split: Split, copies: int) -> Choice:
        machines = Machines(offer, nodes, price, where, (layout,) * offer.count)
        slot = layout.partition("*")[0] if layout else None
        needs = total(need(model, work, split))
        return Choice(machines, gpu.label, slot, memory_gb, needs, split, copies, spot, note)

    found = _divided(model, work, offer)
    if found is not None:
        split, nodes = found
        devices = split.tensor * split.pipeline * split.shards
        yield selected(nodes, None, offer.memory_gb, split, max(1, offer.count * nodes // devices))
    partition = _partition(model, work, gpu)
    if partition is not None:
        name, memory_gb, count = partition
        yield selected(1, mig.text((name,) * count), memory_gb, Split(), count * offer.count)


def _divided(model: Model, work: Workload, offer: Offer) -> tuple[Split, int] | None:
    """The division over whole devices with the fewest nodes, then the fewest devices of a copy; and the nodes."""
    room = usable(offer.memory_gb)

    def fits(split: Split) -> bool:
        return total(need(model, work, split)) <= room

    if work.task != "inference":
        sizes = [(Split(shards=devices), 1) for devices in range(1, offer.count + 1)]
        if _connected(offer):
            sizes += [(Split(shards=offer.count * nodes), nodes) for nodes in range(2, _NODES + 1)]
        if not sizes or not fits(sizes[-1][0]):
            return None
        return next(each for each in sizes if fits(each[0]))
    widths = [width for width in range(1, offer.count + 1) if _divides(model, width)]
    alone = next((Split(tensor=width) for width in widths if fits(Split(tensor=width))), None)
    if alone is not None:
        return alone, 1
    if not _connected(offer):
        return None
    stages = range(2, min(_STAGES, model.layers or 1) + 1)
    return next(((split, n) for n in stages if fits(split := Split(tensor=widths[-1], pipeline=n))), None)


def _divides(model: Model, width: int) -> bool:
    """Returns whether *width* devices can share a layer: each gets as many heads, and KV heads, or copies of them."""
    if model.heads is None or model.kv_heads is None:
        return width == 1
    heads, kv = model.heads, model.kv_heads
    return heads % width == 0 and (kv % width == 0 or width % kv == 0)


def _connected(offer: Offer) -> bool:
    """Returns whether several such machines make sense: with 8 devices each, and connections from node to node."""
    known = providers.deployable()
    return offer.count >= 8 and (offer.provider not in known or providers.read(offer.provider).traits.node_to_node)


def _partition(model: Model, work: Workload, gpu: Gpu) -> tuple[str, float, int] | None:
    """Returns the smallest profile that carries an undivided copy, its memory, and how many of it a GPU has."""
    if gpu.divided is None:
        return None
    wanted = total(need(model, work))
    able = [kind for kind in gpu.kinds() if kind.profile and not kind.all_of_it and usable(kind.memory_gb) >= wanted]
    if not able:
        return None
    name = str(min(able, key=lambda kind: (kind.memory_gb, kind.slices, kind.order)).profile)
    return name, next(kind.memory_gb for kind in able if kind.profile == name), mig.max_count(name, gpu.divided)


def _note(offer: Offer, work: Workload) -> str:
    if offer.vendor != "nvidia":
        return ""
    architecture = catalog.choose(offer.accelerator, offer.memory_gb, offer.form_factor).architecture or ""
    if work.dtype == "bf16" and architecture in _OLD:
        return f"{architecture} has no bf16: in fp16"
    if work.dtype == "fp8" and architecture in (*_OLD, "Ampere"):
        return f"{architecture} computes in 16 bits: fp8 for the weights alone"
    return ""
