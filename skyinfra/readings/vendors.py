"""Figures of slots on accelerators of AMD, AWS and Intel, from the driver's files or the vendor's tool.

A figure that is not told is None; nothing here raises. TPU slots have none: libtpu tells them to nobody but the process
that holds the chip, whose port `tpu-info` asks (https://pypi.org/project/tpu-info/).
"""

from __future__ import annotations

import contextlib
import csv
import json
import os
import re
import subprocess
import tempfile
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from skyinfra.gpu.inventory import find_tool, number_of
from skyinfra.protocol.instance import InstanceInfo
from skyinfra.protocol.nodeconfig import Vendor
from skyinfra.protocol.readings import SlotReading

_MIB = 2**20
# `skyinfra top` waits five seconds for its answer.
_TOOL_S = 4.0


def read(vendor: Vendor, slots: Sequence[InstanceInfo], *, root: Path = Path("/")) -> list[SlotReading]:
    """Returns the reading of each of *slots*, which stand on accelerators of *vendor*. *root*: the parent of sys/."""
    reader = _READERS.get(vendor)
    return list(reader(slots, root)) if reader is not None else [SlotReading(slot) for slot in slots]


def _amd(slots: Sequence[InstanceInfo], root: Path) -> Iterator[SlotReading]:
    """Yields what amdgpu's files say (docs.kernel.org/gpu/amdgpu/thermal.html).

    ROCm counts its devices in the order of the nodes of the KFD topology that compute, and so does the variable of a
    slot. A partition has its own memory there, with AMD's own driver also how much is used; amdgpu has no file of how
    busy one partition is.
    """
    files = (root / "sys/class/kfd/kfd/topology/nodes").glob("[0-9]*/properties")
    nodes = [(file.parent, _properties(file)) for file in sorted(files, key=lambda file: int(file.parent.name))]
    devices = {str(rank): each for rank, each in enumerate(node for node in nodes if node[1].get("simd_count"))}
    for slot in slots:
        device = devices.get(_visible(slot))
        yield SlotReading(slot) if device is None else _of_amd(slot, *device, root)


def _of_amd(slot: InstanceInfo, node: Path, known: Mapping[str, int], root: Path) -> SlotReading:
    """Returns the reading of a GPU or partition. *node*: its folder in the topology. *known*: what stands there."""
    whole = slot.kind == "gpu" or slot.size == slot.units
    location = known.get("location_id", 0)
    # Some drivers have the number of a partition where the function of the PCI address stands.
    place = f"{location >> 8 & 0xFF:02x}:{location >> 3 & 0x1F:02x}.{location & 7 if whole else 0}"
    gpu = root / "sys/bus/pci/devices" / f"{known.get('domain', 0):04x}:{place}"
    if whole:
        used, total = number_of(gpu / "mem_info_vram_used"), number_of(gpu / "mem_info_vram_total")
    else:
        memory = node / "mem_banks/0"
        used, total = number_of(memory / "used_memory"), _properties(memory / "properties").get("size_in_bytes")
    temperature = _sensor(gpu, "temp1_input", "temp2_input")
    power = _sensor(gpu, "power1_average", "power1_input")
    return SlotReading(
        slot,
        utilization=number_of(gpu / "gpu_busy_percent") if whole else None,
        memory_used=_whole(used),
        memory_total=_whole(total),
        temperature=None if temperature is None else round(temperature / 1000),
        power=None if power is None else power / 1_000_000,
    )


def _properties(file: Path) -> dict[str, int]:
    """Returns the lines ``NAME NUMBER`` of a file of KFD; empty where it cannot be read."""
    try:
        found = re.findall(r"^(\w+) (\d+)$", file.read_text(encoding="utf-8"), re.M)
    except OSError:
        return {}
    return {name: int(number) for name, number in found}


def _sensor(device: Path, *names: str) -> float | None:
    """Returns the value of the first of the sensors *names* that *device* has."""
    values = (number_of(file) for name in names for file in device.glob(f"hwmon/hwmon*/{name}"))
    return next((value for value in values if value is not None), None)


# What neuron-monitor is to report, and how often.
_NEURON_MONITOR = {
    "period": "1s",
    "neuron_runtimes": [
        {"tag_filter": ".*", "metrics": [{"type": "neuroncore_counters"}, {"type": "memory_used"}]},
    ],
    "system_metrics": [],
}


def _neuron(slots: Sequence[InstanceInfo], root: Path) -> Iterator[SlotReading]:
    """Yields what neuron-monitor reports (AWS Neuron documentation, "Neuron Monitor User Guide").

    The utilization of a slot is the mean of its cores. Nothing tells the temperature, or the power in watts.
    """
    report = _neuron_report()
    listed = report.get("neuron_runtime_data")
    runtimes = [_part(each) for each in listed] if isinstance(listed, list) else []
    busy: dict[str, float] = {}
    used: dict[str, float] = {}
    for runtime in runtimes:
        for core, found in _part(runtime, "report", "neuroncore_counters", "neuroncores_in_use").items():
            busy[core] = busy.get(core, 0.0) + _figure(_part(found).get("neuroncore_utilization"))
        usage = _part(runtime, "report", "memory_used", "neuron_runtime_used_bytes", "usage_breakdown")
        for core, kinds in _part(usage, "neuroncore_memory_usage").items():
            used[core] = used.get(core, 0.0) + sum(map(_figure, _part(kinds).values()))
    # A runtime that could not be asked may use the cores that no other one does.
    silent = not report or any(each.get("error") for each in runtimes)
    size = _figure(_part(report, "neuron_hardware_info").get("neuron_device_memory_size"))
    for slot in slots:
        first, _, last = _visible(slot).partition("-")
        cores = [str(core) for core in range(int(first), int(last or first) + 1)] if first else []
        is_known = bool(cores) and not (silent and not any(core in busy for core in cores))
        yield SlotReading(
            slot,
            utilization=sum(busy.get(core, 0.0) for core in cores) / len(cores) if is_known else None,
            memory_used=round(sum(used.get(core, 0.0) for core in cores)) if is_known else None,
            memory_total=round(size) if size else None,
        )


def _neuron_report() -> dict[str, Any]:
    """Returns the first report of neuron-monitor, which goes on until it is ended; empty where it gives none."""
    program = find_tool("neuron-monitor")
    if program is None:
        return {}
    with tempfile.NamedTemporaryFile("w", suffix=".json") as config:
        json.dump(_NEURON_MONITOR, config)
        config.flush()
        try:
            process = subprocess.Popen(
                [program, "-c", config.name], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
            )
        except OSError:
            return {}
        with process:
            end = threading.Timer(_TOOL_S, process.kill)
            end.start()
            line = process.stdout.readline() if process.stdout is not None else ""
            end.cancel()
            process.kill()
    with contextlib.suppress(ValueError):
        report = json.loads(line)
        return report if isinstance(report, dict) else {}
    return {}


def _figure(value: object) -> float:
    return float(value) if isinstance(value, int | float) else 0.0


def _part(document: object, *names: str) -> dict[str, Any]:
    """Returns the object at the path *names* of a document; empty where there is none."""
    part = document
    for name in names:
        part = part.get(name) if isinstance(part, dict) else None
    return part if isinstance(part, dict) else {}


_HL_SMI = ("module_id", "utilization.aip", "memory.used", "memory.total", "temperature.aip", "power.draw")


def _gaudi(slots: Sequence[InstanceInfo], root: Path) -> Iterator[SlotReading]:
    """Yields what hl-smi tells of the module of each slot (docs.habana.ai, "System Management Interface Tool")."""
    rows = {}
    for row in csv.reader(_hl_smi().splitlines(), skipinitialspace=True):
        if len(row) == len(_HL_SMI):
            rows[row[0].strip()] = [_cell(text) for text in row[1:]]
    for slot in slots:
        busy, used, total, temperature, power = rows.get(_visible(slot), [None] * 5)
        yield SlotReading(
            slot,
            utilization=busy,
            memory_used=None if used is None else int(used * _MIB),
            memory_total=None if total is None else int(total * _MIB),
            temperature=_whole(temperature),
            power=power,
        )


def _hl_smi() -> str:
    program = find_tool("hl-smi")
    if program is None:
        return ""
    command = [program, "-Q", ",".join(_HL_SMI), "-f", "csv,noheader,nounits"]
    # It writes a log, and fails where it may not.
    with tempfile.TemporaryDirectory() as logs:
        try:
            done = subprocess.run(
                command,
                capture_output=True,
                text=True,
                errors="replace",
                timeout=_TOOL_S,
                env={**os.environ, "HABANA_LOGS": logs},
                check=False,
            )
        except (OSError, subprocess.TimeoutExpired):
            return ""
    return done.stdout


def _cell(text: str) -> float | None:
    number = re.match(r"\s*(\d+(?:\.\d+)?)", text)
    return float(number[1]) if number else None


def _whole(number: float | None) -> int | None:
    return None if number is None else round(number)


def _visible(slot: InstanceInfo) -> str:
    return slot.visible[1] if slot.visible is not None else ""


_READERS: dict[Vendor, Callable[[Sequence[InstanceInfo], Path], Iterator[SlotReading]]] = {
    "amd": _amd,
    "aws": _neuron,
    "intel": _gaudi,
}
