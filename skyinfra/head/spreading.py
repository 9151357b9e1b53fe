"""Moves tasks that wait behind another one to slots that are free.

Dask's own stealing takes none from a slot that it took to be idle when it looked last, by what it believed of the time
that its tasks take: of a function that it does not know, half a second. Behind one that takes hours, others wait for
hours. Here a slot is free where it has no task at all.
"""

from __future__ import annotations

from collections.abc import Container

from distributed import Scheduler
from distributed.core import Status
from distributed.scheduler import WorkerState


def spread(scheduler: Scheduler, leased: Container[str]) -> None:
    """Asks for tasks that have not started to be given to free slots that may take them; is called often.

    *leased*: the slots of gangs, whose ranks may be on their way.
    """
    free = {worker for worker in scheduler.running if not worker.processing and str(worker.name) not in leased}
    for worker in scheduler.workers.values() if free else ():
        if len(worker.processing) > worker.nthreads and worker.status == Status.running:
            _take_from(scheduler, worker, free)


def _take_from(scheduler: Scheduler, worker: WorkerState, free: set[WorkerState]) -> None:
    for task in [task for task in worker.processing if task not in worker.executing]:
        takers = scheduler.valid_workers(task)
        found = next(iter(free if takers is None else free & takers), None)
        if found is not None:
            free.discard(found)
            # The worker refuses where it has started meanwhile, which the head hears within a second.
            scheduler.extensions["stealing"].move_task_request(task, worker, found)
