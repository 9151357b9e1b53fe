"""What is found on a node against what is declared."""

from __future__ import annotations

import types
from pathlib import Path
from typing import Any, cast

import pynvml
import pytest
from local_fleets.running_node import h100

from skyinfra import AcceleratorMissing
from skyinfra.accelerators import catalog
from skyinfra.first_boot import programs
from skyinfra.gpu import inventory
from skyinfra.gpu.hardware import Hardware
from skyinfra.gpu.nvml import Gpu, Nvml
from skyinfra.gpu.simulated.driver import SimulatedDriver
from skyinfra.node.folder import NodeDirectory
from skyinfra.protocol.nodeconfig import NodeAccelerator, NodeConfig, Vendor


def driver(accelerator: NodeAccelerator, tmp_path: Path) -> SimulatedDriver:
    made = SimulatedDriver(accelerator, path=tmp_path / "gpus.json", seed="s")
    made.nvmlInit()
    return made


def test_gpus_are_confined_by_uuid(tmp_path: Path) -> None:
    wanted = h100((), ())
    devices = inventory.nvidia(Nvml(driver(wanted, tmp_path)), wanted)
    assert [d.index for d in devices] == [0, 1]
    assert all(d.visible == d.uuid and d.visible.startswith("GPU-") for d in devices)


@pytest.mark.parametrize(
    ("declared", "message"),
    [
        (NodeAccelerator("H100", "nvidia", 4, 80.0), r"declared 4 x H100, found 2: 2 x NVIDIA H100 \(simulated\)"),
        (NodeAccelerator("A100", "nvidia", 2, 80.0), r"found 2 x NVIDIA H100 \(simulated\): GPU 0 is another model"),
        (NodeAccelerator("H100", "nvidia", 2, 40.0), "GPU 0 has 86 GB of memory instead of 40"),
    ],
)
def test_another_machine_than_declared(tmp_path: Path, declared: NodeAccelerator, message: str) -> None:
    with pytest.raises(AcceleratorMissing, match=message):
        inventory.nvidia(Nvml(driver(h100((), ()), tmp_path)), declared)


@pytest.mark.parametrize(
    ("declared", "reported", "same"),
    [
        ("H100", "NVIDIA H100 80GB HBM3", True),
        ("A100", "NVIDIA A100-SXM4-80GB", True),
        ("A100-40GB", "NVIDIA A100-SXM4-40GB", True),
        ("L4", "NVIDIA L4", True),
        ("L4", "NVIDIA L40S", False),
        ("H100", "NVIDIA GH200 480GB", False),
        ("RTX4090", "NVIDIA GeForce RTX 4090", True),
        ("RTX PRO 6000", "NVIDIA RTX PRO 6000 Blackwell Server Edition", True),
        ("T4", "Tesla T4", True),
        ("A10", "NVIDIA A10G", False),
        ("A10", "NVIDIA A10-24Q", True),
        ("RTX 4070", "NVIDIA GeForce RTX 4070", True),
        ("RTX 4070", "NVIDIA GeForce RTX 4070 Ti", False),
        ("RTX 4070", "NVIDIA GeForce RTX 4070 SUPER", False),
        ("RTX 4070 Ti", "NVIDIA GeForce RTX 4070 Ti SUPER", False),
        ("RTX 3060", "NVIDIA GeForce RTX 3060 Laptop GPU", False),
        ("RTX 4090", "NVIDIA GeForce RTX 4090 D", False),
    ],
)
def test_models_are_compared_by_whole_words(declared: str, reported: str, same: bool) -> None:
    assert inventory.same_model(declared, reported) is same


def test_no_model_of_the_catalog_is_taken_for_another() -> None:
    names = [name for name in catalog.names() if catalog.variants(name)[0].vendor == "nvidia"]
    for name in names:
        assert [each for each in names if inventory.same_model(name, f"NVIDIA {each}")] == [name]


@pytest.mark.parametrize(
    ("declared", "name", "number", "same"),
    [
        # The id decides, whatever a driver calls the card.
        ("RTX 4070", "NVIDIA GeForce RTX 4070", "0x2786", True),
        ("RTX 4070", "NVIDIA GeForce RTX 4070", "0x2782", False),
        ("RTX 4070 Ti", "NVIDIA GeForce RTX 4070 Ti", "0x2782", True),
        ("RTX 4070 Ti", "NVIDIA GeForce RTX 4070 Ti SUPER", "0x2705", False),
        ("RTX 4070 Ti Super", "NVIDIA GeForce RTX 4070 Ti SUPER", "0x2705", True),
        ("RTX 3080-10GB", "NVIDIA GeForce RTX 3080", "0x2206", True),
        # Not a card for consumers, and one that is newer than the list.
        ("H100", "NVIDIA H100 80GB HBM3", "0x2330", True),
        ("RTX 4070", "NVIDIA GeForce RTX 4070 Ti", "0xFFFF", False),
    ],
)
def test_variants_of_a_card_are_told_apart_by_their_pci_id(declared: str, name: str, number: str, same: bool) -> None:
    gpu = types.SimpleNamespace(name=name, pci_device_id=number)
    assert inventory.is_model(declared, cast(Gpu, gpu)) is same


def test_the_codes_of_the_first_boot_are_those_of_nvml() -> None:
    """The first boot has no pynvml; what is done about each code is said here."""
    assert set(programs.NVML) | {pynvml.NVML_ERROR_NO_PERMISSION} == set(inventory._TO_DO)
    assert programs.NVML[pynvml.NVML_ERROR_LIB_RM_VERSION_MISMATCH] == "updated: reboot"


@pytest.mark.parametrize(
    ("code", "message"),
    [
        (pynvml.NVML_ERROR_LIBRARY_NOT_FOUND, r"no NVIDIA driver: libnvidia-ml\.so\.1 not found"),
        (pynvml.NVML_ERROR_DRIVER_NOT_LOADED, "NVIDIA driver not loaded"),
        (pynvml.NVML_ERROR_NO_PERMISSION, "NVIDIA driver refuses this user"),
        (pynvml.NVML_ERROR_LIB_RM_VERSION_MISMATCH, "updated: reboot(.|\\n)*the old one is still loaded"),
        (pynvml.NVML_ERROR_UNKNOWN, r"UNKNOWN \(999\)"),
    ],
)
def test_no_driver(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, code: int, message: str) -> None:
    def refuse() -> None:
        raise pynvml.NVMLError(code)

    monkeypatch.setattr(pynvml, "nvmlInit", refuse)
    with pytest.raises(AcceleratorMissing, match=message) as caught:
        Hardware(config(NodeAccelerator("T4", "nvidia", 1, 16.0)), NodeDirectory(tmp_path)).devices()
    assert caught.value.hint


def test_a_library_that_is_there_and_cannot_be_loaded(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    library = tmp_path / "libnvidia-ml.so.1"
    monkeypatch.setattr(inventory, "_LIBRARY", str(library))
    error = pynvml.NVMLError(pynvml.NVML_ERROR_LIBRARY_NOT_FOUND)
    assert "libnvidia-ml.so.1 not found" in str(inventory.no_driver(error))
    library.write_text("of another architecture")
    assert "is there and cannot be loaded" in str(inventory.no_driver(error))


def config(accelerator: NodeAccelerator, **fields: Any) -> NodeConfig:
    return NodeConfig(1, "demo", "p", "n1", "local", True, "127.0.0.1:0", accelerator, **fields)


FILES: list[tuple[Vendor, list[str], list[str]]] = [
    ("amd", ["dev/kfd", "dev/dri/renderD129", "dev/dri/renderD128", "dev/dri/card0"], ["0", "1"]),
    ("aws", ["dev/neuron0", "dev/neuron1", "dev/neuron10"], ["0-1", "2-3", "4-5"]),
    ("google", ["dev/accel0", "dev/accel1"], ["0", "1"]),
    ("google", ["dev/vfio/0", "dev/vfio/1", "dev/vfio/vfio"], ["0", "1"]),
    ("intel", ["dev/accel/accel0", "dev/accel/accel1", "dev/accel/accel_controlD0"], ["0", "1"]),
    ("intel", ["dev/hl0", "dev/hl1", "dev/hl_controlD0"], ["0", "1"]),
]


@pytest.mark.parametrize(("vendor", "files", "visible"), FILES)
def test_device_files(tmp_path: Path, vendor: Vendor, files: list[str], visible: list[str]) -> None:
    for file in files:
        (tmp_path / file).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / file).touch()
    accelerator = NodeAccelerator("Chip", vendor, len(visible))
    hardware = Hardware(config(accelerator), NodeDirectory(tmp_path), root=tmp_path)
    assert [d.visible for d in hardware.devices()] == visible
    more = NodeAccelerator("Chip", vendor, len(visible) + 1)
    with pytest.raises(AcceleratorMissing, match=f"declared {len(visible) + 1} x Chip, found {len(visible)}"):
        inventory.by_device_files(more, root=tmp_path)


def test_a_graphics_card_is_no_amd_accelerator(tmp_path: Path) -> None:
    (tmp_path / "dev/dri").mkdir(parents=True)
    (tmp_path / "dev/dri/renderD128").touch()
    with pytest.raises(AcceleratorMissing, match="found 0: none") as caught:
        inventory.by_device_files(NodeAccelerator("MI300X", "amd", 1), root=tmp_path)
    assert "/dev/kfd" in (caught.value.hint or "")


LOGICAL = "../../../../opt/aws/neuron/logical_nc_config"


@pytest.mark.parametrize(
    ("files", "visible"),
    [
        ({"core_count": "4"}, ["0-3", "4-7"]),
        # Older drivers let only root read the number, and everybody list the cores.
        ({"core_count/": "", "neuron_core0/stats/": "", "neuron_core1/stats/": ""}, ["0-1", "2-3"]),
        # Trainium2: the runtime counts pairs of its eight cores, unless it is told otherwise.
        ({"core_count": "8"}, ["0-3", "4-7"]),
        ({"core_count": "8", LOGICAL: "NEURON_LOGICAL_NC_CONFIG=1"}, ["0-7", "8-15"]),
        ({"core_count": "2", LOGICAL: "# nothing"}, ["0-1", "2-3"]),
    ],
)
def test_the_cores_of_a_neuron_device(tmp_path: Path, files: dict[str, str], visible: list[str]) -> None:
    device = tmp_path / "sys/class/neuron_device/neuron0"
    device.mkdir(parents=True)
    for name, text in files.items():
        (device / name).parent.mkdir(parents=True, exist_ok=True)
        if name.endswith("/"):
            (device / name).mkdir(parents=True, exist_ok=True)
        else:
            (device / name).write_text(f"{text}\n")
    (tmp_path / "dev").mkdir()
    for number in range(2):
        (tmp_path / f"dev/neuron{number}").touch()
    devices = inventory.by_device_files(NodeAccelerator("Trainium", "aws", 2), root=tmp_path)
    assert [d.visible for d in devices] == visible


@pytest.mark.parametrize(("said", "visible"), [("1", "0-7"), ("2", "0-3"), ("0", "0-3"), ("", "0-3")])
def test_the_image_may_say_how_cores_are_grouped(tmp_path: Path, said: str, visible: str) -> None:
    for file, text in (
        ("dev/neuron0", ""),
        ("sys/class/neuron_device/neuron0/core_count", "8"),
        ("opt/aws/neuron/logical_nc_config", "NEURON_LOGICAL_NC_CONFIG=4"),
    ):
        (tmp_path / file).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / file).write_text(text)
    declared = config(NodeAccelerator("Trainium2", "aws", 1), env={"NEURON_LOGICAL_NC_CONFIG": said})
    assert [d.visible for d in Hardware(declared, NodeDirectory(tmp_path), root=tmp_path).devices()] == [visible]


def test_gaudi_cards_are_named_by_their_module(tmp_path: Path) -> None:
    (tmp_path / "dev/accel").mkdir(parents=True)
    for number, module in enumerate((6, 3)):
        (tmp_path / f"dev/accel/accel{number}").touch()
        device = tmp_path / f"sys/class/accel/accel{number}/device"
        device.mkdir(parents=True)
        (device / "module_id").write_text(f"{module}\n")
    devices = inventory.by_device_files(NodeAccelerator("Gaudi2", "intel", 2), root=tmp_path)
    assert [(d.index, d.visible) for d in devices] == [(0, "6"), (1, "3")]


def test_simulated_and_custom_accelerators_are_numbers(tmp_path: Path) -> None:
    simulated = config(NodeAccelerator("MI300X", "amd", 2), simulate=True)
    custom = config(NodeAccelerator("Mine", "custom", 3))
    for declared, count in ((simulated, 2), (custom, 3)):
        devices = Hardware(declared, NodeDirectory(tmp_path), root=tmp_path).devices()
        assert [d.visible for d in devices] == [str(i) for i in range(count)]
