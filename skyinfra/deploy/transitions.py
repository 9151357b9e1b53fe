"""The partitions that another layout takes from a running fleet, leaves it, and gives it, GPU by GPU."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from skyinfra import mig
from skyinfra.accelerators import Accelerator
from skyinfra.errors import SkyinfraError
from skyinfra.mig import Layout
from skyinfra.protocol.instance import InstanceInfo
from skyinfra.protocol.manifest import Manifest
from skyinfra.terraform.program import Plan
from skyinfra.terraform.synthesized import SynthesizedStack

_PATIENCE_S = 3.0


@dataclass(frozen=True)
class GpuChange:
    """One GPU of a node: its layout before and after; an empty one is that of a whole GPU.

    ends: the tasks that run now on each slot that goes, by the slot's name.
    """

    node: str
    gpu: int
    model: str | None
    before: Layout
    after: Layout
    ends: tuple[tuple[str, tuple[str, ...]], ...]

    @property
    def kept(self) -> Layout:
        """The partitions that are left alone, with their UUIDs and tasks."""
        return self._parts(self.before, self.after, there=True)

    @property
    def destroyed(self) -> Layout:
        """The partitions that are destroyed, when their slots are drained."""
        return self._parts(self.before, self.after, there=False)

    @property
    def created(self) -> Layout:
        """The partitions that are created."""
        return self._parts(self.after, self.before, there=False)

    @staticmethod
    def _parts(layout: Layout, other: Layout, *, there: bool) -> Layout:
        """Returns the partitions of *layout*, compute instances one by one, that are in *other*, or are not."""
        others = set(mig.parts(other))
        return tuple(each for each in mig.parts(layout) if (each in others) is there)

    @property
    def tasks(self) -> tuple[str, ...]:
        """The tasks that run now on what goes."""
        return tuple(task for _, tasks in self.ends for task in tasks)

    def to_json(self) -> dict[str, Any]:
        """Plain JSON values."""
        layouts = {name: getattr(self, name) for name in ("before", "after", "kept", "destroyed", "created")}
        # Their names in the version before.
        layouts |= {"stays": self.kept, "goes": self.destroyed, "comes": self.created}
        return {
            "node": self.node,
            "gpu": self.gpu,
            **{
                name: [{k: v for k, v in asdict(p).items() if k != "fixed" and (v or k != "compute")} for p in held]
                for name, held in layouts.items()
            },
            "ends": {slot: list(tasks) for slot, tasks in self.ends},
        }


@dataclass(frozen=True)
class Transition:
    """The change of a fleet's layout: the GPUs that change, how many do not, and the time that tasks have to end."""

    fleet: str
    changes: tuple[GpuChange, ...]
    unchanged: int
    drain_seconds: float

    def to_json(self) -> dict[str, Any]:
        """Plain JSON values."""
        changes = [change.to_json() for change in self.changes]
        return {"fleet": self.fleet, "gpus": changes, "unchanged": self.unchanged, "drain_seconds": self.drain_seconds}


def transition(manifest: Manifest, accelerator: Accelerator, drain_seconds: float) -> Transition:
    """Returns the change of the running fleet to the layout of *accelerator*. Asks its head what stands and runs.

    A node takes the placement that disturbs least what stands and runs then. Raises `FleetError`.
    """
    from skyinfra.client import open_questions

    with open_questions(manifest, timeout=_PATIENCE_S) as fleet:
        slots = (now := fleet.look()).slots + now.draining
        tasks = {slot: [task.name for task in running] for slot, running in fleet.running().items()}
    counts = [slot.gpu + 1 for slot in slots if slot.gpu is not None]
    layouts = accelerator.layouts(max(accelerator.count or 0, *counts, 0)) if counts else ()
    found = changes(slots, tasks, layouts, accelerator.mig_model)
    changed = tuple(each for each in found if each.before != each.after)
    return Transition(manifest.fleet, changed, len(found) - len(changed), drain_seconds)


def changes(
    slots: Iterable[InstanceInfo], tasks: Mapping[str, Sequence[str]], layouts: Sequence[Layout], model: str | None
) -> tuple[GpuChange, ...]:
    """Each GPU of the registered *slots* and its change to the desired *layouts*; none at all: GPUs become whole.

    tasks: the names of those that run, by the name of the slot. model: key of the MIG geometry.
    """
    geometry = mig.geometry(model) if model is not None else None
    by_gpu: dict[tuple[str, int], list[InstanceInfo]] = {}
    for slot in slots:
        if slot.gpu is not None:
            by_gpu.setdefault((slot.node, slot.gpu), []).append(slot)
    found = []
    for (node, gpu), here in sorted(by_gpu.items()):
        at = {slot.placement: slot for slot in here if slot.size}
        before = mig.together(at)
        in_use = {place.at for place, slot in at.items() if tasks.get(slot.slot)}
        desired = layouts[gpu] if gpu < len(layouts) else ()
        after = mig.rearranged(desired, before, geometry, in_use=in_use)
        left = set(mig.parts(after))
        going = [slot for place, slot in at.items() if place not in left] if at else here if after else []
        ends = tuple((slot.slot, tuple(tasks.get(slot.slot, ()))) for slot in going)
        found.append(GpuChange(node, gpu, model, before, after, ends))
    return tuple(found)


def _in_place(action: str, address: str) -> bool:
    """Returns whether a change of a resource may bring another layout to nodes that run.

    Where nodes are set up over SSH, the resource that hands a layout on is made anew (modules/hosts).
    """
    handed_on = action == "replace" and ".terraform_data.layout" in address
    return "." in address and (action == "update" or handed_on)


def transitions(stack: SynthesizedStack, plan: Plan) -> tuple[Transition, ...]:
    """Returns the changes of layouts that *plan* brings to the fleets of *stack* that run.

    Only pools with a change in place are asked for; a fleet that does not answer is left out, and so is one whose
    layouts follow the work: it has what its head has chosen.
    """
    updated = {address.split(".")[1] for action, address in plan.changes if _in_place(action, address)}
    changed = [pool for pool in stack.pools if pool["name"] in updated and pool.get("accelerator")]
    pools = [pool for pool in changed if not pool.get("layouts_follow")]
    fleets = stack.fleets() if pools else {}
    found = []
    for pool in pools:
        if pool["name"] in fleets:
            try:
                accelerator = Accelerator.parse(pool["accelerator"])
                found.append(transition(fleets[pool["name"]], accelerator, pool.get("drain_seconds", 600.0)))
            except SkyinfraError:
                continue  # a custom accelerator is no string; `status` says why a fleet does not answer
    return tuple(each for each in found if each.changes)
