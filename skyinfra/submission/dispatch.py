"""Sends tasks to a fleet, and tells those who wait for one when its slots or the head are gone.

Everything here runs in the event loop of a `LoopThread`.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import os
import pickle
import time
from collections.abc import AsyncIterator, Collection, Iterator
from dataclasses import dataclass, field, replace
from typing import Any

from skyinfra.engine.executor import Executor, ItemsLost, Moves, may_pass, overdue
from skyinfra.errors import NotInTask, NotSupported, SlotFailed, SlotLost, SlotsHeld, TaskInputsLost, counted
from skyinfra.protocol import failures, services
from skyinfra.protocol.calls import Item, Outcome
from skyinfra.protocol.gang import HELD
from skyinfra.protocol.instance import instance_info
from skyinfra.submission.connection import Connection
from skyinfra.submission.items import Arrivals
from skyinfra.submission.snapshot import ANYWHERE, Snapshot, Target
from skyinfra.submission.watching import Watcher
from skyinfra.sync import sync
from skyinfra.tasks.pickling import Shipment
from skyinfra.worker import cancellation

# How often the head is asked which slots there are, while somebody waits for a task; at most half of the patience.
_LOOK_S = 2.0
# And while nobody does, where nodes may end themselves.
_IDLE_LOOK_S = 30.0
# After a connection that failed; Dask needs time to notice that.
_PAUSE_S = 0.1
# A task that is cancelled is over within that long, and its last lines are here.
_LAST_WORDS_S = 10.0
# For that long all tasks that others may wait for are looked at, before one is said to wait for ever.
_STUCK_S = 3.0
# After that long without anybody who takes its items, a generator is said to keep others waiting.
_STALLED_S = 30.0
# How often a task is sent again because the head had no room to keep what it needs.
_LOSSES = 3


@dataclass
class Waiting:
    """A coroutine that waits for a task.

    key: of the present attempt; empty before the first. arrivals: of the items of a generator. failure: why the waiting
    was ended.
    """

    name: str
    target: Target
    waiter: asyncio.Task[Any]
    timeout: float | None = None
    key: str = ""
    arrivals: Arrivals | None = None
    missing_since: float | None = None
    failure: Exception | None = None

    def take(self, content: Any) -> Outcome | None:
        """Takes an event of the present attempt: its pickled outcome, or an item. Raises `ItemsLost`."""
        if not isinstance(content, Item):
            outcome: Outcome = pickle.loads(content)  # noqa: S301 - the fleet's own, over mutual TLS
            return outcome
        if self.arrivals is not None and not self.arrivals.add(self.key, content):
            raise ItemsLost
        return None

    def has_all(self, outcome: Outcome) -> bool:
        """Returns whether all items have come of which *outcome* is the end."""
        return outcome.items is None or self.arrivals is None or self.arrivals.came == outcome.items


@dataclass
class Window:
    """Limits the tasks at the fleet to its slots: each one on a worker that dies is blamed for its death."""

    limit: int
    _inside: int = 0
    _changed: asyncio.Condition = field(default_factory=asyncio.Condition)

    @contextlib.asynccontextmanager
    async def place(self) -> AsyncIterator[None]:
        """Waits for a place and holds it."""
        async with self._changed:
            await self._changed.wait_for(lambda: self._inside < self.limit)
            self._inside += 1
        try:
            yield
        finally:
            async with self._changed:
                self._inside -= 1
                self._changed.notify()

    async def resize(self, limit: int) -> None:
        """Sets the limit, to 1 at least."""
        async with self._changed:
            self.limit = max(1, limit)
            self._changed.notify_all()


class Dispatcher:
    """Executes shipments on a fleet, and ends the waiting for those whose target is gone."""

    def __init__(self, connection: Connection, watcher: Watcher, trees: set[str]) -> None:
        """*trees*: gets the names of those that were sent to the head."""
        self._trees = trees
        self.connection = connection
        self._watcher = watcher
        self._windows: dict[tuple[Target, int], Window] = {}
        self._snapshot = Snapshot(())
        self._waiting: dict[str, Waiting] = {}
        self.executor = Executor(connection, cancellation.stop, connection.manifest.fleet)
        self._background: asyncio.Task[None] | None = None
        self._answered = self._looked = time.monotonic()
        # The slots that the task holds in which this process is, where they are of this fleet.
        self._held: tuple[str, ...] = ()
        # Since when none of the tasks that it waits for can run.
        self._stuck: float | None = None

    async def start(self) -> None:
        """Starts watching the fleet for the tasks that will come."""
        with contextlib.suppress(OSError):  # each task that waits reports it
            await self.saw(await self.connection.look())
        self._held = _held_slots(self._snapshot)
        self._background = asyncio.create_task(self._watch())

    async def close(self) -> None:
        """Stops every task that somebody still waits for, also where it runs."""
        tasks = [waiting.waiter for waiting in self._waiting.values()]
        if self._background is not None:
            tasks.append(self._background)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await self.executor.all_stopped()

    @contextlib.contextmanager
    def waiting_for(
        self, key: str, name: str, target: Target, timeout: float | None = None, arrivals: Arrivals | None = None
    ) -> Iterator[Waiting]:
        """Watches the target of a task while the present coroutine waits for it. Raises `Waiting.failure`."""
        waiter = asyncio.current_task()
        assert waiter is not None  # noqa: S101 - a coroutine runs in a task
        waiting = self._waiting[key] = Waiting(name, target, waiter, timeout, arrivals=arrivals)
        try:
            yield waiting
        except asyncio.CancelledError:
            if waiting.failure is not None:
                raise waiting.failure from None
            raise
        finally:
            del self._waiting[key]
            self._stuck = None

    async def execute(
        self,
        shipment: Shipment,
        target: Target,
        *,
        windowed: bool,
        arrivals: Arrivals | None = None,
        moves: bool = True,
    ) -> Outcome:
        """Runs one task. *arrivals*: gets the items of a generator. Cancelling stops the task.

        Where a slot fails it and it *moves*, it is sent again, which counts as no attempt. So it is, once and to a
        fresh process, where its device had no room and tasks before it held some. Raises `SlotLost`, `SlotsHeld`,
        `FleetUnreachable`, `TaskAttemptsExceeded`.
        """
        with self.waiting_for(shipment.key, shipment.name, target, shipment.settings.timeout, arrivals) as waiting:
            if not shipment.brought:
                await self.bring(shipment)
            async with self.place(target, windowed=windowed):
                numbers, failed = itertools.count(), Moves()
                left = shipment.settings.retries
                while True:
                    outcome = await self._one_attempt(shipment, numbers, waiting)
                    if (slot := outcome.slot_failed) is not None:
                        if not moves:
                            return outcome
                        if not failed.may_go_on(slot, len(self._snapshot.nodes(target))):
                            return _given_up(outcome, failed)
                    elif outcome.crowded and not shipment.fresh:
                        shipment.fresh = True
                    elif left <= 0 or not may_pass(outcome):
                        return outcome
                    else:
                        left -= 1

    def place(self, target: Target, *, windowed: bool, each: int = 1) -> contextlib.AbstractAsyncContextManager[None]:
        """Holds a place in the window of *target*, see `window`; does nothing for a task that is not *windowed*."""
        return self.window(target, each).place() if windowed else contextlib.nullcontext()

    @contextlib.contextmanager
    def shown(self, keys: Collection[str]) -> Iterator[None]:
        """While it lasts, shows what the tasks *keys* say in the context of the present coroutine.

        That is the context of the thread that started it: in a notebook, the cell that submitted the tasks.
        """
        context = self._watcher.begins(keys)
        wait = 0.0
        try:
            yield
        except asyncio.CancelledError:
            wait = _LAST_WORDS_S
            raise
        finally:
            for key in keys:
                if wait:
                    asyncio.get_running_loop().call_later(wait, self._watcher.ended, key, context)
                else:
                    self._watcher.ended(key, context)

    async def _one_attempt(self, shipment: Shipment, numbers: Iterator[int], waiting: Waiting) -> Outcome:
        """Sends the task, again where the head restarts, or loses the task's inputs or result."""
        losses = 0
        number = next(numbers)
        while True:
            waiting.key, header = shipment.attempt(number)
            waited = time.monotonic() - shipment.came if number == 0 else 0.0
            with self.shown([waiting.key]):
                try:
                    outcome = await self.executor.attempt(
                        shipment.name,
                        waiting.key,
                        header,
                        shipment.call,
                        waiting.target.resources,
                        waiting.take,
                        waited=waited,
                    )
                except ItemsLost:
                    number = next(numbers)
                    continue
                except SlotFailed as error:
                    return Outcome(failure=failures.of(error, below=__file__), slot_failed="")
            outcome = await self.fetched(outcome)
            if outcome is None:
                continue
            if not outcome.missing and waiting.has_all(outcome):
                return outcome
            losses += bool(outcome.missing)
            if losses > _LOSSES:
                raise TaskInputsLost(
                    f"what {shipment.name} needs, or gives, was lost at the head {losses} times",
                    hint="What is in flight at once is more than the head can keep: send less, or give it a larger "
                    "disk.",
                )
            # Under its old key, the head would return the old outcome: that the task could not run.
            number = next(numbers)
            await self.bring(shipment, files=True)

    async def bring(self, shipment: Shipment, *, files: bool = False) -> None:
        """Makes sure that a large call is at the head, and the *files* that were synced.

        Raises `FleetUnreachable`, `TaskInputsLost`, `TaskTooLarge`, `StateDirectoryError`.
        """
        files = files or (shipment.tree is not None and shipment.tree not in self._trees)
        await self.connection.again(lambda head: sync.bring(head, shipment, files=files))
        shipment.brought = True
        if shipment.tree is not None:
            self._trees.add(shipment.tree)

    @property
    def snapshot(self) -> Snapshot:
        """The fleet as it was seen last."""
        return self._snapshot

    async def fetched(self, outcome: Outcome | None) -> Outcome | None:
        """Returns *outcome* with its result, where that stayed at the head; None where the head does not answer."""
        try:
            return outcome and self._snapshot.advised(await sync.fetched(self.connection.head, outcome))
        except OSError:
            await asyncio.sleep(_PAUSE_S)
            return None

    async def _watch(self) -> None:
        """Ends the waiting for a slot or a head that is gone, and for tasks that are over their time."""
        while True:
            await asyncio.sleep(min(_LOOK_S, self.connection.patience / 2))
            if not self._waiting and not self._may_end():
                self._answered = time.monotonic()
                continue
            try:
                now = await self.connection.look() if self.connection.alive else None
            except OSError:
                now = None
            if now is None:
                self._look_for_head()
            else:
                self._answered = time.monotonic()
                await self.saw(now)
                self._look_for_slots(now)
                await self._look_for_overtime()
                await self._look_for_nodes(now)
                self._look_for_stalled()
                if self._held:
                    await self._look_inside(now)

    def _may_end(self) -> bool:
        """Returns whether it is time to look for nodes that end themselves soon, although nobody waits for a task."""
        state = self._snapshot.state
        return state is not None and state.ends and time.monotonic() - self._looked > _IDLE_LOOK_S

    @property
    def declared_secrets(self) -> dict[str, str]:
        """The names of the secrets that the image declares, by their variables."""
        state = self._snapshot.state
        return state.secrets if state is not None else {}

    async def saw(self, now: Snapshot) -> None:
        """Sets the windows to the number of slots *now*."""
        self._snapshot, self._looked = now, time.monotonic()
        if now.state is not None:
            self._watcher.warn_of_end(self.connection.manifest.fleet, now.state.stops)
        for (target, each), window in self._windows.items():
            await window.resize(each * self._places(target))

    def window(self, target: Target, each: int = 1) -> Window:
        """Returns the window of the tasks for *target*, of which *each* slot has that many."""
        if (target, each) not in self._windows:
            self._windows[target, each] = Window(max(1, each * self._places(target)))
        return self._windows[target, each]

    def _places(self, target: Target) -> int:
        there = sum(target.takes(slot) for slot in self._snapshot.slots)
        # Layouts follow what waits at the head, not what waits here.
        return max(there, self._snapshot.possible(target))

    def _look_for_head(self) -> None:
        if time.monotonic() - self._answered > self.connection.patience:
            for waiting in self._waiting.values():
                self._wake(waiting, self.connection.gone())

    def _look_for_slots(self, now: Snapshot) -> None:
        clock = time.monotonic()
        for waiting in self._waiting.values():
            prospect = now.prospect(waiting.target)
            if prospect == "gone" or now.unknown(waiting.target, self.connection.manifest):
                self._wake(waiting, self._changed(waiting, now))
            elif prospect != "missing":
                waiting.missing_since = None
            elif waiting.missing_since is None:
                waiting.missing_since = clock
            elif clock - waiting.missing_since > self.connection.patience:
                self._wake(waiting, self._lost(waiting, now))

    async def _look_for_overtime(self) -> None:
        limited = {each.key: each for each in self._waiting.values() if each.timeout}
        if not limited:
            return
        with contextlib.suppress(OSError):
            for key, name, seconds in itertools.chain(*(await self.connection.running()).values()):
                waiting = limited.get(key)
                late = overdue(name, waiting.timeout, seconds) if waiting is not None else None
                if waiting is not None and late is not None:
                    self._wake(waiting, late)

    async def _look_for_nodes(self, now: Snapshot) -> None:
        """Says why nodes are missing where their number follows the work, and no task runs of those that wait here."""
        if now.state is None or now.state.size is None or not now.state.size.lack or not self._waiting:
            return
        sent = tuple(each.key or own for own, each in self._waiting.items())
        with contextlib.suppress(OSError):
            running = itertools.chain(*(await self.connection.running()).values())
            if not any(key.startswith(sent) for key, _, _ in running):
                self.connection.lacks.tell(now.state)

    def _look_for_stalled(self) -> None:
        """Ends the waiting for slots which generators hold whose items nobody takes."""
        running = [each for each in self._waiting.values() if each.key]
        if running and all(each.arrivals and each.arrivals.stalled_s > _STALLED_S for each in running):
            holders = ", ".join(sorted({each.name for each in running}))
            for each in self._waiting.values():
                if not each.key:
                    error = SlotsHeld(
                        f"{each.name} cannot start: generators hold all slots that this client has, and nobody has "
                        f"taken an item of theirs for {_STALLED_S:g} s: {holders}",
                        hint="Take their items, or close() them; a task that returns a list holds no slot afterwards.",
                    )
                    self._wake(each, error)

    def waits_inside(self, key: str, name: str) -> contextlib.AbstractContextManager[object]:
        """Watches the job *key* as `waiting_for` does, where it is a task of this fleet that waits for it."""
        return self.waiting_for(key, name, ANYWHERE) if self._held else contextlib.nullcontext()

    async def _look_inside(self, now: Snapshot) -> None:
        """Ends the waiting of a task for tasks that can never start: all their slots are held by tasks that wait so."""
        waiting = {each.key or key: each for key, each in self._waiting.items()}
        with contextlib.suppress(OSError, NotSupported):  # a head of an earlier version
            running = itertools.chain(*(await self.connection.running()).values())
            if any(key.startswith(tuple(waiting)) for key, _, _ in running):
                self._stuck = None
                return
            held = set(await services.wait_inside(self.connection.head, slots=list(self._held)))
            stuck = [each for each in waiting.values() if _slots_of(each.target, now) <= held]
            if len(stuck) < len(waiting):
                self._stuck = None
                return
            self._stuck = self._stuck or time.monotonic()
            if time.monotonic() - self._stuck > _STUCK_S:
                for each in stuck:
                    self._wake(each, self._inside(each, held))

    def _inside(self, waiting: Waiting, held: Collection[str]) -> SlotsHeld:
        fleet = self.connection.manifest.fleet
        return SlotsHeld(
            f"{waiting.name} can never start: {counted(len(held), 'slot')} of {fleet} ({', '.join(sorted(held))}), all "
            "that may run it, are held by tasks that wait for other tasks",
            hint="Call the function in the task itself, submit it from the client, or let fewer tasks wait than there "
            "are slots.",
        )

    def _lost(self, waiting: Waiting, now: Snapshot) -> SlotLost:
        what = f"every slot of {self.connection.manifest.fleet}" if waiting.target == ANYWHERE else str(waiting.target)
        hint = "pool.slots() lists the slots that are there; pool.broadcast(task, slots=...) uses some of them."
        return SlotLost(
            f"{what}, which {waiting.name} waits for, is gone for more than {self.connection.patience:g} s",
            hint="\n".join([*now.failures(waiting.target), hint]),
        )

    def _changed(self, waiting: Waiting, now: Snapshot) -> SlotLost:
        left = now.left(waiting.target)
        if left is not None:
            return SlotLost(
                f"{waiting.target}, which {waiting.name} waits for, left {self.connection.manifest.fleet}: {left}",
                hint="Send the task to any slot (`task >> pool`): it moves to another node then.",
            )
        fleet = self.connection.manifest.fleet
        if waiting.target.slot is None:
            what = f"{fleet} has no slot{waiting.target.which}, which {waiting.name} waits for"
        else:
            what = f"{waiting.target}, which {waiting.name} waits for, is not in the layout of {fleet}"
        return SlotLost(what, hint=now.instead(waiting.target, self.connection.manifest))

    def _wake(self, waiting: Waiting, failure: Exception) -> None:
        if waiting.failure is None:
            waiting.failure = failure
            waiting.waiter.cancel()


def _given_up(outcome: Outcome, moves: Moves) -> Outcome:
    """Returns *outcome* of a task that so many slots failed, with a word about them."""
    failure = outcome.failure
    return replace(outcome, failure=replace(failure, advice=moves.text)) if failure is not None else outcome


def _slots_of(target: Target, now: Snapshot) -> set[str]:
    """Returns the slots that may take *target*; never empty."""
    takers = {slot.slot for slot in (*now.slots, *now.draining) if target.takes(slot)}
    return takers if takers and not now.possible(target) else {""}


def _held_slots(now: Snapshot) -> tuple[str, ...]:
    """Returns the slots that the task of this process holds; none outside of a task, and in one of another fleet."""
    try:
        own = instance_info()
    except NotInTask:
        return ()
    here = any(own == slot for slot in (*now.slots, *now.draining))
    return tuple(os.environ.get(HELD, own.slot).split(",")) if here else ()
