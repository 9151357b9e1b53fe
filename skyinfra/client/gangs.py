"""Gangs: all ranks start or none, the first failure ends all, and they may start again.

Everything in `Gangs` runs in the event loop of a `LoopThread`.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import itertools
import pickle
import uuid
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import cast

from skyinfra.client import ranks
from skyinfra.client.dispatch import Dispatcher
from skyinfra.client.ranks import Size
from skyinfra.client.snapshot import ANYWHERE, Snapshot, Target
from skyinfra.engine.executor import may_pass
from skyinfra.engine.waiting import within
from skyinfra.errors import InvalidField, NotSupported, SkyinfraError, SlotLost, TaskAttemptsExceeded
from skyinfra.protocol import services
from skyinfra.protocol.calls import Outcome
from skyinfra.protocol.gang import Framework, GangState, Rank, RankEnd, Wish, Work
from skyinfra.protocol.instance import InstanceInfo
from skyinfra.tasks import pickling
from skyinfra.tasks.pickling import Shipment
from skyinfra.tasks.task import Included, Task
from skyinfra.worker.attempts import ATTEMPTS
from skyinfra.worker.ranks import run as run_rank

# A gang that waits for slots looks that often whether the fleet is another one.
_POLL_S = 2.0
_WAIT_S = 20.0
_ANSWER_S = 10.0
# Ranks that end because another one failed have that long for their last lines.
_LAST_WORDS_S = 2.0
# The rank that failed has that long to say with what.
_FAILURE_S = 15.0

Lines = list[list[str]]


@dataclass(frozen=True)
class Launch:
    """A gang to start.

    framework: None for one task that takes several slots. start_within: seconds until all ranks must have their slots.
    timeout: seconds for which each rank may run. topic: of the lines of the ranks; empty: the lines stay in the output
    of the tasks, which the client prints with *echo*. on_slots: called with the slots of the gang. included: the synced
    files of the client.
    """

    work: Work
    framework: Framework | None
    size: Size
    target: Target = ANYWHERE
    env: dict[str, str] | None = None
    max_restarts: int = 0
    start_within: float | None = None
    timeout: float | None = None
    topic: str = ""
    echo: bool = False
    key: str | None = None
    listen: Callable[[str, Callable[[Lines], object] | None], None] | None = None
    on_lines: Callable[[int, Lines], object] | None = None
    on_slots: Callable[[list[InstanceInfo]], object] | None = None
    included: Included | None = None


@dataclass(frozen=True)
class _Ended:
    """The end of one start of a gang. first: the rank that failed first. ends: None for a rank that was lost."""

    first: int | None
    ends: list[RankEnd | None]
    slots: list[InstanceInfo]


@dataclass
class _Before:
    """The earlier starts of a gang, and the number of slots of the first one (0: there was none)."""

    starts: int = 0
    size: int = 0


class _ForgottenError(Exception):
    """The head does not know the gang any more: it, or the connection to it, was restarted."""


@dataclass(frozen=True)
class _RankTask(Task[RankEnd]):
    title: str = ""

    @property
    def name(self) -> str:
        return self.title


class Gangs:
    """Starts gangs on the fleet of *dispatcher*. *topic*: of the events that this client receives."""

    def __init__(self, dispatcher: Dispatcher, topic: str) -> None:
        self._dispatcher = dispatcher
        self._topic = topic
        self._connection = dispatcher.connection

    async def run(self, launch: Launch) -> list[RankEnd]:
        """Runs a gang until all of its ranks have ended well; starts it again up to ``max_restarts`` times.

        Raises the exception of the first rank that failed, `GangFailed` where it raised none, `InvalidField`,
        `SlotLost`, `FleetUnreachable`, and TimeoutError where it has not started in time.
        """
        before = _Before()
        failures = 0
        while True:
            error: BaseException
            try:
                ended = await self._once(launch, before)
                if ended.first is None:
                    return cast(list[RankEnd], ended.ends)
                error, again = ranks.explain(
                    launch.work.name, ended.first, ended.ends[ended.first], ended.slots[ended.first]
                )
            except _ForgottenError:
                before.starts += 1
                continue
            except SlotLost as lost:
                error, again = lost, True
            if failures >= launch.max_restarts or not again:
                raise error
            failures += 1
            before.starts += 1

    async def several(self, launch: Launch, retries: int) -> Outcome:
        """Runs a task that takes several slots; it starts again where a process of it is lost."""
        attempts = deaths = 0
        for start in itertools.count():
            try:
                ended = await self._once(replace(launch, key=f"{launch.key}.{start}"), _Before(start))
            except _ForgottenError:
                continue
            end = ended.ends[0]
            if end is None or end.outcome is None:
                deaths += 1
                if deaths >= ATTEMPTS:
                    raise TaskAttemptsExceeded(
                        f"{launch.work.name} lost a process {deaths} times and is not tried again",
                        hint="Usual causes: the machine ran out of memory, a crash in native code, or os._exit().",
                    )
                continue
            attempts += 1
            outcome = cast(Outcome, pickle.loads(end.outcome))  # noqa: S301 - the fleet's own, over mutual TLS
            if attempts > retries or not may_pass(outcome):
                return outcome
        raise AssertionError  # it counts for ever

    # One start ------------------------------------------------------------------------------------------------------

    async def _once(self, launch: Launch, before: _Before) -> _Ended:
        identity = uuid.uuid4().hex
        limit = asyncio.timeout(launch.start_within)
        tasks: list[asyncio.Task[RankEnd]] = []
        try:
            async with limit:
                wish, slots = await self._granted(identity, launch, before.size)
                # From the first start on: a gang that is to have all slots is not to be smaller where some are late.
                before.size = before.size or len(slots)
                if launch.on_slots is not None:
                    launch.on_slots(slots)
                places = _places(launch, wish, slots, before.starts)
                with _listening(launch, places):
                    tasks += [asyncio.create_task(self._rank(launch, place)) for place in places]
                    working = [task for task, place in zip(tasks, places, strict=True) if not place.holds]
                    first = await self._until_over(identity, tasks, working, limit)
                return _Ended(first, [_end_of(task) for task in tasks], slots)
        except TimeoutError:
            if not limit.expired():
                raise
            raise TimeoutError(await self._why_not(identity, launch)) from None
        finally:
            # It asks the ranks to end; those that do not listen to the head are stopped.
            await asyncio.shield(self._dispatcher.executor.detach(self._release(identity)))
            if tasks:
                await asyncio.wait(tasks, timeout=_LAST_WORDS_S)
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _granted(self, identity: str, launch: Launch, size: int) -> tuple[Wish, list[InstanceInfo]]:
        """Waits until the gang has its slots, *size* of them if they come in time."""
        clock = asyncio.get_running_loop().time
        lacking_since: float | None = None
        known: dict[str, InstanceInfo] = {}
        while True:
            await self._connection.ready()
            with contextlib.suppress(OSError):
                now = await self._connection.look()
                wish = self._wish(identity, launch, now)
                if isinstance(wish, SkyinfraError) or wish.size < size:
                    lacking_since = lacking_since or clock()
                    if clock() - lacking_since <= self._connection.patience and self._may_come(launch, now, size):
                        await asyncio.sleep(_POLL_S / 4)
                        continue
                    if isinstance(wish, SkyinfraError):
                        raise wish
                else:
                    lacking_since = None
                known.update({slot.slot: slot for slot in now.slots})
                call = services.gang_ask(
                    self._connection.client.scheduler,
                    gang=identity,
                    client=wish.client,
                    nodes=wish.nodes,
                    candidates=wish.candidates,
                    wait_s=_POLL_S,
                )
                state = await within(call, _POLL_S + _ANSWER_S)
                if state["phase"] == "granted":
                    return wish, [known[name] for name in state["slots"]]
                if state["phase"] != "unknown":
                    continue
            await asyncio.sleep(0.1)

    def _may_come(self, launch: Launch, now: Snapshot, size: int) -> bool:
        """Whether waiting may help: a gang that had its slots may get them again; a new one fails at once."""
        return size > 0 or ranks.may_come(now, self._connection.manifest, launch.target, launch.size)

    def _wish(self, identity: str, launch: Launch, now: Snapshot) -> Wish | InvalidField | SlotLost:
        """Returns the request for the head, or the error that makes one impossible."""
        if launch.framework is None:
            now = _without_partitions(now, launch)
        try:
            nodes, found = ranks.candidates(now, launch.target, launch.size)
        except (InvalidField, SlotLost) as error:
            if launch.framework is None and isinstance(error, InvalidField):
                error.field = "slots"
            return error
        return Wish(identity, str(self._connection.client.id), nodes, found)

    async def _rank(self, launch: Launch, place: Rank) -> RankEnd:
        title = f"{launch.work.name}.{place.rank}" if launch.framework else launch.work.name
        work = Work(launch.work.name) if place.holds else launch.work
        task = _RankTask(run_rank, (place, work), title=title)
        key = None if place.rank else launch.key
        shipment = Shipment(task, topic=self._topic, echo=launch.echo, key=key, included=launch.included)
        outcome = await self._dispatcher.execute(shipment, Target(slot=place.slots[place.rank]), windowed=False)
        return cast(RankEnd, pickling.result(outcome, title))

    async def _until_over(
        self,
        identity: str,
        tasks: Sequence[asyncio.Task[RankEnd]],
        working: Sequence[asyncio.Task[RankEnd]],
        limit: asyncio.Timeout,
    ) -> int | None:
        """Waits until the working ranks have ended well (returns None), or the gang is over (the first failed rank)."""
        watching = asyncio.create_task(self._watch(identity, limit))
        try:
            pending = set(working)
            while pending and not watching.done():
                await asyncio.wait({*pending, watching}, return_when=asyncio.FIRST_COMPLETED)
                for task in [task for task in pending if task.done()]:
                    task.result()
                    pending.remove(task)
            if not watching.done() and all(task.result().ok for task in working):
                return None
            first, lives = await watching
            await asyncio.wait(tasks, timeout=_LAST_WORDS_S)
            if lives:
                await asyncio.wait([tasks[first]], timeout=_FAILURE_S)
            return first
        finally:
            watching.cancel()

    async def _watch(self, identity: str, limit: asyncio.Timeout) -> tuple[int, bool]:
        """Waits until the gang is over. Returns the first failed rank, and whether its process still runs."""
        seen = "granted"
        while True:
            try:
                state = await self._state(identity, seen, _WAIT_S)
            except OSError:
                await self._connection.ready()
                continue
            if state["phase"] == "started":
                limit.reschedule(None)
                seen = "started"
            elif state["phase"] != "granted":
                if state["first"] is None:
                    raise _ForgottenError
                return state["first"], not state["died"]

    async def _why_not(self, identity: str, launch: Launch) -> str:
        text = f"{launch.work.name} has not started within {launch.start_within:g} s"
        with contextlib.suppress(OSError):
            state = await self._state(identity, "", 0)
            if state["phase"] == "granted":
                return f"{text}: other tasks run on {', '.join(state['missing'])}"
            if state["phase"] == "waiting":
                return f"{text}: other gangs have the slots"
        return text

    async def _release(self, identity: str) -> None:
        # A head that is gone has no gangs.
        with contextlib.suppress(OSError):
            if self._connection.alive:
                await within(services.gang_release(self._connection.client.scheduler, gang=identity), _ANSWER_S)

    async def _state(self, identity: str, seen: str, wait_s: float) -> GangState:
        """The state of the gang, as soon as its phase is another than *seen*. Raises OSError."""
        call = services.gang_state(self._connection.client.scheduler, gang=identity, seen=seen, wait_s=wait_s)
        return await within(call, wait_s + _ANSWER_S)


def _places(launch: Launch, wish: Wish, slots: list[InstanceInfo], start: int) -> list[Rank]:
    return [
        replace(
            place,
            restart=start,
            max_restarts=launch.max_restarts,
            env=launch.env or {},
            topic=launch.topic,
            run_id=f"{wish.gang}.{place.rank}",
            timeout=launch.timeout,
        )
        for place in ranks.ranks(wish, slots, launch.framework)
    ]


def _without_partitions(now: Snapshot, launch: Launch) -> Snapshot:
    """Returns *now* without partitions: a process uses one of them. Raises `NotSupported` where nothing is left."""
    slots = tuple(slot for slot in now.slots if slot.kind != "partition")
    partition = next((slot for slot in now.slots if slot.kind == "partition" and launch.target.takes(slot)), None)
    if partition is not None and not any(map(launch.target.takes, slots)):
        raise NotSupported(
            f"a process uses one partition, and the slots are partitions ({partition.profile})",
            field="slots",
            given=launch.size.per_node,
            hint="pool.launch(function) runs it once on each slot.",
        )
    return replace(now, slots=slots)


@contextlib.contextmanager
def _listening(launch: Launch, places: Sequence[Rank]) -> Iterator[None]:
    """Forwards the lines of the ranks to `Launch.on_lines`."""
    if launch.listen is None or launch.on_lines is None:
        yield
        return
    for place in places:
        launch.listen(place.run_id, functools.partial(launch.on_lines, place.rank))
    try:
        yield
    finally:
        for place in places:
            launch.listen(place.run_id, None)


def _end_of(task: asyncio.Task[RankEnd]) -> RankEnd | None:
    if not task.done() or task.cancelled() or task.exception() is not None:
        return None
    return task.result()
