"""One GPU and the steps from its actual to its desired layout; NVML's refusals as errors."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from functools import partial
from typing import Any, TypeVar

import pynvml

from skyinfra.errors import PartitionFailed
from skyinfra.gpu.machine import InstanceId
from skyinfra.gpu.nvml import ComputeInstance, Gpu, GpuInstance, ProfileInfo, error_name, error_text
from skyinfra.mig import Compute, Placement, gpu_profile, same_profile
from skyinfra.mig.steps import Partition, Step, difference, steps_between

T = TypeVar("T")

# A GPU instance may stay busy for a moment after the last process on it has ended.
_RETRY_S = 0.5
# Some drivers refuse these questions while MIG is off.
_NOT_NOW = (pynvml.NVML_ERROR_NOT_SUPPORTED, pynvml.NVML_ERROR_INVALID_STATE, pynvml.NVML_ERROR_INVALID_ARGUMENT)

HINTS = {
    pynvml.NVML_ERROR_NO_PERMISSION: "Changing partitions needs root: run `sudo skyinfra-runner partition`.",
    pynvml.NVML_ERROR_IN_USE: (
        "The driver does not say by what; `fuser -v /dev/nvidia* /dev/nvidia-caps/*` lists who has the device files "
        "open. Run it again when they are closed."
    ),
    pynvml.NVML_ERROR_INSUFFICIENT_RESOURCES: (
        "Something else is there: `nvidia-smi mig -lgi` lists what. Destroy what skyinfra did not create."
    ),
    pynvml.NVML_ERROR_INVALID_ARGUMENT: (
        "This GPU does not allow that place: `nvidia-smi mig -lgipp` lists those it allows. "
        "The GPU may be another model than declared."
    ),
    pynvml.NVML_ERROR_NOT_SUPPORTED: "This GPU or its driver cannot do that; see `nvidia-smi -q` for both.",
    pynvml.NVML_ERROR_GPU_IS_LOST: "The GPU has fallen off the bus: replace the node.",
}
RESET_HINT = "Run `nvidia-smi --gpu-reset -i {index}` with nothing on the GPU, or reboot the node; then run it again."
_DEFAULT_HINT = "`nvidia-smi -q` and the kernel log (NVRM lines) say what the driver sees."


@contextlib.contextmanager
def asking(failure: str, gpu: GpuTransition | None = None) -> Iterator[None]:
    """Turns NVML's refusal into a `PartitionFailed` about *gpu*, if given, whose message starts with *failure*."""
    try:
        yield
    except pynvml.NVMLError as error:
        message, hint = f"{failure}: {error_text(error)}", HINTS.get(error.value, _DEFAULT_HINT)
        if gpu is None:
            raise PartitionFailed(message, field="accelerator", hint=hint) from error
        if error.value == pynvml.NVML_ERROR_RESET_REQUIRED:
            hint = RESET_HINT.format(index=gpu.index)
        raise gpu.error(message, hint) from error


# Gets every step that was executed.
Done = Callable[[Step], None]
# Gets a GPU that is in use, the instance on it with this id or else all of it, and whether patience is over. Returns
# whether it has ended or stopped something that holds it.
Release = Callable[[Gpu, InstanceId | None, bool], bool]


class _Stays(Exception):
    """NVML destroyed an instance with success, and it is still there (NVIDIA/go-nvml issue 146)."""


def _release_nothing(gpu: Gpu, instance: InstanceId | None, over: bool) -> bool:
    return False


class GpuTransition:
    """One GPU and its desired layout; an empty one means MIG off. Every method raises `PartitionFailed`.

    *patience_s*: how long to wait for an instance that is in use.
    """

    def __init__(self, gpu: Gpu, desired: Sequence[Placement], *, patience_s: float = 10.0) -> None:
        self.gpu = gpu
        self.index = gpu.index
        # The field that declares its layout.
        self.field = f"accelerator.layouts[{gpu.index}]"
        self._desired = sorted(desired, key=lambda p: p.start)
        self._patience_s = patience_s
        self.on = bool(self._desired)
        with self.refused("read its MIG mode"):
            self._mode = gpu.mig_mode()
        if self._mode is None and self._desired:
            raise self.error("it has no MIG", "Declare it without a layout, or choose a GPU that has MIG.")

    @property
    def mode_differs(self) -> bool:
        """Whether MIG is not as desired, now or after the next reset."""
        return self._mode is not None and self._mode != (self.on, self.on)

    def check(self) -> None:
        """Refuses profiles and places that this device does not have, as far as the driver lists them with MIG off."""
        if not self._desired:
            return
        off = self._mode is not None and not self._mode[0]
        try:
            if not self.gpu.profiles() and off:
                return
            names = dict.fromkeys(partition.profile for partition in self._desired)
            places = {name: self.gpu.places(self._resolve(name)) for name in names}
        except pynvml.NVMLError as error:
            if off and error.value in _NOT_NOW:
                return
            with self.refused("list its profiles"):
                raise
        for partition in self._desired:
            allowed = places[partition.profile]
            if (partition.start, partition.size) not in allowed:
                shown = ", ".join(f"{start}:{size}" for start, size in allowed) or "nowhere"
                raise self.error(f"it does not allow {partition}", f"It allows that profile at {shown}.")

    def steps(self) -> list[Step]:
        """Returns the steps to the desired layout, in the order of execution."""
        mode = self.on if self.mode_differs else None
        return steps_between(self.index, self._actual(), self._desired, mode=mode)

    def users(self) -> dict[str, tuple[int, ...]]:
        """Returns the processes that use what has to go, by what they use: an instance, or the whole GPU."""
        with self.refused("list its processes"):
            if self.mode_differs:
                held = {"the GPU": self.gpu.processes()}
            else:
                actual = self._actual()
                unwanted = difference(actual, self._desired)[0]
                held = self._users_of(unwanted, self._staying(actual))
        return {what: pids for what, pids in held.items() if pids}

    def set_mode(self, done: Done, release: Release = _release_nothing) -> int:
        """Asks for the desired mode. Returns NVML's code: 0 where it is active now, else why it is pending."""
        status = 0

        def ask() -> None:
            nonlocal status
            status = 0
            status = self.gpu.set_mig_mode(self.on)
            if status == pynvml.NVML_ERROR_IN_USE:
                raise pynvml.NVMLError(status)

        with self.refused(f"turn MIG {'on' if self.on else 'off'}"):
            try:
                self._patiently(ask, partial(release, self.gpu, None))
            except pynvml.NVMLError:
                # Else NVML refused to take the wish: it is not even pending.
                if not status:
                    raise
            self._mode = self.gpu.mig_mode()
        if not self.mode_differs:
            done(Step(self.index, "mode", on=self.on))
        return status

    def change(self, done: Done, release: Release = _release_nothing) -> None:
        """Destroys the partitions that are not desired; then, where the mode is, creates the missing ones, by start."""
        actual = self._actual()
        unwanted, missing = difference(actual, self._desired)
        staying = self._staying(actual)
        live = self._instances() if unwanted else []
        ids: dict[int | str, InstanceId] = {instance.start: instance.id for instance in live}
        ids.update((each.uuid, (instance.id, each.id)) for instance in live for each in instance.compute)
        for partition in unwanted:
            key = partition.uuid if partition.start in staying else partition.start
            released = partial(release, self.gpu, ids.get(key))
            self._destroy_patiently(partition, released, whole=partition.start not in staying)
            done(Step.at(self.index, "destroy", partition, partition.uuid))
        handles: dict[int, Any] = {}
        for place in () if self.mode_differs else missing:
            profile = self._resolve(place.profile)
            with self.refused(f"create {place}"):
                if place.start not in handles:
                    create = partial(self.gpu.create, profile, start=place.start, size=place.size)
                    existing = self._at(place.start)[:1] if place.start in staying else []
                    handles[place.start] = existing[0].handle if existing else self._patiently(create)
                fill = partial(self.gpu.fill, handles[place.start], profile)
                if place.compute:
                    one = place.compute[0]
                    fill = partial(self.gpu.share, handles[place.start], profile, start=one.start, size=one.size)
                compute = self._patiently(fill)
            done(Step.at(self.index, "create", place, compute.uuid))

    def partitions(self) -> list[Partition]:
        """Returns the partitions, read anew after a change. Every desired one exists."""
        actual = self._actual()
        missing = difference(actual, self._desired)[1]
        if missing:
            message = f"{missing[0]} was created but is not there"
            raise self.error(message, "Look in the kernel log for NVRM lines.")
        return actual

    def error(self, message: str, hint: str) -> PartitionFailed:
        """Returns the exception with *message* about this GPU, its desired and its actual layout."""
        return PartitionFailed(f"{self}: {message}", field=self.field, hint=f"{self.desired_and_actual()}\n{hint}")

    def desired_and_actual(self) -> str:
        """One line for a message."""
        return f"Wanted: {', '.join(map(str, self._desired)) or 'MIG off'}. Found: {self._found()}."

    def __str__(self) -> str:
        return f"GPU {self.index} ({self.gpu.name})"

    def refused(self, what: str) -> contextlib.AbstractContextManager[None]:
        """Turns NVML's refusal of *what* into a `PartitionFailed`."""
        return asking(f"NVML refuses to {what}", self)

    def _patiently(self, function: Callable[[], T], release: Callable[[bool], bool] = lambda over: False) -> T:
        """Returns the value of *function*, called again while NVML answers that something is in use.

        *release* gets whether patience is over, and returns whether it is worth to go on.
        """
        deadline = time.monotonic() + self._patience_s
        while True:
            try:
                return function()
            except (pynvml.NVMLError, _Stays) as error:
                if isinstance(error, pynvml.NVMLError) and error.value != pynvml.NVML_ERROR_IN_USE:
                    raise
                over = time.monotonic() >= deadline
                if release(over):
                    deadline = time.monotonic() + self._patience_s
                    continue
                if over:
                    raise
            time.sleep(_RETRY_S)

    def _staying(self, actual: Sequence[Partition]) -> set[int]:
        """The starts of the GPU instances with compute instances that stand where one of that profile is desired."""
        usable = [partition for partition in actual if partition.uuid]
        there = {(partition.start, partition.size): gpu_profile(partition.profile) for partition in usable}
        return {place.start for place in self._desired if there.get((place.start, place.size)) == place.profile}

    def _users_of(self, unwanted: Sequence[Partition], staying: Collection[int]) -> dict[str, tuple[int, ...]]:
        """The processes on the *unwanted* partitions, by instance; one that is not *staying* goes as a whole."""
        going = {partition.start for partition in unwanted if partition.start not in staying or not partition.compute}
        shares = {(partition.start, partition.compute): str(partition) for partition in unwanted if partition.compute}
        held = {}
        for instance in self._instances():
            if instance.start in going:
                held[str(instance)] = self.gpu.processes_on(instance)
                continue
            for each in instance.compute:
                name = shares.get((instance.start, Compute(each.start, each.compute_slices)))
                if name is not None:
                    held[name] = self.gpu.processes_in(each)
        return held

    def _destroy_patiently(self, partition: Partition, release: Callable[[bool], bool], *, whole: bool) -> None:
        """Destroys *partition*; *whole*: with its GPU instance, and whatever shares that."""
        destroy = partial(self._destroy, partition.start) if whole else partial(self._destroy_share, partition)
        try:
            with self.refused(f"destroy {partition}"):
                self._patiently(destroy, release)
        except _Stays as error:
            message = f"NVML answers that {partition} was destroyed, and it is still there"
            raise self.error(message, f"Run it again. If it stays: {RESET_HINT.format(index=self.index)}") from error

    def _destroy(self, start: int) -> None:
        # Looked up each time: an attempt may have destroyed the compute instances and failed on the GPU instance.
        for instance in self._at(start):
            self.gpu.empty(instance)
            self.gpu.destroy(instance)
        if self._at(start):
            raise _Stays

    def _destroy_share(self, partition: Partition) -> None:
        for compute in self._shares(partition):
            self.gpu.destroy_compute(compute)
        if self._shares(partition):
            raise _Stays

    def _shares(self, partition: Partition) -> list[ComputeInstance]:
        """Returns the compute instance that is *partition*, as long as it stands."""
        return [each for live in self._at(partition.start) for each in live.compute if each.uuid == partition.uuid]

    def _at(self, start: int) -> list[GpuInstance]:
        return [live for live in self.gpu.instances() if live.start == start]

    def _actual(self) -> list[Partition]:
        """The partitions that exist. A desired one has its declared name, whatever this driver calls the profile."""
        live = self._instances()
        declared = {(self._resolve(p.profile).profile_id, p.start): p.profile for p in self._desired} if live else {}
        found = []
        for each in live:
            name = declared.get((each.profile.profile_id, each.start), each.profile.name)
            found += each.partitions(self.index, name)
        return found

    def _instances(self) -> list[GpuInstance]:
        """Returns the GPU instances; none where MIG is off."""
        if self._mode is None or not self._mode[0]:
            return []
        with self.refused("list its GPU instances"):
            return self.gpu.instances()

    def _resolve(self, name: str) -> ProfileInfo:
        with self.refused("list its profiles"):
            profiles = {profile.name: profile for profile in self.gpu.profiles()}
        found = same_profile(name, profiles, device=True)
        if found is None:
            raise self.error(f"it has no profile {name}", f"It has {', '.join(profiles)}.")
        return profiles[found]

    def _found(self) -> str:
        try:
            mode = self.gpu.mig_mode()
            if mode is None or not mode[0]:
                return "no MIG" if mode is None else f"MIG off{', on after a reset' if mode[1] else ''}"
            there = [part for each in self.gpu.instances() for part in each.partitions(self.index)]
            live = ", ".join(map(str, there)) or "MIG on, no instance"
            return live if mode[1] else f"{live}, off after a reset"
        except pynvml.NVMLError as error:
            return f"not known, {error_name(error.value)}"
