"""Gangs: all ranks start or none, the first failure ends all, and they may start again.

What awaits runs in the event loop of a `LoopThread`.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import itertools
import pickle
import uuid
from collections.abc import Collection, Sequence
from dataclasses import replace
from typing import cast

from skyinfra.client import ranks
from skyinfra.client.ranks import Launch, Lines
from skyinfra.engine import deaths
from skyinfra.engine.deaths import Death
from skyinfra.engine.executor import Moves, may_pass
from skyinfra.engine.waiting import within
from skyinfra.errors import (
    InvalidField,
    NotSupported,
    SkyinfraError,
    SlotFailed,
    SlotLost,
    TaskAttemptsExceeded,
    counted,
)
from skyinfra.protocol import services
from skyinfra.protocol.calls import ATTEMPTS, FETCH, Outcome
from skyinfra.protocol.gang import GangState, Rank, RankEnd, Wish, Work
from skyinfra.protocol.instance import InstanceInfo
from skyinfra.protocol.rpc import Peer
from skyinfra.submission.fleet import Fleet
from skyinfra.submission.snapshot import Snapshot, Target
from skyinfra.tasks import outcomes
from skyinfra.tasks.pickling import Shipment
from skyinfra.tasks.task import Task
from skyinfra.worker.ranks import run as run_rank

# A gang that waits for slots looks that often whether the fleet is another one.
_POLL_S = 2.0
_WAIT_S = 20.0
_ANSWER_S = 10.0
# Ranks that end because another one failed have that long for their last lines.
_LAST_WORDS_S = 2.0
# They have that long to send the files that their client wants.
_FILES_S = 120.0
# The rank that failed has that long to say with what.
_FAILURE_S = 15.0
# Starts of a gang that one node may fail: there is nowhere else, since it is asked last.
_STARTS_OF_NODE = 3


class _ForgottenError(Exception):
    """The head does not know the gang any more: it, or the connection to it, was restarted."""


class _RankFailedError(Exception):
    """The *slot* of a rank could not run it for a reason of its own, which *error* says."""

    def __init__(self, slot: str, error: SlotFailed) -> None:
        super().__init__(slot)
        self.slot = slot
        self.error = error


class _Elsewhere:
    """Starts a gang again whose ranks were failed by their slots; that counts as none of its restarts."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._moves = Moves()
        self._error: SlotFailed | None = None

    @property
    def nodes(self) -> list[str]:
        """The nodes of the slots that failed."""
        return [slot.rpartition("/")[0] for slot in self._moves.slots]

    def note(self, failed: _RankFailedError, nodes: int) -> None:
        """Notes the slot that failed; so many *nodes* have slots for the gang. Raises `SlotFailed` where it is of no
        use to start again."""
        self._error = failed.error
        may_start = self._moves.may_go_on(failed.slot, nodes)
        if not may_start or self.nodes.count(self.nodes[-1]) >= _STARTS_OF_NODE:
            raise self._given_up(failed.error, self._moves.text) from failed.error

    def check(self, lacking: InvalidField | SlotLost) -> None:
        """Raises `SlotFailed` for a gang that lacks slots since some of them failed."""
        if self._error is not None:
            raise self._given_up(self._error, f"There is nowhere else: {lacking.message}.") from lacking

    def _given_up(self, error: SlotFailed, why: str) -> SlotFailed:
        return SlotFailed(f"{self._name} cannot start: {error.message}. {why}", hint=error.hint)


async def run(fleet: Fleet, launch: Launch) -> list[RankEnd]:
    """Runs a gang until all of its ranks have ended well; starts it again as often as *launch* says.

    Raises the exception of the first rank that failed, `GangFailed` where it raised none, `InvalidField`,
    `SlotLost`, `SlotFailed`, `FleetUnreachable`, and TimeoutError where it has not started in time.
    """
    failures = size = 0
    elsewhere = _Elsewhere(launch.work.name)
    for number in itertools.count():
        start = _Start(fleet, launch, number, size, elsewhere.nodes)
        error: BaseException
        try:
            first = await start.run()
            if first is None:
                return cast(list[RankEnd], start.ends)
            now = fleet.dispatcher.snapshot
            end = start.ends[first]
            printed = start.printed(first)
            error, again = ranks.explain(launch.work.name, first, end, start.slots[first], now, printed)
            raised = end is not None and end.outcome is not None
        except _ForgottenError:
            continue
        except _RankFailedError as failed:
            elsewhere.note(failed, len(fleet.dispatcher.snapshot.nodes(launch.target)))
            continue
        except InvalidField as lacking:
            elsewhere.check(lacking)
            raise
        except SlotLost as lost:
            elsewhere.check(lost)
            error, again, raised = lost, True, False
        finally:
            size = start.size
        if failures >= launch.restarts(raised=raised) or not again:
            raise error
        failures += 1
    raise AssertionError  # it counts for ever


async def run_task(fleet: Fleet, launch: Launch) -> Outcome:
    """Runs a task that takes several slots; it starts again where a process of it is lost."""
    attempts = lost = 0
    died: list[Death] = []
    elsewhere = _Elsewhere(launch.work.name)
    for number in itertools.count():
        start = _Start(fleet, launch, number, avoided=elsewhere.nodes)
        try:
            await start.run()
        except _ForgottenError:
            continue
        except _RankFailedError as failed:
            elsewhere.note(failed, len(fleet.dispatcher.snapshot.nodes(launch.target)))
            continue
        except (InvalidField, SlotLost) as lacking:
            elsewhere.check(lacking)
            raise
        end = start.ends[0]
        if end is None or end.outcome is None:
            lost += 1
            died += [Death(end.code)] if end is not None and end.code is not None else []
            if lost >= ATTEMPTS:
                cause = f": {deaths.causes(died)}" if died else ""
                hint = filter(None, [start.printed(0), deaths.remedy([each.code for each in died])])
                text = f"{launch.work.name} lost a process {lost} times{cause}"
                raise TaskAttemptsExceeded(text, hint="\n".join(hint) or None)
            continue
        attempts += 1
        outcome = cast(Outcome, pickle.loads(end.outcome))  # noqa: S301 - the fleet's own, over mutual TLS
        outcome = fleet.dispatcher.snapshot.advised(outcome)
        if attempts > launch.settings.retries or not may_pass(outcome):
            return outcome
    raise AssertionError  # it counts for ever


class _Start:
    """A start of a gang. size: the number of slots of the first start, 0 before it. ends: None for a lost rank.

    *avoided*: the nodes that it takes only where there are too few others.
    """

    def __init__(self, fleet: Fleet, launch: Launch, number: int, size: int = 0, avoided: Collection[str] = ()) -> None:
        self.size = size
        self._avoided = avoided
        self.slots: list[InstanceInfo] = []
        self.ends: list[RankEnd | None] = []
        self._keys: dict[int, str] = {}
        self._fleet = fleet
        self._launch = launch
        self._number = number
        self._connection = fleet.connection
        self._identity = uuid.uuid4().hex
        self._limit = asyncio.timeout(launch.start_within)
        self._last_words_s = last_words_s(launch)

    async def run(self) -> int | None:
        """Starts the ranks and waits for their end. Returns the rank that failed first, None where none has."""
        with contextlib.ExitStack() as lines:  # to the end: ranks that are asked to end may say something
            return await self._run(lines)

    def printed(self, rank: int) -> str | None:
        """Returns the last lines of a *rank* and where its output is; None where the client takes its lines."""
        end = self.ends[rank]
        if self._launch.watched:
            return None
        return deaths.printed(self._fleet.manifest.fleet, self._keys[rank], end.last if end is not None else ())

    async def _run(self, lines: contextlib.ExitStack) -> int | None:
        launch = self._launch
        tasks: list[asyncio.Task[RankEnd]] = []
        try:
            async with self._limit:
                await self._granted()
                # From the first start on: a gang that is to have all slots is not to be smaller where some are late.
                self.size = self.size or len(self.slots)
                launch.deliver(self.slots)
                topic = self._fleet.topic if launch.watched else ""
                places = ranks.ranks(launch, self._identity, self.slots, self._number, topic)
                for place in places if launch.watched else ():
                    deliver = functools.partial(_deliver, launch, place.rank)
                    lines.enter_context(self._fleet.listening(place.run_id, deliver))
                tasks += [asyncio.create_task(self._rank(place)) for place in places]
                working = [task for task, place in zip(tasks, places, strict=True) if not place.holds]
                first = await self._until_over(tasks, working)
                self.ends = [_end_of(task) for task in tasks]
                return first
        except TimeoutError:
            if not self._limit.expired():
                raise
            raise TimeoutError(await self._why_not()) from None
        finally:
            # It asks the ranks to end; those that do not listen to the head are stopped.
            await asyncio.shield(self._fleet.dispatcher.executor.detach(self._release()))
            if tasks:
                await asyncio.wait(tasks, timeout=self._last_words_s)
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _granted(self) -> None:
        """Waits until the gang has its slots, as many as it had before if they come in time."""
        clock = asyncio.get_running_loop().time
        lacking_since: float | None = None
        known: dict[str, InstanceInfo] = {}
        while True:
            now = await self._connection.again(lambda _: self._connection.look())
            wish = self._best_wish(now)
            if isinstance(wish, SkyinfraError) and await self._asks_for_nodes(now):
                await asyncio.sleep(_POLL_S / 4)
                continue
            if isinstance(wish, SkyinfraError) or wish.size < self.size:
                lacking_since = lacking_since or clock()
                if clock() - lacking_since <= self._connection.patience and self._may_come(now):
                    await asyncio.sleep(_POLL_S / 4)
                    continue
                if isinstance(wish, SkyinfraError):
                    raise wish
            else:
                lacking_since = None
            known.update({slot.slot: slot for slot in now.slots})
            state = await self._connection.again(functools.partial(self._ask, wish))
            if state["phase"] == "granted":
                self.slots = [known[name] for name in state["slots"]]
                return
            if state["phase"] == "unknown":
                await asyncio.sleep(0.1)
            elif not self.size:
                # Others have the slots that it could have; there may be more.
                await self._asks_for_nodes(now)

    async def _ask(self, wish: Wish, head: Peer) -> GangState:
        return await within(services.gang_ask(head, **vars(wish), wait_s=_POLL_S), _POLL_S + _ANSWER_S)

    async def _asks_for_nodes(self, now: Snapshot) -> bool:
        """Asks the head for the nodes of this gang, where their number follows the work; returns whether they may come.

        Raises `InvalidField` where there are never that many.
        """
        size, launch = now.state.size if now.state is not None else None, self._launch
        nodes, per_node = launch.nodes or 1, launch.per_node or 1
        coming = sum(launch.target.takes(slot) for slot in size.slots) if size is not None else 0
        if size is None or launch.target.slot or launch.target.node or per_node > coming:
            return False
        if nodes > size.most:
            most = f"{self._fleet.manifest.fleet} has {counted(size.most, 'node')} at most"
            hint = f"Ask for fewer, or declare a range with a larger most: nodes=sky.Range({size.least}, {nodes})."
            raise InvalidField(most, field="nodes", given=nodes, hint=hint)
        wanted = {name: float(amount) for name, amount in launch.target.resources.items()}
        ask = functools.partial(services.demand, asker=self._identity, nodes=nodes, resources=wanted, per_node=per_node)
        await self._connection.again(ask)
        self._connection.lacks.tell(now.state)
        return True

    def _may_come(self, now: Snapshot) -> bool:
        """Returns whether waiting may help: a gang that had its slots may get them again; a new one fails at once."""
        return self.size > 0 or ranks.may_come(now, self._fleet.manifest, self._launch)

    def _best_wish(self, now: Snapshot) -> Wish | InvalidField | SlotLost:
        """As `_wish`, without the slots of nodes that are avoided where the others are enough."""
        others = tuple(slot for slot in now.slots if slot.node not in self._avoided)
        if len(others) < len(now.slots):
            wish = self._wish(replace(now, slots=others))
            if isinstance(wish, Wish) and wish.size >= self.size:
                return wish
        return self._wish(now)

    def _wish(self, now: Snapshot) -> Wish | InvalidField | SlotLost:
        """Returns the request for the head, or the error that makes one impossible."""
        launch = self._launch
        if launch.framework is None:
            now = _without_partitions(now, launch)
        try:
            nodes, found = ranks.candidates(now, self._fleet.manifest, launch)
        except (InvalidField, SlotLost) as error:
            if launch.framework is None and isinstance(error, InvalidField):
                error.field = "slots"
            return error
        return Wish(self._identity, str(self._connection.client.id), nodes, found)

    async def _rank(self, place: Rank) -> RankEnd:
        launch = self._launch
        title = f"{launch.work.name}.{place.rank}" if launch.framework else launch.name or launch.work.name
        work = Work(launch.work.name) if place.holds else launch.work
        shipment = Shipment(
            Task(run_rank, (place, work)),
            topic=self._fleet.topic,
            echo=self._fleet.watcher.echoes,
            name=title,
            # Under the key of an earlier start, the head would return the outcome of that.
            key=None if place.rank or launch.key is None else f"{launch.key}.{self._number}",
            included=launch.included,
            secrets=self._fleet.secrets,
            uses=launch.secrets,
            at_head=self._fleet.trees,
        )
        self._keys[place.rank] = shipment.key
        slot = place.slots[place.rank]
        try:
            outcome = await self._fleet.dispatcher.execute(shipment, Target(slot=slot), windowed=False, moves=False)
            return cast(RankEnd, outcomes.result(outcome, title))
        except SlotFailed as failed:
            raise _RankFailedError(slot, failed) from failed
        except SlotLost as lost:
            state = self._fleet.dispatcher.snapshot.state
            if state is None or slot not in state.sick:
                raise
            raise _RankFailedError(slot, SlotFailed(f"slot {slot} is sick: {state.sick[slot]}")) from lost

    async def _until_over(
        self, tasks: Sequence[asyncio.Task[RankEnd]], working: Sequence[asyncio.Task[RankEnd]]
    ) -> int | None:
        """Waits until the working ranks have ended well (returns None), or the gang is over (the first failed rank)."""
        watching = asyncio.create_task(self._watch())
        try:
            pending = set(tasks)
            while pending.intersection(working) and not watching.done():
                await asyncio.wait({*pending, watching}, return_when=asyncio.FIRST_COMPLETED)
                for task in [task for task in pending if task.done()]:
                    task.result()
                    pending.remove(task)
            if not watching.done() and all(task.result().ok for task in working):
                return None
            first, lives = await watching
            await asyncio.wait(tasks, timeout=self._last_words_s)
            if lives:
                await asyncio.wait([tasks[first]], timeout=_FAILURE_S)
            return first
        finally:
            watching.cancel()

    async def _watch(self) -> tuple[int, bool]:
        """Waits until the gang is over. Returns the first failed rank, and whether its process still runs."""
        seen = "granted"
        while True:
            state = await self._connection.again(functools.partial(self._state, seen=seen, wait_s=_WAIT_S))
            if state["phase"] == "started":
                self._limit.reschedule(None)
                seen = "started"
            elif state["phase"] != "granted":
                if state["first"] is None:
                    raise _ForgottenError
                return state["first"], not state["died"]

    async def _why_not(self) -> str:
        text = f"{self._launch.work.name} has not started within {self._launch.start_within:g} s"
        with contextlib.suppress(OSError):
            state = await self._state(self._connection.head, "", 0)
            if state["phase"] == "granted":
                return f"{text}: other tasks run on {', '.join(state['missing'])}"
            if state["phase"] == "waiting":
                return f"{text}: other gangs have the slots"
        return text

    async def _release(self) -> None:
        # A head that is gone has no gangs.
        with contextlib.suppress(OSError):
            if self._connection.alive:
                await within(services.gang_release(self._connection.head, gang=self._identity), _ANSWER_S)

    async def _state(self, head: Peer, seen: str, wait_s: float) -> GangState:
        """Returns the state of the gang, as soon as its phase is another than *seen*. Raises OSError."""
        call = services.gang_state(head, gang=self._identity, seen=seen, wait_s=wait_s)
        return await within(call, wait_s + _ANSWER_S)


def last_words_s(launch: Launch) -> float:
    """For how many seconds ranks that end because another one failed, or that are to end, may send what they have."""
    return _FILES_S if launch.env.get(FETCH, "[]") != "[]" else _LAST_WORDS_S


def _without_partitions(now: Snapshot, launch: Launch) -> Snapshot:
    """Returns *now* without partitions: a process uses one of them. Raises `NotSupported` where nothing is left."""
    slots = tuple(slot for slot in now.slots if slot.kind != "partition")
    partition = next((slot for slot in now.slots if slot.kind == "partition" and launch.target.takes(slot)), None)
    if partition is not None and not any(map(launch.target.takes, slots)):
        raise NotSupported(
            f"a process uses one partition, and the slots are partitions ({partition.profile})",
            field="slots",
            given=launch.per_node,
            hint="pool.launch(function) runs it once on each slot.",
        )
    return replace(now, slots=slots)


def _deliver(launch: Launch, rank: int, lines: Lines) -> None:
    launch.deliver((rank, lines))


def _end_of(task: asyncio.Task[RankEnd]) -> RankEnd | None:
    if not task.done() or task.cancelled() or task.exception() is not None:
        return None
    return task.result()
