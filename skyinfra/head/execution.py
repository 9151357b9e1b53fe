"""Runs calls on the slots of the fleet for the head itself, as a client would from outside."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Collection
from dataclasses import replace
from typing import Any

from distributed import Scheduler
from distributed.core import Status
from distributed.security import Security

from skyinfra.engine import dask_client, dask_comms
from skyinfra.engine.executor import Executor
from skyinfra.engine.waiting import within
from skyinfra.errors import SkyinfraError, SlotFailed, TaskFailed, TaskInputsLost
from skyinfra.head import carried
from skyinfra.head.relay import Relay
from skyinfra.protocol import failures, questions
from skyinfra.protocol.calls import Ending, Header, Outcome
from skyinfra.protocol.readings import Figures
from skyinfra.worker import cancellation

_ANSWER_S = 10.0
_CLOSE_S = 5.0
# The runner of a node has the figures of its tasks in its memory.
_FIGURES_S = 2.0
# After a scheduler that did not answer.
_PAUSE_S = 0.5

Resources = dict[str, int]


class Execution:
    """Runs calls on the workers of *scheduler*, which is that of this process. *security*: of a client of the fleet.

    Its own client of Dask is made for the first call: most fleets have no jobs.
    """

    def __init__(self, scheduler: Scheduler, relay: Relay, security: Security) -> None:
        self._scheduler = scheduler
        self._security = security
        self._connecting = asyncio.Lock()
        self._closing = False
        self._executor = Executor(self, cancellation.stop)
        self.client: Any = None
        self.ask = relay.ask
        self.all_stopped = self._executor.all_stopped

    def slots(self) -> list[dict[str, float]]:
        """Returns the resources of each slot that takes tasks."""
        return [
            dict(worker.resources) for worker in self._scheduler.workers.values() if worker.status == Status.running
        ]

    def nodes(self, resources: Resources) -> int:
        """Returns how many nodes have slots with *resources*, in service or not."""
        workers = self._scheduler.workers.values()
        fit = (each for each in workers if all(each.resources.get(name, 0) >= n for name, n in resources.items()))
        return len({str(worker.name).rpartition("/")[0] for worker in fit})

    def running(self) -> dict[str, tuple[str, float]]:
        """Returns slot and seconds of the running tasks, by their keys, as the workers reported last."""
        return {
            key: (slot, seconds) for slot, tasks in tasks_on_slots(self._scheduler).items() for key, _, seconds in tasks
        }

    @property
    def ended(self) -> bool:
        """Whether the scheduler has ended: what it seems to have lost goes on, and the next one takes it over."""
        return bool(self._scheduler.status != Status.running)

    def in_service(self, slot: str) -> bool:
        """Returns whether the worker of *slot* is registered."""
        return slot in self._scheduler.aliases

    def sent_to(self, key: str) -> str | None:
        """Returns the slot that was given the task *key*, where it runs or is about to; None where none was."""
        task = self._scheduler.tasks.get(key)
        return None if task is None or task.processing_on is None else str(task.processing_on.name)

    def on_closed_slot(self, key: str) -> bool:
        """Returns whether the task *key* is on a slot that takes no others, which is none of `slots`."""
        task = self._scheduler.tasks.get(key)
        worker = None if task is None else task.processing_on
        return bool(worker is not None and worker.status != Status.running)

    def release(self, key: str) -> None:
        """Notes that the outcome of an attempt that was taken over is not wanted any more."""
        carried.release(self._scheduler, key)

    async def run(
        self, header: Header, call: bytes, resources: Resources, waited: float = 0.0
    ) -> tuple[Ending, str | None] | None:
        """Runs *call* on a slot; returns its end, and the slot's name. None: the scheduler lost it, or the worker that
        carried it did.

        waited: for how many seconds the call has waited.

        A call whose worker process dies starts again elsewhere. Being cancelled ends the call on its slot.
        """
        attempt = self._executor.attempt(header.name, header.key, header.dumps(), call, resources, waited=waited)
        del call  # it may be large
        try:
            given: dask_comms.Serialized | None = await attempt
        except Exception as error:  # noqa: BLE001 - errors of Dask about a call end its job
            error.__context__ = None
            failed = _failed(error.with_traceback(None))
            return replace(failed, slot_failed="") if isinstance(error, SlotFailed) else failed, None
        if given is None:
            return None
        try:
            # Whatever it claims to be: bytes are what they are.
            data = b"".join(given.frames)
            if not data and header.adopted:
                return None
            ending = Ending.loads(data)
        except (AttributeError, TypeError, ValueError) as error:
            ending = _failed(TaskFailed(f"what the slot of {header.name} gave is no outcome: {error}"))
        if ending.missing:  # the head has no others
            lost = TaskInputsLost(
                f"the files that {header.name} needs are not at the head any more",
                hint="Sync them and submit it again; give the head a larger disk (disk_gb) where that happens often.",
            )
            ending = _failed(lost)
        task = self._scheduler.tasks.get(header.key)
        holders = task.who_has if task is not None else None
        return ending, str(next(iter(holders)).name) if holders else None

    async def figures(self, slot: str, key: str) -> Figures | None:
        """Returns the figures of the task *key* on *slot*, where it runs or ran; None where nobody knows them."""
        try:
            answer = await self.ask(slot.rpartition("/")[0], questions.FIGURES, {"task": key}, _FIGURES_S)
            return None if answer is None else Figures.read(answer)
        except (SkyinfraError, OSError):  # the node has gone, or is of an older version
            return None

    def leave(self, keys: Collection[str]) -> None:
        """From now on, calls that are cancelled are not ended on their slots; those with *keys* go on there."""
        self._closing = True
        carried.hold(self._scheduler, keys)

    async def close(self) -> None:
        """Leaves the scheduler; calls that still run are forgotten."""
        client, self.client = self.client, None
        if client is not None:
            with contextlib.suppress(OSError):
                await within(self.all_stopped(), _CLOSE_S)
            await dask_client.end_client(client, _CLOSE_S)

    # What the executor needs of a fleet -----------------------------------------------------------------------------

    @property
    def alive(self) -> bool:
        """Whether calls can be ended on their slots."""
        return self.client is not None and self.client.status == "running" and not self._closing

    async def ready(self) -> None:
        """Waits until the scheduler is connected."""
        async with self._connecting:
            while self.client is None or self.client.status == "closed":
                try:
                    client = dask_comms.carrying_client(self._scheduler, self._security, timeout=_ANSWER_S)
                    self.client = await dask_client.connected(client)
                except OSError:
                    await asyncio.sleep(_PAUSE_S)

    def submit(self, key: str, header: bytes, call: bytes, resources: Resources, waited: float) -> Any:
        """Sends a call; its future is done when it has ended."""
        return dask_client.send_task(self.client, key, header, call, resources, waited)


def _failed(error: Exception) -> Ending:
    return Ending.of(Outcome(failure=failures.of(error, below=__file__)))


def tasks_on_slots(scheduler: Scheduler) -> dict[str, list[tuple[str, str, float]]]:
    """The tasks that run on each slot, by its name: key, name, and for how many seconds, as the worker reported last,
    which it does every second or so."""
    return {
        str(worker.name): [
            (str(task.key), str(task.key).rpartition("-")[0], float(seconds))
            for task, seconds in worker.executing.items()
            if task in worker.processing
        ]
        for worker in scheduler.workers.values()
    }
