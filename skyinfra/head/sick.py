"""The slots that take no tasks for a reason of their node: they are sick.

Workers say so themselves where they fail tasks, runners of those that do not start. Here the slots are found that end
worker processes. A task that does so is mostly at fault itself, and ends the next one too: so a death speaks against
its slot only where each task that was there then ends on another slot, without another death. The end of all slots of a
node at once is that of its runner or machine, and a connection that broke no death at all.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass

from distributed import Scheduler
from distributed.core import Status
from distributed.diagnostics.plugin import SchedulerPlugin

from skyinfra.engine.deaths import Death
from skyinfra.engine.waiting import Changes
from skyinfra.protocol.calls import ATTEMPTS

logger = logging.getLogger("skyinfra.runner")

# So many deaths within so long take a slot out of service, for as long.
TIMES, WITHIN_S = 3, 3600.0
# The processes of a node that end with its runner do so within that long.
_AT_ONCE_S = 10.0
# A runner tells of the end of a process within milliseconds; one of the version before never does.
_REPORTED_S = 3.0
# Characters of why a slot fails.
_WORDS = 300
_WHY = f"its worker process ended {TIMES} times within an hour, under tasks that ran elsewhere"


@dataclass(eq=False)
class _Death:
    """The end of a worker process on *slot*. tasks: the keys of those that have not ended elsewhere since."""

    slot: str
    tasks: set[str]
    at: float


class Suspects(SchedulerPlugin):  # type: ignore[misc]
    """The deaths of worker processes, and what became of their tasks. Is kept in memory: another head begins anew."""

    name = "skyinfra-suspects"

    def __init__(self, slot_at: Callable[[str], str | None], clock: Callable[[], float] = time.monotonic) -> None:
        """*slot_at*: returns the name of the slot of the worker at an address, while it is there."""
        self._slot_at = slot_at
        self._clock = clock
        self._deaths: dict[str, _Death] = {}
        # Tasks that have ended more than one process.
        self._culprits: set[str] = set()
        self._against: dict[str, list[float]] = {}

    def died(self, slot: str, tasks: Collection[str]) -> None:
        """Notes that the worker process of *slot* has ended, where *tasks* ran or were about to."""
        before = {key: self._deaths[key] for key in tasks if key in self._deaths}
        for key, death in before.items():
            self._culprits.add(key)
            self._drop(death)
        if tasks and not self._culprits.intersection(tasks):
            death = _Death(slot, set(tasks), self._clock())
            self._deaths |= dict.fromkeys(tasks, death)

    def transition(self, key: str, start: str, finish: str, *arguments: object, **details: object) -> None:
        """Is called with each change of a task's state."""
        if finish == "memory" and key in self._deaths:
            self._ended(key, self._slot_at(str(details.get("worker"))))
        elif finish in ("forgotten", "erred"):
            self._culprits.discard(key)
            if key in self._deaths:
                self._drop(self._deaths[key])

    def forget(self, node: str) -> None:
        """Forgets what speaks against slots of *node*, which has another machine."""
        self._against = {slot: at for slot, at in self._against.items() if _node(slot) != node}

    def all_died(self, node: str) -> None:
        """Notes that the last worker process of *node* has ended: those that have just ended speak against no slot."""
        since = self._clock() - _AT_ONCE_S
        for death in [each for each in self._deaths.values() if _node(each.slot) == node and each.at > since]:
            self._drop(death)
        for slot in [each for each in self._against if _node(each) == node]:
            self._against[slot] = [at for at in self._against[slot] if at <= since]

    def found(self) -> dict[str, str]:
        """Returns why slots are to take no tasks, by their names."""
        since = self._clock() - WITHIN_S
        recent = {slot: [at for at in times if at > since] for slot, times in self._against.items()}
        self._against = {slot: times for slot, times in recent.items() if times}
        return {slot: _WHY for slot, times in self._against.items() if len(times) >= TIMES}

    def _ended(self, key: str, slot: str | None) -> None:
        death = self._deaths[key]
        if slot is None or slot == death.slot:
            self._drop(death)
            return
        del self._deaths[key]
        death.tasks.discard(key)
        if not death.tasks:
            self._against.setdefault(death.slot, []).append(death.at)

    def _drop(self, death: _Death) -> None:
        for key in death.tasks:
            self._deaths.pop(key, None)


class Killers(SchedulerPlugin):  # type: ignore[misc]
    """The worker processes that each task has ended, on whichever nodes, as their runners tell.

    Is kept in memory: another head begins anew. A node counts those of its own, see `skyinfra.worker.attempts`.
    """

    name = "skyinfra-killers"

    def __init__(self) -> None:
        self._deaths: dict[str, list[Death]] = {}
        self._reported: set[str] = set()
        # The slots of which a report is waited for.
        self._awaited: set[str] = set()
        self._closed = False
        self._changes = Changes()

    def tell(self, slot: str, key: str, code: int, out_of_memory: bool) -> None:
        """Notes that the worker process of *slot* has ended while it ran the task *key*; empty for none."""
        if key:
            self._deaths.setdefault(key, []).append(Death(code, out_of_memory))
        self._reported.add(slot)
        self._changes.notify()

    async def heard(self, slot: str) -> None:
        """Waits for a moment until `tell` was called for the end of the process of *slot*, or it has another one."""
        self._awaited.add(slot)
        try:
            await self._changes.until(lambda: self._closed or slot in self._reported, _REPORTED_S)
        finally:
            self._awaited.discard(slot)
            self._reported.discard(slot)

    def stop_waiting(self) -> None:
        """Ends all waits: the head ends, and with it the runner that would tell."""
        self._closed = True
        self._changes.notify()

    def restarted(self, slot: str) -> bool:
        """Notes that *slot* has another process: what was told is of the one before. Returns whether somebody waited
        for that, and does no longer."""
        if slot in self._awaited:
            self._reported.add(slot)
            self._changes.notify()
            return True
        self._reported.discard(slot)
        return False

    def ended_by(self, key: str) -> list[Death]:
        """Returns the ends of processes for which the task *key* is not to start again; none where it is to."""
        found = self._deaths.get(key, [])
        return found if len(found) >= ATTEMPTS else []

    def transition(self, key: str, start: str, finish: str, *arguments: object, **details: object) -> None:
        """Is called with each change of a task's state."""
        if finish in ("memory", "forgotten", "erred"):
            self._deaths.pop(key, None)


class Sick:
    """The sick slots of *scheduler*, which get no task.

    promised: the names of the slots that each node is to have. on_sick: gets a node and why it is sick, once each time
    that it becomes so. is_gone: whether a node was heard of before, and has not been for long, or for so many seconds.
    """

    def __init__(self, scheduler: Scheduler, promised: Mapping[str, Collection[str]]) -> None:
        self._scheduler = scheduler
        self._promised = promised
        # Why slots take no tasks: as their workers say, and as the runner of a node says of those that do not start.
        self._failing: dict[str, str] = {}
        self._not_started: dict[str, dict[str, str]] = {}
        self.unwatched: dict[str, str] = {}
        self.suspects = Suspects(self._slot_at)
        # The workers that get no task, by their addresses, and the state that they are in themselves.
        self.held: dict[str, Status] = {}
        # The nodes that are known to have such slots, and since when.
        self._known: dict[str, float] = {}
        self.on_sick: Callable[[str, str], object] = lambda node, why: None
        self.is_gone: Callable[..., bool] = lambda node, seconds=0.0: False
        # The workers that were told to end a task, for which they may have to end their process.
        self._end_tasks: set[str] = set()

    def report(self, node: str, not_started: dict[str, str], unwatched: str | None) -> None:
        """Notes which slots of *node* are not there as their workers do not start, and why; and whether something is
        missing there that starts its runner again."""
        self._not_started[node] = dict(not_started)
        self.unwatched.pop(node, None)
        if unwatched is not None:
            self.unwatched[node] = unwatched
        self.enforce()

    def note(self, slot: str, why: object) -> None:
        """Notes why *slot* fails tasks; None where it takes some again."""
        self._failing.pop(slot, None)
        if why is None:
            logger.info("slot %s takes tasks again", slot)
        else:
            self._failing[slot] = " ".join(str(why).split())[:_WORDS]
        self.enforce()

    def gone(self, address: str, *, expected: bool) -> None:
        """Notes that the worker at *address* is about to be removed; *expected*: as it was to be, or was cut off."""
        worker = self._scheduler.workers[address]
        node = _node(str(worker.name))
        self._failing.pop(str(worker.name), None)
        expected = expected or address in self._end_tasks
        self._end_tasks.discard(address)
        # Not one that is drained, stopped or replaced.
        if self.held.pop(address, worker.status) == Status.running and not expected:
            self.suspects.died(str(worker.name), [str(task.key) for task in worker.processing])
        stay = any(_node(str(each.name)) == node for where, each in self._scheduler.workers.items() if where != address)
        if not stay and len(self._promised.get(node, ())) > 1:
            self.suspects.all_died(node)

    def ends_task(self, address: str) -> None:
        """Notes that the worker at *address* is told to end a task."""
        self._end_tasks.add(address)

    def enforce(self) -> None:
        """Gives no task to the slots that are sick, and tells who is to hear of it of each node that has become so."""
        self._forget_gone()
        sick, change = self.slots(), Scheduler.handle_worker_status_change
        for address, worker in self._scheduler.workers.items():
            if str(worker.name) in sick and address not in self.held:
                self.held[address] = worker.status
                change(self._scheduler, Status.paused, worker, "skyinfra-sick")
            elif str(worker.name) not in sick and address in self.held:
                change(self._scheduler, self.held.pop(address), worker, "skyinfra-well")
        nodes: dict[str, str] = {}
        for slot, why in sorted(sick.items()):
            nodes.setdefault(_node(slot), why)
        for node in sorted(nodes.keys() - self._known.keys()):
            logger.warning("node %s is sick, its slots take no tasks: %s", node, nodes[node])
            self.on_sick(node, nodes[node])
        now = time.monotonic()
        self._known = {node: self._known.get(node, now) for node in nodes}

    def seconds(self) -> dict[str, float]:
        """Returns for how many seconds nodes have had sick slots, by their names."""
        now = time.monotonic()
        return {node: now - since for node, since in self._known.items()}

    def slots(self) -> dict[str, str]:
        """Returns the sick slots, and why they are."""
        there = {str(worker.name) for worker in self._scheduler.workers.values()}
        # Not those that are not to be there any more: the node leaves, or has left, or has another layout.
        absent = {
            slot: why
            for node, slots in self._not_started.items()
            for slot, why in slots.items()
            if slot not in there and slot in self._promised.get(node, slots)
        }
        found = {**_few(self.suspects.found(), there), **self._failing}
        return _with_nodes({**absent, **{slot: why for slot, why in found.items() if slot in there}}, there)

    def _slot_at(self, address: str) -> str | None:
        worker = self._scheduler.workers.get(address)
        return None if worker is None else str(worker.name)

    def _forget_gone(self) -> None:
        """Forgets what nodes said that died without a word."""
        there = {_node(str(worker.name)) for worker in self._scheduler.workers.values()}
        for node in (self._not_started.keys() | self.unwatched.keys()) - there:
            if self.is_gone(node):
                self._not_started.pop(node, None)
                self.unwatched.pop(node, None)


def _few(suspected: dict[str, str], there: set[str]) -> dict[str, str]:
    """Returns *suspected*, but none of more than half of the slots on more than half of the nodes.

    It is the tasks then, such as ones that leave memory behind in the process, and not the machines.
    """
    nodes, found = ({_node(slot) for slot in slots} for slots in (there, suspected.keys() & there))
    most = 2 * len(suspected.keys() & there) > len(there) and 2 * len(found) > len(nodes)
    return {} if most else suspected


def _with_nodes(sick: dict[str, str], there: set[str]) -> dict[str, str]:
    """Returns *sick* with the other slots of nodes of which half, and two at least, are sick, but for the last node
    with slots that are not."""
    every: dict[str, set[str]] = {}
    for slot in there | sick.keys():
        every.setdefault(_node(slot), set()).add(slot)
    well = {node for node, slots in every.items() if slots - sick.keys()}
    for node in sorted(well):
        found = every[node] & sick.keys()
        if len(found) >= max(2, len(every[node]) / 2) and len(well) > 1:
            well.discard(node)
            why = f"{len(found)} of the {len(every[node])} slots of its node are sick: {sick[min(found)]}"[:_WORDS]
            sick = {**sick, **dict.fromkeys(every[node] - found, why)}
    return sick


def _node(slot: str) -> str:
    return slot.rpartition("/")[0]
