"""What skyinfra relies on NVML for. The simulated driver and the fake one keep the same contract.

Its terms are those of nvml.h and of NVIDIA's MIG user guide.
"""

from __future__ import annotations

import re

import pynvml
import pytest
from devices.nvml_contract import AMPERE, BOTH, HOPPER, Make, refused
from devices.nvml_worlds import at, create, existing, listed, partition, place, profile
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from skyinfra import mig
from skyinfra.mig.grid import Grid

MODELS = [model for model in mig.models() if any(p.starts for p in mig.geometry(model).profiles)]
# One of each kind of grid and of each generation; the others have no rule of their own.
FEW = (AMPERE, HOPPER, "a30_24gb", "gh200_144gb", "b200_180gb", "rtx_pro_6000_96gb")
ALL = pytest.mark.parametrize(
    "model", [model if model in FEW else pytest.param(model, marks=pytest.mark.slow) for model in MODELS]
)


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
    assert existing(here.gpu(0)) == []
    assert existing(here.gpu(1)) == [("3g.40gb", 0, 4)]


def test_mig_stays_on_while_instances_stand(world: Make) -> None:
    here = world(HOPPER)
    here.gpu().set_mig_mode(True)
    partition(here.gpu(), "3g.40gb", 0, 4)
    assert here.gpu().set_mig_mode(False) == pynvml.NVML_ERROR_IN_USE
    assert here.gpu().mig_mode() == (True, False)
    assert existing(here.gpu()) == [("3g.40gb", 0, 4)]
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
    assert existing(gpu) == [("3g.40gb", 0, 4)], "the GPU itself is still known"


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
    assert len(existing(here.gpu())) == 3
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
    assert [start for _, start, _ in existing(here.gpu())] == [0, 3, 6]


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
        assert existing(gpu) == [(p.profile, p.start, p.size) for p in grid.layout()]

    agree()


def test_as_many_as_there_can_be(world: Make) -> None:
    here = world()
    gpu = here.gpu()
    gpu.set_mig_mode(True)
    assert here.api.nvmlDeviceGetMaxMigDeviceCount(here.device()) == 7
    uuids = {partition(gpu, "1g.10gb", start, 1).uuid for start in range(7)}
    assert existing(gpu) == [("1g.10gb", start, 1) for start in range(7)]
    assert {instance.uuid for instance in gpu.instances()} == uuids
    assert len(uuids) == 7
    refused(pynvml.NVML_ERROR_INVALID_ARGUMENT, create, gpu, "1g.10gb", 7, 1)
