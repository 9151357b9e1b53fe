"""Private names of Dask for its scheduler and the dashboard, each with the reason for its use."""

from __future__ import annotations

import asyncio
import importlib
import socket
from collections.abc import Callable, Container
from typing import TYPE_CHECKING, Any

from distributed.core import Status
from tornado.iostream import IOStream

from skyinfra.protocol.instance import GPU_MEMORY

if TYPE_CHECKING:
    from distributed import Scheduler
    from distributed.scheduler import WorkerState

# Tasks that come within that long have the same priority, as those of Dask's own client.
_FIFO_S = 0.1
# Clients listen on the loopback of their machines, at any port.
_ORIGINS = ("127.0.0.1:*", "localhost:*")


# Dask keeps the last thousand events of each topic for ever.


def has_listeners(scheduler: Scheduler, topic: str) -> bool:
    """Returns whether a client listens to *topic*."""
    found = scheduler._broker._topics.get(topic)
    return found is not None and bool(found.subscribers)


def unsubscribe(scheduler: Scheduler, client: str, prefix: str) -> list[str]:
    """Makes *client* leave the topics that begin with *prefix*; forgets those without listeners, with their events.

    Returns those that were forgotten.
    """
    forgotten = []
    for topic in [topic for topic in scheduler._broker._topics if topic.startswith(prefix)]:
        scheduler.unsubscribe_topic(topic, client)
        if not has_listeners(scheduler, topic):
            del scheduler._broker._topics[topic]
            forgotten.append(topic)
    return forgotten


def drop_events(scheduler: Scheduler, topic: str) -> None:
    """Forgets the events of *topic*."""
    scheduler._broker.truncate(topic)


def create_task(
    scheduler: Scheduler,
    client: str,
    key: str,
    call: tuple[Callable[..., object], bytes, bytes],
    resources: object,
    worker: str | None = None,
    *,
    once: bool = False,
) -> None:
    """Makes the state of one task as `Scheduler.update_graph` does, without graph and thread.

    worker: the address of the one that gets it while it is there. once: it is not placed anew where its worker dies.
    """
    from dask._task_spec import Task
    from distributed.metrics import time

    now = time()
    scheduler._create_taskstate_from_graph(
        start=now,
        dsk={key: Task(key, *call)},
        keys={key},
        ordered={key: 0},
        client=client,
        annotations_by_type={},
        global_annotations={"resources": resources, **_preferring(worker)},
        stimulus_id=f"skyinfra-task-{now}",
        submitting_task=None,
        span_metadata={"collections": []},
        fifo_timeout=_FIFO_S,
    )
    if once and (task := scheduler.tasks.get(key)) is not None:
        task.metadata = {**(task.metadata or {}), _ONCE: True}


def _preferring(worker: str | None) -> dict[str, object]:
    return {} if worker is None else {"workers": [worker], "allow_other_workers": True}


# The task's client has been sent its outcome; or sends what it holds itself where its worker dies.
_SENT, _ONCE = "skyinfra-sent", "skyinfra-once"


def note_sent(scheduler: Scheduler, key: object) -> None:
    """Notes that the client of the task *key* has been sent its outcome, which its worker still has."""
    task = scheduler.tasks.get(key)
    if task is not None:
        task.metadata = {**(task.metadata or {}), _SENT: True}


def forget_ended(scheduler: Scheduler, worker: str, *, died: bool) -> None:
    """Forgets the tasks that Dask would run again as *worker* is gone, and that are not to be: those whose outcomes it
    alone has, which their clients have been sent; and, where it *died*, those on it that run *once*.

    A client whose connection has lost its outcome sends the task again.
    """
    from distributed import Scheduler

    state = scheduler.workers[worker]
    found = [task for task in state.has_what if len(task.who_has or ()) == 1 and (task.metadata or {}).get(_SENT)]
    found += [task for task in state.processing if died and (task.metadata or {}).get(_ONCE)]
    for client in {each.client_key for task in found for each in task.who_wants or ()}:
        keys = [task.key for task in found if task.key in scheduler.tasks]
        wanted = [key for key in keys if scheduler.clients[client] in (scheduler.tasks[key].who_wants or ())]
        # Dask's own: there is no worker to be told.
        Scheduler.stimulus_cancel(scheduler, wanted, client, force=True, reason="lost", msg="its worker is gone")


def header_of(scheduler: Scheduler, key: str) -> bytes:
    """Returns the first argument of the call that `create_task` was given for the task *key*."""
    header: bytes = scheduler.tasks[key].run_spec.args[0]
    return header


def change_header(scheduler: Scheduler, key: str, header: bytes) -> None:
    """Replaces the argument that `header_of` returns, for the next start of the task *key*."""
    from dask._task_spec import Task

    given = scheduler.tasks[key].run_spec
    scheduler.tasks[key].run_spec = Task(key, given.func, header, *given.args[1:])


# The Nanny of a worker says so that its process has ended.
_ENDED = "nanny-close-"


def is_end_of_process(stimulus: object) -> bool:
    """Returns whether a worker is removed with *stimulus* as its process has ended."""
    return str(stimulus).startswith(_ENDED)


# Dask's own look at workers that have not said anything for long.
_SILENT = "check-worker-ttl"


def is_silent(stimulus: object) -> bool:
    """Returns whether a worker is removed with *stimulus* as nothing was heard of it for long."""
    return str(stimulus).startswith(_SILENT)


def release_task(scheduler: Scheduler, client: str, key: str) -> None:
    """Notes that *client*, which is none but by its name, does not want the task *key* any more."""
    if client in scheduler.clients:
        scheduler.client_releases_keys(keys=[key], client=client)


def keep_no_spans(scheduler: Scheduler) -> None:
    """Replaces the record of what ran together, for the dashboard: it never forgets a task, and nobody reads it."""
    from distributed.spans import SpansSchedulerExtension

    class NoSpans(SpansSchedulerExtension):  # type: ignore[misc]
        def observe_tasks(self, *_: object, **__: object) -> dict[str, dict[str, object]]:
            return {}

        def heartbeat(self, *_: object) -> None:
            pass

    scheduler.extensions["spans"] = NoSpans(scheduler)


# Dask's own stealing takes none from a slot that it took to be idle when it looked last, by what it believed of the
# time that its tasks take: of a function that it does not know, half a second. Behind one that takes hours, others wait
# for hours. Here a slot is free where it has no task at all.


def spread(scheduler: Scheduler, leased: Container[str], held: Container[str] = ()) -> None:
    """Asks for tasks that have not started to be given to free slots that may take them; is called often.

    *leased*: the slots of gangs, whose ranks may be on their way. *held*: addresses of workers that get no task.
    """
    free = {worker for worker in scheduler.running if not worker.processing and str(worker.name) not in leased}
    for worker in scheduler.workers.values() if free else ():
        if len(worker.processing) > worker.nthreads and (worker.status == Status.running or worker.address in held):
            _take_from(scheduler, worker, free)


def _take_from(scheduler: Scheduler, worker: WorkerState, free: set[WorkerState]) -> None:
    for task in [task for task in worker.processing if task not in worker.executing]:
        takers = scheduler.valid_workers(task)
        # The smallest, as FleetScheduler.worker_objective does.
        found = min(free if takers is None else free & takers, key=_size, default=None)
        if found is not None:
            free.discard(found)
            # The worker refuses where it has started meanwhile, which the head hears within a second.
            scheduler.extensions["stealing"].move_task_request(task, worker, found)


def _size(worker: WorkerState) -> tuple[float, str]:
    return worker.resources.get(GPU_MEMORY, 0.0), str(worker.name)


class Pages:
    """The dashboard of *scheduler*, which needs bokeh. It listens nowhere: a connection is a pair of sockets."""

    def __init__(self, scheduler: Scheduler) -> None:
        from distributed.http.routing import RoutingApplication
        from tornado.httpserver import HTTPServer

        pages: Any = importlib.import_module("distributed.dashboard.scheduler")
        # Not that of the scheduler, which has a port of the loopback.
        self._application = RoutingApplication([])
        pages.connect(self._application, scheduler.http_server, scheduler, prefix="")
        for each in self._application.applications:
            each.websocket_origins.clear()
            each.websocket_origins.update(_ORIGINS)
        self._server = HTTPServer(self._application)

    async def connect(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        """Opens a connection to it."""
        ours, theirs = socket.socketpair()
        theirs.setblocking(False)
        self._server.handle_stream(IOStream(theirs), ("", 0))
        return await asyncio.open_connection(sock=ours)

    def close(self) -> None:
        """Ends what draws it. Its connections have been closed."""
        for each in self._application.applications:
            each.stop()
