"""One GPU and the layout it is to have: what differs, who stands in the way, and each step towards it."""

from __future__ import annotations

import contextlib
import re
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal, TypeVar

import pynvml

from skyinfra.errors import PartitionFailed
from skyinfra.gpu.nvml import Gpu, GpuInstance, ProfileInfo, error_name
from skyinfra.protocol.nodeconfig import PlacedPartition

T = TypeVar("T")

# The same profile is named with a little less or more memory by some drivers: 3g.39gb, 3g.40gb.
_MEMORY_TOLERANCE_GB = 3
_NAME = re.compile(r"(?P<slices>\d+g)\.(?P<gb>\d+)gb(?P<rest>.*)")
# A GPU instance may stay busy for a moment after the last process on it has ended.
_RETRY_S = 0.5
# Some drivers refuse these questions while MIG is off.
_NOT_NOW = (pynvml.NVML_ERROR_NOT_SUPPORTED, pynvml.NVML_ERROR_INVALID_STATE, pynvml.NVML_ERROR_INVALID_ARGUMENT)

Action = Literal["mode", "destroy", "create"]

HINTS = {
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
RESET_HINT = "Run `nvidia-smi --gpu-reset -i {index}` with nothing on the GPU, or reboot the node; then run it again."


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

    def to_event(self) -> dict[str, Any]:
        """That it was done: ``action`` is the ``phase`` then."""
        fields = self.to_json()
        return {"phase": fields.pop("action"), **fields}

    def __str__(self) -> str:
        if self.action == "mode":
            return f"GPU {self.gpu}: turn MIG {'on' if self.on else 'off'}"
        return f"GPU {self.gpu}: {self.action} {self.profile} at {self.start}:{self.size}"


# Gets every step that was done.
Done = Callable[[Step], None]


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


class Target:
    """One GPU and the partitions it is to have; none of them means MIG off. Everything raises `PartitionFailed`.

    *patience_s*: for how long an instance that is in use is waited for.
    """

    def __init__(self, gpu: Gpu, wanted: Sequence[PlacedPartition], *, patience_s: float = 10.0) -> None:
        self.gpu = gpu
        self._wanted = sorted(wanted, key=lambda p: p.start)
        self._patience_s = patience_s
        self.on = bool(self._wanted)
        self._profiles: list[ProfileInfo] | None = None
        self._live: list[GpuInstance] | None = None
        with self.refused("read its MIG mode"):
            self._mode = gpu.mig_mode()
        if self._mode is None and self._wanted:
            raise self.error("it has no MIG", "Declare it without a layout, or choose a GPU that has MIG.")

    @property
    def index(self) -> int:
        return self.gpu.index

    @property
    def mode_differs(self) -> bool:
        """Whether MIG is not as wanted, now or after the next reset."""
        return self._mode is not None and self._mode != (self.on, self.on)

    def check(self) -> None:
        """Refuses profiles and places that this device does not have, as far as it says so while MIG is off."""
        if not self._wanted:
            return
        off = self._mode is not None and not self._mode[0]
        try:
            self._profiles = self.gpu.profiles()
            if off and not self._profiles:
                self._profiles = None
                return
            wanted = {self._resolve(partition.profile) for partition in self._wanted}
            places = {profile.profile_id: self.gpu.places(profile) for profile in wanted}
        except pynvml.NVMLError as error:
            if off and error.value in _NOT_NOW:
                return
            with self.refused("list its profiles"):
                raise
        for partition in self._wanted:
            allowed = places[self._resolve(partition.profile).profile_id]
            if (partition.start, partition.size) not in allowed:
                shown = ", ".join(f"{start}:{size}" for start, size in allowed) or "nowhere"
                raise self.error(f"it does not allow {_place(partition)}", f"It allows that profile at {shown}.")

    def steps(self) -> list[Step]:
        """The differences, in the order in which they are resolved."""
        unwanted, missing = self._difference()
        steps = [self._step("destroy", instance) for instance in unwanted]
        if self.mode_differs:
            steps.append(Step(self.index, "mode", on=self.on))
        return steps + [Step(self.index, "create", None, p.profile, p.start, p.size) for p in missing]

    def users(self) -> dict[str, tuple[int, ...]]:
        """The processes that use what has to go, by what they use: an instance, or the whole GPU."""
        with self.refused("list its processes"):
            if self.mode_differs:
                held = {"the GPU": self.gpu.processes()}
            else:
                held = {_where(instance): self.gpu.processes_on(instance) for instance in self._difference()[0]}
        return {what: pids for what, pids in held.items() if pids}

    def set_mode(self) -> int:
        """Asks for the wanted mode. NVML's code: 0 where it is active now, else why it is pending."""
        self._live = None
        with self.refused(f"turn MIG {'on' if self.on else 'off'}"):
            status = self.gpu.set_mig_mode(self.on)
            self._mode = self.gpu.mig_mode()
        return status

    def destroy_unwanted(self, done: Done) -> None:
        """Destroys compute instances, then GPU instances: those that are not wanted."""
        unwanted = self._difference()[0]
        self._live = None if unwanted else self._live
        for instance in unwanted:
            with self.refused(f"destroy {_where(instance)}"):
                self._patiently(lambda start=instance.start: self._destroy(start))  # type: ignore[misc]
            done(self._step("destroy", instance))

    def create_missing(self, done: Done) -> None:
        """Creates what is missing, by start."""
        missing = self._difference()[1]
        self._live = None if missing else self._live
        for wanted in missing:
            profile = self._resolve(wanted.profile)
            with self.refused(f"create {_place(wanted)}"):
                handle = self._patiently(
                    lambda profile=profile, place=wanted: self.gpu.create(profile, start=place.start, size=place.size)  # type: ignore[misc]
                )
                compute = self._patiently(lambda handle=handle, profile=profile: self.gpu.fill(handle, profile))  # type: ignore[misc]
            done(Step(self.index, "create", None, wanted.profile, wanted.start, wanted.size, compute.uuid))

    def partitions(self) -> list[Partition]:
        """What stands, read anew: all that is wanted."""
        uuids = {instance.start: instance.uuid for instance in self._instances()}
        return [self._partition(wanted, uuids.get(wanted.start)) for wanted in self._wanted]

    def error(self, message: str, hint: str) -> PartitionFailed:
        """The exception that says it of this GPU, with what was wanted and what was found."""
        return PartitionFailed(f"{self}: {message}", field=self.field, hint=f"{self.wanted_and_found()}\n{hint}")

    @property
    def field(self) -> str:
        """Where the layout of this GPU is declared."""
        return f"accelerator.layouts[{self.index}]"

    def wanted_and_found(self) -> str:
        """One line for a message."""
        wanted = ", ".join(map(_place, self._wanted)) or "MIG off"
        return f"Wanted: {wanted}. Found: {self._found()}."

    def __str__(self) -> str:
        return f"GPU {self.index} ({self.gpu.name})"

    @contextlib.contextmanager
    def refused(self, what: str) -> Iterator[None]:
        """Turns NVML's refusal of *what* into a `PartitionFailed`."""
        try:
            yield
        except pynvml.NVMLError as error:
            default = "`nvidia-smi -q` and the kernel log (NVRM lines) say what the driver sees."
            hint = HINTS.get(error.value, default)
            if error.value == pynvml.NVML_ERROR_RESET_REQUIRED:
                hint = RESET_HINT.format(index=self.index)
            raise self.error(f"NVML refuses to {what}: {error_name(error.value)}", hint) from error

    def _partition(self, wanted: PlacedPartition, uuid: str | None) -> Partition:
        if uuid is None:
            raise self.error(f"{_place(wanted)} was created but is not there", "Look in the kernel log for NVRM lines.")
        return Partition(self.index, wanted.profile, wanted.start, wanted.size, uuid)

    def _patiently(self, function: Callable[[], T]) -> T:
        """The value of *function*, called again while NVML answers that something is in use."""
        deadline = time.monotonic() + self._patience_s
        while True:
            try:
                return function()
            except pynvml.NVMLError as error:
                if error.value != pynvml.NVML_ERROR_IN_USE or time.monotonic() >= deadline:
                    raise
            time.sleep(_RETRY_S)

    def _destroy(self, start: int) -> None:
        # Looked up each time: an attempt may have destroyed the compute instances and failed on the GPU instance.
        for instance in [live for live in self.gpu.instances() if live.start == start]:
            self.gpu.empty(instance)
            self.gpu.destroy(instance)

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
        """What stands there, listed anew after a change; nothing does where MIG is off."""
        if self._mode is None or not self._mode[0]:
            return []
        if self._live is None:
            with self.refused("list its GPU instances"):
                self._live = self.gpu.instances()
        return self._live

    def _resolve(self, name: str) -> ProfileInfo:
        if self._profiles is None:
            with self.refused("list its profiles"):
                self._profiles = self.gpu.profiles()
        profile = resolve(name, self._profiles)
        if profile is None:
            has = ", ".join(known.name for known in self._profiles)
            raise self.error(f"it has no profile {name}", f"It has {has}.")
        return profile

    def _step(self, action: Action, instance: GpuInstance) -> Step:
        return Step(self.index, action, None, instance.profile.name, instance.start, instance.size, instance.uuid)

    def _found(self) -> str:
        try:
            mode = self.gpu.mig_mode()
            if mode is None or not mode[0]:
                return "no MIG" if mode is None else f"MIG off{', on after a reset' if mode[1] else ''}"
            live = [_where(instance) for instance in self.gpu.instances()]
            after = "" if mode[1] else ", off after a reset"
            return (", ".join(live) or "MIG on, no instance") + after
        except pynvml.NVMLError as error:
            return f"not known, {error_name(error.value)}"


def _key(instance: GpuInstance) -> tuple[int, int, int]:
    return instance.profile.profile_id, instance.start, instance.size


def _where(instance: GpuInstance) -> str:
    return f"{instance.profile.name} at {instance.start}:{instance.size}"


def _place(partition: PlacedPartition) -> str:
    return f"{partition.profile} at {partition.start}:{partition.size}"
