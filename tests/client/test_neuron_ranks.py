"""Ranks on AWS Neuron slots see the cores that torch-xla, its mode SPMD and JAX want."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from skyinfra.client.ranks import Launch, ranks
from skyinfra.protocol import gang
from skyinfra.protocol.gang import Framework, Rank, Work
from skyinfra.protocol.instance import InstanceInfo
from skyinfra.submission.snapshot import Target

CORES = "NEURON_RT_VISIBLE_CORES"
DEVICES = "NEURON_PJRT_PROCESSES_NUM_DEVICES"


def launched(framework: Framework | None, *visible: str, nodes: int = 2, **env: str) -> list[dict[str, str]]:
    """The variables of each rank of a gang on *nodes* nodes, whose slots have the cores *visible*."""
    slots = [
        InstanceInfo(f"n{node}", index, f"n{node}/{index}", "cores", "s/p", gpu=index, visible=(CORES, cores))
        for node in range(nodes)
        for index, cores in enumerate(visible)
    ]
    launch = Launch(Work("train"), Target(), None, None, framework, env, key=None if framework else "task")
    return [variables(rank) for rank in found(launch, slots)]


def found(launch: Launch, slots: Sequence[InstanceInfo]) -> list[Rank]:
    return ranks(launch, "g", slots, 0, "")


def variables(rank: Rank) -> dict[str, str]:
    return {**gang.environment(rank, "10.0.0.5", 41000), **rank.visible, **rank.env}


def test_torch_gets_a_core_for_each_rank_of_the_node() -> None:
    # remap_visible_cores of torch-xla refuses another number of cores than LOCAL_WORLD_SIZE.
    every = launched("torch", "0-7", "8-15", "16-23")
    assert [each[CORES] for each in every] == ["0,8,16"] * 6
    assert all(len(each[CORES].split(",")) == int(each["LOCAL_WORLD_SIZE"]) for each in every)
    taken = [(each["GROUP_RANK"], each[CORES].split(",")[int(each["LOCAL_RANK"])]) for each in every]
    assert len(set(taken)) == 6
    assert not any(DEVICES in each for each in every)
    # MASTER_PORT is taken by torch's own store.
    assert {each["NEURON_RT_ROOT_COMM_ID"] for each in every} == {"10.0.0.5:41001"}


@pytest.mark.parametrize(("framework", "env"), [("jax", {}), ("torch", {"XLA_USE_SPMD": "1"})])
def test_jax_and_spmd_get_all_cores_of_the_slot(framework: Framework, env: dict[str, str]) -> None:
    every = launched(framework, "0-3", "4-7", **env)
    assert [each[CORES] for each in every] == ["0-3", "4-7"] * 2
    assert {each[DEVICES] for each in every} == {"4,4,4,4"}
    assert [each["NEURON_PJRT_PROCESS_INDEX"] for each in every] == ["0", "1", "2", "3"]
    assert not any("JAX_LOCAL_DEVICE_IDS" in each for each in every)


def test_one_core_is_a_range_too() -> None:
    [alone] = launched("jax", "3", nodes=1)
    assert (alone[CORES], alone[DEVICES]) == ("3", "1")


def test_others_know_nothing_of_neuron() -> None:
    for framework in ("none", None):
        every = launched(framework, "0-1", "2-3", nodes=1)  # type: ignore[arg-type]
        assert not any("NEURON_RT_ROOT_COMM_ID" in each or DEVICES in each for each in every)
    slot = InstanceInfo("n0", 0, "n0/0", "gpu", "s/p", gpu=0, visible=("CUDA_VISIBLE_DEVICES", "GPU-a"))
    [rank] = found(Launch(Work("train"), Target(), None, None, "torch"), [slot])
    assert not any(name.startswith("NEURON") for name in variables(rank))
    assert variables(rank)["CUDA_VISIBLE_DEVICES"] == "GPU-a"
