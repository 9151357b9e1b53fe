"""The partitions that exist on a GPU, and the steps from them to a desired layout."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any, Literal

from skyinfra.errors import PartitionFailed
from skyinfra.mig.geometry import gpu_profile, same_profile
from skyinfra.mig.grid import Compute, Layout, Placement, parts, together
from skyinfra.mig.placement import carries

Action = Literal["mode", "destroy", "create"]


@dataclass(frozen=True)
class Partition:
    """One MIG device that exists: its GPU, profile, place in memory slices, and UUID (``MIG-...``).

    compute: of one that shares its GPU instance, its place in the compute slices of that; the profile is then
    ``1c.3g.40gb`` and the like, start and size are those of the GPU instance.
    """

    gpu: int
    profile: str
    start: int
    size: int
    uuid: str
    compute: Compute | None = field(default=None, kw_only=True, metadata={"later": True})

    @property
    def name(self) -> str:
        """The name of its profile."""
        return self.profile

    @property
    def place(self) -> tuple[str, int, int, Compute | None]:
        """Name and place: equal for the partition that exists and for one that is desired."""
        return self.profile, self.start, self.size, self.compute

    def __str__(self) -> str:
        return _where(*self.place) + ("" if self.uuid else " (without a compute instance)")

    def to_json(self) -> dict[str, Any]:
        """Returns its fields; without ``compute`` where it is None."""
        return {key: value for key, value in asdict(self).items() if key != "compute" or value}


@dataclass(frozen=True, slots=True)
class Actual:
    """The partitions of one GPU, which are compared with layouts here alone: not by profiles, which say too little.

    layout: its GPU instances, with the compute instances that share them. None: MIG is off; empty: MIG is on without
    any. unused: those of them that have no compute instance, which nothing can use.
    """

    layout: Layout | None
    unused: Layout = ()

    @classmethod
    def of(cls, partitions: Iterable[Partition]) -> Actual:
        """Returns the state of a GPU with these partitions; one that has none may have MIG off as well."""
        usable: list[Placement] = []
        unused: list[Placement] = []
        for each in partitions:
            compute = (each.compute,) if each.compute else ()
            place = Placement(gpu_profile(each.profile), each.start, each.size, compute=compute)
            (usable if each.uuid else unused).append(place)
        return cls(together([*usable, *unused]), together(unused))

    def named(self, desired: Layout) -> Layout:
        """Returns its usable GPU instances; a desired profile has its declared name, whatever the driver calls it."""
        names = {each.profile for each in desired}
        found = (each for each in self.layout or () if each not in self.unused)
        return tuple(
            replace(each, profile=same_profile(each.profile, names, device=True) or each.profile) for each in found
        )

    def has(self, desired: Layout | None) -> bool:
        """Returns whether it has just the *desired* partitions, in whatever places, those that are fixed in theirs.

        None is MIG off.
        """
        if self.layout is None or desired is None:
            return self.layout is None and desired is None
        return not self.unused and carries(self.named(desired), desired)


def _where(profile: str | None, start: int | None, size: int | None, compute: Compute | None) -> str:
    return f"{profile} at {start}:{size}" + (f" ({compute.start}:{compute.size})" if compute else "")


@dataclass(frozen=True)
class Step:
    """One difference between the actual and the desired layout, and the action that resolves it.

    mode: MIG is turned on (``on``) or off. destroy: the instance at ``start`` goes, with the MIG device ``uuid``.
    create: an instance of ``profile`` comes to ``start``. compute: it is about that compute instance of several.
    """

    gpu: int
    action: Action
    on: bool | None = None
    profile: str | None = None
    start: int | None = None
    size: int | None = None
    uuid: str | None = None
    compute: Compute | None = None

    @classmethod
    def at(cls, gpu: int, action: Action, place: Placement | Partition, uuid: str | None = None) -> Step:
        """Returns the step that destroys or creates the instance at *place*, or its one compute instance."""
        return cls(gpu, action, None, place.name, place.start, place.size, uuid or None, _compute_of(place))

    def undoes(self, partition: Partition) -> bool:
        """Returns whether *partition* goes with it, usable or not."""
        if self.action == "mode":
            return self.gpu == partition.gpu
        mine = (self.gpu, self.start, self.size, self.compute)
        here = (partition.gpu, partition.start, partition.size, partition.compute)
        return self.action == "destroy" and mine == here

    def ends(self, gpu: int | None, uuid: str | None) -> bool:
        """Returns whether it ends the device *uuid* of the GPU *gpu*; no device survives a change of the MIG mode."""
        if self.action == "mode":
            return self.gpu == gpu
        return self.action == "destroy" and uuid is not None and self.uuid == uuid

    def to_json(self) -> dict[str, Any]:
        """Returns its fields without those that are None."""
        return {key: value for key, value in asdict(self).items() if value is not None}

    def to_event(self) -> dict[str, Any]:
        """Returns the event of the executed step: ``action`` is its ``phase``."""
        fields = self.to_json()
        return {"phase": fields.pop("action"), **fields}

    def __str__(self) -> str:
        if self.action == "mode":
            return f"GPU {self.gpu}: turn MIG {'on' if self.on else 'off'}"
        return f"GPU {self.gpu}: {self.action} {_where(self.profile, self.start, self.size, self.compute)}"


def difference(actual: Sequence[Partition], desired: Iterable[Placement]) -> tuple[list[Partition], list[Placement]]:
    """The partitions of one GPU that have to go, and the placements that have to be created, one for each partition.

    A partition without a UUID is not usable: it goes, and is created anew where it is desired.
    """
    missing = {(place.name, place.start, place.size, _compute_of(place)): place for place in parts(desired)}
    unwanted = [p for p in actual if not p.uuid or missing.pop(p.place, None) is None]
    return unwanted, list(missing.values())


def _compute_of(place: Placement | Partition) -> Compute | None:
    if isinstance(place, Partition):
        return place.compute
    return place.compute[0] if place.compute else None


def steps_between(
    gpu: int, actual: Sequence[Partition], desired: Iterable[Placement], *, mode: bool | None
) -> list[Step]:
    """The steps from *actual* to *desired*, in the order of execution. mode: turn MIG on or off; None leaves it."""
    unwanted, missing = difference(actual, desired)
    steps = [Step.at(gpu, "destroy", partition, partition.uuid) for partition in unwanted]
    if mode is not None:
        steps.append(Step(gpu, "mode", on=mode))
    return steps + [Step.at(gpu, "create", place) for place in missing]


def check_no_steps(steps: Sequence[Step]) -> None:
    """Raises `PartitionFailed` with the *steps* where there are any."""
    if steps:
        raise PartitionFailed(
            "the GPUs do not stand as declared",
            field="accelerator.layouts",
            hint="\n".join([*map(str, steps), "Run `sudo skyinfra-runner partition` with the same configuration."]),
        )
