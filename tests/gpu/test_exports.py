"""Layouts of machines with the fake driver, as Slurm and the device plugin of Kubernetes take it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from capability_files import list_capabilities
from fake_nvml.fake_machine import FakeMachine
from test_partition_on_fake import run

from skyinfra import PartitionFailed
from skyinfra.gpu import live
from skyinfra.gpu.hardware import session
from skyinfra.gpu.nvml import Nvml

Machine = Callable[..., FakeMachine]


def gres(machine: FakeMachine, root: Path) -> tuple[str, tuple[str, ...]]:
    with machine.loaded(), session(Nvml()) as nvml:
        return live.gres(nvml, root=root)


def lines(text: str) -> list[str]:
    return [line.partition(" #")[0] for line in text.splitlines() if not line.startswith("#")]


def test_gres_conf_of_whole_and_partitioned_gpus(fake_machine: Machine, tmp_path: Path) -> None:
    machine = fake_machine("h100_80gb,h100_80gb,t4")
    assert run(machine, "--layout", "3g.40gb+1g.10gb", "--gpu", "1").returncode == 0
    list_capabilities(machine, tmp_path)
    text, warnings = gres(machine, tmp_path)
    assert warnings == ()
    assert "Gres=gpu:nvidia_h100_80gb_hbm3:1,gpu:" in text
    found = lines(text)
    assert found[:2] == ["AutoDetect=off", "Name=gpu Type=nvidia_h100_80gb_hbm3 File=/dev/nvidia0 Flags=nvidia_gpu_env"]
    assert found[-1] == "Name=gpu Type=tesla_t4 File=/dev/nvidia2 Flags=nvidia_gpu_env" or "t4" in found[-1]
    parts = sorted(found[2:-1])
    assert [part.split()[1] for part in parts] == ["Type=1g.10gb", "Type=3g.40gb"]
    files = {file for part in parts for file in part.split()[2].removeprefix("MultipleFiles=").split(",")}
    caps = {f"/dev/nvidia-caps/nvidia-cap{minor}" for minor in range(21, 25)}
    assert files == {"/dev/nvidia1", *caps}, "the GPU, and for each partition its GPU and its compute instance"
    assert text.count("# MIG-") == 2


def test_a_gpu_without_partitions_is_a_warning(fake_machine: Machine, tmp_path: Path) -> None:
    machine = fake_machine("h100_80gb")
    assert run(machine, "--layout", "7g.80gb").returncode == 0
    script = "import pynvml as n; n.nvmlInit(); d = n.nvmlDeviceGetHandleByIndex(0)\n"
    script += "from skyinfra.gpu.nvml import Nvml\ng = Nvml().gpus()[0]\n"
    script += "for i in g.instances(): g.empty(i); g.destroy(i)"
    assert machine.python("-c", script).returncode == 0
    text, warnings = gres(machine, tmp_path)
    assert (lines(text), len(warnings)) == (["AutoDetect=off"], 1)


def test_without_capability_files_nothing_is_guessed(fake_machine: Machine, tmp_path: Path) -> None:
    machine = fake_machine("h100_80gb")
    assert run(machine, "--layout", "7g.80gb").returncode == 0
    with pytest.raises(PartitionFailed, match="lists no capability files"):
        gres(machine, tmp_path)
    folder = tmp_path / "proc/driver/nvidia/capabilities/gpu0/mig/gi0/ci0"
    folder.mkdir(parents=True)
    (folder.parent / "access").write_text("DeviceFileMinor: 3\n")
    (folder / "access").write_text("something else\n")
    with pytest.raises(PartitionFailed, match="no DeviceFileMinor"):
        gres(machine, tmp_path)


def test_the_command_line(fake_machine: Machine) -> None:
    machine = fake_machine("h100_80gb,h100_80gb")
    assert run(machine, "--export", "--format", "device-plugin").stdout.endswith("migStrategy: none\n")
    assert run(machine, "--layout", "1g.10gb").returncode == 0
    text = run(machine, "--export", "--format", "device-plugin").stdout
    assert text.endswith("migStrategy: single\n")
    assert "#   nvidia.com/gpu: 14\n" in text
    assert run(machine, "--export", "--format", "mig-parted").stdout == run(machine, "--export").stdout
    wrong = machine.python("-m", "skyinfra.runner", "partition", "--layout", "off", "--format", "gres")
    assert (wrong.returncode, "--format goes with --export" in wrong.stderr) == (2, True)
