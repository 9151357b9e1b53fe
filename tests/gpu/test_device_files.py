"""The device files of NVIDIA's driver, in a folder that stands for the root of a machine."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from skyinfra.doctor import nvidia
from skyinfra.gpu import machine
from skyinfra.gpu.machine import SystemMachine

ACCESS = {"mig/config": 1, "gpu0/mig/gi1/access": 12, "gpu0/mig/gi1/ci0/access": 13, "mig/monitor": 2}
# What nvidia-modprobe does: -u is the module of unified memory, -f a capability's file in /proc.
MODPROBE = """#!/bin/sh
echo "$@" >> {root}/asked
while [ $# -gt 0 ]; do
  case "$1" in
  -u) : > {root}/dev/nvidia-uvm ;;
  -c) shift ;;
  -f) shift; mkdir -p {root}/dev/nvidia-caps
      : > {root}/dev/nvidia-caps/nvidia-cap$(sed -n 's/DeviceFileMinor: //p' "$1") ;;
  esac
  shift
done
"""


@pytest.fixture
def root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A machine whose driver has made a partition; root works on it, and it has no nvidia-modprobe."""
    (tmp_path / "dev").mkdir()
    (tmp_path / "bin").mkdir()
    proc = tmp_path / "proc/driver/nvidia"
    proc.mkdir(parents=True)
    (proc / "version").write_text("NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  570.86.15\n")
    for name, minor in ACCESS.items():
        file = proc / "capabilities" / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(f"DeviceFileMinor: {minor}\nDeviceFileMode: 292\nDeviceFileModify: 1\n")
    monkeypatch.setattr(machine, "_ROOT", tmp_path)
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}:/usr/bin:/bin")
    return tmp_path


def give_program(root: Path, text: str = MODPROBE) -> None:
    program = root / "bin/nvidia-modprobe"
    program.write_text(text.format(root=root))
    program.chmod(0o755)


def names(root: Path) -> list[str]:
    return [str(file.relative_to(root / "dev")) for file in machine.missing_files(root)]


def test_what_is_not_there_is_made_by_the_drivers_own_program(root: Path) -> None:
    give_program(root)
    assert names(root) == [
        "nvidia-uvm",
        "nvidia-caps/nvidia-cap12",
        "nvidia-caps/nvidia-cap13",
        "nvidia-caps/nvidia-cap2",
    ]
    assert SystemMachine().make_device_files() == ""
    assert names(root) == []
    proc = root / "proc/driver/nvidia/capabilities"
    files = [f"-f {proc / name}" for name in ACCESS if name != "mig/config"]
    assert (root / "asked").read_text().splitlines() == ["-u -c 0", " ".join(files)]
    # Where all are there, nothing is asked for.
    assert SystemMachine().make_device_files() == ""
    assert len((root / "asked").read_text().splitlines()) == 2


def test_a_new_partition_needs_its_own(root: Path) -> None:
    give_program(root)
    SystemMachine().make_device_files()
    file = root / "proc/driver/nvidia/capabilities/gpu1/mig/gi3/access"
    file.parent.mkdir(parents=True)
    file.write_text("DeviceFileMinor: 30\nDeviceFileMode: 292\n")
    assert names(root) == ["nvidia-caps/nvidia-cap30"]
    assert SystemMachine().make_device_files() == ""
    assert names(root) == []


def test_without_partitions_it_is_unified_memory_alone(root: Path) -> None:
    give_program(root)
    for name in ACCESS:
        if name.startswith("gpu"):
            (root / "proc/driver/nvidia/capabilities" / name).unlink()
    assert SystemMachine().make_device_files() == ""
    assert (root / "asked").read_text() == "-u -c 0\n"


def test_what_could_not_be_made_is_named_with_the_reason(root: Path) -> None:
    uvm, last = f"{root}/dev/nvidia-uvm, ", f"{root}/dev/nvidia-caps/nvidia-cap2: "
    made = SystemMachine().make_device_files()
    assert made.startswith(uvm) and made.endswith(f"{last}there is no nvidia-modprobe")
    give_program(root, "#!/bin/sh\necho no module >&2\nexit 1\n")
    assert SystemMachine().make_device_files().endswith(f"{last}no module; no module")
    give_program(root, "#!/bin/sh\n")
    assert SystemMachine().make_device_files().endswith(f"{last}nvidia-modprobe did not make it")


def test_nothing_is_asked_without_a_driver_or_by_who_may_not(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    assert SystemMachine().make_device_files() == ""
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    (root / "proc/driver/nvidia/version").unlink()
    assert SystemMachine().make_device_files() == ""
    assert machine.needed_files(root) == ()


def test_doctor_names_what_is_missing(root: Path) -> None:
    [finding] = nvidia._device_files(root)
    assert (finding.what, finding.result) == ("device files", "wrong")
    assert f"{root}/dev/nvidia-uvm is missing; " in finding.found and "nvidia-modprobe" in finding.to_do
    give_program(root)
    SystemMachine().make_device_files()
    [finding] = nvidia._device_files(root)
    assert (finding.result, finding.found, finding.to_do) == ("ok", "all there", "")
    (root / "proc/driver/nvidia/version").unlink()
    assert list(nvidia._device_files(root)) == []
