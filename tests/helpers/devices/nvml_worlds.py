"""Machines on which the contract of NVML is tested: that of the simulated driver, and those of the fake one."""

from __future__ import annotations

import ctypes
from abc import ABC, abstractmethod
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pynvml
import pytest
from fake_nvml.fake_machine import FakeMachine

from skyinfra import mig
from skyinfra.gpu.nvml import ComputeInstance, Gpu, GpuInstance, Nvml, ProfileInfo
from skyinfra.gpu.simulated.driver import SimulatedDriver
from skyinfra.protocol.nodeconfig import NodeAccelerator


class World(ABC):
    """A machine with GPUs of one model, whose NVML is open."""

    api: Any

    def nvml(self) -> Nvml:
        return Nvml(self.api)

    def gpu(self, index: int = 0) -> Gpu:
        return self.nvml().gpus()[index]

    def device(self, index: int = 0) -> Any:
        return self.api.nvmlDeviceGetHandleByIndex(index)

    @abstractmethod
    def hold(self, index: int, pid: int, start: int | None = None, compute: int | None = None) -> None:
        """The process *pid* is on the GPU, or on the instance at *start*, or on the compute instance at *compute*."""

    @abstractmethod
    def release(self, index: int, pid: int, start: int | None = None) -> None:
        """It is no longer."""

    @abstractmethod
    def pass_through(self, index: int) -> None:
        """The GPU is a virtual machine's, which cannot reset it."""

    @abstractmethod
    def reset(self, index: int) -> bool:
        """Whether the GPU could be reset. NVML is closed meanwhile."""

    @abstractmethod
    def reboot(self) -> None:
        """The machine restarts."""


class Simulated(World):
    """The driver of ``Local``."""

    def __init__(self, model: str | None, count: int, folder: Path) -> None:
        memory = mig.geometry(model).memory_gib if model else 16
        accelerator = NodeAccelerator(model or "T4", "nvidia", count, memory and float(memory), model)
        self.api: Any = SimulatedDriver(accelerator, path=folder / "gpus.json", seed="n1")
        self.api.nvmlInit()

    def hold(self, index: int, pid: int, start: int | None = None, compute: int | None = None) -> None:
        self.api.hold(index, pid=pid, start=start, compute=compute or 0)

    def release(self, index: int, pid: int, start: int | None = None) -> None:
        self.api.hold(index, held=False, pid=pid, start=start)

    def pass_through(self, index: int) -> None:
        self.api.pass_through(index)

    def reset(self, index: int) -> bool:
        try:
            self.api.reset(index)
        except pynvml.NVMLError as error:
            assert error.value == pynvml.NVML_ERROR_IN_USE
            return False
        return True

    def reboot(self) -> None:
        self.api.reboot()


class Fake(World):
    """The fake driver, which pynvml has loaded."""

    api = pynvml

    def __init__(self, machine: FakeMachine) -> None:
        self.machine = machine
        pynvml.nvmlInit()

    def hold(self, index: int, pid: int, start: int | None = None, compute: int | None = None) -> None:
        where = (*(() if start is None else ("--start", start)), *(() if compute is None else ("--compute", compute)))
        self.machine.control("hold", index, "--pid", pid, *where)

    def release(self, index: int, pid: int, start: int | None = None) -> None:
        self.machine.control("release", index, "--pid", pid)

    def pass_through(self, index: int) -> None:
        self.machine.control("passthrough", index)

    def reset(self, index: int) -> bool:
        address = self.gpu(index).bus_id
        pynvml.nvmlShutdown()
        done = self.machine.reset(address)
        pynvml.nvmlInit()
        assert done.returncode in (0, 255), done.stdout + done.stderr
        return done.returncode == 0

    def reboot(self) -> None:
        self.machine.control("reboot")


# What the fake driver may do as well as not: `Nvml` does with all of it.
SETTINGS: dict[str, dict[str, str]] = {
    "fake": {},
    # Every handle dies with the MIG mode, and profiles say that there is one instance of each.
    "fake-hostile": {"STALE": "1", "UNDERSTATE": "1"},
}


def place(start: int, size: int) -> Any:
    return ctypes.byref(pynvml.c_nvmlGpuInstancePlacement_t(start=start, size=size))


def listed(function: Callable[..., Any], kind: Any, *arguments: Any, room: int = 64) -> list[Any]:
    """What a function fills into an array with more room than it needs."""
    array, count = (kind * room)(), ctypes.c_uint()
    function(*arguments, array, ctypes.byref(count))
    # It writes what it counts, and nothing behind that.
    assert not any(bytes(memoryview(array).cast("B"))[count.value * ctypes.sizeof(kind) :])
    return [array[i] for i in range(count.value)]


def profile(gpu: Gpu, name: str) -> ProfileInfo:
    return next(known for known in gpu.profiles() if known.name == name)


def create(gpu: Gpu, name: str, start: int, size: int) -> Any:
    """A GPU instance without a compute instance: its handle."""
    return gpu.create(profile(gpu, name), start=start, size=size)


def partition(gpu: Gpu, name: str, start: int, size: int) -> ComputeInstance:
    """A GPU instance that one compute instance fills."""
    known = profile(gpu, name)
    return gpu.fill(gpu.create(known, start=start, size=size), known)


def at(gpu: Gpu, start: int) -> GpuInstance:
    return next(instance for instance in gpu.instances() if instance.start == start)


def existing(gpu: Gpu) -> list[tuple[str, int, int]]:
    return [(instance.profile.name, instance.start, instance.size) for instance in gpu.instances()]


def refused(code: int, function: Callable[..., object], *arguments: object) -> None:
    """Fails where *function* does not answer with the error *code*."""
    with pytest.raises(pynvml.NVMLError) as caught:
        function(*arguments)
    assert caught.value.value == code
