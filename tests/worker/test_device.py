"""A device whose driver answers with errors: its slot fails, and not the task that met it."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pynvml
import pytest
from fake_nvml.fake_machine import FakeMachine
from local_fleets.client_fixtures import eventually

import skyinfra as sky
from skyinfra.client import open_pool
from skyinfra.node import device
from skyinfra.protocol.instance import InstanceInfo
from skyinfra.tasks import Task

Machine = Callable[..., FakeMachine]
LOST = "nvmlDeviceGetMemoryInfo:15"
# As PyTorch (https://github.com/Agent-RL/ReCall/issues/54), CuPy and XLA write them.
STAY = [
    "CUDA error: an illegal memory access was encountered",
    "CUDA error: device-side assert triggered",
    "CUDA error: unspecified launch failure",
    "cudaErrorIllegalAddress: an illegal memory access was encountered",
    "INTERNAL: CUDA_ERROR_ILLEGAL_ADDRESS: an illegal memory access was encountered",
    "CUDA_ERROR_LAUNCH_FAILED: unspecified launch failure",
]


def uuids(machine: FakeMachine) -> list[str]:
    with machine.loaded():
        pynvml.nvmlInit()
        try:
            handles = [pynvml.nvmlDeviceGetHandleByIndex(index) for index in range(pynvml.nvmlDeviceGetCount())]
            return [str(pynvml.nvmlDeviceGetUUID(handle)) for handle in handles]
        finally:
            pynvml.nvmlShutdown()


@pytest.mark.parametrize("text", STAY)
def test_errors_that_stay_with_the_process(text: str) -> None:
    found = device.words(RuntimeError(text))
    assert found is not None and device.stays(found)


@pytest.mark.parametrize(
    "text",
    ["CUDA out of memory. Tried to allocate 2 GiB", "CUDA_ERROR_OUT_OF_MEMORY: out of memory", "no CUDA here", ""],
)
def test_what_is_of_no_device_or_of_its_memory(text: str) -> None:
    assert device.words(RuntimeError(text)) is None


def test_errors_that_pass() -> None:
    found = device.words(RuntimeError("CUDA error: invalid argument"))
    assert found is not None and not device.stays(found)


def test_the_driver_is_asked_for_the_device_of_the_slot(fake_machine: Machine) -> None:
    machine = fake_machine("h100_80gb,h100_80gb")
    uuid = uuids(machine)[1]
    slot = InstanceInfo("n1", 0, "n1/0", "gpu", "s/p", gpu=1, uuid=uuid, visible=("CUDA_VISIBLE_DEVICES", uuid))
    with machine.loaded():
        device.check(slot)
    with machine.loaded(FAIL=LOST):
        with pytest.raises(OSError, match="GPU is lost"):
            device.check(slot)
        device.check(replace(slot, simulated=True))
        device.check(replace(slot, visible=("ROCR_VISIBLE_DEVICES", uuid)))
    with machine.loaded(FAIL="nvmlInitWithFlags:999"), pytest.raises(OSError, match="Unknown Error"):
        device.check(slot)


def meet(lost: bool, starts: str, text: str) -> str:
    with open(starts, "a") as file:  # noqa: PTH123
        file.write("x")
        first = file.tell() == 1
    if first:
        if lost:
            os.environ["FAKE_NVML_FAIL"] = LOST
        raise RuntimeError(text)
    return sky.instance_info().slot


def process() -> int:
    return os.getpid()


@pytest.mark.slow
def test_a_lost_device_costs_no_task_and_a_kernel_that_fails_costs_its_own(
    fake_machine: Machine, fleets: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Any
) -> None:
    machine = fake_machine("h100_80gb,h100_80gb")
    for name, value in machine.environment().items():
        monkeypatch.setenv(name, value)
    fleet = fleets(nodes=("n0",), slots=2, whole=True, uuids=uuids(machine))
    with open_pool(fleet.manifest) as pool:
        eventually(lambda: len(pool.slots()) == 2)
        assert pool.submit(meet, True, str(tmp_path / "lost"), STAY[2]).result(timeout=60) in {"n0/0", "n0/1"}
        eventually(lambda: len(pool.slots()) == 2)
        before = pool.broadcast(Task(process))
        with pytest.raises(RuntimeError, match="illegal memory access"):
            pool.submit(Task(meet, (False, str(tmp_path / "own"), STAY[0])).options(slot="n0/0")).result(timeout=60)
        # It left its process to nobody else.
        after = pool.broadcast(Task(process))
        assert after[0] != before[0] and after[1] == before[1]
