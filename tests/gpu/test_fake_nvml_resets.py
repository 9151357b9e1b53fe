"""The fake NVIDIA driver: its clients, resets and reboots."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable

import pynvml
import pytest
from devices.nvml_worlds import Fake, at, partition, refused
from fake_nvml.fake_machine import FakeMachine

Machine = Callable[..., FakeMachine]


CLIENT = "import pynvml, sys; pynvml.nvmlInit(); print(flush=True); sys.stdin.read()"


@pytest.mark.parametrize(("model", "status"), [("a100_40gb", pynvml.NVML_ERROR_IN_USE), ("h100_80gb", 0)])
def test_a_monitor_keeps_the_mode_of_ampere_pending(fake_machine: Machine, model: str, status: int) -> None:
    """Any process that has NVML open is a client, and the kernel forgets it when it ends."""
    machine = fake_machine(model)
    command = [sys.executable, "-c", CLIENT]
    with machine.loaded():
        gpu = Fake(machine).gpu()
        pipe = subprocess.PIPE
        with subprocess.Popen(command, env=machine.environment(), stdin=pipe, stdout=pipe) as monitor:
            assert monitor.stdout is not None
            monitor.stdout.readline()
            assert gpu.set_mig_mode(True) == status
            assert gpu.mig_mode() == (status == 0, True)
            monitor.kill()
        assert gpu.set_mig_mode(True) == 0
        assert gpu.mig_mode() == (True, True)


def test_a_reset_wants_nvml_closed(fake_machine: Machine) -> None:
    machine = fake_machine("a100_40gb,a100_40gb")
    with machine.loaded():
        here = Fake(machine)
        addresses = [gpu.bus_id for gpu in here.nvml().gpus()]
        here.gpu(0).set_mig_mode(True)
        partition(here.gpu(0), "3g.20gb", 0, 4)
        refused_reset = machine.reset(*addresses)
        here.nvml().close()
        done = machine.reset(*addresses)
    assert refused_reset.returncode == 255
    assert "GPU 00000000:1B:00.0: In use by another client\n  GPU 00000000:28:00.0" in refused_reset.stdout
    assert done.returncode == 0
    assert "GPU 00000000:28:00.0 was successfully reset.\nAll done.\n" in done.stdout
    assert [len(gpu["instances"]) for gpu in machine.show()] == [0, 0]


def test_what_cannot_be_reset(fake_machine: Machine) -> None:
    machine = fake_machine("a100_40gb,a100_40gb")
    machine.control("hold", 1)
    done = machine.reset("0000:1b:00.0", "0000:28:00.0")
    assert done.returncode == 255
    assert "  GPU 00000000:28:00.0: In use by another client\n\n1 device is currently" in done.stdout
    machine.control("release", 1)
    machine.control("passthrough", 1)
    done = machine.reset("0000:28:00.0")
    assert (done.returncode, done.stdout) == (3, "Resetting GPU 00000000:28:00.0 is not supported.\n")
    assert machine.reset("0000:99:00.0").returncode == 6


def test_nvidia_smi_does_nothing_else(fake_machine: Machine) -> None:
    machine = fake_machine()
    done = subprocess.run([machine.driver / "nvidia-smi", "-L"], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (2, "")
    assert "only: nvidia-smi --gpu-reset -i" in done.stderr


def test_a_process_holds_as_long_as_it_lives(fake_machine: Machine) -> None:
    machine = fake_machine()
    with machine.loaded():
        gpu = Fake(machine).gpu()
        gpu.set_mig_mode(True)
        partition(gpu, "3g.40gb", 0, 4)
        with subprocess.Popen(["sleep", "60"]) as process:
            machine.control("hold", 0, "--pid", process.pid, "--start", 0, "--live")
            assert gpu.processes() == (process.pid,)
            refused(pynvml.NVML_ERROR_IN_USE, gpu.empty, at(gpu, 0))
            process.kill()
        assert gpu.processes() == ()
        gpu.empty(at(gpu, 0))


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (("hold", "8"), 2, "expected a number below 1, got 8"),
        (("hold", "0", "--start", "3"), 1, "there is no instance at 3"),
        (("hold", "0", "--loud"), 2, "fake-nvml-ctl hold GPU"),
        (("new", "h100"), 1, 'no model "h100"'),
        (("explode",), 2, "fake-nvml-ctl reboot"),
        ((), 2, "fake-nvml-ctl reboot"),
    ],
)
def test_the_control_program_refuses(
    fake_machine: Machine, arguments: tuple[str, ...], code: int, message: str
) -> None:
    machine = fake_machine()
    command = [machine.driver / "fake-nvml-ctl", *arguments]
    done = subprocess.run(command, env=machine.environment(), capture_output=True, text=True, check=False)
    assert done.returncode == code
    assert message in done.stderr
    assert machine.show()[0]["processes"] == []
