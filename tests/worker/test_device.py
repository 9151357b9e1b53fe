"""A device whose driver answers with errors: its slot fails, and not the task that met it."""

from __future__ import annotations

import ctypes
import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pynvml
import pytest
from fake_nvml.fake_machine import FakeMachine
from local_fleets.client_fixtures import eventually
from local_fleets.running_node import RunningNode, h100

import skyinfra as sky
from skyinfra.client import open_pool
from skyinfra.client.script import detach_script, run_script
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


DRIVER = r"""
#include <stdlib.h>
#include <stdio.h>
typedef unsigned long size;
static size has(const char *name, size other) { char *said = getenv(name); return said ? strtoul(said, 0, 10) : other; }
int cuDeviceGet(int *device, int number) { *device = number; return 0; }
int cuDevicePrimaryCtxGetState(int device, unsigned *flags, int *active) { *active = has("CUDA_ACTIVE", 1); return 0; }
int cuDevicePrimaryCtxRetain(void **context, int device) { *context = (void *)1; return has("CUDA_RETAIN", 0); }
int cuCtxPushCurrent_v2(void *context) { return context != (void *)1; }
int cuCtxPopCurrent_v2(void **context) { return 0; }
int cuDevicePrimaryCtxRelease_v2(int device) { return 0; }
int cuMemGetInfo_v2(size *free, size *total) {
    *total = 80000000000; *free = *total - has("CUDA_USED", 500000000); return has("CUDA_WRONG", 0); }
"""


@pytest.fixture(scope="session")
def driver(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The parts of CUDA's driver that `device.held` asks, which say what variables of the process say."""
    folder = tmp_path_factory.mktemp("driver")
    (folder / "driver.c").write_text(DRIVER)
    command = ["cc", "-shared", "-fPIC", "-Wl,-soname,libcuda.so.1", "-o", "libcuda.so.1", "driver.c"]
    subprocess.run(command, cwd=folder, check=True, capture_output=True)
    return folder / "libcuda.so.1"


@pytest.mark.parametrize(
    ("variables", "found"),
    [
        ({}, 500_000_000),
        ({"CUDA_USED": "60000000000"}, 60_000_000_000),
        ({"CUDA_ACTIVE": "0"}, None),
        ({"CUDA_RETAIN": "700"}, None),
        ({"CUDA_WRONG": "700"}, None),
    ],
)
def test_memory_in_use_by_cuda(driver: Path, variables: dict[str, str], found: int | None) -> None:
    program = "import ctypes, sys; from skyinfra.node import device; before = device.held(); "
    program += "ctypes.CDLL(sys.argv[1]); print(before, device.held())"
    command = [sys.executable, "-c", program, str(driver)]
    done = subprocess.run(command, env={**os.environ, **variables}, capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["None", str(found)]


@pytest.fixture
def emptied(pool: sky.Pool) -> sky.Pool:
    """The pool, whose processes keep none of the objects of other tests, for which they would not be replaced."""
    pool.broadcast(Task(process).options(fresh=True))
    eventually(lambda: len(pool.slots()) == 4)
    return pool


def load(driver: str, used: float) -> int:
    """Stands for a task that leaves *used* bytes in its process."""
    ctypes.CDLL(driver)
    # Not in `os.environ`, which is put back after the task.
    ctypes.CDLL(None).setenv(b"CUDA_USED", str(int(used)).encode(), 1)
    return os.getpid()


def wants(marks: str, most: int = 99) -> int:
    """Runs out of memory in a process that *load* was in, and in the first *most* ones."""
    with Path(marks).open("a") as file:
        file.write(f"{os.getpid()}\n")
    if len(Path(marks).read_text().split()) <= most:
        raise RuntimeError("CUDA out of memory. Tried to allocate 60.00 GiB.")
    return os.getpid()


def test_a_task_gets_the_memory_that_those_before_it_in_its_process_hold(
    driver: Path, emptied: sky.Pool, tmp_path: Path
) -> None:
    pool, marks = emptied, tmp_path / "marks"
    slot = pool.slots()[0].slot
    on = {"slot": slot}

    def starts() -> list[str]:
        return marks.read_text().split() if marks.exists() else []

    before = pool.submit(Task(load, (str(driver), 60e9)).options(**on)).result(timeout=60)
    after = pool.submit(Task(wants, (str(marks), 1)).options(**on)).result(timeout=60)
    assert starts() == [str(before), str(after)] and before != after
    # One that has no room in a new process either ends with that, and no third start.
    marks.unlink()
    pool.submit(Task(load, (str(driver), 60e9)).options(**on)).result(timeout=60)
    with pytest.raises(RuntimeError, match="CUDA out of memory"):
        pool.submit(Task(wants, (str(marks),)).options(**on)).result(timeout=60)
    assert len(starts()) == 2
    # Where little is in use, as a context is, the task itself is the reason.
    marks.unlink()
    pool.submit(Task(load, (str(driver), 5e8)).options(**on)).result(timeout=60)
    with pytest.raises(RuntimeError, match="CUDA out of memory"):
        pool.submit(Task(wants, (str(marks),)).options(**on)).result(timeout=60)
    assert len(starts()) == 1


def opened(file: str) -> int:
    """Stands for a task that opens a device, as far as files tell."""
    device.FILES = (file,)
    os.open(file, os.O_RDONLY)
    return os.getpid()


def test_a_program_gets_a_slot_whose_process_has_no_device_open(emptied: sky.Pool, tmp_path: Path) -> None:
    """Scripts and ranks have processes of their own, beside which that of the slot is not to hold memory."""
    pool, file, program = emptied, tmp_path / "device", tmp_path / "program.py"
    file.touch()
    program.write_text("import os; print(os.getppid())")

    def parent() -> int:
        lines: list[str] = []
        run_script(pool, program, on_line=lambda _, text: lines.append(text))
        return int(lines[0])

    # Nothing is open there: the processes stay.
    assert parent() in Task(os.getpid, ()) @ pool
    before = Task(opened, (str(file),)) @ pool
    assert parent() not in before
    (rank,) = pool.launch(os.getppid, nodes=1, per_node=1, framework="none")
    assert rank not in before


def test_a_job_that_is_a_program_gets_such_a_slot_too(make_node: Callable[..., RunningNode], tmp_path: Path) -> None:
    node, file, program = make_node(accelerator=h100(())), tmp_path / "device", tmp_path / "program.py"
    file.touch()
    program.write_text("import os; print(os.getppid())")
    node.boot()
    with node.pool() as pool:
        before = pool.submit(Task(opened, (str(file),))).result(timeout=60)
        job = detach_script(pool, program, name="program")
        assert job.result(timeout=60) == 0 and job.info().attempts == 1
        assert int(job.logs()) != before
