"""What a node was given by a batch system or a cluster makes its slots, and nothing is partitioned."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
from devices.nvml_worlds import Fake, partition
from fake_nvml.fake_machine import FakeMachine
from local_fleets.running_node import RunningNode, h100, on_slot

from skyinfra import AcceleratorMissing
from skyinfra.gpu import inventory
from skyinfra.gpu.nvml import Gpu, Nvml
from skyinfra.protocol.nodeconfig import NodeAccelerator

Machine = Callable[..., FakeMachine]
PARTS = (("3g.40gb", 0, 4), ("2g.20gb", 4, 2))


@pytest.fixture
def nvml(fake_machine: Machine) -> Iterator[Nvml]:
    """A node of three H100, of which the second has two MIG devices."""
    machine = fake_machine("h100_80gb,h100_80gb,h100_80gb")
    with machine.loaded():
        found = Fake(machine).nvml()
        gpu = found.gpus()[1]
        gpu.set_mig_mode(True)
        for name, start, size in PARTS:
            partition(found.gpus()[1], name, start, size)
        yield found


def names(gpu: Gpu) -> list[str]:
    return [device.uuid for device in gpu.mig_devices()]


def seen(nvml: Nvml, accelerator: NodeAccelerator, **environment: str) -> list[tuple[int, str | None]]:
    return [(device.index, device.profile) for device in inventory.given(nvml, accelerator, environment)]


def test_gpus_are_named_by_number_or_uuid(nvml: Nvml) -> None:
    two, whole = h100((), ()), [(0, None), (2, None)]
    assert seen(nvml, two, CUDA_VISIBLE_DEVICES="0,2") == whole
    uuids = [gpu.uuid for gpu in nvml.gpus()]
    assert seen(nvml, two, CUDA_VISIBLE_DEVICES="all", NVIDIA_VISIBLE_DEVICES=f"{uuids[0]}, {uuids[2]}") == whole
    assert seen(nvml, h100(()), CUDA_VISIBLE_DEVICES="2", NVIDIA_VISIBLE_DEVICES="0,1,2") == [(2, None)]
    devices = inventory.given(nvml, h100(()), {"CUDA_VISIBLE_DEVICES": "2"})
    assert [(device.visible, device.uuid) for device in devices] == [(uuids[2], uuids[2])]


def test_mig_devices_are_named_by_uuid(nvml: Nvml) -> None:
    first, second = names(nvml.gpus()[1])
    both = [(1, "3g.40gb"), (1, "2g.20gb")]
    assert seen(nvml, h100(PARTS), NVIDIA_VISIBLE_DEVICES=f"{first},{second}") == both
    assert seen(nvml, h100(PARTS[:1]), CUDA_VISIBLE_DEVICES=first) == both[:1]
    # Where nothing is named, all that the driver shows counts.
    assert seen(nvml, h100((), PARTS, ()), NVIDIA_VISIBLE_DEVICES="void") == [(0, None), *both, (2, None)]


@pytest.mark.parametrize(
    ("environment", "message"),
    [
        ({"CUDA_VISIBLE_DEVICES": "0,2"}, "declared 1 x H100, and this node was given 2 x H100"),
        ({"CUDA_VISIBLE_DEVICES": "NoDevFiles"}, "declared 1 x H100, and this node was given none"),
        ({"CUDA_VISIBLE_DEVICES": "7"}, "CUDA_VISIBLE_DEVICES names 7, of which the driver shows 0"),
        ({"NVIDIA_VISIBLE_DEVICES": "1"}, "NVIDIA_VISIBLE_DEVICES names 1, of which the driver shows 2"),
        ({}, "given 2 x H100, 1 x H100 2g.20gb, 1 x H100 3g.40gb"),
    ],
)
def test_what_was_not_declared_is_refused(nvml: Nvml, environment: dict[str, str], message: str) -> None:
    with pytest.raises(AcceleratorMissing, match=message):
        inventory.given(nvml, h100(()), environment)


def test_another_model_is_refused(fake_machine: Machine) -> None:
    machine = fake_machine("a30,h100_80gb")
    with machine.loaded():
        nvml = Fake(machine).nvml()
        with pytest.raises(AcceleratorMissing, match="declared 1 x H100, found GPU 0, NVIDIA A30"):
            inventory.given(nvml, h100(()), {"CUDA_VISIBLE_DEVICES": "0"})
        assert seen(nvml, h100(()), CUDA_VISIBLE_DEVICES="1") == [(1, None)]


def visible() -> str:
    import os

    return os.environ["CUDA_VISIBLE_DEVICES"]


def test_a_node_serves_the_mig_devices_that_it_was_given(
    nvml: Nvml, make_node: Callable[..., RunningNode], monkeypatch: pytest.MonkeyPatch, fake_machine: Machine
) -> None:
    """The driver of the machine is loaded by the real library in the real runner; two other GPUs are not its own."""
    first, second = names(nvml.gpus()[1])
    machine = fake_machine("h100_80gb,h100_80gb,h100_80gb")
    for name, value in machine.environment(CUDA="").items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", f"{second},{first}")
    before = machine.show()
    node = make_node("n1", accelerator=h100(PARTS), simulate=False, given=True)
    status = node.boot()
    assert [(slot.kind, slot.profile, slot.uuid, slot.gpu, slot.memory_gb) for slot in status.slots] == [
        ("partition", "2g.20gb", second, 1, 20.0),
        ("partition", "3g.40gb", first, 1, 40.0),
    ]
    with node.client() as client:
        assert [on_slot(client, slot, visible) for slot in ("n1/0", "n1/1")] == [second, first]
    node.run("stop")
    assert machine.show() == before
