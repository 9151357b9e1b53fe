"""The memory of models against published figures, and what carries them."""

from __future__ import annotations

import dataclasses
import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

import skyinfra as sky
from skyinfra import InvalidField, NotOffered, UnknownModel, mig, offers
from skyinfra.compiler import compile_pool
from skyinfra.offers import Offer, Price
from skyinfra.packing.declare import sellers
from skyinfra.recommendation import Split, Workload, custom, find, kv_bytes, models, need, recommend, total, usable
from skyinfra.recommendation.memory import adapter_params, weights
from tools import recommend_page

PUBLISHED = json.loads(Path(__file__).with_name("published.json").read_text(encoding="utf-8"))
# What providers need besides region and machine type.
_KEY, _NETWORK = "ssh-ed25519 AAAA", ["203.0.113.7/32"]
GIVEN = (
    sky.GCP(project="p"),
    sky.Verda(ssh_public_key=_KEY),
    sky.Lambda(ssh_public_key=_KEY),
    *(
        cls(ssh_public_key=_KEY, allow_cidrs=_NETWORK)
        for cls in (sky.Azure, sky.Crusoe, sky.DigitalOcean, sky.Scaleway, sky.Vultr)
    ),
    sky.Nebius(ssh_public_key=_KEY, allow_cidrs=_NETWORK, project_id="project-e00", subnet_id="vpcsubnet-e00"),
)


def named(each: dict[str, Any]) -> str:
    return " ".join(str(value) for key, value in each.items() if key not in ("why", "source"))


def machine(name: str, count: int, usd: float = 1.0, memory_gb: int | None = None, provider: str = "any") -> Offer:
    found = sky.accelerators.parse(name)
    price = Price(usd, "here", "2026-01-01")
    return Offer(provider, f"{name}x{count}", found.name, count, memory_gb or found.memory_gb, on_demand=price)


# Published figures ---------------------------------------------------------------------------------------------------


def test_every_figure_has_a_source() -> None:
    rows = [row for name in ("weights", "kv_cache", "states", "training", "carried") for row in PUBLISHED[name]]
    assert {row["source"] for row in rows} == set(PUBLISHED["sources"])
    assert len(rows) > 10 and PUBLISHED["read"]
    assert all("why" in row for row in rows if {"within", "ours", "times"} & row.keys() and row.get("within") != 0.01)


@pytest.mark.parametrize("each", PUBLISHED["weights"], ids=named)
def test_weights(each: dict[str, Any]) -> None:
    said = each["gb"] * 1e9 if "gb" in each else each["gib"] * 2**30
    assert weights(find(each["model"]), each["dtype"]) == pytest.approx(said, rel=each.get("within", 0.04))


@pytest.mark.parametrize("each", PUBLISHED["kv_cache"], ids=named)
def test_kv_cache(each: dict[str, Any]) -> None:
    found = kv_bytes(find(each["model"]), each["tokens"]) / 2**30
    assert found * each.get("times", 1) == pytest.approx(each["gib"], rel=0.002)


@pytest.mark.parametrize("each", PUBLISHED["states"], ids=named)
def test_states_of_training(each: dict[str, Any]) -> None:
    work = Workload(each["task"], "bf16", 2048, 1)
    parts = need(custom(each["params"]), work, Split(shards=each.get("shards", 1)))
    states = sum(part.bytes for part in parts if part.name in ("weights", "gradients", "optimizer"))
    assert states == pytest.approx(each["gb"] * 1e9, rel=0.003)


@pytest.mark.parametrize("each", PUBLISHED["training"], ids=named)
def test_training(each: dict[str, Any]) -> None:
    parts = need(custom(each["params"]), Workload(each["task"], each["dtype"], 2048, 1))
    assert total(parts) == pytest.approx(each["gb"] * 1e9, rel=0.15)


@pytest.mark.parametrize("each", PUBLISHED["carried"], ids=named)
def test_carried(each: dict[str, Any]) -> None:
    found = recommend(each["model"], dtype=each["dtype"], offers=[machine(each["accelerator"], each["count"])])
    assert found.best.machines.nodes == each.get("ours", each["nodes"])


def test_the_adapters_of_llama_are_as_many_as_peft_counts() -> None:
    # "trainable params: 41,943,040" for rank 16 on all linear layers of Llama 3 8B.
    assert adapter_params(find("llama-3-8b")) == 41_943_040


# Models --------------------------------------------------------------------------------------------------------------


def test_there_are_many_models_each_with_a_source() -> None:
    assert len(models()) >= 40
    assert Counter(model.name for model in models()).most_common(1)[0][1] == 1
    for model in models():
        assert len(model.source) > 20 and "2026-" in model.source
        assert find(model.name) is model
        for alias in model.aliases:
            assert find(alias) is model
        assert bool(model.active) == bool(model.experts)


@pytest.mark.parametrize("model", [each for each in models() if each.kind == "llm"], ids=lambda model: model.name)
def test_the_size_of_a_language_model_is_that_of_its_shape(model: Any) -> None:
    edges = 2 * model.heads * model.head_dim + 2 * model.kv_heads * model.head_dim
    widths = [2, 3] if not model.experts else [3]
    experts = model.experts or 1
    counted = [
        model.embeddings + model.layers * (model.hidden * edges + width * model.hidden * model.ffn * experts)
        for width in widths
    ]
    # DeepSeek has a latent attention and three layers without experts, Llama 4 an expert for all tokens besides, which
    # Maverick has, as the others, in every second layer alone.
    tolerance = {"DeepSeek V3": 0.06, "DeepSeek R1": 0.06, "Llama 4 Scout": 0.08, "Llama 4 Maverick": 1.0}
    assert any(size == pytest.approx(model.params, rel=tolerance.get(model.name, 0.02)) for size in counted)


@pytest.mark.parametrize(
    ("spelling", "name"),
    [
        ("llama-3-70b", "Llama 3 70B"),
        ("meta-llama/Meta-Llama-3.1-8B-Instruct", "Llama 3.1 8B"),
        ("LLAMA_2_7B_chat_hf", "Llama 2 7B"),
        ("mistralai/Mistral-7B-Instruct-v0.3", "Mistral 7B"),
        ("Qwen/Qwen3-30B-A3B", "Qwen3 30B A3B"),
        ("google/gemma-3-27b-it", "Gemma 3 27B"),
        ("openai/gpt-oss-120b", "gpt-oss 120B"),
        ("bert-base-uncased", "BERT base"),
        ("ViT-L/16", "ViT-L/16"),
        ("openai/whisper-large-v3", "Whisper large v3"),
    ],
)
def test_spellings(spelling: str, name: str) -> None:
    assert find(spelling).name == name


def test_an_unknown_model_gets_the_nearest_names() -> None:
    with pytest.raises(UnknownModel) as error:
        recommend("llama-3")
    assert "Llama 3 8B" in str(error.value) and "--params" in str(error.value)
    with pytest.raises(UnknownModel, match="Llama 3 70B"):
        recommend("lama 3 70b")


def test_a_model_by_its_size_alone_has_the_shape_of_the_nearest() -> None:
    model = custom(13e9)
    assert model.layers == 40 and model.hidden == 5120 and "Llama 2 13B" in model.source
    own = custom(13e9, layers=48, hidden=4096, kv_heads=8)
    assert (own.layers, own.hidden, own.kv_heads, own.source) == (48, 4096, 8, "given")
    assert kv_bytes(own, 1000) == 2 * 8 * own.head_dim * 48 * 2 * 1000  # type: ignore[operator]


# Arithmetic ----------------------------------------------------------------------------------------------------------


def test_windows_bound_the_cache() -> None:
    gemma = find("gemma-3-27b")
    short, long = kv_bytes(gemma, 1024), kv_bytes(gemma, 131072)
    values = 2 * 2 * 16 * 128
    assert short == values * 62 * 1024
    assert long == values * (10 * 131072 + 52 * 1024)


def test_latent_attention_keeps_less_than_heads() -> None:
    assert kv_bytes(find("deepseek-v3"), 1000) == 2 * 576 * 61 * 1000


def test_experts_are_all_in_memory() -> None:
    mixtral = find("mixtral-8x7b")
    assert mixtral.active and mixtral.active < mixtral.params / 3
    assert weights(mixtral, "bf16") == 2 * mixtral.params


def test_parts_divide_among_devices() -> None:
    llama = find("llama-3-70b")
    work = Workload("inference", "bf16", 8192, 1)
    alone = {part.name: part.bytes for part in need(llama, work)}
    four = {part.name: part.bytes for part in need(llama, work, Split(tensor=4))}
    assert four["weights"] == alone["weights"] / 4 and four["KV cache"] == alone["KV cache"] / 4
    # Eight KV heads are on eight devices; sixteen keep each of them twice.
    sixteen = {part.name: part.bytes for part in need(llama, work, Split(tensor=16))}
    assert sixteen["KV cache"] == alone["KV cache"] / 8
    staged = {part.name: part.bytes for part in need(llama, work, Split(tensor=8, pipeline=3))}
    # 80 layers in three stages: 27 in the largest.
    assert staged["weights"] == pytest.approx(alone["weights"] * 27 / 80 / 8)


def test_the_overhead_of_a_small_device_is_that_of_cuda() -> None:
    assert usable(80) == 72e9
    assert usable(5) == pytest.approx(3.7e9)


def test_longer_sequences_and_more_of_them_need_more() -> None:
    for task in ("inference", "lora", "finetune", "pretrain"):
        sizes = [
            total(need(find("llama-3.1-8b"), Workload(task, "bf16", context, batch)))  # type: ignore[arg-type]
            for context, batch in ((1024, 1), (4096, 1), (4096, 4))
        ]
        assert sizes == sorted(set(sizes))


# What carries it -----------------------------------------------------------------------------------------------------


def test_cheapest_first_and_each_has_room() -> None:
    found = recommend("llama-3.1-8b", dtype="int4", batch=4)
    assert [each.cost_per_hour for each in found.choices] == sorted(each.cost_per_hour for each in found.choices)
    for each in found.choices:
        assert each.needs <= usable(each.memory_gb)
        assert each.copies >= 1
    labels = [(each.gpu, each.slot is None) for each in found.choices]
    assert len(labels) == len(set(labels))


def test_a_partition_stands_beside_whole_gpus() -> None:
    found = recommend("llama-3.1-8b", dtype="int4", offers=[machine("A100", 2, 4.0)])
    whole, part = found.best, found.partition
    assert part is not None
    assert (whole.slot, whole.copies, part.slot, part.copies) == (None, 2, "1g.10gb", 14)
    assert part.machines.accelerator == "A100:2/1g.10gb*7" and part.cost_per_copy == pytest.approx(4 / 14)
    # The smallest profile with the memory, not the next one below.
    bigger = recommend("llama-3.1-8b", offers=[machine("A100", 1)])
    assert bigger.partition is not None and bigger.partition.slot == "1g.20gb"
    profile = mig.geometry("a100_80gb").profile("1g.10gb")
    assert usable(profile.memory_gb) < bigger.bytes <= usable(20)
    assert recommend("qwen2.5-32b", offers=[machine("A100", 1)]).partition is None


def test_a_gpu_that_its_tenant_cannot_partition_has_no_partitions() -> None:
    offer = dataclasses.replace(machine("A100", 1), divisible=False)
    assert recommend("llama-3.1-8b", offers=[offer]).partition is None


def test_several_nodes_only_of_eight_gpus_that_reach_one_another() -> None:
    with pytest.raises(NotOffered, match="carries DeepSeek V3"):
        recommend("deepseek-v3", offers=[machine("H100", 4)])
    with pytest.raises(NotOffered):
        recommend("deepseek-v3", offers=[machine("H100", 8, provider="runpod")])
    found = recommend("deepseek-v3", offers=[machine("H100", 8, 10.0, provider="aws")]).best
    assert (found.machines.nodes, found.how) == (2, "tensor parallel 8, pipeline parallel 2")
    assert found.cost_per_hour == 20
    trained = recommend("llama-3-70b", task="finetune", offers=[machine("H100", 8)]).best
    assert trained.how == f"ZeRO-3 over {trained.machines.nodes * 8}" and trained.machines.nodes > 1
    assert trained.needs <= usable(80)


def test_heads_that_do_not_divide_are_not_divided() -> None:
    # 28 heads and 4 KV heads: not by 8, though that would have room.
    found = recommend("qwen2.5-7b", context=32768, batch=8, offers=[machine("T4", 8)]).best
    assert found.split.tensor in (2, 4)


def test_a_model_of_unknown_shape_is_not_divided() -> None:
    with pytest.raises(NotOffered):
        recommend("flux.1-dev", offers=[machine("A10G", 8)])
    found = recommend("flux.1-dev", offers=[machine("L40S", 2)])
    assert (found.best.how, found.best.copies) == ("undivided", 2)
    assert "not counted" in found.need[-1].how


def test_types_that_hardware_does_not_compute_are_left_out() -> None:
    for dtype, gpu in (("int4", "V100"), ("mxfp4", "T4"), ("int4", "MI300X")):
        with pytest.raises(NotOffered):
            recommend("qwen2.5-0.5b", dtype=dtype, offers=[machine(gpu, 1)])  # type: ignore[arg-type]
    old = recommend("qwen2.5-0.5b", offers=[machine("T4", 1)])
    assert old.best.note == "Turing has no bf16: in fp16"
    assert "weights alone" in recommend("llama-3-8b", dtype="fp8", offers=[machine("A100", 1)]).best.note
    with pytest.raises(NotOffered):
        recommend("qwen2.5-0.5b", task="finetune", dtype="fp8", offers=[machine("A100", 1)])


def test_what_is_left_out_is_counted() -> None:
    tpu = next(offer for offer in offers.load() if offer.vendor == "google")
    free = dataclasses.replace(machine("H100", 1), on_demand=None)
    found = recommend("llama-3-8b", offers=[machine("H100", 1), tpu, free])
    assert found.left_out == {"neither an NVIDIA nor an AMD GPU": 1, "price not known": 1}
    shipped = recommend("llama-3-8b").left_out
    assert {"a provider that cannot be deployed to", "not deployed without an image of one's own"} <= shipped.keys()
    assert "not sold on demand" in shipped and "not sold on demand" not in recommend("llama-3-8b", spot=True).left_out


def test_a_place_where_nobody_may_partition_has_no_partitions() -> None:
    found = recommend("llama-3-8b", dtype="int4", provider=["runpod", "vastai", "vultr"])
    assert found.partition is None


@pytest.mark.parametrize(
    "asked",
    [
        {"model": "llama-3.1-8b", "dtype": "int4"},
        {"model": "llama-3-70b", "dtype": "fp8", "batch": 8},
        {"model": "deepseek-v3"},
        {"model": "llama-3-70b", "task": "finetune"},
        {"model": "llama-3.1-8b", "spot": True},
        *({"model": "llama-3.1-8b", "provider": kind} for kind in sellers() if kind != "oci"),
    ],
    ids=named,
)
def test_declarations_compile_to_the_machine_and_price(asked: dict[str, Any]) -> None:
    for each in recommend(**asked).choices:
        (pool,) = each.pools(*GIVEN)
        (source,) = _declared(each.source(), pool)
        selection = compile_pool(pool, "recommended").selection
        assert selection.machine_types[0] == each.machines.offer.machine_type
        assert pool.nodes == source.nodes == each.machines.nodes
        assert pool.spot == each.spot
        assert selection.accelerator is not None
        assert (selection.accelerator.mig is None) == (each.slot is None)


def _declared(text: str, pool: sky.ComputePool) -> list[sky.ComputePool]:
    """The pools that the text declares; *pool* where the text says that something is to be added."""
    if "To be added" in text:
        return [pool]
    space: dict[str, Any] = {}
    exec(text, space)
    pools: list[sky.ComputePool] = space["pools"]
    return pools


# Questions that cannot be answered -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("asked", "message"),
    [
        ({}, "model: a model, or params, is needed"),
        ({"model": "llama-3-8b", "params": 8e9}, "params: a model that is named has its own size"),
        ({"params": -1}, "params: must be more than 0"),
        ({"model": "llama-3-8b", "task": "infer"}, "Did you mean inference"),
        ({"model": "llama-3-8b", "dtype": "bf8"}, "Did you mean"),
        ({"model": "llama-3-8b", "context": 9000}, "context: Llama 3 8B takes at most 8,192 tokens"),
        ({"model": "llama-3-8b", "batch": 0}, "batch: a whole number from 1"),
        ({"model": "llama-3-8b", "task": "finetune", "dtype": "int4"}, 'task="lora"'),
        ({"model": "llama-3-8b", "provider": "awz"}, "provider: no provider"),
    ],
)
def test_what_cannot_be_asked(asked: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidField) as error:
        recommend(**asked)
    assert message in str(error.value)


def test_what_nothing_carries_says_what_needs_less() -> None:
    with pytest.raises(NotOffered) as error:
        recommend("llama-3.1-405b", provider="runpod", spot=True, task="finetune")
    assert "--task lora needs less" in str(error.value) and "of runpod" in str(error.value)


def test_a_provider_without_images_says_so() -> None:
    with pytest.raises(NotOffered, match="not deployed without an image of one's own"):
        recommend("llama-3-8b", provider="oci")


# The page ------------------------------------------------------------------------------------------------------------


def test_the_page_is_that_of_the_offers() -> None:
    page = recommend_page.PAGE.read_text(encoding="utf-8")
    assert recommend_page.written(page) == page, "run python -m tools.recommend_page"


@pytest.mark.parametrize("row", recommend_page.ROWS, ids=lambda row: row.about)
def test_rows_of_others_come_out_or_are_explained(row: recommend_page.Row) -> None:
    assert tuple(gpus for gpus in row.gpus if not recommend_page.carries(gpus, row.asked)) == row.fails
    assert bool(row.why) >= bool(row.fails)


def test_the_reasons_are_true() -> None:
    carries = recommend_page.carries
    for dtype in ("fp8", "int4"):
        assert carries("A10G", {"model": "Llama 2 13B", "dtype": dtype})
    assert carries("A100", {"model": "Llama 3.2 3B", "task": "finetune"})
    assert carries("A100:2", {"model": "Llama 3.1 8B", "task": "finetune"})
    assert carries("H200", {"model": "Llama 3.1 70B", "dtype": "fp8"})
    assert carries("A100", {"model": "Llama 3.1 70B", "dtype": "int4"})
    assert carries("A100", {"model": "Qwen2.5 32B"})
