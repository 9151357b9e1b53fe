"""Brings the AMD GPUs of a node to the partition modes that its configuration declares.

Level-triggered: only a mode that differs is set, so that a second run does nothing. The memory mode is set first: it
needs idle GPUs and a reload of the driver, changes every GPU of the node, and resets compute modes. It is set on the
first partition of each GPU; the others refuse it. Then the compute modes are set, one GPU after the other.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from skyinfra.errors import PartitionFailed
from skyinfra.gpu import inventory
from skyinfra.gpu.amd.simulated import SimulatedAmd
from skyinfra.gpu.amd.smi import AmdGpu, AmdSmi, Answer
from skyinfra.gpu.inventory import Device
from skyinfra.gpu.partitioner import Emit
from skyinfra.mig.steps import Partition, Step, check_no_steps
from skyinfra.node.folder import NodeDirectory
from skyinfra.protocol.nodeconfig import NodeAccelerator, NodeConfig

WHOLE = ("SPX", "NPS1")
# A GPU may stay busy for a moment after the last process on it has ended.
_RETRY_S = 0.5
_GUEST = (
    "Inside a virtual machine (SR-IOV) only the host sets the modes: choose a bare-metal machine type, "
    "or declare the GPUs as the host divides them. A driver or firmware that is too old refuses as well."
)
_HINTS = {
    "NO_PERM": "Changing the modes needs root: run `sudo skyinfra-runner partition`.",
    "BUSY": "Something holds the GPU: stop it, and run it again.",
    "NOT_SUPPORTED": _GUEST,
    "NOT_YET_IMPLEMENTED": _GUEST,
    "SETTING_UNAVAILABLE": (
        "`sudo amd-smi partition --accelerator --memory` lists the modes of this GPU. "
        "It may be another model than declared, or its driver may be too old for the mode."
    ),
    "AMDGPU_RESTART_ERR": "The driver could not be loaded again: stop what uses the GPUs, or reboot the node.",
}
_HINTS["INVAL"] = _HINTS["SETTING_UNAVAILABLE"]
_DEFAULT_HINT = "`amd-smi static --partition` and the kernel log (`dmesg | grep amdgpu`) say what the driver sees."
_RELOAD_HINT = (
    "The memory mode becomes active when the driver is loaded again, which needs idle GPUs: stop what uses them "
    "(also a display or monitoring service), or reboot the node; then run it again."
)


@dataclass(frozen=True)
class ComputePartition(Partition):
    """One partition of an AMD GPU; start and size are in XCDs. ``visible`` is its number among ROCm's devices.

    ``uuid`` is amd-smi's; where the driver gives all partitions of a GPU the same (before ROCm 7.0), with the index of
    the partition behind it.
    """

    visible: str


@dataclass(frozen=True)
class ModeStep(Step):
    """Sets the modes of one GPU, or reloads its driver: no process on it survives. profile: ``CPX+NPS4``."""

    def __str__(self) -> str:
        return f"GPU {self.gpu}: set {self.profile}"


class AmdGpus:
    """The AMD GPUs of one node and their desired modes. Its methods are those of `Hardware`.

    *patience_s*: how long to wait for a GPU that is in use.
    """

    def __init__(self, driver: AmdSmi, accelerator: NodeAccelerator, *, patience_s: float = 10.0) -> None:
        self._driver = driver
        self._accelerator = accelerator
        self._patience_s = patience_s
        self._compute, self._memory = WHOLE
        if accelerator.layouts:
            self._compute, self._memory = accelerator.layouts[0][0].profile, accelerator.memory_mode or WHOLE[1]

    def devices(self) -> tuple[Device, ...]:
        """Returns the physical GPUs. Raises `AcceleratorMissing` where they are not the declared ones."""
        gpus = self._driver.gpus()
        found = ", ".join(f"{gpu.name or 'AMD GPU'} at {gpu.address}" for gpu in gpus) or "none"
        inventory.check_count(self._accelerator, len(gpus), found, hint="`amd-smi list` names what the driver sees.")
        for gpu in gpus:
            if gpu.name and not inventory.same_model(self._accelerator.name, gpu.name):
                raise inventory.other_model(self._accelerator, found)
        return tuple(Device(gpu.index, str(gpu.index), gpu.devices[0].uuid) for gpu in gpus)

    def plan(self) -> list[Step]:
        """One step for each GPU whose modes are set, or whose driver is reloaded; empty where the modes are desired."""
        return self._steps(self._driver.gpus())

    def partition(self, emit: Emit = lambda event: None) -> tuple[Partition, ...]:
        """Sets the desired modes of every GPU and returns the partitions, by GPU and start.

        *emit* gets an event for every step. Raises `PartitionFailed` with the message of amd-smi.
        """
        gpus = self._driver.gpus()
        if any(map(self._memory_differs, gpus)):
            gpus = self._set_memory(gpus, emit)
        changed = [gpu for gpu in gpus if self._compute_differs(gpu)]
        if changed:
            gpus = self._set_compute(changed)
        for gpu in changed:
            emit(self._step(gpu).to_event())
        return self._partitions(gpus)

    def actual(self) -> tuple[Partition, ...]:
        """Returns the partitions of GPUs that have the desired modes. Raises `PartitionFailed` where they differ."""
        gpus = self._driver.gpus()
        check_no_steps(self._steps(gpus))
        return self._partitions(gpus)

    # A GPU that names no mode has that of a whole GPU.

    def _memory_differs(self, gpu: AmdGpu) -> bool:
        return (gpu.memory or WHOLE[1]) != self._memory

    def _compute_differs(self, gpu: AmdGpu) -> bool:
        return (gpu.compute or WHOLE[0]) != self._compute

    def _steps(self, gpus: Sequence[AmdGpu]) -> list[Step]:
        every = any(map(self._memory_differs, gpus))
        return [self._step(gpu) for gpu in gpus if every or self._compute_differs(gpu)]

    def _step(self, gpu: AmdGpu) -> Step:
        return ModeStep(gpu.index, "mode", profile=f"{self._compute}+{self._memory}")

    def _set_memory(self, gpus: Sequence[AmdGpu], emit: Emit) -> list[AmdGpu]:
        """Sets the memory mode, reloads the driver if amd-smi has not, and returns the GPUs as they are then."""
        now = list(gpus)
        for gpu in gpus:
            if not self._memory_differs(gpu):
                continue
            answer = self._patiently(partial(self._driver.set_memory, gpu, self._memory))
            if answer.failed or now == gpus:
                now = self._driver.gpus()
            if not any(map(self._memory_differs, now)):
                # Before ROCm 7 the first change reloads the driver, and with it changes every GPU.
                break
            if answer.failed:
                raise self._refused(gpu, self._memory, f"refuses the memory mode {self._memory}", answer)
        else:
            answer = self._reload(emit)
            now = self._driver.gpus()
        for gpu in now:
            if self._memory_differs(gpu):
                raise self._refused(gpu, self._memory, f"does not take the memory mode {self._memory} over", answer)
        emit({"phase": "memory", "profile": self._memory})
        return now

    def _reload(self, emit: Emit) -> Answer:
        answer = self._patiently(self._driver.reload)
        if answer.failed:
            raise PartitionFailed(
                f"the amdgpu driver cannot be loaded again for the memory mode {self._memory}: {answer.text}",
                field="accelerator.memory_mode",
                hint=_HINTS["NO_PERM"] if answer.status == "NO_PERM" else self._with_processes(_RELOAD_HINT),
            )
        emit({"phase": "reload", "driver": "amdgpu"})
        return answer

    def _set_compute(self, gpus: Sequence[AmdGpu]) -> list[AmdGpu]:
        """Sets the compute mode of *gpus* and returns all GPUs, read anew: amd-smi's exit code is not enough."""
        now = list(gpus)
        answers: dict[int, Answer] = {}
        # The last GPU first, so that amd-smi's numbers of the remaining GPUs stay.
        for gpu in reversed(gpus):
            answers[gpu.index] = self._patiently(partial(self._driver.set_compute, gpu, self._compute))
            if not answers[gpu.index].failed and gpu is not gpus[0]:
                continue
            now = self._driver.gpus()
            for each in now:
                if each.index in answers and self._compute_differs(each):
                    what = f"refuses the compute mode {self._compute}"
                    raise self._refused(each, self._compute, what, answers[each.index])
        return now

    def _patiently(self, change: Callable[[], Answer]) -> Answer:
        """Returns the answer to *change*, which is called again for as long as a process holds the GPU."""
        deadline = time.monotonic() + self._patience_s
        while (answer := change()).failed and answer.busy and time.monotonic() < deadline:
            time.sleep(_RETRY_S)
        return answer

    def _partitions(self, gpus: Sequence[AmdGpu]) -> tuple[Partition, ...]:
        """Returns the actual partitions, by GPU and start. ROCm counts devices in the order of their topology nodes."""
        if not self._accelerator.layouts:
            return ()
        devices = [device for gpu in gpus for device in gpu.devices]
        ordered = sorted(devices, key=lambda device: (device.node is None, device.node or 0, device.number))
        visible = {device.number: str(rank) for rank, device in enumerate(ordered)}
        uuids = [device.uuid for device in devices]
        made = []
        for gpu in gpus:
            layout = sorted(self._accelerator.layouts[gpu.index], key=lambda p: p.start)
            if len(gpu.devices) != len(layout):
                raise _error(
                    gpu,
                    f"{self._compute}+{self._memory}",
                    f"{gpu.compute} shows {len(gpu.devices)} partitions where {len(layout)} were declared",
                    "It may be another model than declared. With many partitions the kernel can run out of DRM nodes: "
                    "unload display drivers such as ast (`modprobe -r ast`) and amdgpu, then load amdgpu again.",
                )
            for p, device in zip(layout, gpu.devices, strict=True):
                own = device.uuid if uuids.count(device.uuid) == 1 else None
                uuid = own or f"{device.uuid or gpu.address}/{device.partition}"
                made.append(ComputePartition(gpu.index, p.profile, p.start, p.size, uuid, visible[device.number]))
        return tuple(made)

    def _refused(self, gpu: AmdGpu, desired: str, what: str, answer: Answer) -> PartitionFailed:
        hint = _HINTS.get(answer.status or "", _DEFAULT_HINT)
        if gpu.compute is None or gpu.name.endswith(" VF"):
            hint = _GUEST
        elif answer.busy:
            hint = self._with_processes(_HINTS["BUSY"])
        return _error(gpu, desired, f"the driver {what}: {answer.text or 'amd-smi says nothing'}", hint)

    def _with_processes(self, hint: str) -> str:
        found = self._driver.processes()
        return f"{hint}\nOn the GPUs: {', '.join(found)}." if found else hint


def of(config: NodeConfig, directory: NodeDirectory, *, root: Path = Path("/")) -> AmdGpus | None:
    """Returns the AMD GPUs of the node *config* where they are, or are to be, divided; else None."""
    accelerator = config.accelerator
    if accelerator is None or accelerator.vendor != "amd" or config.scheduler_only:
        return None
    if config.simulate:
        driver = SimulatedAmd(accelerator, path=directory.path, seed=f"{config.fleet}/{config.node}")
        return AmdGpus(driver, accelerator) if accelerator.layouts or driver.exists else None
    if not accelerator.layouts:
        whole = len(inventory.device_files("amd", root)[0]) == accelerator.count
        if whole or inventory.find_tool("amd-smi") is None:
            return None
    return AmdGpus(AmdSmi(), accelerator)


def _error(gpu: AmdGpu, desired: str, message: str, hint: str) -> PartitionFailed:
    name = f"GPU {gpu.index} ({gpu.name or 'AMD'} at {gpu.address})"
    found = f"{gpu.compute or 'no partition mode'}, {gpu.memory or 'no memory mode'}"
    return PartitionFailed(
        f"{name}: {message}",
        field=f"accelerator.layouts[{gpu.index}]",
        hint=f"Wanted: {desired}. Found: {found}.\n{hint}",
    )
