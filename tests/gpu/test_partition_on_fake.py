"""``skyinfra-runner partition`` on machines with the fake driver."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from unittest import mock

import pynvml
import pytest
from devices.partitioning import CHANGING, EIGHT, MIXED, SEVEN, changes, config, events, phases, profiles, program, run
from fake_nvml.fake_machine import FakeMachine

from skyinfra import PartitionBusy
from skyinfra.gpu import partitioner, targets
from skyinfra.gpu.hardware import session
from skyinfra.gpu.nvml import Nvml
from skyinfra.gpu.partitioner import ApplyOptions
from skyinfra.mig import Placement
from skyinfra.protocol.nodeconfig import NodeAccelerator

Machine = Callable[..., FakeMachine]


# What the issue shows.


def test_a_mixed_layout_on_all_gpus_then_seven_on_one(fake_machine: Machine) -> None:
    machine = fake_machine(EIGHT)
    for layout, gpu in ((MIXED, "all"), (SEVEN, "0")):
        done = program(machine, "--layout", layout, "--gpu", gpu)
        assert done.returncode == 0, done.stderr
        assert program(machine, "--layout", layout, "--gpu", gpu, "--check").returncode == 0
        machine.forget_calls()
        again = program(machine, "--layout", layout, "--gpu", gpu)
        assert (again.returncode, phases(again), changes(machine)) == (0, [], 0)
        assert events(again) == [event for event in events(done) if event["event"] == "standing"]
    assert profiles(machine) == [["1g.10gb"] * 7] + 7 * [["2g.20gb", "1g.10gb", "1g.10gb", "3g.40gb"]]
    assert program(machine, "--layout", SEVEN, "--gpu", "0", "--check").returncode == 0
    assert program(machine, "--layout", MIXED, "--gpu", "1,2,3,4,5,6,7", "--check").returncode == 0
    differs = program(machine, "--layout", MIXED, "--gpu", "all", "--check")
    assert differs.returncode == 1
    assert {event["gpu"] for event in events(differs)} == {0}


def test_the_exact_words_of_the_issue(fake_machine: Machine) -> None:
    """``skyinfra-runner`` by its name, with LD_LIBRARY_PATH alone."""
    machine = fake_machine(EIGHT)
    command = f'skyinfra-runner partition --layout "{MIXED}" --gpu all'
    for suffix in ("", " --check"):
        shell = ["sh", "-c", command + suffix]
        done = subprocess.run(shell, env=machine.environment(), capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr


def test_eight_gpus_into_56_instances(fake_machine: Machine, record_property: Callable[[str, object], None]) -> None:
    machine = fake_machine(EIGHT)
    done = program(machine, "--layout", SEVEN, "--gpu", "all")
    assert [len(gpu["instances"]) for gpu in machine.show()] == [7] * 8
    assert len({event["uuid"] for event in events(done) if event["event"] == "standing"}) == 56
    calls = machine.calls()
    assert {name: calls[name] for name in sorted(CHANGING) if calls[name]} == {
        "nvmlDeviceCreateGpuInstanceWithPlacement": 56,
        "nvmlDeviceSetMigMode": 8,
        "nvmlGpuInstanceCreateComputeInstance": 56,
    }
    total = sum(calls.values())
    record_property("nvml_calls", total)
    # Each GPU is asked for its profiles and places before and after its mode changes, and what stands is read again.
    assert total < 1200


def test_no_gpu_named_is_not_all_of_them(fake_machine: Machine) -> None:
    """As in ``--gpu "$GPUS"`` where the variable is not set."""
    machine = fake_machine("h100_80gb")
    for given in ("", " "):
        done = run(machine, "--layout", SEVEN, "--gpu", given)
        assert (done.returncode, changes(machine)) == (2, 0)
        assert f"--gpu: all, or indices of GPUs (given: '{given}')" in done.stderr


def test_a_reader_of_the_events_that_goes_stops_nothing(fake_machine: Machine) -> None:
    """As in ``skyinfra-runner partition ... | head -1``."""
    machine = fake_machine("h100_80gb,h100_80gb")
    command = [sys.executable, "-m", "skyinfra.runner", "partition", "--layout", SEVEN]
    reading, writing = os.pipe()
    os.close(reading)
    with os.fdopen(writing, "wb") as out:
        done = subprocess.run(
            command, env=machine.environment(), stdout=out, stderr=subprocess.PIPE, text=True, check=False
        )
    assert (done.returncode, done.stderr) == (0, "")
    assert profiles(machine) == [["1g.10gb"] * 7] * 2


def test_a_driver_that_is_too_old_for_what_stands_together(fake_machine: Machine) -> None:
    """It has 4g and 3g, but not beside each other: found before what stands has gone."""
    machine = fake_machine("a100_80gb", DRIVER="470.57.02")
    assert run(machine, "--layout", "4g.40gb+2g.20gb").returncode == 0
    machine.forget_calls()
    for mode in ((), ("--check",), ("--dry-run",)):
        done = run(machine, "--layout", "4g.40gb+3g.40gb", *mode)
        assert (done.returncode, changes(machine)) == (2, 0)
        assert "GPU 0 (NVIDIA A100-SXM4-80GB): 4g.40gb+3g.40gb on a100_80gb needs driver 510 or later" in done.stderr
    assert run(machine, "--layout", "4g.40gb+3g.40gb", DRIVER="510.47.03").returncode == 0


# Only the difference is touched.


def test_what_is_right_stays(fake_machine: Machine) -> None:
    machine = fake_machine("h100_80gb,h100_80gb")
    before = events(run(machine, "--layout", "3g.40gb+2g.20gb*2", "--gpu", "all"))
    kept = {event["uuid"] for event in before if event.get("profile") == "3g.40gb" and event["event"] == "standing"}
    machine.control("hold", 0, "--pid", 4242, "--start", 4)
    machine.forget_calls()
    after = run(machine, "--layout", MIXED, "--gpu", "all")
    assert after.returncode == 0, after.stderr
    assert kept <= {event["uuid"] for event in events(after) if event["event"] == "standing"}
    # On each GPU one 2g.20gb goes and two 1g.10gb come.
    assert machine.calls()["nvmlGpuInstanceDestroy"] == 2
    assert machine.calls()["nvmlDeviceCreateGpuInstanceWithPlacement"] == 4
    assert machine.calls()["nvmlDeviceSetMigMode"] == 0


def test_a_look_changes_nothing(fake_machine: Machine) -> None:
    machine = fake_machine("h100_80gb,a100_40gb")
    run(machine, "--layout", "3g.40gb", "--gpu", "0")
    machine.forget_calls()
    before = machine.show()
    for arguments, code in (
        (("--layout", MIXED, "--gpu", "0", "--dry-run"), 0),
        (("--layout", MIXED, "--gpu", "0", "--check"), 1),
        (("--layout", "1g.5gb*7", "--gpu", "1", "--check"), 1),
        (("--export",), 0),
    ):
        assert run(machine, *arguments).returncode == code
    assert machine.show() == before
    assert changes(machine) == 0


# Several models in one node.


def test_gpus_of_several_models(fake_machine: Machine) -> None:
    machine = fake_machine("h100_80gb,a30,rtx_pro_6000,t4")
    layouts = {"0": MIXED, "1": "2g.12gb+1g.6gb*2", "2": "1g.24gb+me.all+1g.24gb-me*3"}
    for gpu, layout in layouts.items():
        done = run(machine, "--layout", layout, "--gpu", gpu)
        assert done.returncode == 0, done.stderr
    assert [len(found) for found in profiles(machine)] == [4, 3, 4, 0]
    for gpu, layout in layouts.items():
        assert run(machine, "--layout", layout, "--gpu", gpu, "--check").returncode == 0
    exported = run(machine, "--export")
    assert exported.returncode == 0
    assert '"1g.24gb-me": 3' in exported.stdout or "1g.24gb-me: 3" in exported.stdout
    assert run(machine, "--layout", "off", "--gpu", "0,1,2").returncode == 0
    assert [gpu["current"] for gpu in machine.show()] == [0, 0, 0, 0]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--layout", "3g.40gb", "--gpu", "all"), "a30"),
        (("--layout", "3g.20gb", "--gpu", "0"), "3g.20gb"),
        (("--layout", "1g.10gb*8", "--gpu", "0"), "1g.10gb"),
        (("--layout", "1g.5gb", "--gpu", "2"), "Tesla T4"),
        (("--layout", "3g.40gb", "--gpu", "9"), "this node has 3 GPUs"),
        (("--layout", "3g.40gb", "--gpu", "x"), "Write it like 0 or 0,3."),
        (("--layout", "a lot", "--gpu", "0"), "a lot"),
    ],
)
def test_what_cannot_be_is_refused_before_anything_is_touched(
    fake_machine: Machine, arguments: tuple[str, ...], message: str
) -> None:
    machine = fake_machine("h100_80gb,a30,t4")
    done = run(machine, *arguments)
    assert done.returncode == 2, done.stderr
    assert message in done.stderr
    assert changes(machine) == 0


# Who may not, and who is in the way.


def test_only_root_may(fake_machine: Machine) -> None:
    machine = fake_machine(UNPRIVILEGED="1")
    done = run(machine, "--layout", "3g.40gb")
    assert done.returncode == 1
    assert "NO_PERMISSION (4)" in done.stderr
    assert "sudo skyinfra-runner partition" in done.stderr


def test_a_busy_partition_is_not_destroyed(fake_machine: Machine) -> None:
    machine = fake_machine("h100_80gb,h100_80gb")
    assert run(machine, "--layout", "3g.40gb", "--gpu", "all").returncode == 0
    before = machine.show()
    with subprocess.Popen(["sleep", "600"]) as process, machine.loaded(), session(Nvml()) as nvml:
        machine.control("hold", 1, "--pid", process.pid, "--start", 4, "--live")
        with pytest.raises(PartitionBusy) as caught:
            partitioner.apply(nvml, targets.given(nvml, SEVEN, "all"), options=ApplyOptions(patience_s=0))
        process.kill()
    used = f"GPU 1 (NVIDIA H100 80GB HBM3): 3g.40gb at 4:4 is used by {process.pid} (sleep"
    assert used in str(caught.value)
    assert "--force" in str(caught.value)
    assert [gpu["instances"] for gpu in machine.show()] == [gpu["instances"] for gpu in before]


def test_unless_by_force(fake_machine: Machine) -> None:
    machine = fake_machine("h100_80gb,h100_80gb")
    assert run(machine, "--layout", "3g.40gb", "--gpu", "all").returncode == 0
    with subprocess.Popen(["sleep", "600"]) as process:
        machine.control("hold", 1, "--pid", process.pid, "--start", 4, "--live")
        forced = run(machine, "--layout", SEVEN, "--gpu", "all", "--force")
        assert process.wait(timeout=10) != 0
    assert forced.returncode == 0, forced.stderr
    assert phases(forced)[0] == "force"
    assert profiles(machine) == [["1g.10gb"] * 7] * 2


def test_an_instance_that_lingers_is_waited_for(fake_machine: Machine) -> None:
    machine = fake_machine(LINGER="2")
    assert run(machine, "--layout", "7g.80gb").returncode == 0
    done = run(machine, "--layout", MIXED)
    assert done.returncode == 0, done.stderr
    assert machine.calls()["nvmlGpuInstanceDestroy"] == 3
    assert machine.calls()["nvmlComputeInstanceDestroy"] == 1


# Drivers.


@pytest.mark.parametrize(
    "settings",
    [
        {"NAMES": "3g.40gb=3g.39gb,4g.40gb=4g.39gb,7g.80gb=7g.79gb"},
        {"SILENT_WHILE_OFF": "1"},
        {"UNDERSTATE": "1"},
        {"STALE": "1"},
    ],
    ids=lambda settings: next(iter(settings)),
)
def test_on_drivers_that_do_it_differently(fake_machine: Machine, settings: dict[str, str]) -> None:
    machine = fake_machine("a100_80gb", **settings)
    for layout in (MIXED, SEVEN, "off", MIXED):
        done = run(machine, "--layout", layout)
        assert done.returncode == 0, done.stderr
        assert run(machine, "--layout", layout, "--check").returncode == 0
    assert profiles(machine) == [["2g.20gb", "1g.10gb", "1g.10gb", "3g.40gb"]]


def test_on_a_driver_before_r510(fake_machine: Machine) -> None:
    machine = fake_machine("a100_40gb", old=True)
    assert run(machine, "--layout", "3g.20gb+2g.10gb+1g.5gb*2").returncode == 0
    assert run(machine, "--layout", "3g.20gb+2g.10gb+1g.5gb*2", "--check").returncode == 0


def test_a_driver_that_is_too_old_for_the_layout_changes_nothing(fake_machine: Machine) -> None:
    """Before R510, 4g and 3g do not stand together."""
    machine = fake_machine("a100_40gb", old=True)
    assert run(machine, "--layout", "2g.10gb").returncode == 0
    machine.forget_calls()
    layout = (Placement("4g.20gb", 0, 4), Placement("3g.20gb", 4, 4))
    accelerator = NodeAccelerator("A100-40GB", "nvidia", 1, 40.0, "a100_40gb", (layout,))
    for source in (["--layout", "4g.20gb+3g.20gb"], config(machine, accelerator)):
        done = run(machine, *source)
        assert done.returncode == 2, done.stderr
        assert "needs driver 510 or later (given: '470.223.02')" in done.stderr
        assert changes(machine) == 0
    assert profiles(machine) == [["2g.10gb"] * 3]


def test_a_driver_without_gpus(fake_machine: Machine) -> None:
    machine = fake_machine("a100_40gb")
    with mock.patch.object(pynvml, "nvmlDeviceGetCount", return_value=0):
        done = run(machine, "--layout", "2g.10gb", "--check")
    assert done.returncode == 1
    assert "AcceleratorMissing: accelerator: the driver sees no GPU" in done.stderr


def test_without_a_driver(tmp_path: Path, fake_machine: Machine) -> None:
    machine = fake_machine()
    machine.driver = tmp_path
    done = program(machine, "--layout", "3g.40gb")
    assert done.returncode == 1
    assert "libnvidia-ml.so.1 not found" in done.stderr


# A mode that stays pending: services, resets, one reboot.

AMPERE = "3g.20gb+2g.10gb"


@pytest.mark.slow
def test_services_that_hold_the_gpu_are_stopped_meanwhile(fake_machine: Machine) -> None:
    machine = fake_machine("a100_40gb,a100_40gb")
    machine.service("nvidia-dcgm.service", 1, 700)
    done = run(machine, "--layout", AMPERE, "--gpu", "0")
    assert (done.returncode, phases(done)) == (0, ["mode", "create", "create"]), "the other GPU is of no concern"
    assert machine.asked_of_systemd() == []
    done = run(machine, "--layout", AMPERE, "--gpu", "1")
    assert done.returncode == 0, done.stderr
    assert phases(done) == ["clients", "mode", "create", "create"]
    assert machine.asked_of_systemd() == ["stop nvidia-dcgm.service", "start nvidia-dcgm.service"]
    assert profiles(machine) == [["2g.10gb", "3g.20gb"]] * 2
    assert [process["pid"] for process in machine.show()[1]["processes"]] == [700]


def test_hopper_does_not_mind_a_monitor(fake_machine: Machine) -> None:
    machine = fake_machine("h100_80gb")
    machine.service("nvidia-dcgm.service", 0, 700)
    done = run(machine, "--layout", "3g.40gb")
    assert done.returncode == 0, done.stderr
    assert machine.asked_of_systemd() == []


def test_a_mode_that_is_pending_already_is_made_active(fake_machine: Machine) -> None:
    """Somebody asked for it while the GPU was in use, or the power went between the two steps."""
    machine = fake_machine("a100_40gb")
    with machine.loaded():
        machine.control("hold", 0)
        Nvml().open()
        assert Nvml().gpus()[0].set_mig_mode(True) != 0
    machine.control("release", 0)
    assert (machine.show()[0]["current"], machine.show()[0]["pending"]) == (0, 1)
    assert run(machine, "--layout", AMPERE).returncode == 0
    assert profiles(machine) == [["2g.10gb", "3g.20gb"]]


@pytest.mark.slow
def test_a_monitor_that_is_no_known_service_is_named(fake_machine: Machine) -> None:
    machine = fake_machine("a100_40gb")
    machine.control("hold", 0, "--pid", 700, "--look")
    done = run(machine, "--layout", AMPERE)
    assert done.returncode == 1
    assert "MIG stays pending instead of on; a reset or reboot is needed: IN_USE (19)" in done.stderr
    assert "The reset was refused: The following GPUs could not be reset: GPU 00000000:1B:00.0" in done.stderr
    machine.control("release", 0)
    assert run(machine, "--layout", AMPERE).returncode == 0


def test_in_a_virtual_machine_it_takes_one_reboot(fake_machine: Machine) -> None:
    machine = fake_machine("a100_40gb")
    machine.control("passthrough", 0)
    arguments = config(machine)
    done = run(machine, *arguments)
    assert done.returncode == 1
    assert "RESET_REQUIRED (16)" in done.stderr
    assert "The reset was refused: Resetting GPU 00000000:1B:00.0 is not supported.\n" in done.stderr
    assert machine.asked_of_systemd() == []
    done = run(machine, *arguments, "--reboot")
    assert done.returncode != 0
    assert "NodeRebooting: the node reboots once to turn MIG on on GPU 0" in done.stderr
    assert machine.asked_of_systemd() == ["reboot"]
    assert (machine.show()[0]["current"], machine.show()[0]["pending"]) == (1, 1)
    done = run(machine, *arguments, "--reboot")
    assert (done.returncode, phases(done)) == (0, ["create", "create"]), done.stderr
    assert machine.asked_of_systemd() == ["reboot"]
    assert run(machine, *arguments, "--check").returncode == 0


def test_a_reset_activates_the_mode(fake_machine: Machine) -> None:
    """With NVML closed meanwhile, or it is refused; and on those GPUs alone that need it."""
    machine = fake_machine("a100_40gb,a100_40gb,a100_40gb", NEEDS_RESET="1")
    done = run(machine, "--layout", AMPERE, "--gpu", "0,2")
    assert done.returncode == 0, done.stderr
    assert phases(done) == ["mode", "mode", "reset", "mode", "mode", "create", "create", "create", "create"]
    (reset,) = (event for event in events(done) if event.get("phase") == "reset")
    assert reset["gpus"] == [0, 2]
    assert profiles(machine) == [["2g.10gb", "3g.20gb"], [], ["2g.10gb", "3g.20gb"]]
    machine.forget_calls()
    again = run(machine, "--layout", AMPERE, "--gpu", "0,2")
    assert (again.returncode, phases(again), changes(machine)) == (0, [], 0)
    # A reset for the mode of one GPU leaves the others as they are.
    off = run(machine, "--layout", "off", "--gpu", "2")
    assert off.returncode == 0, off.stderr
    assert profiles(machine) == [["2g.10gb", "3g.20gb"], [], []]
    assert [gpu["current"] for gpu in machine.show()] == [1, 0, 0]


def test_a_guest_of_vgpu_names_profiles_one_gigabyte_lower(fake_machine: Machine) -> None:
    machine = fake_machine("h100_80gb", NAMES="1g.10gb=1g.9gb,3g.40gb=3g.39gb")
    for expected in (["mode", *["create"] * 4], []):
        done = run(machine, "--layout", "1g.10gb*3+3g.40gb")
        assert (done.returncode, phases(done)) == (0, expected), done.stderr
    assert run(machine, "--layout", "1g.10gb*3+3g.40gb", "--check").returncode == 0
    assert "has no profile of that name" in run(machine, "--layout", "1g.7gb").stderr
