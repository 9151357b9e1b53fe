"""Brings the GPUs of a node to the layout that its configuration declares.

Level-triggered: what is (profile, start and size of every GPU instance) is compared with what is wanted, and only the
difference is touched, so that a second run does nothing and tasks on other partitions never notice. Every instance is
created at an explicit place and in a fixed order: the same layout then gives the same instances, and with them the
same UUIDs, at every boot. Profiles are resolved by name on the device: ids and names differ between GPUs and drivers.
"""

from __future__ import annotations

import contextlib
import re
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal

import pynvml

from skyinfra._errors import PartitionFailed
from skyinfra.protocol.nodeconfig import NodeAccelerator, PlacedPartition
from skyinfra.runner.nvml import Gpu, GpuInstance, Nvml, ProfileInfo, error_name

# The same profile is named with a little less or more memory by some drivers: 3g.39gb, 3g.40gb.
_MEMORY_TOLERANCE_GB = 3
_NAME = re.compile(r"(?P<slices>\d+g)\.(?P<gb>\d+)gb(?P<rest>.*)")
# A GPU instance may stay busy for a moment after the last process on it has ended.
_RETRY_S = 0.5

Emit = Callable[[dict[str, Any]], None]
Action = Literal["mode", "destroy", "create"]

_HINTS = {
    pynvml.NVML_ERROR_NO_PERMISSION: "Changing partitions needs root: run `sudo skyinfra-runner partition`.",
    pynvml.NVML_ERROR_IN_USE: (
        "Processes hold the GPU: `fuser -v /dev/nvidia*` lists them. "
        "Stop them (often nvidia-dcgm, dcgm-exporter or a display server) and run it again."
    ),
    pynvml.NVML_ERROR_INSUFFICIENT_RESOURCES: (
        "Something else stands there: `nvidia-smi mig -lgi` lists what. Destroy what skyinfra did not create."
    ),
    pynvml.NVML_ERROR_INVALID_ARGUMENT: (
        "This GPU does not allow that place: `nvidia-smi mig -lgipp` lists those it allows. "
        "The GPU may be another model than declared."
    ),
    pynvml.NVML_ERROR_NOT_SUPPORTED: "This GPU or its driver cannot do that; see `nvidia-smi -q` for both.",
    pynvml.NVML_ERROR_GPU_IS_LOST: "The GPU has fallen off the bus: replace the node.",
}
_RESET_HINT = "Run `nvidia-smi --gpu-reset -i {index}` with nothing on the GPU, or reboot the node; then run it again."


@dataclass(frozen=True)
class Partition:
    """One MIG device that exists: its GPU, profile, place in memory slices, and UUID (``MIG-...``)."""

    gpu: int
    profile: str
    start: int
    size: int
    uuid: str


@dataclass(frozen=True)
class Step:
    """One difference between what is and what is wanted, and how it is resolved.

    mode: MIG is turned on (``on``) or off. destroy: the instance at ``start`` goes, with the MIG device ``uuid``.
    create: an instance of ``profile`` comes to ``start``.
    """

    gpu: int
    action: Action
    on: bool | None = None
    profile: str | None = None
    start: int | None = None
    size: int | None = None
    uuid: str | None = None

    def to_json(self) -> dict[str, Any]:
        """Its fields that say something."""
        return {key: value for key, value in asdict(self).items() if value is not None}

    def __str__(self) -> str:
        if self.action == "mode":
            return f"GPU {self.gpu}: turn MIG {'on' if self.on else 'off'}"
        return f"GPU {self.gpu}: {self.action} {self.profile} at {self.start}:{self.size}"


def plan(nvml: Nvml, accelerator: NodeAccelerator) -> list[Step]:
    """The steps from what is to what *accelerator* wants, GPU by GPU; empty where it stands. Changes nothing.

    Raises `PartitionFailed` where NVML refuses to say what is, or the GPU has no MIG or no such profile.
    """
    return [step for gpu in _gpus(nvml) for step in _Target(gpu, accelerator).steps()]


def apply(
    nvml: Nvml, accelerator: NodeAccelerator, *, emit: Emit = lambda event: None, patience_s: float = 10.0
) -> tuple[Partition, ...]:
    """Brings every GPU to its layout and returns the partitions that stand then, by GPU and start.

    *emit* gets an event for every step done. *patience_s*: for how long an instance that is in use is waited for.
    Raises `PartitionFailed` with the GPU, what was wanted, what was found and NVML's error.
    """
    partitions: list[Partition] = []
    for index in range(len(_gpus(nvml))):
        _Target(_gpus(nvml)[index], accelerator).toggle(emit, patience_s)
        # Listed again: a change of the mode voids every handle.
        partitions.extend(_Target(_gpus(nvml)[index], accelerator).fill(emit, patience_s))
    return tuple(partitions)


def standing(nvml: Nvml, accelerator: NodeAccelerator) -> tuple[Partition, ...]:
    """The partitions of a node that stands as declared. Raises `PartitionFailed` where it does not."""
    steps = plan(nvml, accelerator)
    if steps:
        raise PartitionFailed(
            "the GPUs do not stand as declared",
            field="accelerator.layouts",
            hint="\n".join([*map(str, steps), "Run `sudo skyinfra-runner partition` with the same configuration."]),
        )
    return apply(nvml, accelerator)


def resolve(name: str, profiles: Sequence[ProfileInfo]) -> ProfileInfo | None:
    """The profile called *name*, or else the only one with the same slices and attributes and nearly its memory."""
    for profile in profiles:
        if profile.name == name:
            return profile
    wanted = _NAME.fullmatch(name)
    near = [profile for profile in profiles if wanted and _nearly(wanted, _NAME.fullmatch(profile.name))]
    return near[0] if len(near) == 1 else None


def _nearly(wanted: re.Match[str], other: re.Match[str] | None) -> bool:
    same = other is not None and (wanted["slices"], wanted["rest"]) == (other["slices"], other["rest"])
    return other is not None and same and abs(int(wanted["gb"]) - int(other["gb"])) <= _MEMORY_TOLERANCE_GB


def _gpus(nvml: Nvml) -> list[Gpu]:
    try:
        return nvml.gpus()
    except pynvml.NVMLError as error:
        raise PartitionFailed(
            f"NVML cannot list the GPUs: {error_name(error.value)}",
            field="accelerator",
            hint=_HINTS.get(error.value, "`nvidia-smi -q` and the kernel log say what the driver sees."),
        ) from error


class _Target:
    """One GPU and the layout it is to have."""

    def __init__(self, gpu: Gpu, accelerator: NodeAccelerator) -> None:
        self._gpu = gpu
        layouts = accelerator.layouts
        self._wanted = sorted(layouts[gpu.index], key=lambda p: p.start) if gpu.index < len(layouts) else []
        self._on = bool(self._wanted)
        self._profiles: list[ProfileInfo] | None = None
        with self._refused("read its MIG mode"):
            self._mode = gpu.mig_mode()
        if self._mode is None and self._wanted:
            raise self._error("it has no MIG", "Declare it without a layout, or choose a GPU that has MIG.")

    def steps(self) -> list[Step]:
        """The differences, in the order in which they are resolved."""
        unwanted, missing = self._difference()
        steps = [self._step("destroy", instance) for instance in unwanted]
        if self._mode is not None and self._mode != (self._on, self._on):
            steps.append(Step(self._gpu.index, "mode", on=self._on))
        return steps + [Step(self._gpu.index, "create", None, p.profile, p.start, p.size) for p in missing]

    def toggle(self, emit: Emit, patience_s: float) -> None:
        """Turns MIG on or off where it has to be, destroying all instances before off."""
        if self._mode is None or self._mode == (self._on, self._on):
            return
        if not self._on:
            self._destroy_unwanted(emit, patience_s)
        word = "on" if self._on else "off"
        with self._refused(f"turn MIG {word}"):
            status = self._gpu.set_mig_mode(self._on)
            now = self._gpu.mig_mode()
        if now != (self._on, self._on):
            reason = f": {error_name(status)}" if status else ""
            busy = [_HINTS[status]] if status == pynvml.NVML_ERROR_IN_USE else []
            hint = "\n".join([*busy, _RESET_HINT.format(index=self._gpu.index)])
            raise self._error(f"MIG stays pending instead of {word}; a reset or reboot is needed{reason}", hint)
        emit(Step(self._gpu.index, "mode", on=self._on).to_json())

    def fill(self, emit: Emit, patience_s: float) -> list[Partition]:
        """Destroys what is not wanted, creates what is missing, and reads what stands then."""
        if not self._wanted:
            return []
        self._destroy_unwanted(emit, patience_s)
        for wanted in self._difference()[1]:
            self._create(wanted, emit)
        uuids = {instance.start: instance.uuid for instance in self._instances()}
        return [self._partition(wanted, uuids.get(wanted.start)) for wanted in self._wanted]

    def _partition(self, wanted: PlacedPartition, uuid: str | None) -> Partition:
        if uuid is None:
            raise self._error(
                f"{_place(wanted)} was created but is not there", "Look in the kernel log for NVRM lines."
            )
        return Partition(self._gpu.index, wanted.profile, wanted.start, wanted.size, uuid)

    def _create(self, wanted: PlacedPartition, emit: Emit) -> None:
        profile = self._resolve(wanted.profile)
        with self._refused(f"create {_place(wanted)}"):
            handle = self._gpu.create(profile, start=wanted.start, size=wanted.size)
            compute = self._gpu.fill(handle, profile)
        step = Step(self._gpu.index, "create", None, wanted.profile, wanted.start, wanted.size, compute.uuid)
        emit(step.to_json())

    def _destroy_unwanted(self, emit: Emit, patience_s: float) -> None:
        for instance in self._difference()[0]:
            deadline = time.monotonic() + patience_s
            with self._refused(f"destroy {instance.profile.name} at {instance.start}:{instance.size}"):
                while not self._destroyed(instance.start, deadline):
                    time.sleep(_RETRY_S)
            emit(self._step("destroy", instance).to_json())

    def _destroyed(self, start: int, deadline: float) -> bool:
        """Destroys what stands at *start*; False where it is in use and may yet be given free before *deadline*."""
        try:
            for instance in [live for live in self._gpu.instances() if live.start == start]:
                self._gpu.empty(instance)
                self._gpu.destroy(instance)
        except pynvml.NVMLError as error:
            if error.value != pynvml.NVML_ERROR_IN_USE or time.monotonic() >= deadline:
                raise
            return False
        return True

    def _difference(self) -> tuple[list[GpuInstance], list[PlacedPartition]]:
        """The instances that are not wanted, and the wanted ones that are missing."""
        live = self._instances()
        if not live:
            return [], self._wanted
        wanted = {(self._resolve(p.profile).profile_id, p.start, p.size): p for p in self._wanted}
        standing = {key for instance in live if (key := _key(instance)) in wanted and instance.uuid is not None}
        unwanted = [instance for instance in live if _key(instance) not in standing]
        return unwanted, [p for key, p in wanted.items() if key not in standing]

    def _instances(self) -> list[GpuInstance]:
        """What stands there; nothing does where MIG is off."""
        if self._mode is None or not self._mode[0]:
            return []
        with self._refused("list its GPU instances"):
            return self._gpu.instances()

    def _resolve(self, name: str) -> ProfileInfo:
        if self._profiles is None:
            with self._refused("list its profiles"):
                self._profiles = self._gpu.profiles()
        profile = resolve(name, self._profiles)
        if profile is None:
            has = ", ".join(known.name for known in self._profiles)
            raise self._error(f"it has no profile {name}", f"It has {has}.")
        return profile

    def _step(self, action: Action, instance: GpuInstance) -> Step:
        return Step(self._gpu.index, action, None, instance.profile.name, instance.start, instance.size, instance.uuid)

    @contextlib.contextmanager
    def _refused(self, what: str) -> Iterator[None]:
        """Turns NVML's refusal of *what* into a `PartitionFailed`."""
        try:
            yield
        except pynvml.NVMLError as error:
            default = "`nvidia-smi -q` and the kernel log (NVRM lines) say what the driver sees."
            hint = _HINTS.get(error.value, default)
            if error.value == pynvml.NVML_ERROR_RESET_REQUIRED:
                hint = _RESET_HINT.format(index=self._gpu.index)
            raise self._error(f"NVML refuses to {what}: {error_name(error.value)}", hint) from error

    def _error(self, message: str, hint: str) -> PartitionFailed:
        wanted = ", ".join(map(_place, self._wanted)) or "MIG off"
        return PartitionFailed(
            f"GPU {self._gpu.index} ({self._gpu.name}): {message}",
            field=f"accelerator.layouts[{self._gpu.index}]",
            hint=f"Wanted: {wanted}. Found: {self._found()}.\n{hint}",
        )

    def _found(self) -> str:
        try:
            mode = self._gpu.mig_mode()
            if mode is None or not mode[0]:
                return "no MIG" if mode is None else f"MIG off{', on after a reset' if mode[1] else ''}"
            live = [f"{i.profile.name} at {i.start}:{i.size}" for i in self._gpu.instances()]
            return ", ".join(live) or "MIG on, no instance"
        except pynvml.NVMLError as error:
            return f"not known, {error_name(error.value)}"


def _key(instance: GpuInstance) -> tuple[int, int, int]:
    return instance.profile.profile_id, instance.start, instance.size


def _place(partition: PlacedPartition) -> str:
    return f"{partition.profile} at {partition.start}:{partition.size}"
