"""The scheduler of the head: Dask's, which also knows the layout of the fleet and which slots there are to be."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import inspect
import time
from collections.abc import Collection
from typing import Any

from dask._task_spec import Task
from distributed import Scheduler, SchedulerPlugin
from distributed.comm import Comm
from distributed.core import Status
from distributed.metrics import time as clock
from distributed.spans import SpansSchedulerExtension

from skyinfra.engine.waiting import within
from skyinfra.head.blobs import HeadBlobs
from skyinfra.head.execution import tasks_on_slots
from skyinfra.head.jobs import Jobs
from skyinfra.head.leases import Leases
from skyinfra.head.relay import Desk
from skyinfra.head.tunnel import Tunnel
from skyinfra.protocol import calls, fleet, gang, questions
from skyinfra.protocol.fleet import FleetLayout, FleetState, NodeFailure
from skyinfra.protocol.instance import STARTUP_KEY
from skyinfra.worker import execute

# An answer that nobody waits for any more is given up after that long.
_LONGEST_WAIT_S = 60.0
# A node that left is taken to be replaced, or to come back, within that long: a purchase and a boot take minutes.
_REPLACED_S = 900.0
# Dask gathers messages to a worker for 5 ms and to a client for 2 ms, which is a part of a short task's round trip.
_SEND_INTERVAL_S = 0.001
# Tasks that come within that long have the same priority, as those of Dask's own client.
_FIFO_S = 0.1


class FleetScheduler(Scheduler):  # type: ignore[misc]
    """A scheduler that hands *layout* to the nodes that ask, and tells clients what the fleet is to have.

    *desk*: through which clients ask nodes. *blobs*: what it keeps for clients and nodes. *jobs*: those that clients
    leave here.

    ``identity()`` has a `FleetState` under `instance.STARTUP_KEY`.
    """

    def __init__(
        self,
        *,
        layout: FleetLayout,
        desk: Desk | None = None,
        blobs: HeadBlobs | None = None,
        jobs: Jobs | None = None,
        **keywords: Any,
    ) -> None:
        super().__init__(**keywords)
        self.extensions["spans"] = _NoSpans(self)
        if blobs is not None:
            self.handlers.update(blobs.handlers)
        if desk is not None:
            self.handlers[questions.ASK_CALL] = desk.ask
            self.handlers[questions.QUESTIONS_CALL] = desk.questions
            self.handlers[questions.ANSWER_CALL] = desk.answer
        if jobs is not None:
            self.handlers.update(jobs.handlers)
        self._tunnel = Tunnel(self)
        self._offered = layout
        self._changed = asyncio.Event()
        self._promised: dict[str, tuple[str, ...]] = {}
        self._boot_failures: dict[str, NodeFailure] = {}
        # Why a node leaves, and when it last said so.
        self._leaving: dict[str, tuple[str, float]] = {}
        self.handlers[fleet.LAYOUT_CALL] = self._hand_on
        self.handlers[fleet.SLOTS_CALL] = self.promise
        self.handlers[fleet.LEAVE_CALL] = self.leave
        self.handlers[fleet.RUNNING_CALL] = self.tasks_on_slots
        self.stream_handlers[calls.TASK_MESSAGE] = self.take_task
        leases = Leases(self._slots_in_service, self.clients.__contains__)
        self.handlers[gang.ASK_CALL] = leases.ask
        self.handlers[gang.JOIN_CALL] = leases.join
        self.handlers[gang.STATE_CALL] = leases.state
        self.handlers[gang.REPORT_CALL] = leases.report
        self.handlers[gang.RELEASE_CALL] = leases.release
        self.add_plugin(_Departures(leases))

    def offer(self, layout: FleetLayout) -> None:
        """Hands *layout* on from now on; whoever waits for another one gets it at once."""
        if layout != self._offered:
            self._offered = layout
            self._wake()

    def promise(self, node: str, slots: list[str] | tuple[str, ...]) -> None:
        """Takes the names of the slots that *node* is to have; one that has some does not leave."""
        self._promised[node] = tuple(slots)
        self._boot_failures.pop(node, None)
        if slots:
            self._leaving.pop(node, None)

    def fail(self, node: str, failure: NodeFailure) -> None:
        """Takes that *node* could not be set up."""
        self._boot_failures[node] = failure

    def leave(self, node: str, why: str, if_others: bool = False) -> bool:
        """Takes that *node* leaves, and *why*. *if_others*: only where another node has a slot in service and stays.

        False where it is to stay for that. Who asks first may go: the answer to the next one knows of it.
        """
        in_service = (str(w.name).rpartition("/")[0] for w in self.workers.values() if w.status == Status.running)
        if if_others and not any(each != node and each not in self._leaving for each in in_service):
            return False
        self._leaving[node] = why, time.monotonic()
        return True

    def tasks_on_slots(self) -> dict[str, list[tuple[str, str, float]]]:
        """See `execution.tasks_on_slots`."""
        return tasks_on_slots(self)

    def identity(self, n_workers: int = -1) -> dict[str, Any]:
        """What Dask says about itself and its workers, with the `FleetState`."""
        now = time.monotonic()
        leaving = {node: why for node, (why, said) in self._leaving.items() if now - said < _REPLACED_S}
        state = FleetState(fleet.VERSION, dict(self._promised), self._draining(), dict(self._boot_failures), leaving)
        return {**super().identity(n_workers), STARTUP_KEY: state.to_json()}

    async def handle_worker(self, comm: Comm, worker: str) -> None:
        """Talks with a worker for as long as it is there."""
        self.stream_comms[worker].interval = _SEND_INTERVAL_S
        await super().handle_worker(comm, worker)

    async def handle_stream(self, comm: Comm, extra: dict[str, Any] | None = None) -> None:
        """Takes the messages of a worker or a client for as long as it is there."""
        client = (extra or {}).get("client")
        if client in self.client_comms:
            self.client_comms[client].interval = _SEND_INTERVAL_S
        await super().handle_stream(comm, extra)

    def subscribe_topic(self, topic: str, client: str) -> None:
        """Lets a client hear what is told of *topic*; one of ours hears first that `take_task` is there."""
        super().subscribe_topic(topic, client)
        if topic.startswith(calls.TOPIC) and _takes_tasks():
            self.log_event(topic, [calls.TAKES_TASKS, "", None])

    def take_task(
        self, client: str, key: str, header: bytes, call: bytes, resources: dict[str, float], **_: object
    ) -> None:
        """Takes a task for a slot with *resources*: what Dask's `update_graph` does, without graph and thread."""
        now = clock()
        task = Task(key, execute.run, header, call)
        self._create_taskstate_from_graph(**_graph(now, client, task, {"resources": resources}))

    def log_worker_event(self, worker: str, topic: str | Collection[str], msg: Any) -> None:
        """Hands what a worker has to tell on to those who listen; what nobody listens to is dropped."""
        if not (isinstance(topic, str) and topic.startswith(calls.TOPIC) and not self._listeners(topic)):
            super().log_worker_event(worker, topic, msg)

    def remove_client(self, client: str, stimulus_id: str | None = None) -> None:
        """Forgets a client, which may have died, and the events that were for it alone."""
        super().remove_client(client, stimulus_id)
        for name in [name for name in self._broker._topics if name.startswith(calls.TOPIC)]:
            self.unsubscribe_topic(name, client)
            if not self._listeners(name):
                del self._broker._topics[name]

    def _listeners(self, topic: str) -> bool:
        return topic in self._broker._topics and bool(self._broker._topics[topic].subscribers)

    async def close(self, *arguments: Any, **keywords: Any) -> None:
        """Ends the scheduler; whoever waits for a layout gets the present one."""
        self._wake()
        await super().close(*arguments, **keywords)

    def _slots_in_service(self) -> dict[str, bool]:
        """The slots that take tasks, and whether one runs there or waits to."""
        running = (worker for worker in self.workers.values() if worker.status == Status.running)
        return {str(worker.name): bool(worker.processing) for worker in running}

    def _draining(self) -> dict[str, tuple[str, ...]]:
        """The runners pause the workers of the slots that go; what those still process they have started."""
        return {
            str(worker.name): tuple(sorted(key.rpartition("-")[0] for key in map(_key, worker.processing)))
            for worker in self.workers.values()
            if worker.status == Status.paused
        }

    async def _hand_on(self, seen: str | None = None, wait_s: float = 0.0) -> dict[str, object]:
        """The layout, at once where its digest is not *seen*, else when it changes or after *wait_s* seconds."""
        if self._offered.digest == seen and self.status == Status.running:
            with contextlib.suppress(TimeoutError):
                await within(self._changed.wait(), min(wait_s, _LONGEST_WAIT_S))
        return self._offered.to_json()

    def _wake(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()


def _graph(now: float, client: str, task: Task, annotations: dict[str, object]) -> dict[str, object]:
    """What Dask makes the state of a task from, as `update_graph` does."""
    return {
        "start": now,
        "dsk": {task.key: task},
        "keys": {task.key},
        "ordered": {task.key: 0},
        "client": client,
        "annotations_by_type": {},
        "global_annotations": annotations,
        "stimulus_id": f"skyinfra-task-{now}",
        "submitting_task": None,
        "span_metadata": {"collections": []},
        "fifo_timeout": _FIFO_S,
    }


@functools.cache
def _takes_tasks() -> bool:
    """Whether this Dask has what `take_task` uses, which is no public part of it."""
    try:
        create = inspect.signature(Scheduler._create_taskstate_from_graph)
        create.bind(None, **_graph(0.0, "", Task("", int), {}))
    except (AttributeError, TypeError):
        return False
    return True


class _NoSpans(SpansSchedulerExtension):  # type: ignore[misc]
    """Dask's record of what ran together, for its dashboard: it never forgets a task, and nobody reads it."""

    def observe_tasks(self, *_: object, **__: object) -> dict[str, dict[str, object]]:
        """Takes note of nothing."""
        return {}

    def heartbeat(self, *_: object) -> None:
        """Takes note of nothing: a worker may tell of its spans all the same."""


class _Departures(SchedulerPlugin):  # type: ignore[misc]
    """Tells the *leases* which clients and workers are gone."""

    name = "skyinfra-gangs"

    def __init__(self, leases: Leases) -> None:
        self._leases = leases

    def add_worker(self, scheduler: Scheduler, worker: str) -> None:
        self._leases.grant()

    def remove_worker(self, scheduler: Scheduler, worker: str, *, stimulus_id: str, **_: Any) -> None:
        self._leases.worker_gone(worker)

    def remove_client(self, scheduler: Scheduler, client: str) -> None:
        self._leases.client_gone(client)


def _key(task: Any) -> str:
    return str(task.key)
