"""Follows the work with the number of nodes, on the head.

Once a second it looks at the work that no slot can take and at the nodes that are there, and asks the place for more.
It ends no node: one that had no task for the declared time asks whether it may go (`FleetSize.retire`), closes its
slots, looks again, and ends itself (`skyinfra.idle.watch`). So a head that dies ends nothing, and two heads end
nothing twice.
"""

from __future__ import annotations

import asyncio
import json
import logging
import time
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import replace
from pathlib import Path

from distributed.core import Status
from distributed.scheduler import WorkerState

from skyinfra import mig
from skyinfra.elastic.groups import Group, group_of
from skyinfra.elastic.sizing import Crowd, Resources, Sizing, coming_slots, fits, lacking, lacking_for
from skyinfra.engine.notifications import STARTS_NONE
from skyinfra.engine.waiting import check_task, end_task
from skyinfra.errors import SkyinfraError, StateDirectoryError, counted
from skyinfra.head.scheduler import FleetScheduler
from skyinfra.idle.meter import since_boot
from skyinfra.node.folder import NodeDirectory, replace_file
from skyinfra.protocol import rpc, services
from skyinfra.protocol.fleet import NodeFailure, SizeState
from skyinfra.protocol.instance import InstanceInfo
from skyinfra.protocol.nodeconfig import NodeConfig
from skyinfra.worker.process import resources as resources_of

logger = logging.getLogger("skyinfra.runner")

_LOOK_S = 1.0
# Of 100,000 tasks that wait, a look takes 0.1 s: then the head looks less often.
_PART = 20
# What waits for a slot that there is counts after that part of a boot: it may have it before a node is there.
_WAITED = 4
# A gang that waits says so every few seconds, a node that is about to end as well.
_SAYS_S = 30.0
# A machine that became no node says so every 15 seconds.
_FAILS_S = 45.0
# A node that ends is gone after that long, or has asked again.
_ENDS_S = 180.0
_FILE = "size.json"


class FleetSize:
    """Lets the number of nodes of *scheduler*'s fleet follow its work, once `update` has said within which bounds.

    *jobs*: what a slot must have for each job that waits, by id. *address*: where the scheduler listens, as
    ``HOST:PORT``. Answers `services.retire` and `services.demand`.
    """

    def __init__(
        self,
        scheduler: FleetScheduler,
        jobs: Callable[[], Mapping[str, Resources]],
        directory: NodeDirectory,
        address: Callable[[], str | None],
    ) -> None:
        self._scheduler = scheduler
        self._jobs = jobs
        self._directory = directory
        self._address = address
        self._config: NodeConfig | None = None
        self._group: Group | None = None
        self._sizing = Sizing(0.0)
        self._slots: tuple[InstanceInfo, ...] = ()
        self._each: list[Resources] = []
        # What the slots of such a node may become, where layouts follow the work.
        self._may_have: list[Resources] = []
        # Nodes that the head lets go, and when they asked last; those that do not come back, and what asks for several
        # nodes, likewise.
        self._retiring: dict[str, float] = {}
        self._left: dict[str, float] = {}
        self._crowds: dict[str, tuple[Crowd, float]] = {}
        # Since when each task waits.
        self._since: dict[str, float] = {}
        self._need = 0
        # Machines that became no nodes, and why; all nodes that ever were; what they are made of.
        self._failures: dict[str, NodeFailure] = {}
        self._known: set[str] = set()
        self._made_of: object = None
        self._task: asyncio.Task[None] | None = None
        scheduler.use.on_keep = self.try_again
        scheduler.handlers.update(rpc.handlers(services.retire.by(self.retire), services.demand.by(self.demand)))

    def update(self, config: NodeConfig) -> None:
        """Follows *config* of the head from now on. Raises `NodeFailed` where its nodes come from nowhere."""
        self._config = config if config.max_nodes else None
        if self._config is None:
            self._scheduler.size_state = None
            return
        self._slots = coming_slots(config)
        self._each = [_general(resources_of(slot)) for slot in self._slots]
        self._may_have = [
            _general(resources_of(slot)) for other in _with_each_layout(config) for slot in coming_slots(other)
        ]
        if self._group is None:
            self._group = group_of(config.provider, self._directory, config.pool, self._address, self._nodes)
            self._sizing = _read(self._file, self._group)
            self._task = asyncio.create_task(self._run(), name="size")

    def try_again(self) -> None:
        """Asks for nodes at once where the work needs some, whatever became of the last ones."""
        self._sizing.try_again()

    def check(self) -> None:
        """Raises the error of the runner itself that ended it, if any."""
        check_task(self._task)

    async def close(self) -> None:
        """Ends it; the nodes stay."""
        await end_task(self._task)
        if self._group is not None:
            await self._group.close()

    async def _run(self) -> None:
        pause_s = _LOOK_S
        while True:
            await asyncio.sleep(pause_s)
            began = since_boot()
            if self._config is not None and self._group is not None:
                try:
                    self._look(self._config, self._group, since_boot(), time.time())
                except StateDirectoryError as error:
                    self._sizing.refused(str(error), since_boot())
                    logger.error("the number of nodes cannot follow the work: %s", error)
            pause_s = max(_LOOK_S, _PART * (since_boot() - began))

    def _look(self, config: NodeConfig, group: Group, now: float, at: float) -> None:
        self._retiring = {node: asked for node, asked in self._retiring.items() if now - asked < _SAYS_S}
        self._left = {node: asked for node, asked in self._left.items() if now - asked < _ENDS_S}
        nodes, bounds = self._nodes(), group.bounds() or (config.min_nodes, config.max_nodes)
        having = {gang for gang, has in self._scheduler.gangs.items() if has}
        self._crowds = {
            who: said for who, said in self._crowds.items() if who not in having and now - said[1] < _SAYS_S
        }
        self._need, why = self._needed(nodes, group, bounds[1], now)
        if (made_of := (config, group.made_of())) != self._made_of:
            self._made_of = made_of
            self.try_again()
        self._sizing.where = group.where()
        if (problem := group.problem()) is not None:
            self._sizing.refused(problem, now)
        self._look_at_failures(config, group, nodes, now)
        before = self._sizing.size
        if self._sizing.observe(len(nodes), self._need, bounds, why, now, at, group.held()):
            if self._sizing.size != before:
                logger.info(
                    "%d nodes are wanted, and %d are there: %s", self._sizing.size, len(nodes), self._sizing.why
                )
            self._write()
            group.ask(self._sizing.size)
        group.tend()
        sizing = self._sizing
        waits = bool(self._since or self._crowds)
        lack = sizing.lack(waits, bounds[1], now)
        self._scheduler.size_state = SizeState(
            *bounds, len(nodes), sizing.size, sizing.since, sizing.why, sizing.problem, self._slots, *lack
        )

    def _look_at_failures(self, config: NodeConfig, group: Group, nodes: Collection[str], now: float) -> None:
        """Counts machines that became no nodes; where there were too many, the webhooks of jobs are told."""
        self._known |= set(nodes)
        before, self._failures = self._failures, self._scheduler.boot_failures(_FAILS_S)
        new = sorted(self._failures.keys() - before.keys() - self._known)
        said = [f"{node}: step {self._failures[node].step}: {self._failures[node].error}" for node in new]
        for why in [*said, *group.broken()]:
            if self._sizing.broken(why, now):
                logger.error("%s", self._sizing.problem)
                self._scheduler.use.on_stops(config.node, f"{STARTS_NONE}: {self._sizing.problem}")

    # Who ends ------------------------------------------------------------------------------------------------------

    def retire(self, node: str, last: bool) -> bool:
        """Returns whether *node*, which had no task for a while, may end: none runs or waits there, no gang has its
        slots or waits for some, no work needs more nodes, and enough others stay. *last*: it ends now if it may, and
        from then on it is none of the fleet; one that asks again has not ended."""
        left = self._left.pop(node, None)
        nodes, config, group = self._nodes(), self._config, self._group
        if config is None or group is None:
            return False
        least, _ = group.bounds() or (config.min_nodes, config.max_nodes)
        staying = nodes.keys() - self._retiring.keys() - {node}
        leased = {slot.rpartition("/")[0] for slot in self._scheduler.leased}
        busy = any(worker.processing for worker in nodes.get(node, ()))
        waits = self._need or self._crowds or not all(self._scheduler.gangs.values())
        waits = waits or self._waits_for(nodes.get(node, ()))
        if busy or node in leased or waits or len(staying) < least:
            self._retiring.pop(node, None)
            return False
        if not last:
            self._retiring[node] = since_boot()
            return True
        self._retiring.pop(node, None)
        self._left[node] = since_boot()
        if left is None:
            self._sizing.left(f"{node} had no task for a while", time.time())
            self._write()
        return True

    def _waits_for(self, workers: Iterable[WorkerState]) -> bool:
        """Returns whether something waits that one of *workers* could run, whose slot may have closed for it, or a slot
        of another layout in its place."""
        slots = [worker.resources for worker in workers]
        slots += self._may_have if slots else []
        return _any_fits(self._waiting().values(), slots)

    def demand(self, asker: str, nodes: int, resources: dict[str, float], per_node: int) -> None:
        """Notes that *asker*, a gang, waits for so many *nodes* with *per_node* slots that have *resources*."""
        self._crowds[asker] = Crowd(_general(resources), nodes, max(1, per_node)), since_boot()

    # What waits, what is there --------------------------------------------------------------------------------------

    def _nodes(self) -> dict[str, list[WorkerState]]:
        """Returns the workers of each node that is there and stays."""
        found: dict[str, list[WorkerState]] = {}
        for worker in self._scheduler.workers.values():
            node = str(worker.name).rpartition("/")[0]
            if node not in self._left:
                found.setdefault(node, []).append(worker)
        return found

    def _needed(self, nodes: Mapping[str, list[WorkerState]], group: Group, most: int, now: float) -> tuple[int, str]:
        """Returns how many more nodes the work needs, and why."""
        running = [each for each in self._scheduler.workers.values() if each.status == Status.running]
        leased = self._scheduler.leased
        free = [each.resources for each in running if not each.processing and str(each.name) not in leased]
        waiting = self._waiting()
        self._since = {key: self._since.get(key, now) for key in waiting}
        long_s = max(_LOOK_S, group.boot_s / _WAITED)
        running_kinds = {frozenset(each.resources.items()) for each in running}
        kinds: dict[frozenset[tuple[str, float]], bool] = {}

        def counts(key: str, resources: Resources) -> bool:
            kind = frozenset(resources.items())
            if kind not in kinds:
                kinds[kind] = any(fits(resources, dict(slot)) for slot in running_kinds)
            return now - self._since[key] >= (long_s if kinds[kind] else _LOOK_S)

        tasks = [resources for key, resources in waiting.items() if counts(key, resources)]
        room = max(0, most - len(nodes))
        need = lacking(tasks, free, self._each, room)
        why = f"{counted(len(tasks), 'task')} wait for a slot" if len(tasks) != 1 else "a task waits for a slot"
        staying = [workers for node, workers in nodes.items() if node not in self._retiring]
        there = [[worker.resources for worker in each if str(worker.name) not in leased] for each in staying]
        for crowd, _ in self._crowds.values():
            for_crowd = min(room, lacking_for(crowd, there, self._each))
            if for_crowd > need:
                need, why = for_crowd, f"a gang waits for {counted(crowd.nodes, 'node')}"
        if not need and not nodes and room and _any_fits(tasks, self._may_have):
            # Which layout it gets is chosen once it is there.
            need, why = 1, "a task waits for another layout"
        return need, why

    def _waiting(self) -> dict[str, Resources]:
        """Returns what each task and job asks for that no slot has begun, by its key."""
        tasks = [*self._scheduler.unrunnable, *self._scheduler.queued]
        for worker in self._scheduler.workers.values():
            tasks += list(worker.processing)[1:]
        return {str(task.key): dict(task.resource_restrictions or {}) for task in tasks} | dict(self._jobs())

    # What outlives the runner --------------------------------------------------------------------------------------

    @property
    def _file(self) -> Path:
        return self._directory.path / _FILE

    def _write(self) -> None:
        sizing = self._sizing
        replace_file(self._file, json.dumps({"size": sizing.size, "since": sizing.since, "why": sizing.why}) + "\n")


def _read(file: Path, group: Group) -> Sizing:
    """Returns the size that a head before this one asked for."""
    made = Sizing(group.patience_s, group.boot_s)
    try:
        kept = json.loads(file.read_text(encoding="utf-8"))
        made.size, made.since, made.why = int(kept["size"]), float(kept["since"]), str(kept["why"])
    except (OSError, ValueError, KeyError, TypeError, SkyinfraError):
        return made
    return made


def _with_each_layout(config: NodeConfig) -> list[NodeConfig]:
    """Returns *config* with each of the layouts among which those of its GPUs follow the work; [] where none do."""
    accelerator = config.accelerator
    if config.follow is None or accelerator is None or accelerator.mig_model is None:
        return []
    geometry = mig.geometry(accelerator.mig_model)
    found = []
    for among in config.follow.among:
        layout = mig.resolve(among, geometry, gpus=1)[0]
        layouts = tuple(layout if declared else () for declared in accelerator.per_gpu)
        found.append(replace(config, accelerator=replace(accelerator, layouts=layouts)))
    return found


def _any_fits(waiting: Iterable[Resources], slots: Iterable[Resources]) -> bool:
    kinds = [dict(kind) for kind in {frozenset(wanted.items()) for wanted in waiting}]
    return any(fits(wanted, slot) for slot in slots for wanted in kinds)


def _general(resources: Resources) -> dict[str, float]:
    """Returns *resources* without those of one slot or node: no node that comes has these."""
    return {name: amount for name, amount in resources.items() if not name.startswith(("slot:", "node:"))}
