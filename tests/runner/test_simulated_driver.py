"""The simulated driver refuses what a driver refuses."""

from __future__ import annotations

import ctypes
from pathlib import Path
from typing import Any

import pynvml
import pytest
from running_node import h100

from skyinfra.runner.simulated import SimulatedDriver


def place(start: int, size: int) -> Any:
    return ctypes.byref(pynvml.c_nvmlGpuInstancePlacement_t(start=start, size=size))


@pytest.fixture
def api(tmp_path: Path) -> SimulatedDriver:
    driver = SimulatedDriver(h100((("7g.80gb", 0, 8),)), path=tmp_path / "gpus.json", seed="s")
    driver.nvmlInit()
    return driver


@pytest.fixture
def device(api: SimulatedDriver) -> Any:
    handle = api.nvmlDeviceGetHandleByIndex(0)
    assert api.nvmlDeviceSetMigMode(handle, 1) == 0
    return handle


def profile_id(api: SimulatedDriver, device: Any, number: int) -> int:
    return api.nvmlDeviceGetGpuInstanceProfileInfo(device, number).id


def test_nothing_works_before_init(tmp_path: Path) -> None:
    driver = SimulatedDriver(h100(()), path=tmp_path / "gpus.json", seed="s")
    with pytest.raises(pynvml.NVMLError_Uninitialized):
        driver.nvmlDeviceGetCount()


def test_a_placement_by_value_is_refused(api: SimulatedDriver, device: Any) -> None:
    bare = pynvml.c_nvmlGpuInstancePlacement_t(start=0, size=4)
    with pytest.raises(pynvml.NVMLError_InvalidArgument):
        api.nvmlDeviceCreateGpuInstanceWithPlacement(device, profile_id(api, device, 2), bare)


def test_possible_placements(api: SimulatedDriver, device: Any) -> None:
    count = ctypes.c_uint()
    three = profile_id(api, device, pynvml.NVML_GPU_INSTANCE_PROFILE_3_SLICE)
    api.nvmlDeviceGetGpuInstancePossiblePlacements(device, three, None, ctypes.byref(count))
    array = (pynvml.c_nvmlGpuInstancePlacement_t * count.value)()
    api.nvmlDeviceGetGpuInstancePossiblePlacements(device, three, array, ctypes.byref(count))
    assert [(p.start, p.size) for p in array] == [(0, 4), (4, 4)]


def test_occupied_and_impossible_places(api: SimulatedDriver, device: Any) -> None:
    three = profile_id(api, device, pynvml.NVML_GPU_INSTANCE_PROFILE_3_SLICE)
    api.nvmlDeviceCreateGpuInstanceWithPlacement(device, three, place(0, 4))
    with pytest.raises(pynvml.NVMLError_InsufficientResources):
        api.nvmlDeviceCreateGpuInstanceWithPlacement(device, three, place(0, 4))
    with pytest.raises(pynvml.NVMLError_InvalidArgument):
        api.nvmlDeviceCreateGpuInstanceWithPlacement(device, three, place(2, 4))


def test_compute_slices_run_out(api: SimulatedDriver, device: Any) -> None:
    four, three, one = (profile_id(api, device, number) for number in (3, 2, 0))
    api.nvmlDeviceCreateGpuInstanceWithPlacement(device, four, place(0, 4))
    api.nvmlDeviceCreateGpuInstanceWithPlacement(device, three, place(4, 4))
    with pytest.raises(pynvml.NVMLError_InsufficientResources):
        api.nvmlDeviceCreateGpuInstanceWithPlacement(device, one, place(6, 1))


def test_an_instance_with_compute_instances_stays(api: SimulatedDriver, device: Any) -> None:
    three = profile_id(api, device, pynvml.NVML_GPU_INSTANCE_PROFILE_3_SLICE)
    instance = api.nvmlDeviceCreateGpuInstanceWithPlacement(device, three, place(4, 4))
    assert api.nvmlGpuInstanceGetInfo(instance).id == 2, "the second half of the memory"
    info = api.nvmlGpuInstanceGetComputeInstanceProfileInfo(instance, 2, 0)
    compute = api.nvmlGpuInstanceCreateComputeInstance(instance, info.id)
    with pytest.raises(pynvml.NVMLError_InsufficientResources):
        api.nvmlGpuInstanceCreateComputeInstance(instance, info.id)
    with pytest.raises(pynvml.NVMLError_InUse):
        api.nvmlGpuInstanceDestroy(instance)
    api.nvmlComputeInstanceDestroy(compute)
    api.nvmlGpuInstanceDestroy(instance)
    with pytest.raises(pynvml.NVMLError_InvalidArgument):
        api.nvmlGpuInstanceGetInfo(instance)


def test_mig_devices_by_index(api: SimulatedDriver, device: Any) -> None:
    assert api.nvmlDeviceGetMaxMigDeviceCount(device) == 7
    instance = api.nvmlDeviceCreateGpuInstanceWithPlacement(device, profile_id(api, device, 0), place(6, 1))
    compute = api.nvmlGpuInstanceCreateComputeInstance(instance, 0)
    by_index = api.nvmlDeviceGetMigDeviceHandleByIndex(device, 0)
    assert api.nvmlDeviceGetUUID(by_index) == api.nvmlDeviceGetUUID(api.nvmlComputeInstanceGetInfo_v2(compute).device)
    with pytest.raises(pynvml.NVMLError_NotFound):
        api.nvmlDeviceGetMigDeviceHandleByIndex(device, 1)


def test_nothing_is_created_while_mig_is_off(api: SimulatedDriver, device: Any) -> None:
    three = profile_id(api, device, 2)
    assert api.nvmlDeviceSetMigMode(device, 0) == 0
    with pytest.raises(pynvml.NVMLError_NotSupported):
        api.nvmlDeviceCreateGpuInstanceWithPlacement(device, three, place(0, 4))


def test_a_held_gpu_cannot_be_reset(api: SimulatedDriver) -> None:
    api.hold(0)
    with pytest.raises(pynvml.NVMLError_InUse):
        api.reset(0)
