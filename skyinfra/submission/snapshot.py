"""The fleet as its head describes it at one moment, and where in it a task may run."""

from __future__ import annotations

import contextlib
import math
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Literal

from skyinfra.errors import InvalidField, NodeError, did_you_mean
from skyinfra.protocol.calls import Outcome
from skyinfra.protocol.fleet import FleetState
from skyinfra.protocol.instance import GPU_MEMORY, InstanceInfo
from skyinfra.protocol.manifest import Manifest
from skyinfra.protocol.shortage import Shortage
from skyinfra.tasks.task import Options

# There: a slot has the target, or had it when it began to go. Coming: a layout is being changed. Missing: the slot is
# to be there and is not. Gone: there will be none.
Prospect = Literal["there", "coming", "missing", "gone"]
# The words of Dask's resources that are not those of a target.
_RESOURCES = {"accelerator": "accel"}


@dataclass(frozen=True)
class Target:
    """A place for tasks: the slot ``NODE/INDEX``, any slot of a node, a profile or an accelerator, or anywhere.

    Its fields are called as those of `InstanceInfo`. memory_gb: a slot has at least that.
    """

    slot: str | None = None
    node: str | None = None
    profile: str | None = None
    accelerator: str | None = None
    memory_gb: float | None = None

    @property
    def resources(self) -> dict[str, int]:
        """Dask resources. Names of workers do not do: Dask resolves them once, to an address that may be gone."""
        wanted = {_RESOURCES.get(name, name): value for name, value in self._labels.items() if value}
        memory = {GPU_MEMORY: math.ceil(self.memory_gb * 1000)} if self.memory_gb else {}
        return {"slot": 1} | {f"{name}:{value}": 1 for name, value in wanted.items()} | memory

    def takes(self, slot: InstanceInfo) -> bool:
        """Returns whether *slot* is such a place."""
        enough = self.memory_gb is None or (slot.own_memory_gb or 0) >= self.memory_gb
        return enough and all(wanted in (None, getattr(slot, name)) for name, wanted in self._labels.items())

    @property
    def _labels(self) -> dict[str, str | None]:
        """The fields that a slot has or has not."""
        return {name: value for name, value in vars(self).items() if name != "memory_gb"}

    def of(self, settings: Options) -> Target:
        """Returns the part of it that *settings* of a task allow. Raises `InvalidField` where that is nothing."""
        place = settings.of("place")
        return self.narrowed(memory_gb=place.pop("gpu_memory_gb"), **place)

    def narrowed(self, *, memory_gb: float | None = None, **given: str | None) -> Target:
        """Returns what both this target and the given fields allow. Raises `InvalidField` where that is nothing."""
        for name, value in given.items():
            if value is not None and getattr(self, name) not in (None, value):
                raise InvalidField(
                    f"only slots with {name} {getattr(self, name)} are selected", field=name, given=value
                )
        memory = max((gb for gb in (self.memory_gb, memory_gb) if gb is not None), default=None)
        labels = {name: value for name, value in given.items() if value is not None}
        return replace(self, **{**self._labels, **labels}, memory_gb=memory)

    def __str__(self) -> str:
        if self.slot:
            return f"slot {self.slot}" + (f" ({self.profile})" if self.profile else "")
        return f"every slot{self.which}"

    @property
    def which(self) -> str:
        """The conditions on a slot, in words that follow that one."""
        words = [f" of {self.node}"] if self.node else []
        words += [f" with the profile {self.profile}"] if self.profile else []
        words += [f" with the accelerator {self.accelerator}"] if self.accelerator else []
        words += [f" with {self.memory_gb:g} GB at least"] if self.memory_gb else []
        return "".join(words)


ANYWHERE = Target()


@dataclass(frozen=True)
class Snapshot:
    """The state of a fleet, as its head describes it.

    slots: those that are registered and take tasks, in slot order. draining: those that are registered and go.
    state: which slots there are to be, where the head knows that.
    """

    slots: tuple[InstanceInfo, ...]
    draining: tuple[InstanceInfo, ...] = ()
    state: FleetState | None = None

    def promised(self, manifest: Manifest) -> list[str]:
        """Returns the names of the slots that there are to be, and of those that are there besides.

        A node of *manifest* that has not told its slots yet is to have those of the manifest. Which nodes a group has
        changes without notice, so that only those of them count that are there.
        """
        reported = self.state.slots if self.state is not None else {}
        names: list[str] = []
        for node in manifest.nodes:
            # None, where a node has left.
            promised = [f"{node.name}/{slot.index}" for slot in manifest.slots_of(node)]
            names += reported.get(node.name, promised)
        return list(dict.fromkeys([*names, *(slot.slot for slot in self.slots)]))

    def prospect(self, target: Target) -> Prospect:
        """Returns whether there is, or will be, a slot for *target*."""
        sick = self.state.sick if self.state is not None else {}
        if any(target.takes(slot) for slot in (*self.slots, *self.draining) if slot.slot not in sick):
            return "there"
        if self.possible(target):
            return "coming"
        changing = {slot.node for slot in self.draining if slot.slot not in sick}
        if target.slot is None:
            on = changing if target.node is None else changing & {target.node}
            # Another node comes in the place of one that left, or it comes back; until then there may be none.
            replaced = target.node is None and self.state is not None and bool(self.state.out_of_service)
            if on or replaced:
                return "coming"
            named = target.profile or target.accelerator or target.memory_gb
            return "gone" if named and self._complete() else "missing"
        node = target.slot.rpartition("/")[0]
        reported = self.state.slots.get(node) if self.state is not None else None
        renamed = reported is not None and target.slot not in reported
        if renamed or any(slot.slot == target.slot for slot in self.slots):
            return "gone"
        return "coming" if node in changing else "missing"

    def possible(self, target: Target) -> int:
        """The number of slots for *target* that layouts, or a number of nodes, which follow the work can give."""
        size = self.state.size if self.state is not None else None
        follow_state = self.state.follow if self.state is not None else None
        if target.slot:
            return 0
        follows = follow_state is not None and bool(target.profile or target.memory_gb)
        coming = 0
        if size is not None and not target.node:
            # Partitions of nodes that come may be those of any layout, and are counted below.
            slots = [slot for slot in size.slots if not (follows and slot.profile)]
            coming = size.most * sum(target.takes(slot) for slot in slots)
            if follow_state is not None:
                having = [slot for slot in size.slots if target.accelerator in (None, slot.accelerator)]
                gpus = {slot.gpu for slot in having if slot.profile}
                follow_state = replace(follow_state, gpus={size.slots[0].node: len(gpus) * size.most} if gpus else {})
        if follow_state is None or not follows:
            return coming
        return coming + follow_state.most(profile=target.profile, memory_gb=target.memory_gb, node=target.node)

    def failures(self, target: Target) -> list[str]:
        """Returns a sentence for each node of *target* that could not be set up, or is sick."""
        if self.state is None:
            return []
        node = target.slot.rpartition("/")[0] if target.slot else target.node
        failed = {
            name: f"was not set up: step {failure.step}: {failure.error}" for name, failure in self.state.failed.items()
        }
        sick = {name: f"is sick: {why}" for name, why in self.state.sick_nodes().items()}
        found = sorted([*failed.items(), *sick.items()])
        return [f"{name} {why}" for name, why in found if node in (None, name)]

    def nodes(self, target: Target) -> set[str]:
        """Returns the nodes that have slots for *target*, in service or not."""
        return {slot.node for slot in (*self.slots, *self.draining) if target.takes(slot)}

    def unknown(self, target: Target, manifest: Manifest) -> bool:
        """Returns whether neither the head nor *manifest* knows the node of *target*."""
        named = target.slot is None and target.node is not None
        return named and self.state is not None and target.node not in self._nodes(manifest)

    def _nodes(self, manifest: Manifest) -> list[str]:
        """Returns the nodes that *manifest* or the head knows."""
        reported = (self.state.slots, self.state.failed, self.state.out_of_service) if self.state is not None else ()
        return list(dict.fromkeys([*(node.name for node in manifest.nodes), *sorted(set().union(*reported))]))

    def instead(self, target: Target, manifest: Manifest) -> str:
        """Returns a hint for who wants *target* of the fleet of *manifest*, which has no such slot."""
        if target.node is not None and target.node not in (nodes := self._nodes(manifest)):
            return f"{did_you_mean(target.node, nodes)} Nodes: {', '.join(nodes)}.".strip()
        return f"The slots are {self.profiles()} now; pool.slots() lists them."

    def left(self, target: Target) -> str | None:
        """Why the node of *target*'s slot leaves, or has left; None where it does not."""
        node = (target.slot or "").rpartition("/")[0]
        return self.state.out_of_service.get(node) if self.state is not None else None

    def profiles(self) -> str:
        """Returns the slots in words, such as ``2g.20gb*3, 1g.10gb``."""
        return _counted(slot.profile or slot.kind for slot in self.slots) or "none"

    def advised(self, outcome: Outcome) -> Outcome:
        """Returns *outcome* with what would carry the task, where the memory of its device ran out."""
        failure = outcome.failure
        if failure is None or failure.shortage is None:
            return outcome
        with contextlib.suppress(NodeError):  # a later version says more
            advice = self._advice(Shortage.read(failure.shortage))
            return replace(outcome, failure=replace(failure, advice=advice))
        return outcome

    def explained(self, shortage: object) -> list[str]:
        """Returns what the slot of a program had, and what would carry it; *shortage*: as JSON values."""
        with contextlib.suppress(NodeError):
            found = Shortage.read(shortage)
            return [str(found), self._advice(found)]
        return []

    def _advice(self, shortage: Shortage) -> str:
        # It brings offers and pools with it.
        from skyinfra.recommendation.shortage import advice

        return advice(shortage, self.slots)

    def _complete(self) -> bool:
        """Returns whether every slot that there is to be is there, so that nothing else will come."""
        reported = self.state.slots.values() if self.state is not None else ()
        present = {slot.slot for slot in self.slots}
        return bool(present) and any(reported) and all(name in present for names in reported for name in names)


def _counted(names: Iterable[str]) -> str:
    return ", ".join(name if count == 1 else f"{name}*{count}" for name, count in Counter(names).items())
