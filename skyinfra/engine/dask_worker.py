"""Private names of Dask for workers and their Nannies, each with the reason for its use."""

from __future__ import annotations

import asyncio
import functools
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import distributed.nanny

from skyinfra.engine.dask_client import SEND_INTERVAL_S

if TYPE_CHECKING:
    from distributed import Nanny, Worker

# Why Dask closes a worker that has lost its scheduler.
LOST = ("scheduler-close", "worker-handle-scheduler-connection-broken", "worker-heartbeat-missing")
# After a scheduler that still takes this worker to be connected.
_TAKEN_S = 0.5
# Between two attempts to connect, Dask waits for up to twice as long as before, within the time for all of them.
_CONNECT = "5s"


def give_back_waiting(worker: Worker) -> None:
    """Makes the scheduler place the tasks anew that *worker* was given and has not started."""
    from distributed.worker_state_machine import READY, CancelComputeEvent

    for key in [task.key for task in worker.state.tasks.values() if task.state in READY]:
        # Ordered: by the time the scheduler places the task anew, it knows that this worker is paused.
        stimulus = f"drain-{time.time()}"
        worker.handle_stimulus(CancelComputeEvent(key=key, stimulus_id=stimulus))
        worker.batched_send({"op": "reschedule", "key": key, "worker": worker.address, "stimulus_id": stimulus})


async def send_all(worker: Worker) -> None:
    """Sends what *worker* has gathered for its scheduler, which would wait for some milliseconds, or longer where the
    machine is busy."""
    stream = worker.batched_stream
    while stream.buffer and stream.comm is not None and not stream.please_stop:
        stream.next_deadline = None
        stream.waker.set()
        await asyncio.sleep(0)
    # What is not gathered any more is written by a task of its own, which begins in the next round of the loop.
    for _ in range(2):
        await asyncio.sleep(0)


def running(worker: Worker) -> list[str]:
    """Returns the keys of the tasks that have started on *worker*, those that were cancelled and still run included."""
    return sorted(str(task.key) for task in worker.state.all_running_tasks)


def on_exit(nanny: Nanny, on_exit_code: Callable[[int], object]) -> None:
    """Calls *on_exit_code* with that of each worker process of *nanny*, negative for a signal, before the next one."""
    before = nanny._on_worker_exit_sync

    def ended(code: int) -> None:
        on_exit_code(code)
        before(code)

    nanny._on_worker_exit_sync = ended


def of_present_run(worker: Worker, event: Any) -> Any:
    """Returns the *event* of an execution that ended as that of the run for which the scheduler waits.

    The scheduler may have forgotten the task while it ran, and have asked for it again; or it may be another one.
    """
    task = worker.state.tasks.get(event.key)
    if task is not None and hasattr(event, "run_id"):
        event.run_id = task.run_id
    return event


class _Unseen(dict[Any, Any]):
    """The tasks of a worker, of which Dask sees none while it registers: it registers none that has some."""

    def __bool__(self) -> bool:
        return False


def lose_scheduler(worker: Worker) -> None:
    """Makes *worker* forget what its scheduler wanted, which is gone; a task that runs goes on."""
    from distributed.batched import BatchedSend
    from distributed.worker_state_machine import FreeKeysEvent

    worker.batched_stream.abort()
    worker.batched_stream = BatchedSend(interval=SEND_INTERVAL_S, loop=worker.loop)
    worker.handle_stimulus(FreeKeysEvent(keys=list(worker.state.tasks), stimulus_id=f"lost-{time.monotonic()}"))


async def register_again(worker: Worker) -> None:
    """Registers *worker* with the next scheduler at the address of the one that it has lost, however late that comes.

    A task that still runs is one that Dask takes to be cancelled; when the scheduler asks for it, it is taken back.
    """
    worker.state.tasks = _Unseen(worker.state.tasks)
    arguments = worker.connection_args
    worker.connection_args = {**arguments, "timeout": _CONNECT}
    try:
        while True:
            try:
                await worker._register_with_scheduler()
                return
            except ValueError:
                await asyncio.sleep(_TAKEN_S)
    finally:
        worker.connection_args = arguments
        worker.state.tasks = dict(worker.state.tasks)


def is_cancelled(worker: Worker, key: object) -> bool:
    """Returns whether the scheduler has forgotten the task *key*, which still runs on *worker*."""
    task = worker.state.tasks.get(key)
    return task is not None and task.state == "cancelled"


async def unregister(worker: Worker) -> None:
    """Makes the scheduler forget *worker*, which blames no task for it: it places those anew that have not started."""
    stimulus = f"replace-{time.time()}"
    await worker.scheduler.unregister(address=worker.address, stimulus_id=stimulus, expected=True, close=False)


class _Led(distributed.nanny.WorkerProcess):  # type: ignore[misc]
    """The process of a worker, in the main thread of which its class does the first step."""

    @classmethod
    def _run(cls, **arguments: Any) -> None:
        arguments["worker_factory"].func.lead(functools.partial(super()._run, **arguments))


def lead_workers() -> None:
    """Makes the Nannies of this process call ``lead(run)`` of the class of their worker in the main thread of its
    process. *run* is Dask's side: it ends with the worker, and runs in any thread."""
    distributed.nanny.WorkerProcess = _Led
