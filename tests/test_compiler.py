"""pool → Deployment: pure, and checked before anything is created."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

import skyinfra as sky
from skyinfra.bootstrap import user_data
from skyinfra.compiler import compile_pool, compile_pools
from skyinfra.protocol.nodeconfig import NodeConfig


def pool(**fields: Any) -> sky.ComputePool:
    return sky.ComputePool(**{"provider": sky.Local(simulate=True), **fields})


def test_a_layout_reaches_the_node_with_its_placement() -> None:
    made = compile_pool(pool(accelerator="H100:2/3g.40gb+2g.20gb+1g.10gb*2", nodes=3), "stack")
    assert made.fleet == "stack/pool"
    accelerator = made.head.accelerator
    assert accelerator is not None
    assert (accelerator.name, accelerator.vendor, accelerator.count) == ("H100", "nvidia", 2)
    assert accelerator.mig_model == "h100_80gb"
    for layout in accelerator.layouts:
        taken = [unit for p in layout for unit in range(p.start, p.start + p.size)]
        assert len(taken) == len(set(taken)) <= 8
        assert sorted(p.profile for p in layout) == ["1g.10gb", "1g.10gb", "2g.20gb", "3g.40gb"]
    assert [(s.index, s.kind, s.gpu) for s in made.slots] == [(i, "partition", i // 4) for i in range(8)]
    assert made.selection.simulated


def test_how_long_a_slot_waits_for_its_task_reaches_the_node() -> None:
    assert compile_pool(pool(), "s").head.drain_seconds == 600
    patient = compile_pool(pool(worker=sky.Worker(drain_seconds=0.5)), "s")
    assert (patient.head.drain_seconds, patient.worker.drain_seconds) == (0.5, 0.5)
    for wrong in (-1, float("inf"), float("nan"), "soon"):
        with pytest.raises(sky.InvalidField, match=r"worker\.drain_seconds|drain_seconds"):
            pool(worker=sky.Worker(drain_seconds=wrong))


def test_whole_accelerators_chips_and_cpus_are_slots() -> None:
    gpus = compile_pool(pool(accelerator="H100:4"), "s")
    assert [(s.kind, s.profile, s.gpu) for s in gpus.slots] == [("gpu", None, i) for i in range(4)]
    assert gpus.head.accelerator is not None and gpus.head.accelerator.layouts == ()
    chips = compile_pool(pool(accelerator="Trainium2:2"), "s")
    assert [s.kind for s in chips.slots] == ["cores", "cores"]
    cpus = compile_pool(pool(worker=sky.Worker(concurrency=3)), "s")
    assert [s.kind for s in cpus.slots] == ["cpu"] * 3
    assert cpus.head.cpu_slots == 3
    assert not cpus.selection.simulated


def test_the_same_declaration_gives_the_same_bytes() -> None:
    def declare(env: dict[str, str]) -> str:
        made = compile_pool(pool(accelerator="A100:8/1g.10gb", image=sky.Image(env=env, pip=["torch"])), "s")
        return user_data(made).head + user_data(made).worker

    assert declare({"B": "2", "A": "1"}) == declare({"A": "1", "B": "2"})


# A variable of a process can hold anything but NUL, which `Image` refuses.
VALUES = st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\0"), max_size=40)


@given(st.dictionaries(st.from_regex(r"[A-Z_]{1,8}", fullmatch=True), VALUES, max_size=3))
def test_user_data_carries_every_value_unchanged(env: dict[str, str]) -> None:
    made = compile_pool(pool(image=sky.Image(env=env, run=list(env.values()))), "s")
    text = user_data(made).head.replace("@SKYINFRA_NODE@", "pool-0")
    config = NodeConfig.read(json.loads(text))
    assert config.env == env


def test_only_workers_carry_the_place_of_the_head() -> None:
    data = user_data(compile_pool(pool(), "s"))
    assert "@SKYINFRA_HEAD@" not in data.head
    assert "@SKYINFRA_HEAD@" in data.worker
    assert "@SKYINFRA_NODE@" in data.head


@pytest.mark.parametrize(
    ("fields", "field"),
    [
        ({"spot": True}, "pools[0].spot"),
        ({"vcpus": 4}, "pools[0].vcpus"),
        ({"memory_gb": 4.0}, "pools[0].memory_gb"),
        ({"disk_gb": 4}, "pools[0].disk_gb"),
        ({"image": sky.Image(apt=["git"])}, "pools[0].image.apt"),
        ({"image": sky.Image(python="3.12")}, "pools[0].image.python"),
        ({"provider": sky.VastAI(bid=1)}, "pools[0].provider.bid"),
        ({"stack": "other"}, "pools[0].stack"),
    ],
)
def test_what_a_provider_cannot_do_is_refused(fields: dict[str, Any], field: str) -> None:
    with pytest.raises(sky.DeclarationError) as caught:
        compile_pools([pool(**fields)], "s")
    assert caught.value.field == field


@pytest.mark.parametrize("placeholder", ["@SKYINFRA_HEAD@", "@SKYINFRA_NODE@"])
def test_a_placeholder_in_a_declared_value_is_refused(placeholder: str) -> None:
    images = {
        "image.env.A": sky.Image(env={"A": f"x{placeholder}"}),
        "image.pip[0]": sky.Image(pip=[f"https://example.com/{placeholder}.whl"]),
        "image.run[1]": sky.Image(run=["true", f"echo {placeholder}"]),
    }
    for field, image in images.items():
        with pytest.raises(sky.InvalidField) as caught:
            compile_pool(pool(image=image), "s")
        assert caught.value.field == field


def test_two_pools_of_one_name() -> None:
    with pytest.raises(sky.DuplicatePool, match=r"pools\[1\]\.name"):
        compile_pools([pool(name="a"), pool(name="a")], "s")


@pytest.mark.parametrize("pools", [pool(), {"a": pool()}, None])
def test_something_that_is_no_list_of_pools(pools: Any) -> None:
    with pytest.raises(sky.InvalidField, match=r"^pools: expected a list of pools"):
        compile_pools(pools, "s")


def test_something_that_is_no_pool() -> None:
    with pytest.raises(sky.InvalidField, match=r"pools\[0\]"):
        compile_pools(["a"], "s")  # type: ignore[list-item]


def test_concurrency_is_checked_again_with_the_count_that_was_chosen() -> None:
    with pytest.raises(sky.ConcurrencyMismatch):
        compile_pools([pool(accelerator="H100/3g.40gb", worker=sky.Worker(concurrency=16))], "s")
