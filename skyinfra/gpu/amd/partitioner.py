"""Brings the AMD GPUs of a node to the partition modes that its configuration declares.

Level-triggered: only a mode that differs is set, so that a second run does nothing. The memory mode goes first: it
needs idle GPUs and the driver loaded again, changes every GPU of the node, and sets compute modes back. It is asked for
on the first partition of each GPU; the others refuse it. Then the compute modes, each for itself.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from skyinfra.errors import AcceleratorMissing, PartitionFailed
from skyinfra.gpu import inventory
from skyinfra.gpu.amd import smi
from skyinfra.gpu.amd.simulated import SimulatedAmd
from skyinfra.gpu.amd.smi import AmdDriver, AmdGpu, AmdSmi, Answer
from skyinfra.gpu.inventory import Device
from skyinfra.gpu.partitioner import Emit, Partition, Step
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
    """One GPU whose modes are set, or whose driver is loaded again: nothing on it survives. profile: ``CPX+NPS4``."""

    def __str__(self) -> str:
        return f"GPU {self.gpu}: set {self.profile}"


class AmdGpus:
    """The AMD GPUs of one node and the modes they are to have. Its methods are those of `Hardware`."""

    def __init__(self, driver: AmdDriver, accelerator: NodeAccelerator) -> None:
        self._driver = driver
        self._accelerator = accelerator

    def devices(self) -> tuple[Device, ...]:
        """The physical GPUs. Raises `AcceleratorMissing` where they are not those that are declared."""
        gpus = self._driver.gpus()
        found = ", ".join(f"{gpu.name or 'AMD GPU'} at {gpu.address}" for gpu in gpus) or "none"
        inventory.check_count(self._accelerator, len(gpus), found, hint="`amd-smi list` names what the driver sees.")
        for gpu in gpus:
            if gpu.name and not inventory.same_model(self._accelerator.name, gpu.name):
                raise AcceleratorMissing(
                    f"declared {self._accelerator.count} x {self._accelerator.name}, found {found}",
                    field="accelerator.name",
                    hint="The machine type is another than declared: correct the declaration or the machine type.",
                )
        return tuple(Device(gpu.index, str(gpu.index), gpu.devices[0].uuid) for gpu in gpus)

    def plan(self) -> list[Step]:
        """One step for each GPU whose modes are set, or whose driver is loaded again; empty where all stand."""
        return plan(self._driver, self._accelerator)

    def partition(self, emit: Emit) -> tuple[Partition, ...]:
        """Brings every GPU to its modes; the partitions that stand then."""
        return apply(self._driver, self._accelerator, emit=emit)

    def standing(self) -> tuple[Partition, ...]:
        """The partitions of GPUs that stand as declared already; changes nothing."""
        return standing(self._driver, self._accelerator)


def of(config: NodeConfig, directory: NodeDirectory, *, root: Path = Path("/")) -> AmdGpus | None:
    """The AMD GPUs of the node *config* where their modes matter: those that are declared divided, or stand so."""
    accelerator = config.accelerator
    if accelerator is None or accelerator.vendor != "amd" or config.scheduler_only:
        return None
    if config.simulate:
        driver = SimulatedAmd(accelerator, path=directory.path, seed=f"{config.fleet}/{config.node}")
        return AmdGpus(driver, accelerator) if accelerator.layouts or driver.exists else None
    if not accelerator.layouts and (smi.find_program() is None or _as_many(accelerator, root)):
        return None
    return AmdGpus(AmdSmi(), accelerator)


def _as_many(accelerator: NodeAccelerator, root: Path) -> bool:
    """Whether there are as many device files as GPUs, which then are whole."""
    try:
        inventory.by_device_files(accelerator, root=root)
    except AcceleratorMissing:
        return False
    return True


def plan(driver: AmdDriver, accelerator: NodeAccelerator) -> list[Step]:
    """The steps from what is to what *accelerator* wants, GPU by GPU; empty where it stands. Changes nothing."""
    return _steps(driver.gpus(), accelerator)


def apply(
    driver: AmdDriver,
    accelerator: NodeAccelerator,
    *,
    emit: Emit = lambda event: None,
    patience_s: float = 10.0,
) -> tuple[Partition, ...]:
    """Brings every GPU to its modes and returns the partitions that stand then, by GPU and start.

    *emit* gets an event for every step done. *patience_s*: for how long a GPU that is in use is waited for.
    Raises `PartitionFailed` with the GPU, what was wanted, what was found and what amd-smi said.
    """
    compute, memory = _wanted(accelerator)
    gpus = driver.gpus()
    if any(_differs(gpu.memory, memory, WHOLE[1]) for gpu in gpus):
        gpus = _set_memory(driver, gpus, memory, emit, patience_s)
    steps = [gpu for gpu in gpus if _differs(gpu.compute, compute, WHOLE[0])]
    if steps:
        gpus = _set_compute(driver, steps, compute, patience_s)
    for gpu in steps:
        emit(ModeStep(gpu.index, "mode", profile=f"{compute}+{memory}").to_event())
    return _partitions(gpus, accelerator)


def standing(driver: AmdDriver, accelerator: NodeAccelerator) -> tuple[Partition, ...]:
    """The partitions of a node that stands as declared. Raises `PartitionFailed` where it does not."""
    gpus = driver.gpus()
    steps = _steps(gpus, accelerator)
    if steps:
        raise PartitionFailed(
            "the GPUs do not stand as declared",
            field="accelerator.layouts",
            hint="\n".join([*map(str, steps), "Run `sudo skyinfra-runner partition` with the same configuration."]),
        )
    return _partitions(gpus, accelerator)


def _steps(gpus: Sequence[AmdGpu], accelerator: NodeAccelerator) -> list[Step]:
    compute, memory = _wanted(accelerator)
    every = any(_differs(gpu.memory, memory, WHOLE[1]) for gpu in gpus)
    touched = [gpu for gpu in gpus if every or _differs(gpu.compute, compute, WHOLE[0])]
    return [ModeStep(gpu.index, "mode", profile=f"{compute}+{memory}") for gpu in touched]


def _wanted(accelerator: NodeAccelerator) -> tuple[str, str]:
    """The compute and the memory mode that every GPU is to have."""
    if not accelerator.layouts:
        return WHOLE
    return accelerator.layouts[0][0].profile, accelerator.memory_mode or WHOLE[1]


def _differs(found: str | None, wanted: str, usual: str) -> bool:
    """Whether a mode is to be set. A GPU that names none has the usual one."""
    return (found or usual) != wanted


def _set_memory(driver: AmdDriver, gpus: Sequence[AmdGpu], memory: str, emit: Emit, patience_s: float) -> list[AmdGpu]:
    """Asks the GPUs for the memory mode, loads the driver again if amd-smi has not, and gives what stands then."""
    now = list(gpus)
    for gpu in gpus:
        if not _differs(gpu.memory, memory, WHOLE[1]):
            continue
        answer = _patiently(partial(driver.set_memory, gpu, memory), patience_s)
        if answer.failed or now == gpus:
            now = driver.gpus()
        if not any(_differs(each.memory, memory, WHOLE[1]) for each in now):
            # Before ROCm 7 the first change loads the driver again, and with it changes every GPU.
            break
        if answer.failed:
            raise _refused(driver, gpu, memory, f"refuses the memory mode {memory}", answer)
    else:
        answer = _reload(driver, memory, emit, patience_s)
        now = driver.gpus()
    for gpu in now:
        if _differs(gpu.memory, memory, WHOLE[1]):
            raise _refused(driver, gpu, memory, f"does not take the memory mode {memory} over", answer)
    emit({"phase": "memory", "profile": memory})
    return now


def _reload(driver: AmdDriver, memory: str, emit: Emit, patience_s: float) -> Answer:
    answer = _patiently(driver.reload, patience_s)
    if answer.failed:
        raise PartitionFailed(
            f"the amdgpu driver cannot be loaded again for the memory mode {memory}: {answer.text}",
            field="accelerator.memory_mode",
            hint=_HINTS["NO_PERM"] if answer.status == "NO_PERM" else _with_processes(driver, _RELOAD_HINT),
        )
    emit({"phase": "reload", "driver": "amdgpu"})
    return answer


def _set_compute(driver: AmdDriver, gpus: Sequence[AmdGpu], compute: str, patience_s: float) -> list[AmdGpu]:
    """Sets the compute mode of *gpus*, and gives what stands then: amd-smi's word is not taken for it."""
    answers: dict[int, Answer] = {}
    # From the last one on, so that amd-smi's numbers of those that are still to be set stay.
    for gpu in reversed(gpus):
        answers[gpu.index] = _patiently(partial(driver.set_compute, gpu, compute), patience_s)
        if answers[gpu.index].failed:
            _check_compute(driver, driver.gpus(), compute, answers)
    now = driver.gpus()
    _check_compute(driver, now, compute, answers)
    return now


def _check_compute(driver: AmdDriver, gpus: Sequence[AmdGpu], compute: str, answers: Mapping[int, Answer]) -> None:
    for gpu in gpus:
        if gpu.index in answers and _differs(gpu.compute, compute, WHOLE[0]):
            raise _refused(driver, gpu, compute, f"refuses the compute mode {compute}", answers[gpu.index])


def _patiently(change: Callable[[], Answer], patience_s: float) -> Answer:
    """The answer to *change*, which is asked again for as long as something still holds the GPU."""
    deadline = time.monotonic() + patience_s
    while (answer := change()).failed and _is_busy(answer) and time.monotonic() < deadline:
        time.sleep(_RETRY_S)
    return answer


def _is_busy(answer: Answer) -> bool:
    return answer.status == "BUSY" or "in use" in answer.text


def _partitions(gpus: Sequence[AmdGpu], accelerator: NodeAccelerator) -> tuple[Partition, ...]:
    """The partitions as they stand, by GPU and start. ROCm counts devices in the order of their topology nodes."""
    if not accelerator.layouts:
        return ()
    devices = [device for gpu in gpus for device in gpu.devices]
    ordered = sorted(devices, key=lambda device: (device.node is None, device.node or 0, device.number))
    visible = {device.number: str(rank) for rank, device in enumerate(ordered)}
    uuids = [device.uuid for device in devices]
    made: list[Partition] = []
    for gpu in gpus:
        layout = sorted(accelerator.layouts[gpu.index], key=lambda p: p.start)
        if len(gpu.devices) != len(layout):
            raise _error(
                gpu,
                "+".join(_wanted(accelerator)),
                f"{gpu.compute} shows {len(gpu.devices)} partitions where {len(layout)} were declared",
                "It may be another model than declared. With many partitions the kernel can run out of DRM nodes: "
                "unload display drivers such as ast (`modprobe -r ast`) and amdgpu, then load amdgpu again.",
            )
        for place, device in zip(layout, gpu.devices, strict=True):
            own = device.uuid if device.uuid and uuids.count(device.uuid) == 1 else None
            uuid = own or f"{device.uuid or gpu.address}/{device.partition}"
            made.append(
                ComputePartition(gpu.index, place.profile, place.start, place.size, uuid, visible[device.number])
            )
    return tuple(made)


def _refused(driver: AmdDriver, gpu: AmdGpu, wanted: str, what: str, answer: Answer) -> PartitionFailed:
    hint = _HINTS.get(answer.status or "", _DEFAULT_HINT)
    if gpu.compute is None or gpu.name.endswith(" VF"):
        hint = _GUEST
    elif _is_busy(answer):
        hint = _with_processes(driver, _HINTS["BUSY"])
    return _error(gpu, wanted, f"the driver {what}: {answer.text or 'amd-smi says nothing'}", hint)


def _error(gpu: AmdGpu, wanted: str, message: str, hint: str) -> PartitionFailed:
    name = f"GPU {gpu.index} ({gpu.name or 'AMD'} at {gpu.address})"
    found = f"{gpu.compute or 'no partition mode'}, {gpu.memory or 'no memory mode'}"
    return PartitionFailed(
        f"{name}: {message}",
        field=f"accelerator.layouts[{gpu.index}]",
        hint=f"Wanted: {wanted}. Found: {found}.\n{hint}",
    )


def _with_processes(driver: AmdDriver, hint: str) -> str:
    found = driver.processes()
    return f"{hint}\nOn the GPUs: {', '.join(found)}." if found else hint
