"""Stands in for ``amd-smi`` and ``modprobe`` on a machine without AMD GPUs; run as a program of its own.

It answers with the documents of two generations of ROCm and keeps what it is told in a file that FAKE_AMD names. The
fields of `State` are what a test can set there. Sources: the CLI of ROCm/amdsmi at ROCm 6.3 and of ROCm/rocm-systems at
7.13 (subcommands list, static, set, process), and AMD's guide to partitioning MI300X with the outputs in it.
"""

from __future__ import annotations

import dataclasses
import json
import os
import signal
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

COUNTS = {"SPX": 1, "DPX": 2, "TPX": 3, "QPX": 4}
MI300X = {"SPX": ["NPS1"], "DPX": ["NPS1", "NPS2"], "QPX": ["NPS1", "NPS4"], "CPX": ["NPS1", "NPS4"]}
GOES_WITH = {"NPS1": "SPX", "NPS2": "DPX", "NPS4": "CPX"}


@dataclass
class State:
    """The machine.

    rocm: 6 (rows in a list, one UUID a GPU, amd-smi loads the driver again itself) or 7. order: of the GPUs in the KFD
    topology, where one that is divided anew goes to the end. busy, in_use: how often a compute mode, or the removal of
    the driver, is refused from now on. silent: a change is neither made nor refused. late: a change is made and then
    something fails. warned: something is printed before the document. die_at: the program that called is killed at this
    call, and before it is answered. calls: all that were made.
    """

    gpus: list[dict[str, str]]
    rocm: int = 7
    xcds: int = 8
    name: str = "AMD Instinct MI300X"
    modes: dict[str, list[str]] = field(default_factory=lambda: MI300X)
    order: list[int] = field(default_factory=list)
    loaded: bool = True
    root: bool = True
    guest: bool = False
    busy: int = 0
    in_use: int = 0
    silent: bool = False
    late: bool = False
    warned: bool = False
    die_at: int = 0
    calls: list[list[str]] = field(default_factory=list)

    @classmethod
    def load(cls) -> State:
        return cls(**json.loads(Path(os.environ["FAKE_AMD"]).read_text()))

    def store(self) -> None:
        Path(os.environ["FAKE_AMD"]).write_text(json.dumps(dataclasses.asdict(self)))

    def partitions(self, gpu: dict[str, str]) -> int:
        return COUNTS.get(gpu["compute"], self.xcds)

    def devices(self) -> list[tuple[int, int]]:
        """(GPU, partition) by amd-smi's number."""
        return [(index, part) for index, gpu in enumerate(self.gpus) for part in range(self.partitions(gpu))]

    def nodes(self) -> dict[tuple[int, int], int]:
        """The topology node of each device; 0 and 1 are the CPU sockets."""
        ordered = [(i, part) for i in self.order for part in range(self.partitions(self.gpus[i]))]
        return {device: node for node, device in enumerate(ordered, start=2)}


def rows(state: State, *, listed: bool) -> list[dict[str, Any]]:
    found = []
    for number, (index, part) in enumerate(state.devices()):
        function = part if state.rocm > 6 else 0
        if listed:
            uuid = f"{index:02x}ff74a1-0000-1000-80{part if state.rocm > 6 else 0:02x}-ac4e7b4fb1d6"
            fields: dict[str, Any] = {"bdf": f"0000:{5 + 16 * index:02x}:00.{function}", "uuid": uuid}
            fields |= {"kfd_id": 20000 + number, "node_id": state.nodes()[index, part], "partition_id": part}
        else:
            shown = part == 0 and not state.guest
            key = "accelerator_partition" if state.rocm > 6 else "compute_partition"
            modes = {key: state.gpus[index]["compute"], "memory_partition": state.gpus[index]["memory"]}
            name = f"{state.name} VF" if state.guest else state.name
            fields = {"asic": {"market_name": name, "vendor_id": "0x1002"}}
            fields["partition"] = {**(modes if shown else dict.fromkeys(modes, "N/A")), "partition_id": part}
        found.append({"gpu": number, **fields})
    return found


def refuse(state: State, what: str, status: str, number: int) -> int:
    code = {"BUSY": 30, "NOT_SUPPORTED": 2, "SETTING_UNAVAILABLE": 55, "NO_PERM": 10}[status]
    sys.stderr.write(
        f"amdsmi.amdsmi_exception.AmdSmiLibraryException: Error code:\n\t{code} | AMDSMI_STATUS_{status}\n\n"
        f"ValueError: Unable to set {what} on GPU ID: {number} BDF:0000:05:00.0\n"
    )
    return 1


def set_mode(state: State, arguments: list[str]) -> int:
    number, option, mode = int(arguments[1]), arguments[2], arguments[3].upper()
    what = f"{option.removeprefix('--').replace('-', ' ')} to {mode}"
    index, part = state.devices()[number]
    if not state.root:
        # What ROCm 7 does: it says so and ends with 0.
        print("AmdSmiPermissionDeniedException: Command requires elevation. Error code: -10")
        return 0
    if state.guest or part:
        return refuse(state, what, "NOT_SUPPORTED", number)
    if option == "--memory-partition":
        if input("Do you accept these terms? [Y/N] ") not in ("Y", "y", "Yes", "yes", "YES"):
            return 1
        if state.silent:
            return 0
        state.gpus[index]["requested"] = mode
        if state.rocm == 6:
            for gpu in state.gpus:
                gpu["requested"] = mode
            load_driver(state)
    else:
        if state.busy:
            state.busy -= 1
            return refuse(state, what, "BUSY", number)
        if state.gpus[index]["memory"] not in state.modes.get(mode, []):
            return refuse(state, what, "SETTING_UNAVAILABLE", number)
        if state.silent:
            return 0
        state.gpus[index]["compute"] = mode
        state.order = [i for i in state.order if i != index] + [index]
    print(f"GPU: {number}\n    {option[2:].upper()}: Successfully set {what}")
    if state.late:
        print("OSError: [Errno 24] Too many open files")
    return int(state.late)


def load_driver(state: State) -> None:
    for gpu in state.gpus:
        if gpu["memory"] != gpu["requested"]:
            gpu |= {"memory": gpu["requested"], "compute": GOES_WITH[gpu["requested"]]}
    state.order = list(range(len(state.gpus)))
    state.loaded = True


def amd_smi(state: State, arguments: list[str]) -> int:
    if not state.loaded:
        print("ERROR:root:Unable to detect any GPU devices, check amdgpu version and module status", file=sys.stderr)
        return 0
    if arguments[0] == "set":
        return set_mode(state, arguments[1:])
    assert arguments[-1] == "--json", arguments
    if state.warned:
        print("WARNING: User is missing the following required groups: render, video. [see the documentation]")
    if arguments[0] == "process":
        info = {"name": "python3", "pid": 4242} if state.busy or state.in_use else "No running processes detected"
        print(json.dumps([{"gpu": 0, "process_list": [{"process_info": info}]}], indent=4))
        return 0
    assert arguments[:-1] in (["list"], ["static", "--asic", "--partition"]), arguments
    found = rows(state, listed=arguments[0] == "list")
    wrapped = state.rocm > 6 and arguments[0] == "static"
    print(json.dumps({"gpu_data": found} if wrapped else found, indent=4))
    return 0


def modprobe(state: State, arguments: list[str]) -> int:
    if not state.root:
        print("modprobe: ERROR: could not remove 'amdgpu': Operation not permitted", file=sys.stderr)
        return 1
    if arguments == ["-r", "amdgpu"]:
        if state.in_use:
            state.in_use -= 1
            print("modprobe: FATAL: Module amdgpu is in use.", file=sys.stderr)
            return 1
        state.loaded = False
        return 0
    assert arguments == ["amdgpu"], arguments
    load_driver(state)
    return 0


def main(program: str, arguments: list[str]) -> int:
    state = State.load()
    state.order = state.order or list(range(len(state.gpus)))
    state.calls.append([program, *arguments])
    if len(state.calls) == state.die_at:
        state.store()
        os.kill(os.getppid(), signal.SIGKILL)
        return 1
    code = (amd_smi if program == "amd-smi" else modprobe)(state, arguments)
    state.store()
    return code


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], sys.argv[2:]))
