"""What one model of GPU can be divided into, as its driver has it: the rules of the simulated driver.

They are those of NVIDIA's MIG user guide and its open kernel modules; the profiles come from `skyinfra.mig`.
"""

from __future__ import annotations

from dataclasses import dataclass

import pynvml

from skyinfra import mig
from skyinfra.gpu.simulated.state import GpuState, InstanceState

# Compute instance profiles, NVML's enumeration -> compute slices; the last is that of the double-memory GPU instance.
_COMPUTE_SLICES = {
    pynvml.NVML_COMPUTE_INSTANCE_PROFILE_1_SLICE: 1,
    pynvml.NVML_COMPUTE_INSTANCE_PROFILE_2_SLICE: 2,
    pynvml.NVML_COMPUTE_INSTANCE_PROFILE_3_SLICE: 3,
    pynvml.NVML_COMPUTE_INSTANCE_PROFILE_4_SLICE: 4,
    pynvml.NVML_COMPUTE_INSTANCE_PROFILE_7_SLICE: 7,
    pynvml.NVML_COMPUTE_INSTANCE_PROFILE_1_SLICE_REV1: 1,
}
_DOUBLE_MEMORY = pynvml.NVML_COMPUTE_INSTANCE_PROFILE_1_SLICE_REV1
# `nvidia-smi mig -lcip` lists none of three slices on a GPU instance of four.
_NOT_DIVIDED = {(3, 4)}


@dataclass(frozen=True)
class SimulatedProfile:
    """What the driver knows of a GPU instance profile; ``number`` is NVML's enumeration, ``id`` what creates it."""

    name: str
    number: int
    id: int
    compute_slices: int
    size: int
    starts: tuple[int, ...]
    max_count: int

    @property
    def media(self) -> str:
        """What the name says of the media engines: ``+me``, ``+me.all``, ``-me`` or something else."""
        return self.name.partition("gb")[2]

    def excludes(self, other: SimulatedProfile) -> bool:
        """Whether no *other* stands beside it, for the media engines that it takes."""
        if self.media == "+me.all":
            return other.media != "-me"
        return self.media == other.media == "+me"

    def compute_profile(self, number: int) -> int | None:
        """Compute slices of the compute instance profile *number* in such an instance; None where it has no such."""
        double = self.number == pynvml.NVML_GPU_INSTANCE_PROFILE_1_SLICE_REV2
        slices = _COMPUTE_SLICES.get(number)
        if slices is None or double != (number == _DOUBLE_MEMORY) or (slices, self.compute_slices) in _NOT_DIVIDED:
            return None
        return slices if slices <= self.compute_slices else None


class SimulatedModel:
    """The GPU whose geometry is *geometry*."""

    def __init__(self, geometry: mig.Geometry) -> None:
        self.resetless = geometry.resetless
        self.pci_device_id = int(geometry.pci_device_ids[0], 16) if geometry.pci_device_ids else 0
        self.units = geometry.placement_units or 1
        self.compute_slices = geometry.compute_slices or 0
        known = [_profile(p) for p in geometry.profiles]
        self._profiles = [profile for profile in known if profile is not None]

    def by_number(self, number: int) -> SimulatedProfile | None:
        """The profile of NVML's enumeration; None where this GPU has no such."""
        return next((p for p in self._profiles if p.number == number), None)

    def by_id(self, profile_id: int) -> SimulatedProfile | None:
        """The profile that *profile_id* creates; None where this GPU has no such."""
        return next((p for p in self._profiles if p.id == profile_id), None)

    def of(self, instance: InstanceState) -> SimulatedProfile:
        """The profile of an instance that stands."""
        return next(p for p in self._profiles if p.name == instance.profile)

    def has_room(self, gpu: GpuState, profile: SimulatedProfile, start: int) -> bool:
        """Whether one more instance of *profile* can stand at *start*."""
        others = [self.of(instance) for instance in gpu.instances]
        used = sum(other.compute_slices for other in others)
        return (
            not any(instance.overlaps(start, profile.size) for instance in gpu.instances)
            and others.count(profile) < profile.max_count
            and used + profile.compute_slices <= self.compute_slices
            and not any(profile.excludes(other) or other.excludes(profile) for other in others)
        )

    def instance_id(self, start: int, size: int) -> int:
        """As the current driver numbers them: 0 for the whole GPU, 1 and 2 for its halves, and so on."""
        return self.units // size - 1 + start // size


def _profile(known: mig.Profile) -> SimulatedProfile | None:
    """None unless all of it is known; an id that is not known becomes one that no known id is."""
    if known.nvml_enum is None or not known.size or not known.starts or not known.max_count:
        return None
    profile_id = 1000 + known.nvml_enum if known.profile_id is None else known.profile_id
    return SimulatedProfile(
        known.name, known.nvml_enum, profile_id, known.compute_slices, known.size, known.starts, known.max_count
    )
