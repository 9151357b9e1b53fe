"""From accelerators to slots, their labels and their variables."""

from __future__ import annotations

import dataclasses

import pytest
from local_fleets.running_node import h100

import skyinfra as sky
from skyinfra.gpu import inventory
from skyinfra.gpu.inventory import Device
from skyinfra.mig import Compute
from skyinfra.mig.steps import Partition
from skyinfra.protocol.nodeconfig import NodeAccelerator, NodeConfig, Vendor
from skyinfra.runner import slots
from skyinfra.worker import process

GPUS = (Device(0, "GPU-a", "GPU-a"), Device(1, "GPU-b", "GPU-b"))
ON_0 = (Partition(0, "1g.10gb", 4, 1, "MIG-a4"), Partition(0, "3g.40gb", 0, 4, "MIG-a0"))
ON_1 = (Partition(1, "7g.80gb", 0, 8, "MIG-b0"),)


def config(accelerator: NodeAccelerator | None, cpu_slots: int = 0) -> NodeConfig:
    return NodeConfig(1, "demo", "mig", "n1", "local", True, "127.0.0.1:0", accelerator, cpu_slots)


def test_partitions_come_by_gpu_and_place() -> None:
    planned = slots.plan(config(h100((), ())), GPUS, ON_1 + ON_0)
    assert [(s.worker, s.slot, s.gpu, s.profile, s.uuid, s.memory_gb) for s in planned] == [
        (0, "n1/0", 0, "3g.40gb", "MIG-a0", 40.0),
        (1, "n1/1", 0, "1g.10gb", "MIG-a4", 10.0),
        (2, "n1/2", 1, "7g.80gb", "MIG-b0", 80.0),
    ]


def test_compute_instances_share_the_memory_of_their_gpu_instance() -> None:
    ones = [Partition(0, "1c.3g.40gb", 4, 4, f"MIG-c{at}", compute=Compute(at, 1)) for at in (2, 0)]
    planned = slots.plan(config(h100((), ())), GPUS, [*ones, Partition(0, "3g.40gb", 0, 4, "MIG-a0"), *ON_1])
    assert [(s.slot, s.profile, s.uuid, s.memory_gb, s.shared_by) for s in planned] == [
        ("n1/0", "3g.40gb", "MIG-a0", 40.0, None),
        ("n1/1", "1c.3g.40gb", "MIG-c0", 40.0, 2),
        ("n1/2", "1c.3g.40gb", "MIG-c2", 40.0, 2),
        ("n1/3", "7g.80gb", "MIG-b0", 80.0, None),
    ]
    assert [(s.placement.profile, s.placement.at) for s in planned[:2]] == [("3g.40gb", 0), ("3g.40gb", (4, 0))]
    assert [round(s.own_memory_gb or 0, 1) for s in planned] == [40.0, 13.3, 13.3, 80.0]
    # One that comes beside it changes nothing of what runs: no worker ends for it.
    third = Partition(0, "1c.3g.40gb", 4, 4, "MIG-c1", compute=Compute(1, 1))
    more = slots.plan(config(h100((), ())), GPUS, [*ones, third], running=planned[1:3])
    assert {slot.uuid: slot.shared_by for slot in more if slot.compute} == {f"MIG-c{at}": 3 for at in range(3)}
    assert {*planned[1:3]} < {*more}
    kept = slots.plan(config(h100((), ())), GPUS, ones, running=planned[1:3])
    assert {slot.uuid: slot for slot in kept if slot.kind == "partition"} == {s.uuid: s for s in planned[1:3]}


def test_a_gpu_without_partitions_is_one_slot() -> None:
    planned = slots.plan(config(h100((), ())), GPUS, ON_0)
    assert [(s.kind, s.uuid, s.memory_gb) for s in planned][-1] == ("gpu", "GPU-b", 80.0)
    assert planned[-1].visible == ("CUDA_VISIBLE_DEVICES", "GPU-b")


def test_running_slots_keep_their_index() -> None:
    before = slots.plan(config(h100((), ())), GPUS, ON_0 + ON_1)
    after = slots.plan(config(h100((), ())), GPUS, ON_1, running=before[2:])
    assert [(s.slot, s.uuid) for s in after] == [("n1/0", "GPU-a"), ("n1/2", "MIG-b0")], "a worker is not renamed"
    still = slots.plan(config(h100((), ())), GPUS, ON_1, running=before)
    assert [s.slot for s in still] == ["n1/2", "n1/3"], "two workers are never called the same"
    more = (*ON_1, Partition(0, "2g.20gb", 0, 2, "MIG-x"), Partition(0, "2g.20gb", 2, 2, "MIG-y"))
    kept = slots.plan(config(h100((), ())), GPUS, more, running=before[2:])
    assert [(s.slot, s.uuid) for s in kept] == [("n1/0", "MIG-x"), ("n1/1", "MIG-y"), ("n1/2", "MIG-b0")]
    assert slots.plan(config(h100((), ())), GPUS, ON_0 + ON_1, running=before) == before


def test_cpu_slots() -> None:
    planned = slots.plan(config(None, cpu_slots=2), (), ())
    assert [(s.slot, s.kind, s.visible, s.accelerator) for s in planned] == [
        ("n1/0", "cpu", None, None),
        ("n1/1", "cpu", None, None),
    ]
    assert slots.environment(planned[0], None) == {}
    assert process.resources(planned[1]) == {"slot": 1.0, "slot:n1/1": 1.0, "node:n1": 1.0}
    assert slots.plan(config(None, cpu_slots=3), (), (), running=planned)[:2] == planned
    fewer = slots.plan(config(None, cpu_slots=1), (), (), running=planned)
    assert fewer == planned[:1]


KINDS: list[tuple[Vendor, str, dict[str, str]]] = [
    ("amd", "gpu", {"ROCR_VISIBLE_DEVICES": "1", "HIP_VISIBLE_DEVICES": "0"}),
    ("aws", "cores", {"NEURON_RT_VISIBLE_CORES": "2-3"}),
    (
        "google",
        "chip",
        {
            "TPU_VISIBLE_CHIPS": "1",
            "TPU_SKIP_MDS_QUERY": "1",
            **dict.fromkeys(("TPU_CHIPS_PER_PROCESS_BOUNDS", "TPU_PROCESS_BOUNDS"), "1,1,1"),
            **dict.fromkeys(("TPU_CHIPS_PER_HOST_BOUNDS", "TPU_HOST_BOUNDS"), "1,1,1"),
            "TPU_WORKER_HOSTNAMES": "localhost",
            "TPU_WORKER_ID": "0",
        },
    ),
    ("intel", "chip", {"HABANA_VISIBLE_MODULES": "1"}),
    ("custom", "chip", {}),
]


@pytest.mark.parametrize(("vendor", "kind", "variables"), KINDS)
def test_every_vendor_has_its_variables(vendor: Vendor, kind: str, variables: dict[str, str]) -> None:
    accelerator = NodeAccelerator("Chip", vendor, 2, 96.0)
    slot = slots.plan(config(accelerator), inventory.simulated(accelerator), ())[1]
    assert (slot.kind, slot.gpu, slot.accelerator, slot.memory_gb) == (kind, 1, "Chip", 96.0)
    assert slots.environment(slot, vendor) == variables


def test_a_host_of_a_slice_is_one_slot_with_all_of_its_chips() -> None:
    accelerator = NodeAccelerator("TPUv4-32", "google", 4, 32.0)
    host = dataclasses.replace(config(accelerator), slice_hosts=4)
    (slot,) = slots.plan(host, inventory.simulated(accelerator), ())
    assert (slot.slot, slot.kind, slot.gpu, slot.accelerator, slot.memory_gb) == ("n1/0", "host", None, "TPUv4-32", 128)
    assert slots.count(host) == 1 and slots.environment(slot, "google") == {}, "it has what the node configuration says"
    assert slots.plan(host, inventory.simulated(accelerator), (), running=(slot,)) == (slot,)
    with pytest.raises(sky.InvalidNodeConfig, match="chips without a layout"):
        NodeConfig.read({**host.to_json(), "accelerator": None, "cpu_slots": 1})


def test_simulated_says_whether_the_accelerator_is() -> None:
    simulated = dataclasses.replace(config(h100((), ())), simulate=True)
    assert slots.plan(simulated, GPUS, ())[0].simulated
    assert not slots.plan(config(h100((), ())), GPUS, ())[0].simulated
