"""A simulated amdgpu driver: GPUs with partition modes that a file describes.

It keeps the rules of the real one: a memory mode becomes active when the driver is loaded again, on every GPU, and sets
the compute modes to the one that goes with it; there are no more memory domains than partitions. UUIDs follow from the
node, the GPU and the partition.
"""

from __future__ import annotations

import dataclasses
import json
import uuid
from dataclasses import dataclass
from pathlib import Path

from skyinfra.gpu.amd.smi import AmdDevice, AmdGpu, AmdSmi, Answer
from skyinfra.node.folder import replace_file
from skyinfra.protocol.nodeconfig import NodeAccelerator

_NAMESPACE = uuid.uuid5(uuid.NAMESPACE_DNS, "simulated.skyinfra")
_FILE = "simulated_amd.json"
_DONE = Answer(False, "")


@dataclass
class _Gpu:
    """One GPU: its modes now, and the memory mode that it takes when the driver is loaded."""

    compute: str = "SPX"
    memory: str = "NPS1"
    requested: str = "NPS1"


class SimulatedAmd(AmdSmi):
    """The driver of a node with the accelerators *accelerator*, in the state that a file in the folder *path* keeps.

    *seed* tells nodes apart: it enters every UUID.
    """

    def __init__(self, accelerator: NodeAccelerator, *, path: Path, seed: str) -> None:
        self._accelerator = accelerator
        self._file = path / _FILE
        self._seed = seed

    @property
    def exists(self) -> bool:
        """Whether modes were ever set here."""
        return self._file.exists()

    def gpus(self) -> list[AmdGpu]:
        xcds, states = self._load()
        gpus: list[AmdGpu] = []
        number = 0
        for index, state in enumerate(states):
            devices = tuple(
                # As on hardware the CPU sockets come first among the nodes.
                AmdDevice(number + i, i, str(uuid.uuid5(_NAMESPACE, f"{self._seed}/{index}/{i}")), 2 + number + i)
                for i in range(_partitions(state.compute, xcds))
            )
            number += len(devices)
            name = f"AMD Instinct {self._accelerator.name} (simulated)"
            gpus.append(AmdGpu(index, name, f"0000:{5 + 16 * index:02x}:00", state.compute, state.memory, devices))
        return gpus

    def set_memory(self, gpu: AmdGpu, mode: str) -> Answer:
        xcds, states = self._load()
        if _domains(mode) > xcds:
            return Answer(True, f"{mode} has more domains than XCDs", "INVAL")
        states[gpu.index].requested = mode
        self._store(xcds, states)
        return _DONE

    def set_compute(self, gpu: AmdGpu, mode: str) -> Answer:
        xcds, states = self._load()
        state = states[gpu.index]
        partitions = _partitions(mode, xcds)
        if xcds % partitions or partitions < _domains(state.memory):
            return Answer(True, f"{mode} does not go with {xcds} XCDs and {state.memory}", "SETTING_UNAVAILABLE")
        state.compute = mode
        self._store(xcds, states)
        return _DONE

    def reload(self) -> Answer:
        xcds, states = self._load()
        for state in states:
            state.memory = state.requested
            state.compute = {1: "SPX", 2: "DPX"}.get(_domains(state.memory), "CPX")
        self._store(xcds, states)
        return _DONE

    def processes(self) -> list[str]:
        return []

    def _load(self) -> tuple[int, list[_Gpu]]:
        """Returns the XCDs of a GPU, and the state of each GPU."""
        states: list[_Gpu] = []
        xcds = max((p.start + p.size for layout in self._accelerator.layouts for p in layout), default=1)
        if self.exists:
            document = json.loads(self._file.read_text(encoding="utf-8"))
            xcds = xcds if self._accelerator.layouts else document["xcds"]
            states = [_Gpu(**state) for state in document["gpus"][: self._accelerator.count]]
        return xcds, states + [_Gpu() for _ in range(self._accelerator.count - len(states))]

    def _store(self, xcds: int, states: list[_Gpu]) -> None:
        document = {"version": 1, "xcds": xcds, "gpus": [dataclasses.asdict(state) for state in states]}
        replace_file(self._file, json.dumps(document, indent=1) + "\n")


def _partitions(mode: str, xcds: int) -> int:
    return {"SPX": 1, "DPX": 2, "TPX": 3, "QPX": 4}.get(mode, xcds)


def _domains(mode: str) -> int:
    return int(mode.removeprefix("NPS"))
