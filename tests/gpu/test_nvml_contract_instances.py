"""What skyinfra relies on NVML for, continued: compute instances, MIG devices, and processes on them."""

from __future__ import annotations

import contextlib

import pynvml
import pytest
from devices.nvml_contract import AMPERE, BOTH, HOPPER, Make, refused
from devices.nvml_worlds import at, create, existing, listed, partition, profile

from skyinfra.gpu.nvml import Nvml

# Compute instances and MIG devices.


def test_a_compute_instance_makes_the_device(world: Make) -> None:
    here = world(count=2)
    here.gpu(1).set_mig_mode(True)
    create(here.gpu(1), "3g.40gb", 4, 4)
    assert at(here.gpu(1), 4).uuid is None
    refused(pynvml.NVML_ERROR_NOT_FOUND, here.api.nvmlDeviceGetMigDeviceHandleByIndex, here.device(1), 0)
    made = here.gpu(1).fill(at(here.gpu(1), 4).handle, profile(here.gpu(1), "3g.40gb"))
    assert made.uuid.startswith("MIG-")
    assert made.compute_slices == 3
    assert at(here.gpu(1), 4).uuid == made.uuid
    device = here.api.nvmlDeviceGetMigDeviceHandleByIndex(here.device(1), 0)
    for handle in (device, made.device):
        assert here.api.nvmlDeviceGetUUID(handle) == made.uuid
        assert here.api.nvmlDeviceGetName(handle).endswith(" MIG 3g.40gb")
    refused(pynvml.NVML_ERROR_NOT_FOUND, here.api.nvmlDeviceGetMigDeviceHandleByIndex, here.device(1), 1)


@pytest.mark.parametrize(
    ("model", "name", "size", "profiles"),
    [
        (AMPERE, "7g.40gb", 8, {0: 1, 1: 2, 2: 3, 3: 4, 4: 7}),
        (AMPERE, "4g.20gb", 4, {0: 1, 1: 2, 3: 4}),
        (AMPERE, "3g.20gb", 4, {0: 1, 1: 2, 2: 3}),
        (AMPERE, "2g.10gb", 2, {0: 1, 1: 2}),
        (AMPERE, "1g.5gb", 1, {0: 1}),
        (AMPERE, "1g.5gb+me", 1, {0: 1}),
        (AMPERE, "1g.10gb", 2, {7: 1}),
        ("a30_24gb", "4g.24gb", 4, {0: 1, 1: 2, 3: 4}),
        ("rtx_pro_6000_96gb", "4g.96gb", 12, {0: 1, 1: 2, 3: 4}),
    ],
)
def test_compute_profiles(world: Make, model: str, name: str, size: int, profiles: dict[int, int]) -> None:
    """As ``nvidia-smi mig -lcip`` lists them; that of the double-memory instance is number 7."""
    here = world(model)
    here.gpu().set_mig_mode(True)
    handle = create(here.gpu(), name, 0, size)
    query = here.api.nvmlGpuInstanceGetComputeInstanceProfileInfo
    found = {}
    for number in range(pynvml.NVML_COMPUTE_INSTANCE_PROFILE_COUNT):
        with contextlib.suppress(pynvml.NVMLError_NotSupported):
            info = query(handle, number, pynvml.NVML_COMPUTE_INSTANCE_ENGINE_PROFILE_SHARED)
            found[info.id] = info.sliceCount
    assert found == profiles
    refused(pynvml.NVML_ERROR_INVALID_ARGUMENT, query, handle, pynvml.NVML_COMPUTE_INSTANCE_PROFILE_COUNT, 0)


def test_a_part_of_an_instance_is_not_the_partition(world: Make) -> None:
    here = world()
    gpu = here.gpu()
    gpu.set_mig_mode(True)
    handle = create(gpu, "3g.40gb", 0, 4)
    one = pynvml.NVML_COMPUTE_INSTANCE_PROFILE_1_SLICE
    for _ in range(3):
        here.api.nvmlGpuInstanceCreateComputeInstance(handle, one)
    refused(pynvml.NVML_ERROR_INSUFFICIENT_RESOURCES, here.api.nvmlGpuInstanceCreateComputeInstance, handle, one)
    instance = at(gpu, 0)
    assert instance.uuid is None
    assert [compute.compute_slices for compute in instance.compute] == [1, 1, 1]
    assert len({compute.uuid for compute in instance.compute}) == 3
    four = pynvml.NVML_COMPUTE_INSTANCE_PROFILE_4_SLICE
    refused(pynvml.NVML_ERROR_NOT_SUPPORTED, here.api.nvmlGpuInstanceCreateComputeInstance, handle, four)
    gpu.empty(instance)
    gpu.destroy(instance)
    assert existing(gpu) == []


def test_compute_instances_in_their_places(world: Make) -> None:
    here = world()
    gpu = here.gpu()
    gpu.set_mig_mode(True)
    handle = create(gpu, "7g.80gb", 0, 8)
    known = {each.name: each for each in gpu.profiles()}["7g.80gb"]
    places = here.api.nvmlGpuInstanceGetComputeInstancePossiblePlacements
    starts = {}
    for number, size in ((0, 1), (1, 2), (2, 3), (3, 4), (4, 7)):
        found = listed(places, pynvml.c_nvmlComputeInstancePlacement_t, handle, number)
        assert {place.size for place in found} == {size}
        starts[size] = [place.start for place in found]
    assert starts == {1: [*range(7)], 2: [0, 2, 4], 3: [0, 4], 4: [0], 7: [0]}
    refused(pynvml.NVML_ERROR_INVALID_ARGUMENT, lambda: gpu.share(handle, known, start=1, size=2))
    three = gpu.share(handle, known, start=4, size=3)
    refused(pynvml.NVML_ERROR_INSUFFICIENT_RESOURCES, lambda: gpu.share(handle, known, start=4, size=2))
    for start in (2, 0):
        gpu.share(handle, known, start=start, size=2)
    instance = at(gpu, 0)
    assert [(each.start, each.size) for each in instance.shares] == [(0, 2), (2, 2), (4, 3)]
    assert instance.uuid is None and len({each.uuid for each in instance.compute}) == 3
    device = Nvml(here.api).mig_device(three.uuid)
    assert device is not None and device.profile == "3c.7g.80gb"
    gpu.destroy_compute(three)
    assert [(each.start, each.size) for each in at(gpu, 0).shares] == [(0, 2), (2, 2)]


def test_processes_of_compute_instances_apart(world: Make) -> None:
    here = world()
    gpu = here.gpu()
    gpu.set_mig_mode(True)
    handle = create(gpu, "3g.40gb", 4, 4)
    known = {each.name: each for each in gpu.profiles()}["3g.40gb"]
    for start in range(3):
        gpu.share(handle, known, start=start, size=1)
    here.hold(0, 77, start=4, compute=1)
    shares = sorted(at(gpu, 4).compute, key=lambda each: each.start)
    assert [gpu.processes_in(each) for each in shares] == [(), (77,), ()]
    assert gpu.processes_on(at(gpu, 4)) == (77,)
    refused(pynvml.NVML_ERROR_IN_USE, gpu.destroy_compute, shares[1])
    gpu.destroy_compute(shares[0])
    gpu.destroy_compute(shares[2])
    refused(pynvml.NVML_ERROR_IN_USE, gpu.destroy, at(gpu, 4))


def test_an_instance_with_compute_instances_stays(world: Make) -> None:
    here = world()
    gpu = here.gpu()
    gpu.set_mig_mode(True)
    partition(gpu, "3g.40gb", 4, 4)
    instance = at(gpu, 4)
    refused(pynvml.NVML_ERROR_IN_USE, gpu.destroy, instance)
    gpu.empty(instance)
    refused(pynvml.NVML_ERROR_INVALID_ARGUMENT, gpu.empty, instance)
    gpu.destroy(instance)
    refused(pynvml.NVML_ERROR_INVALID_ARGUMENT, gpu.destroy, instance)
    refused(pynvml.NVML_ERROR_INVALID_ARGUMENT, here.api.nvmlGpuInstanceGetInfo, instance.handle)
    refused(pynvml.NVML_ERROR_INVALID_ARGUMENT, here.api.nvmlDeviceGetUUID, instance.compute[0].device)


def test_uuids_follow_from_the_gpu_and_the_place(world: Make) -> None:
    here = world(AMPERE, count=2)
    layout = [("3g.20gb", 4, 4), ("2g.10gb", 0, 2), ("1g.5gb", 2, 1)]

    def uuids(index: int, order: int = 1) -> dict[int, str]:
        here.gpu(index).set_mig_mode(True)
        for instance in here.gpu(index).instances():
            here.gpu(index).empty(instance)
            here.gpu(index).destroy(instance)
        return {start: partition(here.gpu(index), name, start, size).uuid for name, start, size in layout[::order]}

    first, second = uuids(0), uuids(1)
    assert len({*first.values(), *second.values()}) == 6
    assert uuids(0) == first, "created again"
    assert here.reset(0)
    assert uuids(0) == first, "after a reset"
    here.reboot()
    assert uuids(0) == first, "after a reboot"
    assert uuids(1) == second


def test_another_process_sees_what_stands(world: Make) -> None:
    here = world(HOPPER)
    here.gpu().set_mig_mode(True)
    uuid = partition(here.gpu(), "2g.20gb", 2, 2).uuid
    here.api.nvmlShutdown()
    here.api.nvmlInit()
    assert [(i.start, i.uuid) for i in Nvml(here.api).gpus()[0].instances()] == [(2, uuid)]


# Processes.


@BOTH
def test_processes_of_a_gpu_and_of_a_partition(world: Make, model: str) -> None:
    here = world(model, count=2)
    assert here.gpu().processes() == ()
    here.hold(0, 77)
    assert here.gpu().processes() == (77,)
    here.release(0, 77)
    gpu = here.gpu()
    gpu.set_mig_mode(True)
    names = [known.name for known in gpu.profiles()[:2]]
    partition(gpu, names[0], 0, 1)
    partition(gpu, names[1], 2, 2)
    for pid, start in ((300, 0), (20, 2), (300, 2), (20, 2)):
        here.hold(0, pid, start=start)
    assert gpu.processes() == (20, 300)
    assert gpu.processes_on(at(gpu, 0)) == (300,)
    assert gpu.processes_on(at(gpu, 2)) == (20, 300)
    assert here.gpu(1).processes() == ()


def test_processes_of_an_instance_without_a_device(world: Make) -> None:
    here = world()
    here.gpu().set_mig_mode(True)
    create(here.gpu(), "1g.10gb", 0, 1)
    assert here.gpu().processes_on(at(here.gpu(), 0)) == ()


def test_a_partition_in_use_is_not_destroyed(world: Make) -> None:
    here = world()
    gpu = here.gpu()
    gpu.set_mig_mode(True)
    partition(gpu, "3g.40gb", 0, 4)
    partition(gpu, "3g.40gb", 4, 4)
    here.hold(0, 4242, start=4)
    refused(pynvml.NVML_ERROR_IN_USE, gpu.empty, at(gpu, 4))
    gpu.empty(at(gpu, 0))
    gpu.destroy(at(gpu, 0))
    assert existing(gpu) == [("3g.40gb", 4, 4)]
    assert not here.reset(0)
    here.release(0, 4242, start=4)
    gpu.empty(at(gpu, 4))
    gpu.destroy(at(gpu, 4))
    assert existing(gpu) == []


def test_a_process_on_the_whole_gpu_holds_every_partition(world: Make) -> None:
    here = world()
    gpu = here.gpu()
    gpu.set_mig_mode(True)
    partition(gpu, "3g.40gb", 4, 4)
    here.hold(0, 4242)
    refused(pynvml.NVML_ERROR_IN_USE, gpu.empty, at(gpu, 4))
    assert gpu.processes_on(at(gpu, 4)) == ()
    assert gpu.processes() == (4242,)
