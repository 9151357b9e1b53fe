"""The declaration: what works in the spelling of the seeds, and what is refused with which words."""

from __future__ import annotations

import inspect
import re
from typing import Any

import pytest

import skyinfra as sky
from skyinfra.compiler import compile_pool

LOCAL = sky.Local(simulate=True)


def pool(**fields: Any) -> sky.ComputePool:
    return sky.ComputePool(**{"provider": LOCAL, **fields})


# Every ComputePool of the seeds, in our spelling.
SEEDS = {
    "string T4": lambda: sky.ComputePool(provider=sky.AWS(), accelerator="T4"),
    "string A100": lambda: sky.ComputePool(provider=sky.AWS(), accelerator="A100"),
    "string H100": lambda: sky.ComputePool(provider=sky.AWS(), accelerator="H100"),
    "spec H100": lambda: sky.ComputePool(provider=sky.AWS(), accelerator=sky.AcceleratorSpec.NVIDIA.H100()),
    "spec count": lambda: sky.ComputePool(provider=sky.AWS(), accelerator=sky.AcceleratorSpec.NVIDIA.A100(count=4)),
    "spec memory": lambda: sky.ComputePool(
        provider=sky.AWS(), accelerator=sky.AcceleratorSpec.NVIDIA.A100(memory="40GB")
    ),
    "literal": lambda: sky.ComputePool(provider=sky.AWS(), accelerator=sky.NVIDIA.A100),
    "spec mig": lambda: sky.ComputePool(provider=sky.AWS(), accelerator=sky.AcceleratorSpec.NVIDIA.H100(mig="3g.40gb")),
    "spec mig list": lambda: sky.ComputePool(
        provider=sky.AWS(), accelerator=sky.AcceleratorSpec.NVIDIA.A100(mig=["3g.40gb", "3g.40gb"])
    ),
    "trainium spec": lambda: sky.ComputePool(
        provider=sky.AWS(),
        accelerator=sky.AcceleratorSpec.AWS.Trainium(version=2),
        image=sky.Image(pip=["torch-neuronx"]),
    ),
    "inferentia spec": lambda: sky.ComputePool(
        provider=sky.AWS(),
        accelerator=sky.AcceleratorSpec.AWS.Inferentia(version=2),
        image=sky.Image(pip=["torch-neuronx"]),
    ),
    "factory": lambda: sky.ComputePool(provider=sky.AWS(), accelerator=sky.accelerators.A100()),
    "factory count": lambda: sky.ComputePool(provider=sky.AWS(), accelerator=sky.accelerators.H100(count=4)),
    "factory memory": lambda: sky.ComputePool(provider=sky.AWS(), accelerator=sky.accelerators.A100(memory="40GB")),
    "amd": lambda: sky.ComputePool(provider=sky.VastAI(), accelerator=sky.accelerators.MI300X()),
    "trainium": lambda: sky.ComputePool(
        provider=sky.AWS(), accelerator=sky.accelerators.Trainium2(), image=sky.Image(pip=["torch-neuronx"])
    ),
    "inferentia": lambda: sky.ComputePool(
        provider=sky.AWS(), accelerator=sky.accelerators.Inferentia2(), image=sky.Image(pip=["torch-neuronx"])
    ),
    "mig plugin": lambda: sky.ComputePool(
        provider=sky.AWS(),
        accelerator="A100",
        plugins=[sky.plugins.mig(profile="3g.40gb")],
        worker=sky.Worker(concurrency=2, executor="process"),
        image=sky.Image(pip=["torch"]),
    ),
    "fallbacks": lambda: sky.ComputePool(provider=sky.AWS(), accelerator=["H100", "A100-80GB", "A100-40GB:2"]),
    "no upgrade": lambda: sky.ComputePool(provider=sky.AWS(), accelerator="H100!"),
    "cpu and memory": lambda: sky.ComputePool(provider=sky.AWS(), accelerator="H100", vcpus=8, memory_gb=64),
}


@pytest.mark.parametrize("declare", SEEDS.values(), ids=SEEDS)
def test_every_pool_of_the_seeds_can_be_declared(declare: Any) -> None:
    made = declare()
    assert made.accelerators
    assert made.name == "pool"


def test_fallbacks_keep_their_order() -> None:
    made = pool(accelerator=["H100", "A100-80GB", "A100-40GB:2"])
    assert [(a.name, a.memory_gb, a.count) for a in made.accelerators] == [
        ("H100", 80, None),
        ("A100", 80, None),
        ("A100", 40, 2),
    ]


def test_no_accelerator_is_a_cpu_pool() -> None:
    assert pool().accelerators == ()


def test_the_plugin_says_what_the_accelerator_says() -> None:
    plain = pool(accelerator="A100/3g.40gb").accelerators
    assert pool(accelerator="A100", plugins=[sky.plugins.mig("3g.40gb")]).accelerators == plain
    assert pool(accelerator="A100/3g.40gb", plugins=[sky.plugins.mig("3g.40gb")]).accelerators == plain
    with pytest.raises(sky.InvalidField, match="declared twice"):
        pool(accelerator="A100/2g.20gb", plugins=[sky.plugins.mig("3g.40gb")])
    with pytest.raises(sky.InvalidField, match="needs an accelerator"):
        pool(plugins=[sky.plugins.mig("3g.40gb")])


def test_layouts_that_follow_the_work_are_checked_against_the_accelerator() -> None:
    layout = sky.mig.Follow(among=["2x>=40GB", {"7g.80gb": 1}], idle_seconds=60)
    found = compile_pool(pool(accelerator="H100:2", layout=layout), "s")
    assert found.head.follow == sky.mig.Follow(["3g.40gb*2", "7g.80gb*1"], idle_seconds=60)
    assert [slot.profile for slot in found.slots] == ["3g.40gb"] * 4, "nodes begin with the first"
    declared = compile_pool(pool(accelerator="H100:2/1g.10gb*7", layout=layout), "s")
    assert {slot.profile for slot in declared.slots} == {"1g.10gb"}
    assert "follow" not in compile_pool(pool(accelerator="H100:2"), "s").head.dumps()
    for fields, error, where in [
        ({"accelerator": "A100-40GB"}, sky.LayoutError, "layout.among[0]"),
        ({"accelerator": "L4"}, sky.MigNotSupported, "layout"),
        ({}, sky.InvalidField, "layout"),
        ({"accelerator": "H100:2", "worker": sky.Worker(concurrency=4)}, sky.InvalidField, "worker.concurrency"),
    ]:
        with pytest.raises(error) as refused:
            pool(**fields, layout=sky.mig.Follow(among=["4g.40gb+3g.40gb"]))
        assert refused.value.field == f"ComputePool('pool').{where}"


def test_plugins_of_frameworks_set_variables_where_the_image_does_not() -> None:
    both = pool(plugins=[sky.plugins.torch(), sky.plugins.jax()])
    assert both.variables == {
        "TORCH_NCCL_ASYNC_ERROR_HANDLING": "1",
        "TORCH_NCCL_HEARTBEAT_TIMEOUT_SEC": "600",
        "XLA_PYTHON_CLIENT_PREALLOCATE": "false",
        "SKYINFRA_JAX_DISTRIBUTED": "1",
    }
    image = sky.Image(env={"TORCH_NCCL_ASYNC_ERROR_HANDLING": "3", "MINE": "x"})
    own = pool(plugins=[sky.plugins.torch()], image=image).variables
    assert own["TORCH_NCCL_ASYNC_ERROR_HANDLING"] == "3"
    assert own["MINE"] == "x"
    with_layout = pool(accelerator="A100", plugins=[sky.plugins.torch(), sky.plugins.mig("3g.40gb")])
    assert with_layout.accelerators == pool(accelerator="A100/3g.40gb").accelerators


def test_plugins_bring_the_index_of_their_packages_where_the_image_has_none_of_its_own() -> None:
    neuron = "https://pip.repos.neuron.amazonaws.com"
    trainium = {"accelerator": "Trainium", "plugins": [sky.plugins.neuron(), sky.plugins.torch()]}
    assert pool(**trainium).extra_indexes == (neuron,)
    assert pool(**trainium).variables["PJRT_DEVICE"] == "NEURON"
    assert pool(**trainium, image=sky.Image(extra_indexes=["https://a.example/x", neuron])).extra_indexes == (
        "https://a.example/x",
        neuron,
    )
    for own in ({"index": "https://a.example/simple"}, {"wheelhouse": "/wheels"}):
        assert pool(**trainium, image=sky.Image(**own)).extra_indexes == ()
    rocm = pool(accelerator="MI300X", plugins=[sky.plugins.rocm("6.4")])
    assert (rocm.extra_indexes, rocm.variables) == (("https://download.pytorch.org/whl/rocm6.4",), {})
    tpu = pool(accelerator="TPUv5e", plugins=[sky.plugins.torch_xla()])
    assert (tpu.extra_indexes, tpu.variables) == ((), {"PJRT_DEVICE": "TPU"})
    assert pool().extra_indexes == ()


@pytest.mark.parametrize(
    ("accelerator", "plugin", "message"),
    [
        ("H100", sky.plugins.neuron(), "the plugin neuron is for Trainium and Inferentia"),
        (["MI300X", "H100"], sky.plugins.rocm("7.0"), "the plugin rocm-7.0 is for AMD GPUs"),
        (None, sky.plugins.torch_xla(), "the plugin torch-xla is for TPUs"),
    ],
)
def test_a_plugin_of_another_vendor_is_refused(accelerator: Any, plugin: Any, message: str) -> None:
    with pytest.raises(sky.InvalidField, match=message) as caught:
        pool(accelerator=accelerator, plugins=[plugin])
    assert caught.value.field == "ComputePool('pool').plugins"
    assert caught.value.given in ("H100", "no accelerator")
    with pytest.raises(sky.InvalidField, match=r"expected a version of ROCm such as 6\.4"):
        sky.plugins.rocm("latest")


def test_a_declaration_is_frozen() -> None:
    made = pool()
    with pytest.raises(Exception, match="frozen"):
        made.nodes = 3  # type: ignore[misc]


@pytest.mark.parametrize(
    ("fields", "error", "words"),
    [
        ({"accelerator": "H10O"}, sky.UnknownAccelerator, ["ComputePool('pool').accelerator", "H10O", "H100"]),
        ({"accelerator": "H100/9g.99gb"}, sky.UnknownProfile, ["9g.99gb", "3g.40gb"]),
        ({"accelerator": "H100/4g.40gb*2"}, sky.LayoutDoesNotFit, ["accelerator", "4g.40gb"]),
        ({"accelerator": "T4/3g.40gb"}, sky.MigNotSupported, ["T4"]),
        (
            {"accelerator": "H100/3g.40gb", "worker": sky.Worker(concurrency=3)},
            sky.ConcurrencyMismatch,
            ["worker.concurrency", "given: 3", "2"],
        ),
        (
            {"accelerator": "H100:8/3g.40gb", "worker": sky.Worker(concurrency=2)},
            sky.ConcurrencyMismatch,
            ["16", "given: 2"],
        ),
        ({"acelerator": "H100"}, sky.InvalidField, ["ComputePool.acelerator", "unknown field", "accelerator"]),
        ({"nodes": 0}, sky.InvalidField, ["ComputePool.nodes", "given: 0"]),
        ({"nodes": "2"}, sky.InvalidField, ["ComputePool.nodes", "given: '2'"]),
        ({"nodes": True}, sky.InvalidField, ["ComputePool.nodes"]),
        ({"name": "Bad Name"}, sky.InvalidField, ["ComputePool.name", "Bad Name"]),
        ({"stack": "a/b"}, sky.InvalidField, ["ComputePool.stack", "a/b"]),
        ({"provider": "aws"}, sky.InvalidField, ["ComputePool.provider", "'aws'", "Write sky.AWS(...)."]),
        ({"provider": "gpc"}, sky.InvalidField, ["Write sky.GCP(...)."]),
        ({"provider": sky.GCP}, sky.InvalidField, ["not its class", "Write sky.GCP(...)."]),
        ({"provider": 3}, sky.InvalidField, ["expected a provider (given: 3)"]),
        ({"ndoes": 2, "sopt": True}, sky.InvalidField, ["ndoes", "Did you mean nodes", "sopt", "Did you mean spot?"]),
        (
            {"nodes": "2", "sopt": True},
            sky.InvalidField,
            ["Did you mean spot?", "ComputePool.nodes: expected a whole num"],
        ),
        ({"accelerator": "H1000", "ndoes": 2}, sky.InvalidField, ["Did you mean nodes", "Did you mean H100"]),
        # Words of other tools.
        (
            {"gpu": "H100:8"},
            sky.InvalidField,
            ['gpu= is accelerator= here: accelerator="H100:8"\nComputePool has'],
        ),
        (
            {"num_gpus": 8, "num_nodes": 2},
            sky.InvalidField,
            ['accelerator="H100:8"', "is nodes= here: nodes=2"],
        ),
        ({"mig": "3g.40gb"}, sky.InvalidField, ['mig= is accelerator= here: accelerator="H100/3g.40gb"']),
        ({"region": "us-east-1"}, sky.InvalidField, ['part of provider= here: provider=sky.AWS(region="us-east-1")']),
        ({"instance_type": "p5"}, sky.InvalidField, ["part of provider= here: provider=sky.AWS(instance_types="]),
        ({"cpu": 8, "memory": 64}, sky.InvalidField, ["here: vcpus=8", "here: memory_gb=64"]),
        ({"timeout": 60}, sky.InvalidField, ["timeout= is, here: @sky.compute(timeout=60)"]),
        # The value is what is wrong.
        ({"image": "pytorch"}, sky.InvalidField, ["ComputePool.image: expected sky.Image(...) (given: 'pytorch')"]),
        ({"memory_gb": "64GB"}, sky.InvalidField, ["ComputePool.memory_gb: expected a number (given: '64GB')"]),
        ({"spot": "yes"}, sky.InvalidField, ["ComputePool.spot: expected True or False (given: 'yes')"]),
        ({"labels": ["a"]}, sky.InvalidField, ["expected names with their values, such as {'team': 'ml'}"]),
        ({"worker": 2}, sky.InvalidField, ["expected sky.Worker(...) (given: 2)"]),
        ({"layout": "3g.40gb"}, sky.InvalidField, ["expected sky.mig.Follow(...)"]),
        ({"name": "Train"}, sky.InvalidField, ["cannot be written like that (given: 'Train')\nSuch as 'train-2'."]),
        (
            {"accelerator": {"H100": 8}},
            sky.InvalidAccelerator,
            ["preference (given: {'H100': 8})\nSuch as"],
        ),
        ({"accelerator": "8xH100"}, sky.UnknownAccelerator, ['The number comes after a colon: "H100:8".']),
        ({"accelerator": "H100x8"}, sky.UnknownAccelerator, ['The number comes after a colon: "H100:8".']),
        ({"max_hourly_cost": -1}, sky.InvalidField, ["max_hourly_cost"]),
        ({"accelerator": 3}, sky.DeclarationError, ["accelerator", "3"]),
        ({"accelerator": "H100:0"}, sky.InvalidAccelerator, ["accelerator", "0"]),
    ],
    ids=lambda value: str(value) if isinstance(value, dict) else "",
)
def test_what_is_refused(fields: dict[str, Any], error: type[Exception], words: list[str]) -> None:
    with pytest.raises(error) as caught:
        pool(**fields)
    for word in words:
        assert word in str(caught.value)
    assert caught.value.exit_code == 2  # type: ignore[attr-defined]


def test_a_misspelled_field_is_not_missing_as_well() -> None:
    with pytest.raises(sky.InvalidField, match=r"provder: unknown field\nDid you mean provider") as caught:
        sky.ComputePool(provder=LOCAL)  # type: ignore[call-arg]
    assert "is needed" not in str(caught.value)


def test_a_value_of_several_kinds_is_complained_of_once() -> None:
    for accelerator in (8, ("H100", 8)):
        with pytest.raises(sky.InvalidAccelerator) as caught:
            pool(accelerator=accelerator)
        assert "union" not in str(caught.value) and str(caught.value).count("given") == 1
    with pytest.raises(sky.InvalidField, match=r"^Image\.pip: expected a list \(given: {'torch': '2'}\)$"):
        sky.Image(pip={"torch": "2"})  # type: ignore[arg-type]


def test_fields_are_given_by_name() -> None:
    with pytest.raises(sky.InvalidField, match=r"takes its fields by name \(given: 'H100'\)\nWrite ComputePool\(prov"):
        sky.ComputePool("H100")  # type: ignore[call-arg,misc]
    assert "given" not in inspect.signature(sky.ComputePool).parameters


def test_words_of_others_for_providers_images_and_tasks() -> None:
    for make, words in (
        (lambda: sky.AWS(zone="us-east-1a"), "zone= is zones= here"),
        (lambda: sky.Azure(zones=["1"]), "zones= is zone= here"),
        (lambda: sky.AWS(image_id="ami-1"), 'image_id= is ami= here: ami="ami-..."'),
        (lambda: sky.GCP(image_id="x"), "image_id= is image= here"),
        (lambda: sky.AWS(gpu="H100"), 'gpu= is, here: sky.ComputePool(accelerator="H100:8")'),
        (lambda: sky.Image(packages=["torch"]), 'packages= is pip= here: pip=["torch"]'),
        (lambda: sky.Image(docker="x"), "docker= is, here: sky.GCP(image="),
        (lambda: sky.compute(gpu="H100"), "gpu= is, here: a slot of the pool"),
        (lambda: sky.compute(max_retries=3), "max_retries= is retries= here: retries=3"),
    ):
        with pytest.raises(sky.InvalidField, match=re.escape(words)):
            make()  # type: ignore[no-untyped-call]


def test_a_declaration_runs_no_task() -> None:
    def train(epochs: int) -> int:
        return epochs

    for run in (lambda: sky.compute(train)(1) >> pool(), lambda: sky.compute(train)(1) @ pool()):
        with pytest.raises(sky.InvalidField, match=r"declaration.*\n.*as pool: train\(\.\.\.\) [>@]+ pool`") as caught:
            run()
        assert 'sky.connect("STACK/pool")' in str(caught.value)


def test_a_missing_provider() -> None:
    with pytest.raises(sky.InvalidField, match=r"ComputePool\.provider: is needed"):
        sky.ComputePool()  # type: ignore[call-arg]


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"pip": "torch"}, r"Image\.pip: expected a list of strings: \['torch'\] \(given: 'torch'\)$"),
        ({"run": "ls"}, r"Image\.run: expected a list of strings: \['ls'\]"),
        ({"env": {"A": "b\0"}}, r"Image\.env\.A"),
        ({"python": "3"}, "Image.python"),
        ({"env": {"A-B": "1"}}, "A-B"),
        ({"env": {"A": 1}}, "Image.env.A"),
        ({"pyp": ["x"]}, "Did you mean"),
    ],
)
def test_images_that_are_refused(fields: dict[str, Any], words: str) -> None:
    with pytest.raises(sky.InvalidField, match=words):
        sky.Image(**fields)


def test_concurrency_of_an_open_count_may_be_a_multiple() -> None:
    pool(accelerator="H100/3g.40gb", worker=sky.Worker(concurrency=2))
    # The machine may carry eight; the compiler, which knows it, checks again.
    pool(accelerator="H100/3g.40gb", worker=sky.Worker(concurrency=16))


@pytest.mark.parametrize("stack", ["Inference", "gpu_2"])
def test_a_pool_may_name_every_stack_that_there_can_be(stack: str) -> None:
    assert pool(stack=stack).stack == stack


def test_threads_are_refused() -> None:
    with pytest.raises(sky.InvalidField, match=r"Worker\.executor"):
        sky.Worker(executor="thread")  # type: ignore[arg-type]
