"""What skyinfra relies on NVML for. The simulated driver and the fake one keep the same contract.

Its terms are those of nvml.h and of NVIDIA's MIG user guide.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pynvml
import pytest
from fake_nvml.fake_machine import FakeMachine
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from nvml_worlds import SETTINGS, Fake, Simulated, World, at, create, listed, partition, place, profile, standing

from skyinfra import mig
from skyinfra.mig.grid import Grid
from skyinfra.runner.nvml import Nvml

Make = Callable[..., World]
AMPERE, HOPPER = "a100_40gb", "h100_80gb"
BOTH = pytest.mark.parametrize("model", [AMPERE, HOPPER])
MODELS = [model for model in mig.models() if any(p.starts for p in mig.geometry(model).profiles)]
# One of each kind of grid and of each generation; the others have no rule of their own.
FEW = (AMPERE, HOPPER, "a30_24gb", "gh200_144gb", "b200_180gb", "rtx_pro_6000_96gb")
ALL = pytest.mark.parametrize(
    "model", [model if model in FEW else pytest.param(model, marks=pytest.mark.slow) for model in MODELS]
)


# The hostile one does all that the other does.
WORLDS = ["simulated", "fake-hostile", pytest.param("fake", marks=pytest.mark.slow)]


@pytest.fixture(params=WORLDS)
def world(
    request: pytest.FixtureRequest, memory_path: Path, fake_machine: Callable[..., FakeMachine]
) -> Iterator[Make]:
    """``world("h100_80gb", count=2)``: a machine with these GPUs, NVML open; None is a GPU without MIG."""
    with contextlib.ExitStack() as stack:

        def make(model: str | None = HOPPER, count: int = 1) -> World:
            if request.param == "simulated":
                return Simulated(model, count, memory_path)
            # Built only where it is asked for.
            machine = fake_machine(",".join([model or "t4"] * count), **SETTINGS[request.param])
            stack.enter_context(machine.loaded())
            return Fake(machine)

        yield make


def refused(code: int, function: Callable[..., Any], *arguments: Any, **keywords: Any) -> None:
    with pytest.raises(pynvml.NVMLError) as caught:
        function(*arguments, **keywords)
    assert caught.value.value == code


# The library and the GPUs.


def test_nothing_works_before_init_and_after_shutdown(world: Make) -> None:
    nvml = world().nvml()
    nvml.close()
    refused(pynvml.NVML_ERROR_UNINITIALIZED, nvml.gpus)
    refused(pynvml.NVML_ERROR_UNINITIALIZED, nvml.driver_version)
    nvml.open()
    assert len(nvml.gpus()) == 1


def test_the_driver_has_a_version(world: Make) -> None:
    assert re.fullmatch(r"\d{3}\.\d+(\.\d+)?", world().nvml().driver_version())


def test_gpus_by_index(world: Make) -> None:
    here = world(count=3)
    gpus = here.nvml().gpus()
    assert [gpu.index for gpu in gpus] == [0, 1, 2]
    assert len({gpu.uuid for gpu in gpus}) == len({gpu.bus_id for gpu in gpus}) == 3
    assert all(gpu.uuid.startswith("GPU-") and gpu.name.startswith("NVIDIA ") for gpu in gpus)
    refused(pynvml.NVML_ERROR_INVALID_ARGUMENT, here.device, 3)


def test_memory_is_nearly_what_the_model_has(world: Make) -> None:
    assert world(HOPPER).gpu().memory_bytes() == pytest.approx(80 * 2**30, rel=0.01)


def test_pci_address_as_the_kernel_writes_it(world: Make) -> None:
    here = world(AMPERE, count=2)
    for gpu in here.nvml().gpus():
        assert re.fullmatch(r"0000:[0-9a-f]{2}:00\.0", gpu.bus_id)
        for address in (gpu.bus_id, f"0000{gpu.bus_id.upper()}"):
            assert here.api.nvmlDeviceGetUUID(here.api.nvmlDeviceGetHandleByPciBusId(address)) == gpu.uuid
    refused(pynvml.NVML_ERROR_NOT_FOUND, here.api.nvmlDeviceGetHandleByPciBusId, "0000:ff:00.0")


@ALL
def test_pci_device_id_names_the_model(world: Make, model: str) -> None:
    known = mig.geometry(model).pci_device_ids or ("0x0000",)
    assert world(model).gpu().pci_device_id in known


def test_a_gpu_without_mig(world: Make) -> None:
    here = world(None)
    assert here.gpu().mig_mode() is None
    assert here.gpu().profiles() == []
    refused(pynvml.NVML_ERROR_NOT_SUPPORTED, here.gpu().set_mig_mode, True)
    assert here.api.nvmlDeviceGetMaxMigDeviceCount(here.device()) == 0


def test_a_handle_that_is_none_is_refused(world: Make) -> None:
    here = world()
    for kind in (pynvml.c_nvmlDevice_t, pynvml.c_nvmlGpuInstance_t):
        refused(pynvml.NVML_ERROR_INVALID_ARGUMENT, here.api.nvmlDeviceGetMigMode, kind())
        refused(pynvml.NVML_ERROR_INVALID_ARGUMENT, here.api.nvmlGpuInstanceGetInfo, kind())
    refused(pynvml.NVML_ERROR_INVALID_ARGUMENT, here.api.nvmlGpuInstanceGetInfo, here.device())


# The mode.


@BOTH
def test_the_mode_of_an_idle_gpu_changes_at_once(world: Make, model: str) -> None:
    here = world(model, count=2)
    gpu = here.gpu()
    assert gpu.mig_mode() == (False, False)
    for on in (True, True, False, False, True):
        assert gpu.set_mig_mode(on) == pynvml.NVML_SUCCESS
        assert gpu.mig_mode() == here.gpu().mig_mode() == (on, on)
    assert here.gpu(1).mig_mode() == (False, False), "the other GPU is not concerned"


def test_there_are_two_modes(world: Make) -> None:
    here = world()
    refused(pynvml.NVML_ERROR_INVALID_ARGUMENT, here.api.nvmlDeviceSetMigMode, here.device(), 2)


@BOTH
def test_a_held_gpu_keeps_its_mode_pending(world: Make, model: str) -> None:
    here = world(model)
    here.hold(0, 4242)
    assert here.gpu().set_mig_mode(True) == pynvml.NVML_ERROR_IN_USE
    assert here.gpu().mig_mode() == (False, True)
    assert not here.reset(0)
    here.release(0, 4242)
    assert here.gpu().mig_mode() == (False, True), "it does not change by itself"
    assert here.gpu().set_mig_mode(True) == pynvml.NVML_SUCCESS
    assert here.gpu().mig_mode() == (True, True)


def test_a_pending_mode_can_be_taken_back(world: Make) -> None:
    here = world(AMPERE)
    here.hold(0, 4242)
    here.gpu().set_mig_mode(True)
    assert here.gpu().set_mig_mode(False) == pynvml.NVML_SUCCESS
    assert here.gpu().mig_mode() == (False, False)


def test_a_reset_makes_a_pending_mode_active(world: Make) -> None:
    here = world(AMPERE)
    here.hold(0, 4242)
    here.gpu().set_mig_mode(True)
    here.release(0, 4242)
    assert here.reset(0)
    assert here.gpu().mig_mode() == (True, True)


def test_ampere_in_a_virtual_machine_needs_a_reboot(world: Make) -> None:
    here = world(AMPERE)
    here.pass_through(0)
    for _ in range(2):
        assert here.gpu().set_mig_mode(True) == pynvml.NVML_ERROR_RESET_REQUIRED
        assert here.gpu().mig_mode() == (False, True)
    here.reboot()
    assert here.gpu().mig_mode() == (True, True)


def test_hopper_in_a_virtual_machine_needs_none(world: Make) -> None:
    here = world(HOPPER)
    here.pass_through(0)
    assert here.gpu().set_mig_mode(True) == pynvml.NVML_SUCCESS
    assert here.gpu().mig_mode() == (True, True)


@pytest.mark.parametrize(
    ("model", "stays"), [(AMPERE, True), ("a30_24gb", True), (HOPPER, False), ("b200_180gb", False)]
)
def test_what_survives_a_reboot(world: Make, model: str, stays: bool) -> None:
    here = world(model)
    here.gpu().set_mig_mode(True)
    first = here.gpu().profiles()[0]
    here.gpu().fill(here.gpu().create(first, start=0, size=1), first)
    here.hold(0, 4242, start=0)
    here.reboot()
    assert here.gpu().mig_mode() == (stays, stays)
    here.gpu().set_mig_mode(True)
    assert here.gpu().instances() == []
    assert here.gpu().processes() == ()


def test_a_reset_keeps_the_mode_and_clears_the_gpu(world: Make) -> None:
    here = world(HOPPER, count=2)
    for gpu in here.nvml().gpus():
        gpu.set_mig_mode(True)
        partition(gpu, "3g.40gb", 0, 4)
    assert here.reset(0)
    assert here.gpu(0).mig_mode() == (True, True)
    assert standing(here.gpu(0)) == []
    assert standing(here.gpu(1)) == [("3g.40gb", 0, 4)]


def test_mig_stays_on_while_instances_stand(world: Make) -> None:
    here = world(HOPPER)
    here.gpu().set_mig_mode(True)
    partition(here.gpu(), "3g.40gb", 0, 4)
    assert here.gpu().set_mig_mode(False) == pynvml.NVML_ERROR_IN_USE
    assert here.gpu().mig_mode() == (True, False)
    assert standing(here.gpu()) == [("3g.40gb", 0, 4)]
    here.gpu().empty(at(here.gpu(), 0))
    here.gpu().destroy(at(here.gpu(), 0))
    assert here.gpu().set_mig_mode(False) == pynvml.NVML_SUCCESS


def test_nothing_stands_and_nothing_is_created_while_mig_is_off(world: Make) -> None:
    here = world()
    refused(pynvml.NVML_ERROR_NOT_SUPPORTED, create, here.gpu(), "3g.40gb", 0, 4)
    refused(pynvml.NVML_ERROR_NOT_SUPPORTED, here.gpu().instances)
    refused(pynvml.NVML_ERROR_NOT_SUPPORTED, here.api.nvmlDeviceGetMigDeviceHandleByIndex, here.device(), 0)
    assert here.api.nvmlDeviceGetMaxMigDeviceCount(here.device()) == 0


def test_what_was_read_before_a_change_of_the_mode_is_void(world: Make) -> None:
    here = world()
    gpu = here.gpu()
    gpu.set_mig_mode(True)
    first = partition(gpu, "3g.40gb", 0, 4)
    before = at(gpu, 0)
    gpu.empty(before)
    gpu.destroy(before)
    gpu.set_mig_mode(False)
    gpu.set_mig_mode(True)
    again = partition(gpu, "3g.40gb", 0, 4)
    assert again.uuid == first.uuid
    refused(pynvml.NVML_ERROR_INVALID_ARGUMENT, here.api.nvmlGpuInstanceGetInfo, before.handle)
    refused(pynvml.NVML_ERROR_INVALID_ARGUMENT, here.api.nvmlComputeInstanceGetInfo_v2, first.handle)
    refused(pynvml.NVML_ERROR_INVALID_ARGUMENT, here.api.nvmlDeviceGetUUID, first.device)
    assert standing(gpu) == [("3g.40gb", 0, 4)], "the GPU itself is still known"


# Profiles and places.


@ALL
def test_profiles_and_places_are_those_of_the_geometry(world: Make, model: str) -> None:
    here = world(model)
    geometry = mig.geometry(model)
    wanted = {p.name: p for p in geometry.profiles if p.starts and p.max_count}
    for on in (False, True):
        here.gpu().set_mig_mode(on)
        found = here.gpu().profiles()
        assert {(p.name, p.compute_slices) for p in found} == {(p.name, p.compute_slices) for p in wanted.values()}
        assert len({p.profile_id for p in found}) == len(found)
        for known in found:
            assert wanted[known.name].profile_id in (None, known.profile_id)
            function = here.api.nvmlDeviceGetGpuInstancePossiblePlacements
            places = listed(function, pynvml.c_nvmlGpuInstancePlacement_t, here.device(), known.profile_id)
            expected = [(start, wanted[known.name].size) for start in wanted[known.name].starts or ()]
            assert sorted((p.start, p.size) for p in places) == expected


def test_the_number_of_places_is_told_without_an_array(world: Make) -> None:
    here = world()
    count = pynvml.c_uint()
    three = profile(here.gpu(), "3g.40gb").profile_id
    here.api.nvmlDeviceGetGpuInstancePossiblePlacements(here.device(), three, None, pynvml.byref(count))
    assert count.value == 2


def test_the_two_numberings(world: Make) -> None:
    here = world(AMPERE)
    query = here.api.nvmlDeviceGetGpuInstanceProfileInfo
    assert query(here.device(), pynvml.NVML_GPU_INSTANCE_PROFILE_3_SLICE).id == 9
    refused(pynvml.NVML_ERROR_NOT_SUPPORTED, query, here.device(), pynvml.NVML_GPU_INSTANCE_PROFILE_8_SLICE)
    refused(pynvml.NVML_ERROR_INVALID_ARGUMENT, query, here.device(), pynvml.NVML_GPU_INSTANCE_PROFILE_COUNT)
    here.gpu().set_mig_mode(True)
    create_instance = here.api.nvmlDeviceCreateGpuInstanceWithPlacement
    refused(pynvml.NVML_ERROR_INVALID_ARGUMENT, create_instance, here.device(), 2, place(0, 4))


@ALL
def test_every_instance_says_where_it_stands(world: Make, model: str) -> None:
    here = world(model)
    gpu = here.gpu()
    gpu.set_mig_mode(True)
    for known in mig.geometry(model).profiles:
        for start in known.starts or ():
            partition(gpu, known.name, start, known.size or 0)
            (instance,) = gpu.instances()
            assert (instance.profile.name, instance.start, instance.size) == (known.name, start, known.size)
            assert instance.uuid is not None
            gpu.empty(instance)
            gpu.destroy(instance)


@pytest.mark.parametrize(("start", "size"), [(2, 4), (1, 4), (0, 3), (0, 8), (8, 4)])
def test_a_place_that_the_profile_does_not_have_is_an_invalid_argument(world: Make, start: int, size: int) -> None:
    here = world()
    here.gpu().set_mig_mode(True)
    refused(pynvml.NVML_ERROR_INVALID_ARGUMENT, create, here.gpu(), "3g.40gb", start, size)


def test_an_occupied_place_is_insufficient_resources(world: Make) -> None:
    here = world()
    here.gpu().set_mig_mode(True)
    create(here.gpu(), "3g.40gb", 0, 4)
    for name, size in (("3g.40gb", 4), ("1g.10gb", 1)):
        refused(pynvml.NVML_ERROR_INSUFFICIENT_RESOURCES, create, here.gpu(), name, 0, size)


def test_compute_slices_run_out(world: Make) -> None:
    here = world()
    here.gpu().set_mig_mode(True)
    create(here.gpu(), "4g.40gb", 0, 4)
    create(here.gpu(), "1g.20gb", 4, 2)
    create(here.gpu(), "1g.20gb", 6, 2)
    assert len(standing(here.gpu())) == 3
    here.gpu().destroy(at(here.gpu(), 6))
    here.gpu().destroy(at(here.gpu(), 4))
    create(here.gpu(), "3g.40gb", 4, 4)
    refused(pynvml.NVML_ERROR_INSUFFICIENT_RESOURCES, create, here.gpu(), "1g.10gb", 6, 1)


@pytest.mark.parametrize(
    ("model", "first", "second"),
    [
        (AMPERE, ("1g.5gb+me", 0, 1), ("1g.5gb+me", 1, 1)),
        ("a30_24gb", ("1g.6gb+me", 0, 1), ("2g.12gb+me", 2, 2)),
        ("rtx_pro_6000_96gb", ("1g.24gb+me.all", 0, 3), ("1g.24gb", 3, 3)),
        ("rtx_pro_6000_96gb", ("2g.48gb", 0, 6), ("1g.24gb+me.all", 6, 3)),
    ],
)
def test_media_engines_exclude_each_other(
    world: Make, model: str, first: tuple[str, int, int], second: tuple[str, int, int]
) -> None:
    here = world(model)
    here.gpu().set_mig_mode(True)
    create(here.gpu(), *first)
    refused(pynvml.NVML_ERROR_INSUFFICIENT_RESOURCES, create, here.gpu(), *second)


def test_without_media_engines_beside_all_of_them(world: Make) -> None:
    here = world("rtx_pro_6000_96gb")
    here.gpu().set_mig_mode(True)
    create(here.gpu(), "1g.24gb+me.all", 0, 3)
    create(here.gpu(), "1g.24gb-me", 3, 3)
    create(here.gpu(), "2g.48gb-me", 6, 6)
    assert [start for _, start, _ in standing(here.gpu())] == [0, 3, 6]


@pytest.mark.parametrize("model", [AMPERE, "a30_24gb", "rtx_pro_6000_96gb"])
def test_the_driver_takes_what_the_grid_allows(world: Make, model: str) -> None:
    """Whatever order instances are asked for and destroyed in."""
    geometry = mig.geometry(model)
    places = [(known, start) for known in geometry.profiles for start in known.starts or ()]
    here = world(model)
    gpu = here.gpu()
    gpu.set_mig_mode(True)
    by_name = {known.name: known for known in gpu.profiles()}

    @settings(max_examples=20, deadline=None, suppress_health_check=list(HealthCheck), derandomize=True)
    @given(st.lists(st.tuples(st.sampled_from(places), st.booleans()), max_size=12))
    def agree(steps: list[tuple[tuple[mig.Profile, int], bool]]) -> None:
        for instance in gpu.instances():
            gpu.destroy(instance)
        grid = Grid(geometry)
        for (known, start), destroy in steps:
            if destroy and grid.placed:
                _, gone = grid.placed.pop(0)
                gpu.destroy(at(gpu, gone))
            try:
                gpu.create(by_name[known.name], start=start, size=known.size or 0)
                taken = True
            except pynvml.NVMLError_InsufficientResources:
                taken = False
            assert taken == grid.allows(known, start), (known.name, start, grid.placed)
            if taken:
                grid.put(known, start)
        assert standing(gpu) == [(p.profile, p.start, p.size) for p in grid.layout()]

    agree()


def test_as_many_as_there_can_be(world: Make) -> None:
    here = world()
    gpu = here.gpu()
    gpu.set_mig_mode(True)
    assert here.api.nvmlDeviceGetMaxMigDeviceCount(here.device()) == 7
    uuids = {partition(gpu, "1g.10gb", start, 1).uuid for start in range(7)}
    assert standing(gpu) == [("1g.10gb", start, 1) for start in range(7)]
    assert {instance.uuid for instance in gpu.instances()} == uuids
    assert len(uuids) == 7
    refused(pynvml.NVML_ERROR_INVALID_ARGUMENT, create, gpu, "1g.10gb", 7, 1)


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
    assert standing(gpu) == []


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
    assert standing(gpu) == [("3g.40gb", 4, 4)]
    assert not here.reset(0)
    here.release(0, 4242, start=4)
    gpu.empty(at(gpu, 4))
    gpu.destroy(at(gpu, 4))
    assert standing(gpu) == []


def test_a_process_on_the_whole_gpu_holds_every_partition(world: Make) -> None:
    here = world()
    gpu = here.gpu()
    gpu.set_mig_mode(True)
    partition(gpu, "3g.40gb", 4, 4)
    here.hold(0, 4242)
    refused(pynvml.NVML_ERROR_IN_USE, gpu.empty, at(gpu, 4))
    assert gpu.processes_on(at(gpu, 4)) == ()
    assert gpu.processes() == (4242,)
