"""`doctor` for NVIDIA GPUs: driver and CUDA, desired and actual layout, and the health of each GPU."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Sequence
from pathlib import Path

import pynvml

from skyinfra import mig
from skyinfra.doctor import incompatible_packages, packages
from skyinfra.doctor.kernel_log import xids
from skyinfra.doctor.system import failed, judged, layout, text_of
from skyinfra.errors import AcceleratorMissing, SkyinfraError
from skyinfra.gpu import exports, inventory, machine
from skyinfra.gpu.hardware import Hardware, session
from skyinfra.gpu.nvml import Gpu, Nvml
from skyinfra.gpu.record import RecordedHardware
from skyinfra.mig.manager import BOOT_HINT, OPERATED_HINT, boots, operated
from skyinfra.node import processes
from skyinfra.node.device import RECOVERY, asks_for
from skyinfra.node.folder import NodeDirectory
from skyinfra.protocol.findings import Finding
from skyinfra.protocol.nodeconfig import NodeConfig

_VENDOR = "0x10de"
_FABRIC = {0: None, 1: "not started", 2: "in progress", 3: "completed"}
# Reasons of lower clocks that cost speed; a power cap under load, or idling, is normal.
_SLOWDOWNS = {
    pynvml.nvmlClocksThrottleReasonHwThermalSlowdown: "too hot",
    pynvml.nvmlClocksThrottleReasonSwThermalSlowdown: "hot",
    pynvml.nvmlClocksThrottleReasonHwPowerBrakeSlowdown: "power brake of the machine",
    pynvml.nvmlClocksThrottleReasonHwSlowdown: "hardware slowdown",
}
# The oldest driver branch for any minor version of a major one: NVIDIA's "CUDA Compatibility", table of minor versions.
_BRANCHES = {11: 450, 12: 525, 13: 580}


def checks(node: NodeConfig | None, directory: NodeDirectory | None, path: list[str], root: Path) -> Iterator[Finding]:
    """Yields the findings; none where no NVIDIA GPU is declared and none is present."""
    declared = node is not None and node.accelerator is not None and node.accelerator.vendor == "nvidia"
    if node is not None and (not declared or node.scheduler_only):
        return
    if node is None and not _present(root):
        return
    nvml = Hardware(node, directory).nvml() if node is not None and directory is not None else session(Nvml())
    what, wanted = "accelerators: driver", "a driver that answers"
    try:
        with nvml as opened:
            yield from _opened(opened, node, directory, path, root)
    except AcceleratorMissing as error:
        yield failed(what, error, wanted)
    except pynvml.NVMLError as error:
        yield failed(what, inventory.no_driver(error), wanted)
    yield from _kernel(root)


def _opened(
    nvml: Nvml, node: NodeConfig | None, directory: NodeDirectory | None, path: list[str], root: Path
) -> Iterator[Finding]:
    gpus = nvml.gpus()
    names = inventory.counted([gpu.name for gpu in gpus])
    wanted = f"{node.accelerator.count} x {node.accelerator.name}" if node and node.accelerator else "at least one"
    if node is None or directory is None:
        yield judged("accelerators", bool(gpus), names, wanted, "")
    else:
        yield from _as_declared(node, directory, names, wanted)
    yield from _others(nvml)
    yield from _driver(nvml, packages.cuda(path))
    yield from incompatible_packages.checks(path, partitions=any(gpu.is_partitioned for gpu in gpus))
    yield from _fabric(gpus, root)
    yield from _device_files(root)
    for gpu in gpus:
        yield from _ecc(gpu)
        yield from _recovery(gpu)
        yield from _clocks(gpu)


def _as_declared(node: NodeConfig, directory: NodeDirectory, found: str, wanted: str) -> Iterator[Finding]:
    """Compares the GPUs and their layouts with the node configuration."""
    hardware = Hardware(node, directory)
    try:
        hardware.devices()
    except SkyinfraError as error:
        yield failed("accelerators", error, wanted)
        return
    yield Finding("accelerators", "ok", found, wanted)
    if os.geteuid() != 0 and RecordedHardware.applies(node, directory):
        hardware = RecordedHardware(node, directory)
    layouts = node.accelerator.layouts if node.accelerator else ()
    spelled = ", ".join(mig.layout_text(each) or "whole" for each in layouts) or "whole GPUs, MIG off"
    todo = "`skyinfra-runner partition --config FILE` makes it, as root; `--dry-run` shows the steps."
    yield layout("MIG layout", hardware, spelled, todo, counted=True)


def _others(nvml: Nvml) -> Iterator[Finding]:
    """Whoever else partitions the GPUs undoes what is declared; one that keeps what stands does not."""
    here, what, wanted = machine.SystemMachine(), "MIG layout: others", "skyinfra alone, or another one's same layout"
    if (manager := here.mig_manager()) is not None:
        yield Finding(what, "wrong", operated(processes.describe(manager)), wanted, OPERATED_HINT)
    if (selected := here.selected_at_boot()) is not None:
        try:
            same = exports.keeps(nvml, selected)
        except SkyinfraError:
            same = False
        yield judged(what, same, boots(selected), wanted, BOOT_HINT)


def _driver(nvml: Nvml, needs: Sequence[packages.Need]) -> Iterator[Finding]:
    """Compares the driver with the CUDA of each package that tasks may import."""
    driver = nvml.driver_version()
    offers = nvml.cuda_version()
    shown = f"driver {driver}" + (f", CUDA up to {offers[0]}.{offers[1]}" if offers else "")
    if not needs:
        yield Finding("CUDA", "ok", shown, "nothing: no package here is made for CUDA")
    digits = re.match(r"\d+", driver)
    branch = int(digits[0]) if digits else 0
    for need in needs:
        what, wanted = f"CUDA of {need.package.split()[0]}", f"CUDA {need} for {need.package}"
        lowest = _BRANCHES.get(need.version[0])
        if (offers is not None and offers >= need.version) or (offers is None and lowest is None):
            yield Finding(what, "unknown" if offers is None else "ok", shown, wanted)
        elif lowest is not None and branch >= lowest and (offers is None or offers[0] == need.version[0]):
            yield Finding(what, "ok", f"{shown}: enough, but for PTX that is compiled at run time", wanted)
        else:
            at_least = f"driver {lowest} or later" if lowest else f"a driver with CUDA {need}"
            todo = f"Choose an image with {at_least}, or a {need.package.split()[0]} made for an older CUDA."
            yield Finding(what, "wrong", shown, f"{wanted}: {at_least}", todo)


def _fabric(gpus: Sequence[Gpu], root: Path) -> Iterator[Finding]:
    """NVSwitch needs the fabric manager: without it CUDA does not start (error 802)."""
    states = {gpu.index: state for gpu in gpus if (state := _FABRIC.get(gpu.fabric_state() or 0))}
    switches = any((root / "dev").glob("nvidia-nvswitch[0-9]*"))
    if not states and not switches:
        return
    # The kernel cuts names of processes at 15 characters.
    manager = any(text_of(entry).startswith("nv-fabricmanag") for entry in (root / "proc").glob("[0-9]*/comm"))
    waiting = ", ".join(f"GPU {index} {state}" for index, state in states.items() if state != "completed")
    found = "running" if manager else "no process nv-fabricmanager"
    if waiting:
        found += f"; {waiting}"
    elif states:
        found += "; every GPU is in the fabric"
    fine = not waiting and (manager or bool(states))
    todo = "`systemctl enable --now nvidia-fabricmanager`; its version has to be that of the driver."
    yield judged("fabric manager", fine, found, "running, for NVSwitch", todo)


def _device_files(root: Path) -> Iterator[Finding]:
    """The device files that CUDA opens."""
    needed = machine.needed_files(root)
    if not needed:
        return
    absent = machine.missing_files(root)
    closed = [file for file in needed if file not in absent and not os.access(file, os.R_OK)]
    found = [f"{file} is missing" for file in absent] + [f"{file} may not be read" for file in closed]
    todo = "`skyinfra-runner partition --config FILE` makes them, as root, with the driver's nvidia-modprobe."
    wanted = "unified memory, and the capabilities of every partition"
    shown = "; ".join(found) or "all there"
    yield judged("device files", not found, shown, wanted, todo)


def _ecc(gpu: Gpu) -> Iterator[Finding]:
    mode = gpu.ask("nvmlDeviceGetEccMode")
    if mode is None:
        return
    errors = gpu.ask("nvmlDeviceGetTotalEccErrors", pynvml.NVML_MEMORY_ERROR_TYPE_UNCORRECTED, pynvml.NVML_VOLATILE_ECC)
    _, _, pending, lost = gpu.ask("nvmlDeviceGetRemappedRows") or (0, 0, 0, 0)
    if lost:
        found, todo = "a row of memory could not be remapped", "Replace the machine."
    elif pending:
        found = "rows of memory wait for a reset to be remapped"
        todo = "Drain the node (`skyinfra-runner drain`) and reset the GPU, or reboot."
    elif errors:
        found = f"{errors} uncorrected errors since the driver was loaded"
        todo = "Drain the node and reset the GPU; replace the machine where they come back."
    else:
        found, todo = "no uncorrected errors" if mode[0] else "off", ""
    wanted = "no uncorrected errors, no failed rows" if todo or mode[0] else "on or off"
    yield judged(f"ECC of GPU {gpu.index}", not todo, found, wanted, todo)


def _recovery(gpu: Gpu) -> Iterator[Finding]:
    """Yields the recovery action that the driver asks for, by which slots are closed; an old one does not know it."""
    fields = gpu.ask("nvmlDeviceGetFieldValues", [RECOVERY])
    if any(field.nvmlReturn == pynvml.NVML_SUCCESS for field in fields or ()):
        asked = asks_for(fields)
        todo = "Drain the node (`skyinfra-runner drain`) and do that, or replace the machine."
        yield judged(f"recovery of GPU {gpu.index}", asked is None, asked or "nothing is asked for", "nothing", todo)


def _clocks(gpu: Gpu) -> Iterator[Finding]:
    reasons = gpu.ask("nvmlDeviceGetCurrentClocksEventReasons")
    if reasons is None:
        reasons = gpu.ask("nvmlDeviceGetCurrentClocksThrottleReasons")
    if reasons is not None:
        slow = [text for bit, text in _SLOWDOWNS.items() if reasons & bit]
        temperature = gpu.temperature()
        shown = f"{', '.join(slow) or 'not throttled'}" + (f", {temperature} °C" if temperature is not None else "")
        todo = "Look at the cooling and the power supply, or tell the provider; the GPU runs at lower clocks."
        yield judged(f"clocks of GPU {gpu.index}", not slow, shown, "not throttled", todo)


def _kernel(root: Path) -> Iterator[Finding]:
    """Xid errors, which the driver writes to the kernel's log."""
    try:
        found = xids(root)
    except OSError as error:
        text = f"the kernel's log cannot be read: {error.strerror}"
        yield Finding("Xid errors", "unknown", text, "none", "Run it as root.")
        return
    if not found:
        yield Finding("Xid errors", "ok", "none since the machine started", "none")
    for xid in found:
        times = f", {xid.count} times" if xid.count > 1 else ""
        text = f"{xid.meaning} on {xid.device}{times}"
        yield judged(f"Xid {xid.number}", not xid.to_do, text, "none", xid.to_do)


def _present(root: Path) -> bool:
    """Returns whether a display or 3D controller of NVIDIA is on the PCI bus, or its driver is installed."""
    for device in (root / "sys/bus/pci/devices").glob("*"):
        if text_of(device / "vendor") == _VENDOR and text_of(device / "class").startswith("0x03"):
            return True
    if any((root / "dev").glob("nvidia[0-9]*")):
        return True
    try:
        pynvml.nvmlInit()
        pynvml.nvmlShutdown()
    except pynvml.NVMLError as error:
        return error.value != pynvml.NVML_ERROR_LIBRARY_NOT_FOUND or inventory.unloadable() is not None
    return True
