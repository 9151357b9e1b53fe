"""Runs calls on the slots of the fleet for the head itself, as a client would from outside."""

from __future__ import annotations

import asyncio
import contextlib
from typing import TYPE_CHECKING, Any

import distributed
from distributed.client import FutureCancelledError
from distributed.core import Status
from distributed.security import Security

from skyinfra.engine.waiting import within
from skyinfra.errors import SkyinfraError, TaskAttemptsExceeded, TaskInputsLost
from skyinfra.head.relay import Relay
from skyinfra.protocol import failures, questions
from skyinfra.protocol.calls import Header, Outcome
from skyinfra.worker import cancellation, execute

if TYPE_CHECKING:
    from skyinfra.head.scheduler import FleetScheduler

# A worker answers in milliseconds, unless native code of its task holds the interpreter.
_LISTENS_S = 0.5
_ANSWER_S = 10.0
_CLOSE_S = 5.0
# After a scheduler that did not answer, or forgot a task.
_PAUSE_S = 0.5

Resources = dict[str, int]


class Execution:
    """Ships calls to the workers of *scheduler*, which is that of this process. *security*: of a client of the fleet.

    Its own client of Dask is made for the first call: most fleets have no jobs.
    """

    def __init__(self, scheduler: FleetScheduler, relay: Relay, security: Security) -> None:
        self._scheduler = scheduler
        self._relay = relay
        self._security = security
        self._client: Any = None
        self._futures: dict[str, Any] = {}
        self._connecting = asyncio.Lock()

    def slots(self) -> list[dict[str, float]]:
        """What each slot that takes tasks has."""
        return [
            dict(worker.resources) for worker in self._scheduler.workers.values() if worker.status == Status.running
        ]

    def running(self) -> dict[str, tuple[str, float]]:
        """Slot and seconds of the tasks that run, by their keys, as the workers reported last."""
        return {
            key: (slot, seconds)
            for slot, tasks in self._scheduler.tasks_on_slots().items()
            for key, _, seconds in tasks
        }

    async def run(self, header: Header, call: bytes, resources: Resources) -> tuple[Outcome, str | None] | None:
        """Runs *call* on a slot; how it ended, and the slot's name. None: the scheduler lost it, or it was stopped.

        Worker processes that die do not end it; it starts again elsewhere.
        """
        try:
            client = await self._connected()
            future = client.submit(execute.run, header.dumps(), call, key=header.key, resources=resources, pure=False)
            self._futures[header.key] = future
            del call  # the scheduler has it, as long as it needs it
            error = await future.exception()
            if error is None:
                outcome: Outcome = await future
                return _checked(outcome, header), self._slot_of(header.key)
        except (FutureCancelledError, OSError):
            await asyncio.sleep(_PAUSE_S)
            return None
        finally:
            self._futures.pop(header.key, None)
        return Outcome(failure=failures.of(_explained(error, header), below=__file__)), _last_slot(error)

    async def stop(self, key: str) -> None:
        """Takes the task *key* back, and ends it where it runs already."""
        task = self._scheduler.tasks.get(key)
        worker = task.processing_on if task is not None else None
        client, future = self._client, self._futures.get(key)
        if future is None or client.status != "running":
            return
        with contextlib.suppress(OSError, FutureCancelledError, SkyinfraError):
            await client.cancel([future], force=True)
            if worker is not None:
                await self._stop_on(client, worker.address, str(worker.name), key)

    async def _stop_on(self, client: Any, address: str, slot: str, key: str) -> None:
        """By itself, or with its process where that does not even listen."""
        stop = client.run(cancellation.stop, key, workers=[address], on_error="ignore")
        try:
            await within(stop, _LISTENS_S)
        except TimeoutError:
            node = slot.rpartition("/")[0]
            await self._relay.ask(node, questions.STOP, {"slot": slot, "key": key}, _ANSWER_S)

    async def close(self) -> None:
        """Leaves the scheduler; what still runs is forgotten."""
        client, self._client = self._client, None
        if client is not None:
            with contextlib.suppress(OSError):
                await within(client.close(), _CLOSE_S)

    async def _connected(self) -> Any:
        async with self._connecting:
            if self._client is None or self._client.status == "closed":
                self._client = await distributed.Client(
                    self._scheduler.address,
                    security=self._security,
                    asynchronous=True,
                    set_as_default=False,
                    timeout=_ANSWER_S,
                )
            return self._client

    def _slot_of(self, key: str) -> str | None:
        """Where the result of *key* lies."""
        task = self._scheduler.tasks.get(key)
        workers = task.who_has if task is not None else None
        return str(next(iter(workers)).name) if workers else None


def _checked(outcome: Outcome, header: Header) -> Outcome:
    """A job's files are kept as those of other tasks are: while there is room for them."""
    if not outcome.missing:
        return outcome
    lost = TaskInputsLost(
        f"the files that {header.name} needs are not at the head any more",
        hint="Sync them and submit it again; give the head a larger disk (disk_gb) where that happens often.",
    )
    return Outcome(failure=failures.of(lost, below=__file__))


def _explained(error: BaseException, header: Header) -> BaseException:
    if isinstance(error, distributed.KilledWorker):
        return TaskAttemptsExceeded(
            f"{header.name} lost its worker process too often, on several nodes, and is not tried again"
        )
    return error


def _last_slot(error: BaseException) -> str | None:
    return str(error.last_worker.name) if isinstance(error, distributed.KilledWorker) else None
