"""Takes over the jobs that went on while the head was away: a worker that carries one registers with its key."""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import Any, NamedTuple

from distributed import Scheduler
from distributed.core import Status
from distributed.diagnostics.plugin import SchedulerPlugin

from skyinfra.engine import carried, dask_scheduler
from skyinfra.protocol import calls
from skyinfra.worker import execute

# The client that wants them, by its name alone, until the queue of jobs has their outcomes.
_CLIENT = "skyinfra-adopted"
# A process of a slot runs one, and has the outcomes of a few at most that no head has.
_MOST = 100


class Claim(NamedTuple):
    """An attempt that is taken over: its header, and what a slot must have to take it; None where it is left as it is,
    since it is given to a slot anew."""

    header: bytes
    resources: dict[str, int]


# Returns the claim to an attempt of a job, by its key, that a slot carries. Raises KeyError where it is not wanted.
Claims = Callable[[str, str], Claim | None]


class Adoption(SchedulerPlugin):  # type: ignore[misc]
    """Gives each attempt that a worker carries back to it, before it gets any other task; ends those not wanted."""

    name = "skyinfra-adoption"

    def __init__(self, claim: Claims | None = None) -> None:
        self._claim = claim

    def add_worker(self, scheduler: Scheduler, worker: str) -> None:
        """Is called when a worker has registered, and has no task yet."""
        if scheduler.status in (Status.closing, Status.closed):
            return  # the worker is about to lose this one, too, and registers with the next
        state = scheduler.workers[worker]
        given: Any = state.extra.get(carried.KEY) or ()
        for key in [key for key in given if isinstance(key, str)][:_MOST]:
            try:
                claim = self._asked(key, str(state.name))
            except KeyError:
                scheduler.worker_send(worker, {"op": calls.ABANDON_MESSAGE, "key": key})
                continue
            if claim is not None:
                call = (execute.run, claim.header, b"")
                dask_scheduler.create_task(scheduler, _CLIENT, key, call, claim.resources, worker)

    def _asked(self, key: str, slot: str) -> Claim | None:
        if self._claim is None:
            raise KeyError(key)
        return self._claim(key, slot)


def hold(scheduler: Scheduler, keys: Collection[str]) -> None:
    """Keeps the attempts *keys* on their slots when the queue of jobs leaves the scheduler, which is about to close."""
    scheduler.client_desires_keys(keys=[key for key in keys if key in scheduler.tasks], client=_CLIENT)


def release(scheduler: Scheduler, key: str) -> None:
    """Notes that the outcome of the attempt *key* that was taken over is not wanted any more."""
    dask_scheduler.release_task(scheduler, _CLIENT, key)
