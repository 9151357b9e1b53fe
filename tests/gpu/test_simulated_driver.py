"""The simulated driver, beyond the contract of NVML that it keeps with the fake one (test_nvml_contract.py)."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pynvml
import pytest
from devices.nvml_worlds import at, partition, profile
from local_fleets.running_node import h100

from skyinfra.gpu.nvml import Gpu, Nvml
from skyinfra.gpu.simulated.driver import SimulatedDriver


@pytest.fixture
def api(tmp_path: Path) -> SimulatedDriver:
    driver = SimulatedDriver(h100((("7g.80gb", 0, 8),)), path=tmp_path / "gpus.json", seed="s")
    driver.nvmlInit()
    return driver


@pytest.fixture
def gpu(api: SimulatedDriver) -> Gpu:
    gpu = Nvml(api).gpus()[0]
    assert gpu.set_mig_mode(True) == 0
    return gpu


def test_a_placement_by_value_is_refused(api: SimulatedDriver, gpu: Gpu) -> None:
    """The real library takes it for an address and ends the process."""
    bare = pynvml.c_nvmlGpuInstancePlacement_t(start=0, size=4)
    device = api.nvmlDeviceGetHandleByIndex(0)
    with pytest.raises(pynvml.NVMLError_InvalidArgument):
        api.nvmlDeviceCreateGpuInstanceWithPlacement(device, profile(gpu, "3g.40gb").profile_id, bare)


def test_instances_are_numbered_as_the_driver_does_it(api: SimulatedDriver, gpu: Gpu) -> None:
    partition(gpu, "3g.40gb", 4, 4)
    assert api.nvmlGpuInstanceGetInfo(at(gpu, 4).handle).id == 2, "the second half of the memory"


def test_a_held_gpu_cannot_be_reset(api: SimulatedDriver) -> None:
    api.hold(0)
    with pytest.raises(pynvml.NVMLError_InUse):
        api.reset(0)
    api.hold(0, held=False)
    api.reset(0)


def test_nobody_holds_what_does_not_stand(api: SimulatedDriver, gpu: Gpu) -> None:
    with pytest.raises(ValueError, match="there is no instance at 4"):
        api.hold(0, pid=1, start=4)
    assert gpu.processes() == ()


def test_memory_is_what_processes_are_said_to_use(api: SimulatedDriver, gpu: Gpu) -> None:
    low, high = partition(gpu, "3g.40gb", 0, 4), partition(gpu, "3g.40gb", 4, 4)
    api.hold(0, pid=1, start=4, used=5 * 2**30)
    devices = [api.nvmlDeviceGetHandleByUUID(uuid) for uuid in (low.uuid, high.uuid)]
    assert [api.nvmlDeviceGetMemoryInfo(device).used for device in devices] == [0, 5 * 2**30]
    assert [api.nvmlDeviceGetGpuInstanceId(device) for device in devices] == [1, 2]
    assert api.nvmlDeviceGetMemoryInfo(devices[0]).total == 40 * 2**30
    assert api.nvmlDeviceGetMemoryInfo(api.nvmlDeviceGetHandleByUUID(gpu.uuid)).used == 5 * 2**30
    api.hold(0, pid=1, start=4, held=False)
    assert api.nvmlDeviceGetMemoryInfo(devices[1]).used == 0
    with pytest.raises(pynvml.NVMLError_NotFound):
        api.nvmlDeviceGetHandleByUUID("MIG-gone")


def test_a_state_that_an_older_version_wrote(tmp_path: Path) -> None:
    instance: dict[str, Any] = {
        "id": 1,
        "profile": "3g.40gb",
        "start": 0,
        "size": 4,
        "compute": [{"id": 0, "slices": 3}],
    }
    gpu = {"current": 1, "pending": 1, "held": True, "guest": False, "instances": [instance]}
    file = tmp_path / "gpus.json"
    file.write_text(json.dumps({"version": 1, "gpus": [gpu]}))
    driver = SimulatedDriver(h100((("3g.40gb", 0, 4),)), path=file, seed="s")
    driver.nvmlInit()
    found = Nvml(driver).gpus()[0]
    assert found.mig_mode() == (True, True)
    assert [(i.profile.name, i.start, i.uuid is not None) for i in found.instances()] == [("3g.40gb", 0, True)]
    assert found.processes() == ()
