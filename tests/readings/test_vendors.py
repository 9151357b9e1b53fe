"""Figures of slots of AMD, AWS and Intel, from made-up files of drivers and programs that print as the vendors' do."""

from __future__ import annotations

import copy
import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from devices import vendor_files
from devices.vendor_files import GIB, NEURON_REPORT, NEURON_USED

from skyinfra.gpu import inventory
from skyinfra.protocol.instance import InstanceInfo
from skyinfra.protocol.nodeconfig import Vendor
from skyinfra.protocol.readings import SlotReading
from skyinfra.readings import vendors


@pytest.fixture
def tools(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The only folder beside the system's where tools are looked for."""
    folder = tmp_path / "tools"
    folder.mkdir()
    monkeypatch.setattr(inventory, "_TOOLS", (str(folder),))
    return folder


def slot(number: int, visible: str, **fields: Any) -> InstanceInfo:
    known = {"kind": "gpu", "fleet": "s/p", "gpu": number, "visible": ("SOME_VARIABLE", visible), **fields}
    return InstanceInfo("n1", number, f"n1/{number}", **known)


def read(vendor: Vendor, root: Path, *slots: InstanceInfo) -> list[tuple[object, ...]]:
    found = vendors.read(vendor, slots, root=root)
    assert [each.slot for each in found] == list(slots)
    assert found == [SlotReading.read(each.to_json()) for each in found]
    return [(each.utilization, each.memory_used, each.memory_total, each.temperature, each.power) for each in found]


NOTHING = (None,) * 5


def test_whole_gpus_of_amd_in_the_order_of_rocm(tmp_path: Path) -> None:
    # The topology has them in another order than the bus.
    vendor_files.kfd(tmp_path, (0x85, 0), (0x05, 0), (0x95, 0))
    vram = {"mem_info_vram_used": 3 * GIB, "mem_info_vram_total": 192 * GIB}
    sensors = {"__temp2_input": 55000, "__power1_input": 412_000_000}
    vendor_files.amd_gpu(tmp_path, 0x05, gpu_busy_percent=37, **vram, **sensors)
    # A GPU that has an edge sensor, and whose driver knows an average.
    both = {"__temp1_input": 41500, "__temp2_input": 49000, "__power1_average": 90_500_000, "__power1_input": 1}
    vendor_files.amd_gpu(tmp_path, 0x85, gpu_busy_percent=0, **both)
    slots = [slot(number, str(number)) for number in range(4)]
    assert read("amd", tmp_path, *slots) == [
        (0.0, None, None, 42, 90.5),
        (37.0, 3 * GIB, 192 * GIB, 55, 412.0),
        NOTHING,  # its files are not there
        NOTHING,  # nor is this GPU
    ]


def test_partitions_of_amd(tmp_path: Path) -> None:
    vendor_files.kfd(tmp_path, *((0x05, part) for part in range(8)), size=24 * GIB, used=(7 * GIB, 0))
    vendor_files.amd_gpu(tmp_path, 0x05, gpu_busy_percent=80, mem_info_vram_used=7 * GIB, __temp2_input=61000)
    fields = {"kind": "partition", "profile": "CPX", "size": 1, "units": 8}
    found = read("amd", tmp_path, *(slot(number, str(number), **fields) for number in (0, 1, 7)))
    assert found == [
        (None, 7 * GIB, 24 * GIB, 61, None),
        (None, 0, 24 * GIB, 61, None),
        (None, None, 24 * GIB, 61, None),  # Linux' own driver does not tell what is used
    ]
    whole = slot(0, "0", kind="partition", profile="SPX", size=8, units=8)
    assert read("amd", tmp_path, whole) == [(80.0, 7 * GIB, None, 61, None)]


@pytest.mark.parametrize("vendor", ["amd", "aws", "intel", "google", "custom"])
def test_nothing_is_told(tmp_path: Path, tools: Path, vendor: Vendor) -> None:
    alone = slot(0, "0-1" if vendor == "aws" else "0", kind="cores")
    bare = replace(slot(1, "0"), visible=None)
    assert read(vendor, tmp_path, alone, bare) == [NOTHING, NOTHING]


def test_a_driver_that_refuses_is_no_error(tmp_path: Path) -> None:
    vendor_files.kfd(tmp_path, (0x05, 0))
    device = vendor_files.amd_gpu(tmp_path, 0x05, gpu_busy_percent="", mem_info_vram_total=64 * GIB)
    # A folder cannot be read, as a file cannot that amdgpu refuses with EBUSY while the GPU is reset.
    (device / "mem_info_vram_used").mkdir()
    assert read("amd", tmp_path, slot(0, "0")) == [(None, None, 64 * GIB, None, None)]


def test_neuron_slots_have_the_figures_of_their_cores(tmp_path: Path, tools: Path) -> None:
    vendor_files.neuron_monitor(tools)
    slots = [slot(number, visible, kind="cores") for number, visible in enumerate(("0-1", "2-3", "2", "10-13"))]
    total = 32 * GIB
    assert read("aws", tmp_path, *slots) == [
        (0.0, 0, total, None, None),
        (42.5, NEURON_USED, total, None, None),
        (42.0, NEURON_USED // 2, total, None, None),
        (0.0, 0, total, None, None),
    ]


def test_a_neuron_runtime_that_does_not_answer(tmp_path: Path, tools: Path) -> None:
    report: dict[str, Any] = copy.deepcopy(NEURON_REPORT)
    report["neuron_runtime_data"].append({"pid": 2, "error": "cannot be read", "report": {}})
    vendor_files.neuron_monitor(tools, report)
    used, other = read("aws", tmp_path, slot(0, "2-3", kind="cores"), slot(1, "0-1", kind="cores"))
    assert (used[0], other[:3]) == (42.5, (None, None, 32 * GIB))


IDLE = (0.0, 0, None, None, None)


@pytest.mark.parametrize(
    ("report", "told"),
    [
        ("no JSON", NOTHING),
        ("[]", NOTHING),
        ('{"neuron_runtime_data": {"a": 1}, "neuron_hardware_info": {"neuron_device_memory_size": 0}}', IDLE),
        ('{"neuron_runtime_data": [{"report": {"neuroncore_counters": {"neuroncores_in_use": {"0": 1}}}}]}', IDLE),
        ('{"neuron_runtime_data": [{"error": "x", "report": {"neuroncore_counters": []}}]}', NOTHING),
    ],
)
def test_reports_that_say_little(tmp_path: Path, tools: Path, report: str, told: tuple[object, ...]) -> None:
    vendor_files.neuron_monitor(tools, report)
    assert read("aws", tmp_path, slot(0, "0-1", kind="cores")) == [told]


def test_a_tool_that_hangs_or_cannot_be_run(tmp_path: Path, tools: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(vendors, "_TOOL_S", 0.2)
    for name in ("neuron-monitor", "hl-smi"):
        vendor_files.program(tools / name, "exec sleep 30")
    assert read("aws", tmp_path, slot(0, "0-1", kind="cores")) == [NOTHING]
    assert read("intel", tmp_path, slot(0, "0", kind="chip")) == [NOTHING]
    for name in ("neuron-monitor", "hl-smi"):
        (tools / name).write_text("no program")
    assert read("aws", tmp_path, slot(0, "0-1", kind="cores")) == [NOTHING]
    assert read("intel", tmp_path, slot(0, "0", kind="chip")) == [NOTHING]


def test_gaudi_slots_are_found_by_their_module(tmp_path: Path, tools: Path) -> None:
    vendor_files.hl_smi(tools, "3, 15, 512, 32768, 36, 103", "1, 0, N/A, 32768, N/A, N/A", "broken")
    slots = [slot(number, module, kind="chip") for number, module in enumerate(("1", "3", "2"))]
    mib = 2**20
    assert read("intel", tmp_path, *slots) == [
        (0.0, None, 32768 * mib, None, None),
        (15.0, 512 * mib, 32768 * mib, 36, 103.0),
        NOTHING,
    ]
    assert not [name for name in os.listdir(tools) if name != "hl-smi"]  # noqa: PTH208
