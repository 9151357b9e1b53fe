"""``amd-smi``: lists the AMD GPUs of a node with their partition modes, and sets these.

Only the JSON of ``list`` and ``static`` is read, which need no root. The output of ``set`` is for people: its effect is
read back, because amd-smi may end with exit code 0 where it was refused. Reading tolerates the
documents of ROCm 6.2 to 7.14: rows in a list or below ``gpu_data``, ``compute_partition`` or
``accelerator_partition``, warnings before the document.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from skyinfra.errors import AcceleratorMissing
from skyinfra.gpu.inventory import find_tool

_PROGRAM = "amd-smi"
_SBIN = ("/usr/sbin", "/sbin")
# Reading is slow with 64 partitions; a change of the memory mode reloads the driver, which amd-smi waits for itself
# before ROCm 7.
_READ_S = 120
_SET_S = 600
_STATUS = re.compile(r"AMDSMI_STATUS_([A-Z_]+)")
_NO_PERMISSION = re.compile(r"requires elevation|permission ?denied|operation not permitted", re.I)
_SHOWN = 400


@dataclass(frozen=True)
class AmdDevice:
    """A device of the driver: a whole GPU, or one partition of it.

    number: amd-smi's, which changes with the modes. partition: its index on the GPU. uuid: as amd-smi names it; before
    ROCm 7.0 the same for every partition of a GPU. node: of the KFD topology, whose order is ROCm's order of devices.
    """

    number: int
    partition: int
    uuid: str | None
    node: int | None


@dataclass(frozen=True)
class AmdGpu:
    """One physical GPU. compute, memory: its modes now, such as CPX and NPS4; None where the driver names none.

    devices: by partition; modes are set through the first.
    """

    index: int
    name: str
    address: str
    compute: str | None
    memory: str | None
    devices: tuple[AmdDevice, ...]


@dataclass(frozen=True)
class Answer:
    """The result of a change. status: as amd-smi names it, without ``AMDSMI_STATUS_``; None where it names none."""

    failed: bool
    text: str
    status: str | None = None

    @property
    def busy(self) -> bool:
        """Whether a process holds the GPU."""
        return self.status == "BUSY" or "in use" in self.text


class AmdSmi:
    """The driver of a node's AMD GPUs, through the programs amd-smi and modprobe."""

    def gpus(self) -> list[AmdGpu]:
        """Returns the physical GPUs by address. Raises `AcceleratorMissing` where the driver does not answer."""
        listed = self._read("list")
        static = {row.get("gpu"): row for row in self._read("static", "--asic", "--partition")}
        found: dict[str, list[tuple[AmdDevice, dict[str, Any]]]] = {}
        for row in listed:
            number = _whole(row.get("gpu"))
            if number is None:
                continue
            more = static.get(number, {})
            # Partitions of one GPU have its bus and device; the function may be that of the partition.
            address = (_text(row.get("bdf")) or f"{number}.").rpartition(".")[0]
            members = found.setdefault(address, [])
            given = (row.get("partition_id"), _part(more, "partition").get("partition_id"), len(members))
            partition = next(index for each in given if (index := _whole(each)) is not None)
            device = AmdDevice(number, partition, _text(row.get("uuid")), _whole(row.get("node_id")))
            members.append((device, more))
        return [_gpu(index, address, found[address]) for index, address in enumerate(found)]

    def set_memory(self, gpu: AmdGpu, mode: str) -> Answer:
        """Sets the memory mode; it may need a `reload` to become active, then on every GPU."""
        return self._set(gpu, "--memory-partition", mode)

    def set_compute(self, gpu: AmdGpu, mode: str) -> Answer:
        """Sets the compute mode of one GPU."""
        return self._set(gpu, "--compute-partition", mode)

    def reload(self) -> Answer:
        """Reloads the driver. It starts with the compute modes that go with the memory mode."""
        path = os.pathsep.join([os.environ.get("PATH", os.defpath), *_SBIN])
        modprobe = shutil.which("modprobe", path=path)
        if modprobe is None:
            return Answer(True, "modprobe not found")
        gone = _answer([modprobe, "-r", "amdgpu"])
        return gone if gone.failed else _answer([modprobe, "amdgpu"])

    def processes(self) -> list[str]:
        """``NAME (PID)`` of the known processes on the GPUs."""
        try:
            rows = self._read("process")
        except AcceleratorMissing:
            return []
        found: dict[str, None] = {}
        for row in rows:
            listed = row.get("process_list")
            for each in listed if isinstance(listed, list) else ():
                info = each.get("process_info", each) if isinstance(each, dict) else None
                if isinstance(info, dict) and info.get("pid") is not None:
                    found[f"{info.get('name')} ({info['pid']})"] = None
        return list(found)

    def _set(self, gpu: AmdGpu, option: str, mode: str) -> Answer:
        # The yes is for the question whether one has read what a memory mode does to the driver.
        return _answer([self._path(), "set", "--gpu", str(gpu.devices[0].number), option, mode], given="Y\n")

    def _read(self, *arguments: str) -> list[dict[str, Any]]:
        """Returns the rows of a document of amd-smi, one for each device."""
        command = [self._path(), *arguments, "--json"]
        rows = None
        try:
            done = subprocess.run(command, capture_output=True, text=True, timeout=_READ_S, stdin=subprocess.DEVNULL)
            rows, reason = _rows(done.stdout), _end_of(done.stdout + done.stderr) or f"exit code {done.returncode}"
        except (OSError, subprocess.TimeoutExpired) as error:
            reason = str(error)
        if rows is None:
            raise AcceleratorMissing(
                f"`amd-smi {' '.join(arguments)}` says nothing that can be read: {reason}",
                field="accelerator",
                hint="Perhaps the amdgpu driver is not loaded: `modprobe amdgpu`; "
                "`dmesg | grep amdgpu` says why it was not.",
            )
        return rows

    @staticmethod
    def _path() -> str:
        program = find_tool(_PROGRAM)
        if program is None:
            raise AcceleratorMissing(
                "no AMD driver tools: amd-smi not found on PATH or in /opt/rocm/bin",
                field="accelerator",
                hint="It comes with ROCm (package amd-smi-lib): install it, or choose an image that has it.",
            )
        return program


def _gpu(index: int, address: str, members: Sequence[tuple[AmdDevice, dict[str, Any]]]) -> AmdGpu:
    ordered = sorted(members, key=lambda member: member[0].partition)
    # The modes stand with the first partition only.
    modes = _part(ordered[0][1], "partition")
    return AmdGpu(
        index,
        _text(_part(ordered[0][1], "asic").get("market_name")) or "",
        address,
        _text(modes.get("accelerator_partition", modes.get("compute_partition"))),
        _text(modes.get("memory_partition")),
        tuple(device for device, _ in ordered),
    )


def _rows(text: str) -> list[dict[str, Any]] | None:
    """Returns the first JSON document in *text* that begins a line, as rows; None where there is none."""
    decoder = json.JSONDecoder()
    for start in re.finditer(r"^[\[{]", text, re.M):
        try:
            document, _ = decoder.raw_decode(text, start.start())
        except ValueError:
            continue
        rows = document.get("gpu_data") if isinstance(document, dict) else document
        if isinstance(rows, list):
            return [row for row in rows if isinstance(row, dict)]
    return None


def _part(row: dict[str, Any], key: str) -> dict[str, Any]:
    part = row.get(key)
    return part if isinstance(part, dict) else {}


def _text(value: object) -> str | None:
    return value.strip() or None if isinstance(value, str) and value != "N/A" else None


def _whole(value: object) -> int | None:
    if isinstance(value, int) and not isinstance(value, bool):
        return value
    return int(value) if isinstance(value, str) and value.isdecimal() else None


def _answer(command: list[str], given: str = "") -> Answer:
    try:
        done = subprocess.run(command, input=given, capture_output=True, text=True, timeout=_SET_S, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        return Answer(True, str(error))
    text = done.stdout + done.stderr
    status = _STATUS.search(text)
    named = status[1] if status else "NO_PERM" if _NO_PERMISSION.search(text) else None
    return Answer(done.returncode != 0 or named is not None, _end_of(text), named)


def _end_of(text: str) -> str:
    """Returns the end of what a program printed, in one line."""
    line = " ".join(text.split())
    return line if len(line) <= _SHOWN else f"...{line[-_SHOWN:]}"
