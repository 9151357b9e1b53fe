"""Partitioning leaves the neighbours alone: services and processes that hold other GPUs, or compute on them.

On machines with the fake driver, whose monitors are on no list of NVML's processes.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
from devices.partitioning import SEVEN, config, phases, profiles, run
from fake_nvml.fake_machine import FakeMachine

from skyinfra import PartitionFailed
from skyinfra.gpu import partitioner, record, targets
from skyinfra.gpu.hardware import session
from skyinfra.gpu.machine import SystemMachine
from skyinfra.gpu.nvml import Nvml
from skyinfra.gpu.partitioner import ApplyOptions
from skyinfra.mig import Placement
from skyinfra.mig.steps import Partition
from skyinfra.node import processes
from skyinfra.node.folder import NodeDirectory
from skyinfra.protocol.nodeconfig import NodeAccelerator

Machine = Callable[..., FakeMachine]
FABRIC = "nvidia-fabricmanager.service"
DCGM = "nvidia-dcgm.service"
SESSION = "/user.slice/user-0.slice/session-3.scope"
AMPERE = "3g.20gb+2g.10gb"


def partition(
    machine: FakeMachine, layout: str, gpus: str = "all", *, events: list[dict[str, Any]] | None = None, **options: Any
) -> tuple[Partition, ...]:
    """Partitions in this process, without patience unless *options* say so."""
    given: dict[str, Any] = {"machine": SystemMachine(), "patience_s": 0.0} | options
    emit = (lambda event: None) if events is None else events.append
    with contextlib.ExitStack() as stack:
        stack.enter_context(machine.loaded())
        stack.enter_context(mock.patch.dict(os.environ, {"PATH": machine.environment()["PATH"]}))
        stack.enter_context(mock.patch("skyinfra.gpu.machine._ROOT", machine.root))
        nvml = stack.enter_context(session(Nvml()))
        return partitioner.apply(nvml, targets.given(nvml, layout, gpus), emit=emit, options=ApplyOptions(**given))


@contextlib.contextmanager
def sleeping(seconds: float = 600) -> Iterator[subprocess.Popen[bytes]]:
    with subprocess.Popen(["sleep", str(seconds)]) as process:
        try:
            yield process
        finally:
            process.kill()


def a100s(count: int) -> NodeAccelerator:
    """GPU 0 is to be partitioned, the others are not."""
    layout = (Placement("3g.20gb", 0, 4), Placement("2g.10gb", 4, 2))
    return NodeAccelerator("A100-40GB", "nvidia", count, 40.0, "a100_40gb", (layout, *((),) * (count - 1)))


# Work on other GPUs.


def test_a_gpu_is_partitioned_while_another_computes(fake_machine: Machine) -> None:
    """No service is stopped that holds the other, and nobody gets a signal."""
    machine = fake_machine(",".join(["a100_40gb"] * 4))
    machine.service("nvidia-persistenced.service", 3, 5000701)
    machine.service(FABRIC, None, 5000702)
    with sleeping() as work:
        machine.control("hold", 3, "--pid", work.pid, "--live")
        done = run(machine, "--layout", AMPERE, "--gpu", "0")
        assert (done.returncode, phases(done)) == (0, ["mode", "create", "create"]), done.stderr
        assert machine.asked_of_systemd() == []
        assert work.poll() is None
    assert profiles(machine) == [["2g.10gb", "3g.20gb"], [], [], []]


def test_the_machine_is_not_rebooted_under_work(fake_machine: Machine) -> None:
    """Not even where the GPU needs it; the message says whom it would hurt, and force reboots."""
    machine = fake_machine(",".join(["a100_40gb"] * 4))
    machine.control("passthrough", 0)
    arguments = config(machine, a100s(4))
    with sleeping() as work:
        machine.control("hold", 3, "--pid", work.pid, "--live")
        machine.opens(work.pid, None, group="/system.slice/vllm.service")
        done = run(machine, *arguments, "--reboot")
        assert done.returncode == 1
        assert "PartitionBusy" in done.stderr
        assert (
            f"its MIG mode needs a reboot, which would end what computes on this machine: GPU 3: {work.pid} (sleep"
            in (done.stderr)
        )
        assert "of vllm.service" in done.stderr
        assert machine.asked_of_systemd() == []
        assert work.poll() is None
        forced = run(machine, *arguments, "--reboot", "--force")
        assert "NodeRebooting" in forced.stderr
    assert machine.asked_of_systemd() == ["reboot"]


def test_fabric_manager_is_stopped_on_an_idle_machine_only(fake_machine: Machine) -> None:
    machine = fake_machine("a100_40gb,a100_40gb")
    machine.service(FABRIC, 0, 5000702)
    with sleeping() as work:
        machine.control("hold", 1, "--pid", work.pid, "--live")
        with pytest.raises(PartitionFailed) as caught:
            partition(machine, AMPERE, "0")
        hint = caught.value.hint or ""
        assert (
            f"held by 5000702 of {FABRIC}, which was not stopped: CUDA programs may end with it: GPU 1: {work.pid}"
            in hint
        )
        assert machine.asked_of_systemd() == []
        assert work.poll() is None
    events: list[dict[str, Any]] = []
    assert len(partition(machine, AMPERE, "0", events=events)) == 2
    assert machine.asked_of_systemd() == [f"stop {FABRIC}", f"start {FABRIC}"]
    # It must not come back without a reset of all GPUs.
    assert [event["gpus"] for event in events if event["phase"] == "reset"][-1] == [0, 1]
    assert not [event for event in events if event["phase"] == "fabric"]


def test_force_stops_fabric_manager_and_says_what_that_breaks(fake_machine: Machine) -> None:
    machine = fake_machine("a100_40gb,a100_40gb")
    machine.service(FABRIC, 0, 5000702)
    machine.control("hold", 1, "--pid", 4242)
    events: list[dict[str, Any]] = []
    assert len(partition(machine, AMPERE, "0", events=events, force=True)) == 2
    assert machine.asked_of_systemd() == [f"stop {FABRIC}", f"start {FABRIC}"]
    (said,) = [event["message"] for event in events if event["phase"] == "fabric"]
    assert "NVLink SHARP may fail" in said


# Holders of partitions.


def test_a_service_that_holds_a_partition_is_stopped_and_started(fake_machine: Machine) -> None:
    """That of another GPU goes on, and that of a partition that stays."""
    machine = fake_machine("h100_80gb,h100_80gb")
    assert run(machine, "--layout", "3g.40gb*2").returncode == 0
    machine.service(DCGM, 0, 5000700, start=0)
    machine.service("stays.service", 0, 5000701, start=4)
    machine.service("other.service", 1, 5000702, start=4)
    done = run(machine, "--layout", "3g.40gb+1g.10gb*2", "--gpu", "0")
    assert done.returncode == 0, done.stderr
    assert phases(done)[:2] == ["clients", "destroy"]
    assert set(phases(done)[2:]) == {"create"}
    assert machine.asked_of_systemd() == [f"stop {DCGM}", f"start {DCGM}"]
    assert (machine.folder / "state.services" / DCGM).exists()
    assert len(machine.show()[0]["instances"]) == 3


def test_one_that_shows_no_capability_is_stopped_when_patience_is_over(fake_machine: Machine) -> None:
    """Restarting DCGM is the only help then, whatever it has open."""
    machine = fake_machine("h100_80gb")
    partition(machine, "7g.80gb")
    machine.service(DCGM, 0, 5000700, start=0)
    (machine.root / "proc/5000700/fd/4").unlink()
    assert len(partition(machine, SEVEN)) == 7
    assert machine.asked_of_systemd() == [f"stop {DCGM}", f"start {DCGM}"]


def test_services_that_stop_with_it_are_started_with_it(fake_machine: Machine) -> None:
    machine = fake_machine("h100_80gb")
    partition(machine, "7g.80gb")
    machine.service(DCGM, 0, 5000700, start=0, required_by="dcgm-exporter.service")
    machine.service("dcgm-exporter.service", None, 5000701)
    assert len(partition(machine, SEVEN)) == 7
    assert machine.asked_of_systemd() == [f"stop {DCGM}", f"start {DCGM} dcgm-exporter.service"]
    assert (machine.folder / "state.services" / "dcgm-exporter.service").exists()


def test_a_service_with_which_work_would_end_is_named(fake_machine: Machine) -> None:
    """It computes on another GPU, or what computes there requires it."""
    machine = fake_machine("h100_80gb,h100_80gb")
    partition(machine, "7g.80gb", "0")
    machine.service("vllm.service", 0, 5000700, start=0)
    machine.control("hold", 1, "--pid", 5000700)
    with pytest.raises(PartitionFailed) as caught:
        partition(machine, SEVEN, "0", force=True)
    assert "It is held by 5000700 of vllm.service, which computes on GPU 1." in (caught.value.hint or "")
    machine.control("release", 0)
    machine.service(DCGM, 0, 5000701, start=0, required_by="vllm.service")
    with pytest.raises(PartitionFailed) as caught:
        partition(machine, SEVEN, "0")
    assert f"5000701 of {DCGM}, which was not stopped: vllm.service would end with it." in (caught.value.hint or "")
    assert machine.asked_of_systemd() == []


def test_a_service_that_systemd_does_not_stop_is_named(fake_machine: Machine) -> None:
    machine = fake_machine("h100_80gb")
    partition(machine, "7g.80gb")
    machine.service(DCGM, 0, 5000700, start=0)
    (machine.folder / "state.services" / f"{DCGM}.refuses").touch()
    with pytest.raises(PartitionFailed, match=r"destroy 7g\.80gb at 0:8: IN_USE") as caught:
        partition(machine, SEVEN)
    assert f"held by 5000700 of {DCGM}, which was not stopped: Failed to stop {DCGM}: Operation refused" in str(
        caught.value
    )
    # It may still end: then it is started.
    assert machine.asked_of_systemd() == [f"stop {DCGM}", f"start {DCGM}"]


def test_what_is_no_service_is_named_and_ended_by_force(fake_machine: Machine) -> None:
    """A device plugin in a container, say: systemd knows a scope, which it cannot start again."""
    machine = fake_machine("h100_80gb")
    partition(machine, "7g.80gb")
    pod = "/kubepods.slice/kubepods-pod1.slice/cri-containerd-4f.scope"
    with sleeping() as plugin:
        machine.opens(plugin.pid, 0, start=0, group=pod, live=True)
        with pytest.raises(PartitionFailed) as caught:
            partition(machine, SEVEN)
        hint = caught.value.hint or ""
        assert f"It is held by {plugin.pid} (sleep, user root) of cri-containerd-4f.scope, which is no service" in hint
        assert "--force" in hint
        assert plugin.poll() is None
        events: list[dict[str, Any]] = []
        assert len(partition(machine, SEVEN, events=events, force=True)) == 7
        assert plugin.wait(10) == -signal.SIGTERM
    assert events[0]["phase"] == "force"
    assert machine.asked_of_systemd() == []


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_services_are_started_again_when_the_partitioning_is_ended(
    fake_machine: Machine, monkeypatch: pytest.MonkeyPatch, number: signal.Signals
) -> None:
    """As systemd does with what takes too long, and a terminal whose link breaks."""
    machine = fake_machine("h100_80gb")
    partition(machine, "7g.80gb")
    machine.service(DCGM, 0, 5000700, start=0)
    stop, start = SystemMachine.stop, SystemMachine.start

    def ended(self: SystemMachine, unit: str) -> str:
        done = stop(self, unit)
        os.kill(os.getpid(), number)
        return done

    def ended_again(self: SystemMachine, units: Sequence[str]) -> None:
        os.kill(os.getpid(), number)
        start(self, units)

    monkeypatch.setattr(SystemMachine, "stop", ended)
    monkeypatch.setattr(SystemMachine, "start", ended_again)
    before = signal.signal(number, signal.SIG_IGN)
    try:
        with pytest.raises(SystemExit) as caught:
            run(machine, "--layout", SEVEN)
        assert signal.getsignal(number) == signal.SIG_IGN, "as it was"
    finally:
        signal.signal(number, before)
    assert caught.value.code == 128 + number
    assert machine.asked_of_systemd()[-1] == f"start {DCGM}"


def test_services_are_started_again_after_a_failure(fake_machine: Machine) -> None:
    machine = fake_machine("h100_80gb", FAIL="nvmlDeviceCreateGpuInstanceWithPlacement:999:9:1")
    partition(machine, "7g.80gb")
    machine.service(DCGM, 0, 5000700, start=0)
    with pytest.raises(PartitionFailed, match="UNKNOWN"):
        partition(machine, SEVEN)
    assert machine.asked_of_systemd() == [f"stop {DCGM}", f"start {DCGM}"]


# The module of the kernel for display servers.


def test_the_display_module_is_unloaded_meanwhile(fake_machine: Machine) -> None:
    machine = fake_machine("a100_40gb,a100_40gb")
    module = machine.load_display(0, 1)
    assert len(partition(machine, AMPERE, "0")) == 2
    assert machine.asked_of_systemd() == ["rmmod nvidia_drm", "modprobe nvidia_drm"]
    assert module.exists()


def test_unless_somebody_uses_it(fake_machine: Machine) -> None:
    machine = fake_machine("a100_40gb,a100_40gb")
    (machine.load_display(0, 1) / "used").touch()
    with pytest.raises(PartitionFailed) as caught:
        partition(machine, AMPERE, "0")
    assert "nvidia_drm was not stopped: rmmod: ERROR: Module nvidia_drm is in use." in (caught.value.hint or "")


# A GPU that fails.


def test_a_gpu_that_fails_leaves_no_other_undone(fake_machine: Machine) -> None:
    machine = fake_machine(",".join(["h100_80gb"] * 4))
    partition(machine, "7g.80gb")
    machine.opens(5000700, 1, start=0, group=SESSION)
    with pytest.raises(PartitionFailed, match=r"GPU 1 .* destroy 7g\.80gb at 0:8: IN_USE") as caught:
        partition(machine, SEVEN)
    assert "GPU 0" not in str(caught.value)
    assert profiles(machine) == [["1g.10gb"] * 7, ["7g.80gb"], ["1g.10gb"] * 7, ["1g.10gb"] * 7]
    machine.control("release", 1)
    partition(machine, "7g.80gb")
    machine.opens(5000701, 0, start=0, group=SESSION)
    machine.opens(5000703, 3, start=0, group=SESSION)
    with pytest.raises(
        PartitionFailed, match=r"^accelerator\.layouts: 2 of 4 GPUs failed\. GPU 0 .*; GPU 3 "
    ) as caught:
        partition(machine, SEVEN)
    assert "accelerator.layouts[0]: Wanted: " in (caught.value.hint or "")
    assert "accelerator.layouts[3]: Wanted: " in (caught.value.hint or "")
    assert "held by 5000703 of session-3.scope" in (caught.value.hint or "")
    assert profiles(machine)[1:3] == [["1g.10gb"] * 7] * 2


def test_the_record_says_what_stands_after_a_failure(fake_machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    """The runner plans from it: what was made on the other GPUs must not go again."""
    monkeypatch.setattr(ApplyOptions.__init__, "__defaults__", (None, 0.0, False, False, None))
    machine = fake_machine("h100_80gb,h100_80gb", NAMES="7g.80gb=7g.79gb,3g.40gb=3g.39gb")
    whole, halves = (Placement("7g.80gb", 0, 8),), (Placement("3g.40gb", 0, 4), Placement("3g.40gb", 4, 4))
    arguments = config(machine, NodeAccelerator("H100", "nvidia", 2, 80.0, "h100_80gb", (whole, whole)))
    assert run(machine, *arguments).returncode == 0
    machine.opens(5000700, 1, start=0, group=SESSION)
    config(machine, NodeAccelerator("H100", "nvidia", 2, 80.0, "h100_80gb", (halves, halves)))
    assert run(machine, *arguments).returncode == 1
    found = record.read(NodeDirectory(machine.folder))
    assert found is not None and found.error is not None
    assert [(p.gpu, p.profile) for p in found.partitions] == [(0, "3g.40gb"), (0, "3g.40gb"), (1, "7g.79gb")]
    assert all(p.uuid for p in found.partitions)


def test_a_mode_that_stays_pending_leaves_no_other_gpu_undone(fake_machine: Machine) -> None:
    machine = fake_machine("a100_40gb,a100_40gb")
    machine.opens(5000700, 0, group=SESSION)
    with pytest.raises(PartitionFailed, match=r"GPU 0 .* stays pending") as caught:
        partition(machine, AMPERE)
    assert "held by 5000700 of session-3.scope, which is no service" in (caught.value.hint or "")
    assert profiles(machine) == [[], ["2g.10gb", "3g.20gb"]]


def test_a_destroy_that_has_no_effect_is_tried_again(fake_machine: Machine) -> None:
    machine = fake_machine("h100_80gb", STAY="2")
    partition(machine, "7g.80gb")
    assert len(partition(machine, SEVEN, patience_s=10)) == 7
    assert machine.calls()["nvmlGpuInstanceDestroy"] == 3


def test_and_blames_nobody_where_it_never_has(fake_machine: Machine) -> None:
    machine = fake_machine("h100_80gb", STAY="1000")
    partition(machine, "7g.80gb")
    with pytest.raises(
        PartitionFailed, match=r"NVML answers that 7g\.80gb at 0:8 was destroyed, and it is still there"
    ) as (caught):
        partition(machine, SEVEN)
    assert "fuser" not in str(caught.value) and "Stop" not in str(caught.value)
    assert "Run it again." in (caught.value.hint or "")


def test_a_mode_that_is_in_use_is_tried_again(fake_machine: Machine) -> None:
    machine = fake_machine("h100_80gb", FAIL="nvmlDeviceSetMigMode:19:2")
    assert len(partition(machine, "3g.40gb", patience_s=10)) == 2


def test_also_while_a_process_ends(fake_machine: Machine) -> None:
    """Ampere: the mode would stay pending, and the GPU be reset."""
    machine = fake_machine("a100_40gb")
    with sleeping(1) as monitor:
        machine.opens(monitor.pid, 0, group=SESSION, live=True)
        events: list[dict[str, Any]] = []
        assert len(partition(machine, AMPERE, events=events, patience_s=60)) == 2
    assert [event["phase"] for event in events] == ["mode", "create", "create"]


# What systemd and the kernel say of a process.


@pytest.mark.parametrize(
    ("text", "unit"),
    [
        ("0::/system.slice/nvidia-dcgm.service\n", DCGM),
        ("12:devices:/system.slice\n1:name=systemd:/system.slice/nvidia-dcgm.service\n0::/\n", DCGM),
        ("0::/system.slice/exporter.service/libpod-payload-1\n", "exporter.service"),
        ("0::/system.slice/k3s.service/kubepods.slice/cri-containerd-1.scope\n", "cri-containerd-1.scope"),
        ("0::/user.slice/user-1.slice/session-3.scope\n", "session-3.scope"),
        ("0::/user.slice/user-1.slice/user@1.service/app.slice/x.service\n", None),
        ("0::/docker/12ab\n", None),
        ("", None),
    ],
)
def test_the_unit_of_a_process(tmp_path: Path, text: str, unit: str | None) -> None:
    (tmp_path / "7").mkdir()
    (tmp_path / "7" / "cgroup").write_text(text)
    assert processes.unit(7, proc=tmp_path) == unit
    assert processes.unit(8, proc=tmp_path) is None


def test_who_has_a_file_open(tmp_path: Path) -> None:
    for pid, file in ((7, "/dev/nvidia0"), (8, "/dev/nvidia1"), (9, "/dev/nvidia0 (deleted)")):
        (tmp_path / str(pid) / "fd").mkdir(parents=True)
        (tmp_path / str(pid) / "fd" / "3").symlink_to(file)
    assert processes.holding({"/dev/nvidia0"}, proc=tmp_path) == [7, 9]
    with (tmp_path / "open").open("w") as file:
        assert processes.holding({str(tmp_path / "open")}) == [], "not this process"
        with subprocess.Popen(["sleep", "600"], stdin=file) as process:
            assert processes.holding({str(tmp_path / "open")}) == [process.pid]
            process.kill()
