"""Describes fleets, nodes and slots as they are: by Terraform's outputs and state, and by what the heads answer."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from skyinfra import mig
from skyinfra.deploy.cost import running_cost
from skyinfra.deploy.last_run import last_run
from skyinfra.deploy.orphans import Orphan
from skyinfra.deploy.spending import fleet_spent, holdings, program_of, spending
from skyinfra.deploy.upgrade import Running, running, wanted
from skyinfra.errors import FleetError
from skyinfra.mig.grid import Placement
from skyinfra.protocol.fleet import FleetState
from skyinfra.protocol.instance import InstanceInfo
from skyinfra.protocol.manifest import Manifest, ManifestNode, ManifestSlot
from skyinfra.protocol.readings import FleetHours
from skyinfra.terraform.blocks import Block
from skyinfra.terraform.state import Resource
from skyinfra.terraform.synthesized import SynthesizedStack

if TYPE_CHECKING:
    from skyinfra.submission.fleet import RunningTask
    from skyinfra.submission.snapshot import Snapshot

# A node says its hours each minute; one that has not for that long is gone, or cut off.
_SILENT_S = 150.0

Tasks = dict[str, list["RunningTask"]]


@dataclass(frozen=True)
class GpuStrip:
    """A divided GPU of a node, as the registrations of its slots describe it.

    units: of the whole GPU; start and size of the partitions count in them. missing: slots that are to stand on it and
    are not there. tasks: those that run on each of the slots.
    """

    gpu: int
    accelerator: str
    units: int
    slots: tuple[InstanceInfo, ...]
    missing: int
    tasks: tuple[tuple[RunningTask, ...], ...] = ()

    @property
    def doing(self) -> tuple[str, ...]:
        """The names of the tasks on each of `layout`, in one line; empty where nothing runs at all."""
        if not any(self.tasks):
            return ()
        pairs = list(zip(self.slots, self.tasks, strict=True))
        here = ([tasks for slot, tasks in pairs if (slot.start or 0) == place.start] for place in self.layout)
        return tuple(", ".join(task.name for tasks in each for task in tasks) for each in here)

    @property
    def layout(self) -> tuple[Placement, ...]:
        """The partitions by start, those that share a GPU instance together."""
        return mig.together(slot.placement for slot in self.slots)

    def to_json(self) -> dict[str, Any]:
        """Plain JSON values."""
        return {
            "gpu": self.gpu,
            "accelerator": self.accelerator,
            "units": self.units,
            "partitions": [
                {
                    "profile": s.profile,
                    "start": s.start,
                    "size": s.size,
                    "worker": s.worker,
                    "uuid": s.uuid,
                    **({"compute": asdict(s.compute), "shared_by": s.shared_by} if s.compute is not None else {}),
                    "tasks": [asdict(task) for task in tasks],
                }
                for s, tasks in zip(self.slots, self.tasks or ((),) * len(self.slots), strict=True)
            ],
            "missing": self.missing,
        }


def strips(
    live: Iterable[InstanceInfo],
    wanted: Sequence[ManifestSlot],
    running: Mapping[str, Sequence[RunningTask]] | None = None,
) -> list[GpuStrip]:
    """Returns the divided GPUs of a node, by index, from its *live* slots and the slots of its manifest.

    running: the tasks that run, by the name of the slot.
    """
    tasks = running or {}
    by_gpu: dict[int, list[InstanceInfo]] = {}
    there = set()
    for slot in live:
        there.add(slot.worker)
        if slot.gpu is not None and slot.size and slot.units:
            by_gpu.setdefault(slot.gpu, []).append(slot)
    absent = [slot.gpu for slot in wanted if slot.index not in there]
    made = []
    for gpu, slots in sorted(by_gpu.items()):
        placed = tuple(sorted(slots, key=lambda slot: (slot.start or 0, slot.compute.start if slot.compute else 0)))
        doing = tuple(tuple(tasks.get(slot.slot, ())) for slot in placed)
        units = max(slot.units or 0 for slot in slots)
        made.append(GpuStrip(gpu, slots[0].accelerator or "", units, placed, absent.count(gpu), doing))
    return made


def stack_status(stack: SynthesizedStack, pool: str = "") -> dict[str, Any]:
    """Describes the pools of *stack*, or *pool* alone, as their heads and the state have them. Raises `PoolNotFound`,
    and what Terraform and the state do."""
    fleets = stack.fleets()
    declared = {each["name"]: each for each in stack.pools}
    if pool and pool not in (*declared, *fleets):
        stack.fleet(pool)  # says what there is
    asked = [pool] if pool else list(dict.fromkeys([*fleets, *declared]))
    deployed = [(fleets[name], declared.get(name)) for name in asked if name in fleets]
    pools = [fleet_status(each, wanted(stack, each), by_name) for each, by_name in deployed]
    run = last_run(stack)
    absent = [name for name in asked if name not in fleets]
    existing = stack.resources() if run is not None or absent else ()
    for name in absent:
        held = [each for each in existing if each.module == name]
        pools.append({"pool": name, "fleet": f"{stack.name}/{name}", "deployed": False, **_existing(held)})
    return {
        "stack": stack.name,
        "pools": pools,
        "incomplete": not run.running if run is not None else any(pool.get("existing") for pool in pools),
        **_existing(existing if run is not None else ()),
        "last_run": asdict(run) if run is not None else None,
    }


def block_status(block: Block | None) -> dict[str, Any] | None:
    """Describes the ``with`` block that a stack belongs to: its program, and what its fleet costs."""
    if block is None:
        return None
    cost = running_cost(block.stack.resources())
    return {
        **(asdict(block.opened) if block.opened is not None else {"program": None, "pid": None, "began": None}),
        "running": block.running,
        "text": f"{program_of(block)} {spending(cost, block.opened)}",
        "cost": cost.to_json(),
    }


def _existing(resources: Sequence[Resource]) -> dict[str, Any]:
    """Describes what exists of a pool or stack, also under the key of the version before."""
    found = _holds(resources)
    return {"existing": found, "standing": found}


def _holds(resources: Sequence[Resource]) -> dict[str, Any] | None:
    """Describes the resources of a pool or stack whose deploy has not ended well; None where there are none."""
    if not resources:
        return None
    failed = [f"{each.module}.{each.type}.{each.name}" for each in resources if each.tainted]
    cost = running_cost(resources).to_json()
    return {"resources": len(resources), "text": holdings(resources), "failed": failed, "cost": cost}


def orphan_status(orphan: Orphan) -> dict[str, Any]:
    return {
        "stack": orphan.stack.name,
        "workspace": orphan.workspace,
        "state": orphan.where,
        "resources": len(orphan.resources),
        "cost": running_cost(orphan.resources).to_json(),
        "problem": orphan.problem,
    }


def fleet_status(manifest: Manifest, version: str | None, declared: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """Describes a deployed fleet. version: of the runner that this skyinfra has for it. declared: the choices for it,
    where it is declared."""
    now: Snapshot | None = None
    tasks: Tasks = {}
    problem: str | None = None
    runner: Running | None = None
    hours: FleetHours | None = None
    try:
        now, tasks, runner, hours = _look(manifest)
    except FleetError as error:
        problem = str(error)
    return {
        "pool": manifest.pool,
        "fleet": manifest.fleet,
        "deployed": True,
        "provider": manifest.provider,
        "simulated": manifest.simulated,
        "head": {"address": manifest.head.address, "port": manifest.head.port},
        "problem": problem,
        "runner": runner.version if runner is not None else None,
        "upgrade": version if runner is not None and runner.problem is None and runner.version != version else None,
        "group_nodes": manifest.group_nodes,
        "replace_sick": bool(declared and declared.get("replace_sick")),
        "spent": fleet_spent(manifest, declared, hours) if hours is not None and declared is not None else None,
        "follow": _follow_status(now),
        "size": _size_status(now),
        "nodes": [
            _node_status(manifest, node, now, tasks, hours) for node in (*manifest.nodes, *_of_group(manifest, now))
        ],
    }


def _size_status(now: Snapshot | None) -> dict[str, Any] | None:
    """Describes the number of nodes of a fleet; None where it is fixed, or the head does not answer."""
    size = now.state.size if now is not None and now.state is not None else None
    if size is None:
        return None
    return {name: value for name, value in asdict(size).items() if name not in ("slots", "lack", "said")}


def _follow_status(now: Snapshot | None) -> dict[str, Any] | None:
    """Describes how the layouts of a fleet follow its work; None where they do not, or the head does not answer."""
    follow_state = now.state.follow if now is not None and now.state is not None else None
    if follow_state is None:
        return None
    return {**asdict(follow_state.policy), "changes": [asdict(change) for change in follow_state.changes]}


def _look(manifest: Manifest) -> tuple[Snapshot, Tasks, Running, FleetHours | None]:
    """Returns the fleet, its tasks, the runner of its head, and the hours of its machines."""
    from skyinfra.client import open_questions

    head = [node.name for node in manifest.nodes if node.head]
    with open_questions(manifest, timeout=5) as pool:
        found = running(pool, head)
        runner = found[head[0]] if head else Running(None, "no node is the head")
        return pool.look(), pool.running(), runner, pool.hours(uses=False)


def plain(stacks: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Turns the GPUs of the nodes into plain JSON values."""
    for node in (node for stack in stacks for pool in stack["pools"] for node in pool.get("nodes", ())):
        node["gpus"] = [gpu.to_json() for gpu in node["gpus"]]
    return stacks


def _of_group(manifest: Manifest, now: Snapshot | None) -> list[ManifestNode]:
    """Returns the nodes that only the head knows: nodes of a group come and go by themselves."""
    known = {node.name for node in manifest.nodes}
    found = {slot.node for slot in (*now.slots, *now.draining)} if now is not None else set()
    found |= set(now.state.failed) if now is not None and now.state is not None else set()
    found -= known
    return [ManifestNode(name, "", "") for name in sorted(found)]


def _silent_s(node: str, hours: FleetHours | None) -> float | None:
    """Returns for how many seconds the head has not heard of *node*; None where it has, or never did."""
    heard = [run.ended for run in hours.runs if run.node == node] if hours is not None else []
    silent = hours.at - max(heard) if hours is not None and heard else 0.0
    return silent if silent > _SILENT_S else None


def _node_status(
    manifest: Manifest, node: ManifestNode, now: Snapshot | None, tasks: Tasks, hours: FleetHours | None
) -> dict[str, Any]:
    live = {slot.slot: slot for slot in (now.slots if now else ()) if slot.node == node.name}
    draining = {slot.slot: slot for slot in (now.draining if now else ()) if slot.node == node.name}
    reported = now.state if now else None
    promised = {f"{node.name}/{slot.index}": slot for slot in manifest.slots_of(node)}
    wanted = reported.slots.get(node.name, tuple(promised)) if reported else tuple(promised)
    slots = [*_draining(draining, reported), *({**slot.to_json(), "state": "ready"} for slot in live.values())]
    slots += [_missing(name, promised.get(name)) for name in wanted if name not in live and name not in draining]
    for slot in slots:
        slot["tasks"] = [asdict(task) for task in tasks.get(str(slot["slot"]), ())]
        slot["sick"] = reported.sick.get(str(slot["slot"])) if reported else None
    reached = bool(live) or (now is not None and node.head)
    state = "ready" if reached and set(wanted) <= set(live) else "missing slots" if live else "not reachable"
    failed = reported.failed.get(node.name) if reported else None
    out_of_service = reported.out_of_service.get(node.name) if reported else None
    why_sick = reported.sick_nodes().get(node.name) if reported else None
    if any(slot["state"] == "draining" for slot in slots):
        state = "draining"
    elif out_of_service and not live:
        state = "drained"
    elif why_sick:
        state = "sick"
    elif failed is not None and not live:
        state = "failed"
    silent = _silent_s(node.name, hours) if state == "not reachable" else None
    return {
        "name": node.name,
        "id": node.id,
        "head": node.head,
        "address": node.address,
        "machine_type": node.machine_type,
        "state": "gone" if silent is not None else state,
        "silent_seconds": silent,
        "failed": asdict(failed) if failed is not None else None,
        "drain_reason": out_of_service,
        "leaving": out_of_service,  # its name in the version before
        "sick": why_sick,
        "unwatched": reported.unwatched.get(node.name) if reported else None,
        "stops": reported.stops.get(node.name) if reported else None,
        "behind": bool(reported and node.name in reported.behind),
        "slots": sorted(slots, key=lambda slot: int(slot["worker"])),
        "gpus": strips(
            [*live.values(), *draining.values()], [promised[name] for name in promised if name in wanted], tasks
        ),
    }


def _draining(slots: Mapping[str, InstanceInfo], reported: FleetState | None) -> list[dict[str, Any]]:
    """Describes the *slots* that are out of service: those that end their tasks, and sick ones."""
    sick, waiting = (reported.sick, reported.draining) if reported else ({}, {})
    return [
        {**slot.to_json(), "state": "sick" if name in sick else "draining", "waits_for": waiting.get(name, ())}
        for name, slot in slots.items()
    ]


def _missing(name: str, slot: ManifestSlot | None) -> dict[str, Any]:
    return {
        "worker": int(name.rpartition("/")[2]),
        "slot": name,
        "kind": slot.kind if slot else None,
        "profile": slot.profile if slot else None,
        "accelerator": slot.accelerator if slot else None,
        "uuid": None,
        "state": "missing",
    }
