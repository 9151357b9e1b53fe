"""A MIG mode that stays pending: the services that hold the GPU, a reset, and one reboot that is never repeated."""

from __future__ import annotations

import contextlib
import json
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pynvml
import pytest
from local_fleets.running_node import until

from skyinfra import NodeFailed, NodeRebooting, PartitionFailed
from skyinfra.gpu import partitioner
from skyinfra.gpu.machine import Holder, InstanceId, SystemMachine
from skyinfra.gpu.nvml import Nvml
from skyinfra.gpu.partitioner import ApplyOptions
from skyinfra.gpu.simulated.driver import SimulatedDriver
from skyinfra.mig import Placement
from skyinfra.protocol.nodeconfig import NodeAccelerator

LAYOUT = (Placement("3g.20gb", 0, 4),)
PASSTHROUGH = "GPU reset is not supported in a virtual machine"


class Machine:
    """A machine whose services hold the GPUs *held*, and which can reset or reboot as far as it is told."""

    def __init__(self, driver: SimulatedDriver, *, held: Sequence[int] = (), reset_refused: str = "") -> None:
        self.driver = driver
        self.held = held
        self.reset_refused = reset_refused
        self.linked = False
        self.boots = 1
        self.reboot_refused = False
        self.device_files = ""
        self.calls: list[tuple[str, Any]] = []
        self.start(["dcgm.service"] if held else [])
        self.calls.clear()

    def alone(self) -> contextlib.AbstractContextManager[None]:
        return contextlib.nullcontext()

    def holders(self, gpu: int, address: str, instance: InstanceId | None, *, device: bool) -> list[Holder]:
        return [Holder(700, "dcgm.service")] if gpu in self.held and device else []

    def unit(self, pid: int) -> str | None:
        return None

    def mig_manager(self) -> int | None:
        return None

    def is_active(self, unit: str) -> bool:
        return False

    def with_dependents(self, unit: str) -> tuple[str, ...]:
        return (unit,)

    def stop(self, unit: str) -> str:
        for index in self.held:
            self.driver.hold(index, held=False)
        self.calls.append(("stop", unit))
        return ""

    def start(self, units: Sequence[str]) -> None:
        for index in self.held if units else ():
            self.driver.hold(index)
        self.calls.append(("start", list(units)))

    def unload_display(self) -> str | None:
        return None

    def reset(self, gpus: Mapping[int, str]) -> str:
        indices = list(gpus)
        self.calls.append(("reset", indices))
        if self.reset_refused:
            return self.reset_refused
        if self.linked and len(indices) < self.driver.count:
            return "linked GPUs reset together"
        for index in indices:
            self.driver.reset(index)
        return ""

    def refresh_cdi(self) -> str:
        self.calls.append(("cdi", None))
        return ""

    def make_device_files(self) -> str:
        return self.device_files

    def boot_id(self) -> str:
        return f"boot-{self.boots}"

    def reboot(self) -> None:
        if self.reboot_refused:
            raise NodeFailed("the machine cannot be rebooted")
        self.calls.append(("reboot", None))

    def come_up_again(self) -> None:
        self.boots += 1
        self.driver.reboot()


class Counted(SimulatedDriver):
    """A driver that says how many GPUs it has, and notices a reset under an open session.

    What holds its GPUs are services, which NVML does not list: they do not compute.
    """

    def __init__(self, accelerator: NodeAccelerator, path: Path) -> None:
        super().__init__(accelerator, path=path, seed="demo/mig/n1")
        self.count = accelerator.count
        # The GPU that does not survive a reset, and those that are gone.
        self.loses: int | None = None
        self.gone: list[int] = []

    def nvmlDeviceGetComputeRunningProcesses_v3(self, device: Any) -> list[Any]:  # noqa: N802
        return []

    def reset(self, index: int) -> None:
        with pytest.raises(pynvml.NVMLError):
            self.nvmlDeviceGetCount()
        super().reset(index)
        self.gone += [index] if index == self.loses else []

    def nvmlDeviceGetCount(self) -> int:  # noqa: N802
        return super().nvmlDeviceGetCount() - len(self.gone)

    def nvmlDeviceGetHandleByIndex(self, index: int) -> Any:  # noqa: N802
        there = [each for each in range(self.count) if each not in self.gone]
        return super().nvmlDeviceGetHandleByIndex(there[index])


def a100(count: int) -> NodeAccelerator:
    return NodeAccelerator("A100", "nvidia", count, 40.0, "a100_40gb", (LAYOUT,) * count)


def opened(tmp_path: Path, count: int = 1) -> tuple[Nvml, Counted]:
    driver = Counted(a100(count), tmp_path / "gpus.json")
    nvml = Nvml(driver)
    nvml.open()
    return nvml, driver


def apply(nvml: Nvml, options: ApplyOptions, count: int = 1, events: list[dict[str, Any]] | None = None) -> int:
    emit = (lambda event: None) if events is None else events.append
    return len(partitioner.apply(nvml, dict.fromkeys(range(count), LAYOUT), emit=emit, options=options))


def test_services_that_hold_the_gpu_are_stopped_and_started_again(tmp_path: Path) -> None:
    nvml, driver = opened(tmp_path)
    machine = Machine(driver, held=[0])
    events: list[dict[str, Any]] = []
    assert apply(nvml, ApplyOptions(machine=machine, patience_s=0), events=events) == 1
    assert machine.calls == [("stop", "dcgm.service"), ("cdi", None), ("start", ["dcgm.service"])]
    assert [e["phase"] for e in events] == ["clients", "mode", "create", "cdi"]
    assert events[0] == {"phase": "clients", "gpu": 0, "stopped": ["dcgm.service"]}


def test_device_files_that_could_not_be_made_are_named_and_the_partitions_stand(tmp_path: Path) -> None:
    nvml, driver = opened(tmp_path)
    machine = Machine(driver)
    machine.device_files = "/dev/nvidia-uvm: there is no nvidia-modprobe"
    for changes in (True, False):
        events: list[dict[str, Any]] = []
        assert apply(nvml, ApplyOptions(machine=machine, patience_s=0), events=events) == 1
        assert events[-1] == {"phase": "devices", "message": machine.device_files}
        assert (len(events) > 1) == changes


def test_a_reset_activates_what_the_driver_cannot(tmp_path: Path) -> None:
    nvml, driver = opened(tmp_path, 2)
    driver.pass_through(1)
    machine = Machine(driver)
    events: list[dict[str, Any]] = []
    assert apply(nvml, ApplyOptions(machine=machine), 2, events) == 2
    assert ("reset", [1]) in machine.calls, "only the GPU that needs it"
    assert {"phase": "reset", "gpus": [1]} in events
    assert apply(nvml, ApplyOptions(machine=machine), 2) == 2
    assert len(machine.calls) == 2, "the second run asks the machine for nothing"


def test_gpus_that_are_linked_reset_together_when_all_are_idle(tmp_path: Path) -> None:
    nvml, driver = opened(tmp_path, 2)
    driver.pass_through(1)
    machine = Machine(driver)
    machine.linked = True
    assert apply(nvml, ApplyOptions(machine=machine), 2) == 2
    assert [call for call in machine.calls if call[0] == "reset"] == [("reset", [1]), ("reset", [0, 1])]


def test_gpus_that_nobody_asked_for_are_not_reset(tmp_path: Path) -> None:
    nvml, driver = opened(tmp_path, 2)
    assert apply(nvml, ApplyOptions(), 1) == 1
    driver.pass_through(1)
    machine = Machine(driver)
    machine.linked = True
    with pytest.raises(PartitionFailed, match="stays pending") as caught:
        partitioner.apply(nvml, {1: LAYOUT}, options=ApplyOptions(machine=machine))
    assert [call for call in machine.calls if call[0] == "reset"] == [("reset", [1])]
    assert "The reset was refused: linked GPUs reset together." in (caught.value.hint or "")
    assert len(nvml.gpus()[0].instances()) == 1


def test_without_leave_a_person_is_asked_to_reboot(tmp_path: Path) -> None:
    nvml, driver = opened(tmp_path)
    driver.pass_through(0)
    machine = Machine(driver, reset_refused=PASSTHROUGH)
    with pytest.raises(PartitionFailed, match=r"reset or reboot is needed: RESET_REQUIRED \(16\)") as caught:
        apply(nvml, ApplyOptions(machine=machine))
    assert PASSTHROUGH in (caught.value.hint or "")
    assert ("reboot", None) not in machine.calls


@pytest.mark.parametrize("wanted", [{0: LAYOUT, 1: LAYOUT}, {0: LAYOUT}], ids=["both", "the one that is lost"])
def test_a_gpu_that_does_not_come_back_is_named(tmp_path: Path, wanted: dict[int, tuple[Placement, ...]]) -> None:
    """The next one has its index then, and is left alone."""
    nvml, driver = opened(tmp_path, 2)
    driver.pass_through(0)
    driver.loses = 0
    with pytest.raises(PartitionFailed, match=r"GPU 0 .* is gone after a reset"):
        partitioner.apply(nvml, wanted, options=ApplyOptions(machine=Machine(driver)))
    if 1 not in wanted:
        assert nvml.gpus()[0].mig_mode() == (False, False)


def test_one_reboot_and_the_next_boot_goes_on(tmp_path: Path) -> None:
    nvml, driver = opened(tmp_path)
    driver.pass_through(0)
    machine = Machine(driver, reset_refused=PASSTHROUGH)
    file = tmp_path / "state" / "reboot.json"
    options = ApplyOptions(machine=machine, reboot=True, reboot_file=file)
    events: list[dict[str, Any]] = []
    with pytest.raises(NodeRebooting, match="reboots once to turn MIG on on GPU 0"):
        apply(nvml, options, events=events)
    assert json.loads(file.read_text()) == {"boot": "boot-1", "gpus": [0]}
    assert events[-1] == {"phase": "reboot", "gpus": [0]}
    with pytest.raises(NodeRebooting):
        apply(nvml, options)
    assert machine.calls.count(("reboot", None)) == 2, "it is the same reboot while the boot is the same"
    machine.come_up_again()
    assert apply(nvml, options) == 1
    assert not file.exists(), "a later change of the mode may reboot again"


def test_a_reboot_that_did_not_help_is_never_repeated(tmp_path: Path) -> None:
    nvml, driver = opened(tmp_path)
    driver.pass_through(0)
    machine = Machine(driver, reset_refused=PASSTHROUGH)
    file = tmp_path / "reboot.json"
    options = ApplyOptions(machine=machine, reboot=True, reboot_file=file)
    with pytest.raises(NodeRebooting):
        apply(nvml, options)
    machine.boots += 1  # and the mode is still pending
    for _ in range(2):
        with pytest.raises(PartitionFailed, match="was rebooted to turn MIG on on GPU 0, and it is still pending"):
            apply(nvml, options)
    file.write_text("")  # power was lost while it was written
    with pytest.raises(PartitionFailed, match="it is not rebooted again"):
        apply(nvml, options)
    assert machine.calls.count(("reboot", None)) == 1


def test_runs_for_other_gpus_do_not_let_the_machine_reboot_again(tmp_path: Path) -> None:
    """At every boot: a run for GPU 1, which stands, then one for GPU 0, whose mode no reboot activates."""
    nvml, driver = opened(tmp_path, count=2)
    driver.pass_through(0)
    machine = Machine(driver, reset_refused=PASSTHROUGH)
    options = ApplyOptions(machine=machine, reboot=True, reboot_file=tmp_path / "reboot.json")
    for boot in range(3):
        assert len(partitioner.apply(nvml, {1: LAYOUT}, options=options)) == 1
        with pytest.raises(PartitionFailed if boot else NodeRebooting, match="turn MIG on on GPU 0"):
            partitioner.apply(nvml, {0: LAYOUT}, options=options)
        machine.boots += 1
    assert machine.calls.count(("reboot", None)) == 1


def test_each_gpu_has_one_reboot(tmp_path: Path) -> None:
    nvml, driver = opened(tmp_path, count=3)
    for index in range(3):
        driver.pass_through(index)
    machine = Machine(driver, reset_refused=PASSTHROUGH)
    file = tmp_path / "reboot.json"
    options = ApplyOptions(machine=machine, reboot=True, reboot_file=file)
    for index in (0, 1):
        with pytest.raises(NodeRebooting):
            partitioner.apply(nvml, {index: LAYOUT}, options=options)
    assert json.loads(file.read_text()) == {"boot": "boot-1", "gpus": [0, 1]}
    assert machine.calls.count(("reboot", None)) == 2, "asked for again in one boot: it may not have been heard"
    machine.boots += 1
    machine.reboot_refused = True
    with pytest.raises(NodeFailed, match="cannot be rebooted"):
        partitioner.apply(nvml, {2: LAYOUT}, options=options)
    assert json.loads(file.read_text()) == {"boot": "boot-1", "gpus": [0, 1]}, "that of the others is remembered"
    machine.reboot_refused = False
    with pytest.raises(NodeRebooting):
        partitioner.apply(nvml, {2: LAYOUT}, options=options)
    machine.come_up_again()
    for index in (1, 0):
        assert len(partitioner.apply(nvml, {index: LAYOUT}, options=options)) == 1
    assert json.loads(file.read_text())["gpus"] == [2]
    assert len(partitioner.apply(nvml, {2: LAYOUT}, options=options)) == 1
    assert not file.exists()


def test_a_machine_that_refuses_to_reboot_may_be_asked_again(tmp_path: Path) -> None:
    nvml, driver = opened(tmp_path)
    driver.pass_through(0)
    machine = Machine(driver, reset_refused=PASSTHROUGH)
    machine.reboot_refused = True
    options = ApplyOptions(machine=machine, reboot=True, reboot_file=tmp_path / "reboot.json")
    for _ in range(2):
        with pytest.raises(NodeFailed, match="cannot be rebooted"):
            apply(nvml, options)
    machine.reboot_refused = False
    with pytest.raises(NodeRebooting):
        apply(nvml, options)


class Locking(Machine):
    """With the lock of a real machine, and nothing else of it."""

    def alone(self) -> contextlib.AbstractContextManager[None]:
        return SystemMachine().alone()


def test_a_run_waits_for_the_one_that_is_at_work(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: Any) -> None:
    """The unit and a person, say: neither destroys what the other creates."""
    lock = tmp_path / "lock"
    monkeypatch.setattr("skyinfra.gpu.machine._LOCK", lock)
    nvml, driver = opened(tmp_path)
    events: list[dict[str, Any]] = []
    with SystemMachine().alone():
        monkeypatch.setattr("skyinfra.gpu.machine._PATIENCE_S", 0.0)
        second = threading.Thread(target=apply, args=(nvml, ApplyOptions(machine=Locking(driver)), 1, events))
        second.start()
        until(lambda: waits_for(lock), "the second to wait")
        until(lambda: "another process partitions" in caplog.text, "it says so")
        assert not events
    second.join()
    assert "create" in [event["phase"] for event in events]
    with SystemMachine().alone():
        pass


def test_who_may_not_lock_is_refused_by_the_driver(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("skyinfra.gpu.machine._LOCK", tmp_path / "missing" / "lock")
    nvml, driver = opened(tmp_path)
    assert apply(nvml, ApplyOptions(machine=Locking(driver)), 1, []) == 1


def waits_for(file: Path) -> bool:
    """Whether somebody waits for the lock of *file*."""
    inode = f":{file.stat().st_ino} "
    return any("->" in line and inode in line for line in Path("/proc/locks").read_text().splitlines())
