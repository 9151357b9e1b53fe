"""Layouts of machines with the fake driver, as Slurm and the device plugin of Kubernetes take it."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
from checks.parted import ODD_PARTED_CONFIGS
from devices.capability_files import list_capabilities
from devices.gres import gres, lines
from devices.partitioning import run
from fake_nvml.fake_machine import FakeMachine

from skyinfra import PartitionFailed, mig
from skyinfra.gpu import actual, exports, partitioner, targets
from skyinfra.gpu.hardware import session
from skyinfra.gpu.nvml import Nvml
from skyinfra.gpu.simulated.driver import SimulatedDriver
from skyinfra.protocol.nodeconfig import NodeAccelerator
from skyinfra.runner import cli

Machine = Callable[..., FakeMachine]


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
    assert (wrong.returncode, "--format needs --export" in wrong.stderr) == (2, True)


# Beside NVIDIA's mig-manager.


CONFIGS = (
    """\
version: v1
mig-configs:
  all-disabled:
    - devices: all
      mig-enabled: false
  small:
    - device-filter: "0x233010DE"
      devices: [0]
      mig-enabled: true
      mig-devices:
        "1g.10gb": 2
        "3g.40gb": 1
    - device-filter: "0x20B010DE"
      devices: all
      mig-enabled: true
      mig-devices: {"1g.5gb": 7}
"""
    + ODD_PARTED_CONFIGS
)


def adopt(machine: FakeMachine, *arguments: str) -> subprocess.CompletedProcess[str]:
    return machine.python("-m", "skyinfra.runner", "adopt", *arguments)


@pytest.fixture
def configs(tmp_path: Path) -> Path:
    file = tmp_path / "config.yaml"
    file.write_text(CONFIGS)
    return file


def test_what_stands_is_adopted(fake_machine: Machine) -> None:
    machine = fake_machine("h100_80gb,h100_80gb")
    assert adopt(machine).stdout == "None\n"
    assert run(machine, "--layout", "1g.10gb@2+3g.40gb@4", "--gpu", "1").returncode == 0
    done = adopt(machine)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout == run(machine, "--export", "--format", "declaration").stdout
    machine.mig_manager("MIG_PARTED_SELECTED_CONFIG=all-disabled")
    told = adopt(machine)
    assert told.stdout == done.stdout
    assert "brings this machine to `all-disabled` of /etc/nvidia-mig-manager/config.yaml at every boot" in told.stderr
    assert "systemctl disable nvidia-mig-manager.service" in told.stderr
    machine.mig_manager("MIG_PARTED_SELECTED_CONFIG=all-disabled", state="disabled")
    assert adopt(machine).stderr == ""


def test_a_configuration_of_mig_manager_is_adopted(fake_machine: Machine, configs: Path) -> None:
    machine = fake_machine("h100_80gb,h100_80gb,t4")
    assert run(machine, "--layout", "2g.20gb@4", "--gpu", "1").returncode == 0
    machine.mig_manager(f"MIG_PARTED_CONFIG_FILE={configs} MIG_PARTED_SELECTED_CONFIG=small")
    done = adopt(machine, "--selected")
    expected = 'sky.mig.per_gpu("3g.40gb+1g.10gb*2", "2g.20gb@4", "off")\n'
    assert (done.returncode, done.stdout) == (0, expected), "a GPU that is not named stays, in its place"
    assert "GPU 1: no entry names it: it stays as it is" in done.stderr
    assert adopt(machine, "--label", "small", "--file", str(configs)).stdout == expected
    assert adopt(machine, "--label", "all-disabled").stdout == "None\n", "the file is that of the service"
    empty = adopt(machine, "--label", "empty")
    assert (empty.stdout, "GPU 0: MIG without partitions cannot be declared" in empty.stderr) == ("None\n", True)
    assert run(machine, "--export").stdout.count("mig-devices") == 1, "nothing was changed"


def test_a_configuration_that_cannot_be_adopted(
    fake_machine: Machine, configs: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    machine = fake_machine("h100_80gb")
    none = adopt(machine, "--selected")
    assert (none.returncode, "nvidia-mig-manager.service is not enabled" in none.stderr) == (2, True)

    def refused(*arguments: str) -> str:
        try:
            assert cli.main(["adopt", *arguments]) == 2
        except SystemExit as usage:
            assert usage.code == 2
        out, err = capsys.readouterr()
        assert not out
        return err

    label = ("--label", "small", "--file", str(configs))
    with machine.loaded(), mock.patch.dict(os.environ, {"PATH": machine.environment()["PATH"]}):
        assert "no configuration of that label" in refused("--label", "smal", *label[2:])
        assert f"{configs}: mig-configs.wrong[0].mig-devices" in refused("--label", "wrong", *label[2:])
        assert "/nowhere.yaml: cannot be read" in refused("--label", "small", "--file", "/nowhere.yaml")
        assert "/etc/nvidia-mig-manager/config.yaml: cannot be read" in refused("--label", "small")
        assert "--file needs --label" in refused("--file", str(configs))
        assert "name a configuration each" in refused("--selected", "--label", "small")
        for text in ("", "[1]", "a: [", "version: v2\nmig-configs: {}\n"):
            configs.write_text(text)
            assert str(configs) in refused(*label)


def test_what_stands_is_handed_to_mig_manager_and_back(fake_machine: Machine, tmp_path: Path) -> None:
    machine = fake_machine("h100_80gb,h100_80gb")
    assert run(machine, "--layout", "3g.40gb*2", "--gpu", "0").returncode == 0
    text = run(machine, "--export", "--format", "mig-manager").stdout
    assert "nvidia.com/mig.config=skyinfra" in text
    file = tmp_path / "skyinfra.yaml"
    file.write_text(text)
    machine.mig_manager(f"MIG_PARTED_CONFIG_FILE={file} MIG_PARTED_SELECTED_CONFIG=skyinfra")
    assert adopt(machine, "--selected").stdout == 'sky.mig.per_gpu("3g.40gb*2", "off")\n'
    wanted = mig.Selected(str(file), "skyinfra")
    with machine.loaded(), session(Nvml()) as nvml:
        assert exports.keeps(nvml, wanted)
        assert not exports.keeps(nvml, mig.Selected(str(file), "all-disabled"))
    assert run(machine, "--layout", "1g.10gb", "--gpu", "1").returncode == 0
    with machine.loaded(), session(Nvml()) as nvml:
        assert not exports.keeps(nvml, wanted)


SHARED = """\
version: v1
mig-configs:
  shared:
    - devices: all
      mig-enabled: true
      mig-devices: {"1c.2g.20gb": 2, "3g.40gb": 1}
  whole:
    - devices: all
      mig-enabled: true
      mig-devices: {"2g.20gb": 1, "3g.40gb": 1}
"""


def test_compute_instances_are_adopted_and_compared_as_what_they_are(fake_machine: Machine, tmp_path: Path) -> None:
    machine, file = fake_machine("h100_80gb"), tmp_path / "config.yaml"
    file.write_text(SHARED)
    machine.mig_manager(f"MIG_PARTED_CONFIG_FILE={file} MIG_PARTED_SELECTED_CONFIG=shared")
    for stands, same in (("3g.40gb+1c.2g.20gb*2", "shared"), ("3g.40gb+2g.20gb", "whole")):
        assert run(machine, "--layout", stands).returncode == 0
        with machine.loaded(), session(Nvml()) as nvml:
            assert [label for label in ("shared", "whole") if exports.keeps(nvml, mig.Selected(str(file), label))] == [
                same
            ]
        for options in (("--selected",), ("--label", "shared", "--file", str(file))):
            assert adopt(machine, *options).stdout == '"3g.40gb+1c.2g.20gb*2"\n'
        assert adopt(machine, "--label", "whole").stdout == '"3g.40gb+2g.20gb"\n'
        adopted = json.loads(adopt(machine, "--label", same).stdout)
        assert run(machine, "--layout", adopted, "--check").returncode == 0, "nothing that stands has to go"


def test_a_gpu_instance_without_its_compute_instance_is_not_what_is_declared(
    fake_machine: Machine, tmp_path: Path
) -> None:
    machine, file = fake_machine("h100_80gb"), tmp_path / "config.yaml"
    file.write_text(SHARED)
    assert run(machine, "--layout", "3g.40gb+2g.20gb").returncode == 0
    with machine.loaded(), session(Nvml()) as nvml:
        (gpu,) = nvml.gpus()
        gpu.empty(next(each for each in gpu.instances() if each.profile.name == "2g.20gb"))
        assert not exports.keeps(nvml, mig.Selected(str(file), "whole"))
    told = adopt(machine)
    assert "GPU 0: 2g.20gb at" in told.stderr and "has no compute instance: nothing can use it" in told.stderr
    differs = run(machine, "--layout", "3g.40gb+2g.20gb", "--dry-run").stdout
    assert [json.loads(line)["event"] for line in differs.splitlines()] == ["differs", "differs", "stays"]


class Boards:
    """A driver whose GPUs are these boards: PCI ids of device and subsystem."""

    def __init__(self, driver: SimulatedDriver, *boards: tuple[int, int]) -> None:
        self._driver, self._boards = driver, boards

    def __getattr__(self, name: str) -> Any:
        return getattr(self._driver, name)

    def nvmlDeviceGetPciInfo(self, device: Any) -> Any:  # noqa: N802 - the driver's name
        found = self._driver.nvmlDeviceGetPciInfo(device)
        known = [self._driver.nvmlDeviceGetHandleByIndex(index) for index in range(len(self._boards))]
        buses = [self._driver.nvmlDeviceGetPciInfo(each).bus for each in known]
        found.pciDeviceId, found.pciSubSystemId = self._boards[buses.index(found.bus)]
        return found


def entry(board: str, devices: str, profiles: str) -> str:
    lines = [f'    - device-filter: "{board}"', f"      devices: {devices}", "      mig-enabled: true"]
    return "\n".join([*lines, f"      mig-devices: {{{profiles}}}", ""])


def test_a_device_filter_is_answered_by_the_boards(tmp_path: Path) -> None:
    """Boards of one model stand in one file; the driver says which each GPU is, also while its MIG is off."""
    accelerator, file = NodeAccelerator("H100", "nvidia", 3, 80.0, "h100_80gb"), tmp_path / "config.yaml"
    driver = SimulatedDriver(accelerator, path=tmp_path / "state", seed="boards")
    boards = Boards(driver, (0x233010DE, 0x16C110DE), (0x233010DE, 0x16C010DE), (0x233110DE, 0x162610DE))

    def adopted(*entries: str) -> tuple[str, tuple[str, ...]]:
        file.write_text("version: v1\nmig-configs:\n  it:\n" + "".join(entries))
        with session(Nvml(boards)) as nvml:
            return exports.configured(nvml, mig.Selected(str(file), "it"))

    pcie = entry("0x233110DE", "all", '"1g.10gb": 7')
    assert adopted(entry("0x233010de", "all", '"3g.40gb": 2'), pcie) == (
        'sky.mig.per_gpu("3g.40gb*2", "3g.40gb*2", "1g.10gb*7")\n',
        (),
    )
    text, warnings = adopted(entry("0x233010DE:0x16C110DE", "all", '"7g.80gb": 1'), pcie)
    assert text == 'sky.mig.per_gpu("7g.80gb*1", "off", "1g.10gb*7")\n', "the other subsystem is another board"
    assert warnings == ("GPU 1: no entry names it: it stays as it is",)
    # What another board has no profile of, is not looked up for this one.
    assert adopted(entry("0x20B510DE", "all", '"1g.5gb": 7'), pcie)[0].count("off") == 2


@pytest.mark.parametrize(
    ("board", "gib", "model"),
    [
        ("0x2BB3", 47.8, "rtx_pro_5000_48gb"),
        ("0x2BB3", 71.6, None),
        ("0x2339", 93.6, "h100_nvl_94gb"),
        ("0x230E", 95.6, "h20_96gb"),
        ("0x2330", 79.6, "h100_80gb"),
        ("0x9999", 79.6, None),
    ],
)
def test_the_model_of_a_board_goes_by_its_memory_too(board: str, gib: float, model: str | None) -> None:
    gpu: Any = SimpleNamespace(pci_device_id=board, memory_bytes=lambda: int(gib * 2**30))
    found = actual.model_of(gpu)
    assert (found.model if found is not None else None) == model


def test_a_board_that_no_row_is_of_is_asked_also_while_mig_is_off(tmp_path: Path) -> None:
    accelerator = NodeAccelerator("H100", "nvidia", 1, 80.0, "h100_80gb")
    driver = SimulatedDriver(accelerator, path=tmp_path / "state", seed="boards")
    boards = Boards(driver, (0x999910DE, 0))
    with session(Nvml(boards)) as nvml:
        found = targets.given(nvml, "3g.40gb+1g.10gb*3", "0")
        assert mig.layout_text(found[0]) == "1g.10gb*3+3g.40gb"
        partitioner.apply(nvml, found)
        assert partitioner.plan(nvml, targets.given(nvml, "1g.10gb*3+3g.40gb", "0")) == []
