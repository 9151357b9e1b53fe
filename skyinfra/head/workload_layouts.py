"""Layouts that follow the work, on the head: what waits and what stands goes to `skyinfra.mig.follow.choose`.

Once a second it looks at the tasks and jobs that no slot has begun, and at the slots with their last tasks. What was
chosen is written where the runner of the head finds it as it finds a declared layout, so that the nodes learn of it
and drain as they always do; a slot that got a task meanwhile is waited for. Tasks that ask for one node or slot do not
count.
"""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections import Counter, deque
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from distributed.core import Status
from distributed.diagnostics.plugin import SchedulerPlugin

from skyinfra import mig
from skyinfra.engine.waiting import check_task, end_task
from skyinfra.errors import StateDirectoryError, UnknownProfile
from skyinfra.head.records import slot_of
from skyinfra.head.scheduler import FleetScheduler
from skyinfra.mig import Follow, Geometry, Placement, follow
from skyinfra.protocol.fleet import FleetLayout, FollowState, LayoutChange
from skyinfra.protocol.instance import GPU_MEMORY, InstanceInfo

logger = logging.getLogger("skyinfra.runner")

_LOOK_S = 1.0
# A change is taken to be under way for that long: partitions are made and workers start within seconds.
_COMING_S = 120.0
# Of the changes, so many are told to clients.
_SHOWN = 20
# The place of a GPU: its node's name and its index there.
Place = tuple[str, int]
Layouts = dict[str, tuple[str, ...]]


class WorkloadLayouts(SchedulerPlugin):  # type: ignore[misc]
    """Lets the layouts of *scheduler*'s fleet follow its work, once `update` has said among which.

    *jobs*: what a slot must have for each job that waits, by id. *write*: keeps the chosen layouts, by node.
    """

    name = "skyinfra-following"

    def __init__(
        self,
        scheduler: FleetScheduler,
        jobs: Callable[[], Mapping[str, Mapping[str, float]]],
        write: Callable[[Layouts], None],
    ) -> None:
        self._scheduler = scheduler
        self._jobs = jobs
        self._write = write
        self._policy: Follow | None = None
        self._geometry: Geometry | None = None
        self._layout: FleetLayout | None = None
        self._selected: Layouts = {}
        # When each GPU was changed, each slot had its last task, and each task began to wait.
        self._changed: dict[Place, float] = {}
        self._used: dict[tuple[str, str | None], float] = {}
        self._since: dict[str, float] = {}
        self._slots: dict[str, InstanceInfo] = {}  # by the address of the worker
        self._recent: deque[LayoutChange] = deque(maxlen=_SHOWN)
        self._task: asyncio.Task[None] | None = None

    def update(self, policy: Follow | None, model: str | None, layout: FleetLayout) -> None:
        """Follows *policy* from now on, if any. *layout*: of the fleet, with what was chosen before."""
        if policy is None or model is None:
            self._policy = self._scheduler.follow_state = None
            self._selected = {}
            return
        if self._policy is None:
            self._selected = dict(layout.by_node)
        known = {
            node: tuple(each if each in policy.among else "" for each in layouts)
            for node, layouts in self._selected.items()
        }
        self._selected = {node: layouts for node, layouts in known.items() if any(layouts)}
        self._policy, self._geometry, self._layout = policy, mig.geometry(model), layout
        if self._task is None:
            self._scheduler.add_plugin(self)
            self._task = asyncio.create_task(self._run(), name="following")

    def check(self) -> None:
        """Raises the error of the runner itself that ended it, if any."""
        check_task(self._task)

    async def close(self) -> None:
        """Ends it."""
        await end_task(self._task)

    def transition(self, key: str, start: str, finish: str, *_: Any, **__: Any) -> None:
        """Notes that a slot has a task, however short that is."""
        if finish == "processing" and (task := self._scheduler.tasks.get(key)) is not None and task.processing_on:
            self._note(self._slots.get(task.processing_on.address), time.monotonic())

    def _note(self, slot: InstanceInfo | None, now: float) -> None:
        if slot is not None:
            self._used[slot.slot, slot.uuid] = now

    async def _run(self) -> None:
        while True:
            await asyncio.sleep(_LOOK_S)
            if self._policy is not None and self._geometry is not None and self._layout is not None:
                self._look(self._policy, self._geometry, self._layout, time.monotonic())

    def _look(self, policy: Follow, geometry: Geometry, layout: FleetLayout, now: float) -> None:
        gpus = self._gpus(geometry, layout, now)
        nodes = Counter(gpu.node for gpu in gpus)
        self._scheduler.follow_state = FollowState(policy, geometry.model, dict(nodes), tuple(self._recent))
        changes = follow.choose(policy, geometry, self._queue(geometry, now), gpus, now)
        if changes:
            self._order(changes, len(layout.layouts), now)

    def _order(self, changes: Iterable[follow.Change], count: int, now: float) -> None:
        """Writes the changes down, which the runner then makes."""
        selected = dict(self._selected)
        for each in changes:
            layouts = list(selected.get(each.node, ("",) * count))
            layouts[each.index] = each.layout
            selected[each.node] = tuple(layouts)
        try:
            self._write(selected)
        except StateDirectoryError as error:
            logger.warning("the layouts cannot follow the work: %s", error)
            return
        self._selected = selected
        for each in changes:
            logger.info("%s GPU %d: %s -> %s: %s", each.node, each.index, each.before, each.layout, each.why)
            self._changed[each.node, each.index] = now
            self._recent.append(LayoutChange(time.time(), each.node, each.index, each.before, each.layout, each.why))

    # What stands ----------------------------------------------------------------------------------------------------

    def _gpus(self, geometry: Geometry, layout: FleetLayout, now: float) -> list[follow.Gpu]:
        """Returns the GPUs of the nodes that are there, but for those that stay whole."""
        there = self._there(now)
        changing = {node for (node, _), at in self._changed.items() if now - at < _COMING_S}
        found = []
        for node in sorted({node for node, _ in there} | changing):
            selected = self._selected.get(node, ("",) * len(layout.layouts))
            for index, (declared, text) in enumerate(zip(layout.layouts, selected, strict=False)):
                if not declared:
                    continue
                wanted = follow.profiles(text, geometry) if text else _counted(geometry, (p.profile for p in declared))
                found.append(self._gpu((node, index), wanted, there.get((node, index), {}), geometry, now))
        return found

    def _gpu(
        self, place: Place, wanted: Counter[str], slots: Mapping[Placement, float], geometry: Geometry, now: float
    ) -> follow.Gpu:
        changed = self._changed.get(place, -math.inf)
        existing = tuple(sorted(slots, key=lambda each: each.start))
        if _counted(geometry, (each.profile for each in existing)) == wanted:
            named = tuple(Placement(geometry.profile(p.profile).name, p.start, p.size) for p in existing)
            return follow.Gpu(*place, named, tuple(slots[each] for each in existing), changed)
        coming = tuple(wanted.elements()) if now - changed < _COMING_S else ()
        return follow.Gpu(*place, (), (), changed, coming)

    def _there(self, now: float) -> dict[Place, dict[Placement, float]]:
        """Returns the partitions of each GPU that take tasks, and when each had a task last."""
        workers = self._scheduler.workers.items()
        slots = {address: self._slots.get(address) or slot_of(worker.extra) for address, worker in workers}
        self._slots = {address: slot for address, slot in slots.items() if slot is not None}
        known = {(slot.slot, slot.uuid) for slot in self._slots.values()}
        self._used = {slot: at for slot, at in self._used.items() if slot in known}
        leased = self._scheduler.leased
        found: dict[Place, dict[Placement, float]] = {}
        for address, slot in self._slots.items():
            worker = self._scheduler.workers[address]
            if slot.gpu is None:
                continue
            here = found.setdefault((slot.node, slot.gpu), {})
            if slot.profile is None or slot.start is None or slot.size is None or worker.status != Status.running:
                continue
            self._used.setdefault((slot.slot, slot.uuid), now)
            busy = bool(worker.processing) or slot.slot in leased
            if busy:
                self._note(slot, now)
            here[Placement(slot.profile, slot.start, slot.size)] = (
                math.inf if busy else self._used[slot.slot, slot.uuid]
            )
        return found

    # What waits -----------------------------------------------------------------------------------------------------

    def _queue(self, geometry: Geometry, now: float) -> list[follow.Want]:
        """The tasks and jobs that no slot has begun; one that lies behind another one on its slot waits, too."""
        tasks = self._scheduler.tasks.values()
        waiting = [task for task in tasks if task.state in ("no-worker", "queued")]
        for worker in self._scheduler.workers.values():
            waiting += list(worker.processing)[1:]
        needs = {str(task.key): task.resource_restrictions or {} for task in waiting} | dict(self._jobs())
        self._since = {key: self._since.get(key, now) for key in needs}
        wants = ((_want(resources, geometry), self._since[key]) for key, resources in needs.items())
        return [follow.Want(*want, (since,)) for want, since in wants if want is not None]


def _want(resources: Mapping[str, float], geometry: Geometry) -> tuple[str | None, float] | None:
    """Profile and memory in GB that a task with *resources* asks for; None for one that no other layout helps."""
    profile: str | None = None
    for name in resources:
        kind, _, value = name.partition(":")
        if kind in ("slot", "node") and value:
            return None
        if kind == "profile":
            try:
                profile = geometry.profile(value).name
            except UnknownProfile:
                return None
    return profile, resources.get(GPU_MEMORY, 0) / 1000


def _counted(geometry: Geometry, names: Iterable[str]) -> Counter[str]:
    return Counter(geometry.profile(name).name for name in names)
