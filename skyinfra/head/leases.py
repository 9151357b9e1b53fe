"""Leases: the slots that each gang has. Everything here runs in the event loop of the scheduler.

Gangs get their slots in the order in which they asked, all of them at once: no two gangs ever hold a part of what both
need. One that waits keeps later ones from all that it may have; what it may not have is theirs.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field

from skyinfra.engine.waiting import Changes
from skyinfra.errors import NotSupported
from skyinfra.protocol import rpc, services
from skyinfra.protocol.gang import Candidates, GangState, Phase, Wish

# A gang is over that long after the first report of a failure: the report of an earlier failure may be on its way.
SETTLE_S = 0.5


@dataclass
class _Gang:
    """A gang that has slots, or waits for them.

    arrived: worker, address and port of each rank that has its slot. ended: the ranks that have finished well.
    failures: (whether its process lived to tell, when, rank), of which the least is the first.
    """

    wish: Wish
    slots: tuple[str, ...] = ()
    arrived: dict[int, tuple[str, str, int]] = field(default_factory=dict)
    ended: set[int] = field(default_factory=set)
    failures: list[tuple[bool, float, int]] = field(default_factory=list)
    over: bool = False
    changes: Changes = field(default_factory=Changes)

    @property
    def phase(self) -> Phase:
        if self.over:
            return "over"
        if not self.slots:
            return "waiting"
        return "started" if len(self.arrived) == len(self.slots) else "granted"

    def state(self) -> GangState:
        first = min(self.failures) if self.failures else None
        members = [self.arrived[rank][1:] for rank in sorted(self.arrived)] if self.phase == "started" else []
        return {
            "phase": self.phase,
            "slots": list(self.slots),
            "members": members,
            "missing": [slot for rank, slot in enumerate(self.slots) if rank not in self.arrived],
            "first": None if first is None else first[2],
            "died": first is not None and not first[0],
        }

    def end(self) -> None:
        self.over = True
        self.changes.notify()

    async def leaves(self, seen: str, wait_s: float) -> GangState:
        """Returns its state, as soon as its phase is another than *seen*."""
        await self.changes.until(lambda: self.phase != seen, wait_s)
        return self.state()


_UNKNOWN: GangState = {"phase": "unknown", "slots": [], "members": [], "missing": [], "first": None, "died": False}


class Leases:
    """The slots of a fleet, as gangs have them.

    *slots*: the slots in service, and whether a task runs there. *is_client*: whether a client of that name is
    connected: a gang ends with the connection of its client. *behind*: the nodes that cannot be connected to.
    """

    def __init__(
        self,
        slots: Callable[[], Mapping[str, bool]],
        is_client: Callable[[str], bool],
        behind: Callable[[], Collection[str]] = tuple,
    ) -> None:
        self._slots = slots
        self._is_client = is_client
        self._behind = behind
        # In the order in which they asked.
        self._gangs: dict[str, _Gang] = {}
        self.handlers = rpc.handlers(
            services.gang_ask.by(self.ask),
            services.gang_join.by(self.join),
            services.gang_state.by(self.state),
            services.gang_report.by(self.report),
            services.gang_release.by(self.release),
        )

    async def ask(self, gang: str, client: str, nodes: int, candidates: Candidates, wait_s: float) -> GangState:
        """Asks for slots, or goes on waiting for them; the state of the *gang* once it has them, or after *wait_s*.

        The place in the queue is that of the first call; *candidates* may be others each time. Raises `NotSupported`
        where it needs several nodes, and too few of them can be connected to.
        """
        if nodes > 1:
            behind = self._behind()
            candidates = tuple(each for each in candidates if each[0] not in behind)
            if behind and len(candidates) < nodes:
                raise NotSupported(
                    f"the ranks of a gang connect to each other, and nobody can connect to {', '.join(sorted(behind))}",
                    field="nodes",
                    given=nodes,
                    hint="A gang on one node works there. Between nodes, open all ports of the nodes to each other.",
                )
        if not self._is_client(client):
            return _UNKNOWN
        wish = Wish(gang, client, nodes, candidates)
        found = self._gangs.setdefault(gang, _Gang(wish))
        found.wish = wish
        self.grant()
        return await found.leaves("waiting", wait_s)

    async def join(self, gang: str, rank: int, worker: str, address: str, port: int, wait_s: float) -> GangState:
        """The *rank* has its slot, on *worker*; the state of the gang once all have, or after *wait_s* seconds."""
        found = self._gangs.get(gang)
        if found is None:
            return _UNKNOWN
        if found.phase == "started" and found.arrived[rank][0] != worker:
            # Its worker process ended, and another one starts the task again: the rank itself is lost.
            self.report(gang, rank, died=True)
            return await found.leaves("started", wait_s)
        if found.phase == "granted":
            found.arrived[rank] = worker, address, port
            if len(found.arrived) == len(found.slots):
                found.changes.notify()
        return await found.leaves("granted", wait_s)

    async def state(self, gang: str, seen: str, wait_s: float) -> GangState:
        """Returns the state of the *gang*, as soon as its phase is another than *seen*, or after *wait_s* seconds."""
        found = self._gangs.get(gang)
        return _UNKNOWN if found is None else await found.leaves(seen, wait_s)

    def report(self, gang: str, rank: int, age: float = 0.0, died: bool = False, ok: bool = False) -> None:
        """The *rank* has ended: *ok*, or it failed *age* seconds ago. *died*: its process did not live to tell."""
        found = self._gangs.get(gang)
        if found is None or found.over:
            return
        if ok:
            found.ended.add(rank)
            return
        loop = asyncio.get_running_loop()
        if not found.failures:
            loop.call_later(SETTLE_S, found.end)
        # A process that died is found dead a moment later; the others, which lost it, tell at once.
        found.failures.append((not died, loop.time() - age, rank))

    def release(self, gang: str) -> None:
        """The *gang* is over and needs no slots any more."""
        found = self._gangs.pop(gang, None)
        if found is not None:
            found.end()
            self.grant()

    def client_gone(self, client: str) -> None:
        """Ends the gangs of *client*."""
        for gang in [gang for gang, found in self._gangs.items() if found.wish.client == client]:
            self.release(gang)

    def worker_gone(self, worker: str) -> None:
        """The ranks on *worker* are lost; one that waits for the others starts again on the worker that follows."""
        for gang, found in self._gangs.items():
            for rank in [rank for rank, arrival in found.arrived.items() if arrival[0] == worker]:
                if found.phase == "granted":
                    del found.arrived[rank]
                elif rank not in found.ended:
                    self.report(gang, rank, died=True)

    @property
    def any(self) -> bool:
        """Whether a gang has slots, or waits for some."""
        return bool(self._gangs)

    @property
    def gangs(self) -> dict[str, bool]:
        """The gangs that there are, and whether each has its slots."""
        return {gang: bool(found.slots) for gang, found in self._gangs.items()}

    @property
    def taken(self) -> set[str]:
        """The slots that gangs have."""
        return {slot for found in self._gangs.values() for slot in found.slots}

    def grant(self) -> None:
        """Gives slots to the gangs that wait, where there are enough."""
        in_service = self._slots()
        taken = self.taken
        for found in self._gangs.values():
            if found.phase != "waiting":
                continue
            slots = _choose(found.wish, {slot: busy for slot, busy in in_service.items() if slot not in taken})
            if slots is not None:
                found.slots = slots
                found.changes.notify()
            taken.update(slots or (slot for _, wanted, _ in found.wish.candidates for slot in wanted))


def _choose(wish: Wish, free: Mapping[str, bool]) -> tuple[str, ...] | None:
    """Returns the slots for *wish* out of the *free* ones, those without a task first; None where there are too few."""
    found: list[tuple[int, int, list[str]]] = []
    for position, (_, slots, count) in enumerate(wish.candidates):
        there = sorted((slot for slot in slots if slot in free), key=lambda slot: free[slot])[:count]
        if len(there) == count:
            ordered = sorted(there, key=slots.index)
            found.append((sum(free[slot] for slot in there), position, ordered))
    if len(found) < wish.nodes:
        return None
    selected = sorted(sorted(found)[: wish.nodes], key=lambda each: each[1])
    return tuple(slot for _, _, slots in selected for slot in slots)
