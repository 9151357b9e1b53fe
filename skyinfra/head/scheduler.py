"""The scheduler of the head: Dask's, with the layout of the fleet and the slots that there are to be."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import replace
from typing import Any

from distributed import Scheduler
from distributed.comm import Comm
from distributed.core import Status
from tornado.ioloop import PeriodicCallback

from skyinfra.engine import carried, dask_client, dask_comms, dask_scheduler, forwarding
from skyinfra.engine.deaths import Death
from skyinfra.engine.reverse_connections import PARK, can_connect
from skyinfra.engine.waiting import Changes, within
from skyinfra.head import admission
from skyinfra.head.carried import Adoption, Claims
from skyinfra.head.execution import tasks_on_slots
from skyinfra.head.leases import Leases
from skyinfra.head.records import PERIOD_S, Records
from skyinfra.head.secrets import HeadSecrets
from skyinfra.head.sick import Killers, Sick
from skyinfra.head.tunnel import Forwards, Tunnel
from skyinfra.idle.use import FleetUse
from skyinfra.protocol import calls, fleet, rpc, services
from skyinfra.protocol.fleet import FleetLayout, FleetState, FollowState, NodeFailure, SizeState
from skyinfra.protocol.instance import GPU_MEMORY, SICK_KEY, STARTUP_KEY
from skyinfra.protocol.rpc import Handlers
from skyinfra.worker import execute

# A node that left is taken to be replaced, or to come back, within that long: a purchase and a boot take minutes.
_REPLACED_S = 900.0
# A client that lives is back within that long after its connection was closed; the tasks of one that is not are ended.
_CLIENT_BACK_S = 5.0
# Characters of the name of who submits.
_WORDS = 300
# What a worker process that has ended said before is read within that long.
_LAST_WORDS_S = 8.0
# For so many times that long a worker waits for the one before it in its slot to be forgotten.
_LOOKS, _LOOK_S = 100, 0.02
# For a connection to a worker that has just registered.
_REACH_S = 3.0

# Between two looks for tasks that wait although a slot is free.
_SPREAD_MS = 500
# A task that waits for others says so every two seconds.
_INSIDE_S = 5.0


class FleetScheduler(Scheduler):  # type: ignore[misc]
    """A scheduler that gives nodes the *layout* of the fleet, and clients the slots that the fleet is to have.

    *handlers*: answer the calls of `skyinfra.protocol.services` that the scheduler does not answer itself. *secrets*:
    those of tasks, where they are to outlive it. *claim*: of jobs that workers carry.

    ``identity()`` has a `FleetState` under `instance.STARTUP_KEY`.
    """

    def __init__(
        self,
        *,
        layout: FleetLayout,
        handlers: Handlers | None = None,
        secrets: HeadSecrets | None = None,
        claim: Claims | None = None,
        **keywords: Any,
    ) -> None:
        super().__init__(**keywords)
        admission.refuse_others(self)
        dask_scheduler.keep_no_spans(self)
        self._offered = layout
        self._changes = Changes()
        self._ending = False
        self._promised: dict[str, tuple[str, ...]] = {}
        # And when they last said so.
        self._boot_failures: dict[str, tuple[NodeFailure, float]] = {}
        # Why a node leaves, and when it last said so.
        self._out_of_service: dict[str, tuple[str, float]] = {}
        self.sick = Sick(self, self._promised)
        self.add_plugin(self.sick.suspects)
        self._killers = Killers()
        self.add_plugin(self._killers)
        # The slots whose tasks wait for other tasks of the fleet, and when they last said so.
        self._inside: dict[str, float] = {}
        # Is set when all is read that the worker at an address has sent.
        self._heard: dict[str, asyncio.Event] = {}
        # The connections of workers, by their addresses.
        self._streams: dict[str, object] = {}
        # The addresses of workers that cannot be connected to.
        self._behind: set[str] = set()
        # How the layouts follow the work, where they do: `skyinfra.head.workload_layouts` writes it.
        self.follow_state: FollowState | None = None
        # The number of nodes, where it follows the work: `skyinfra.elastic.size` writes it.
        self.size_state: SizeState | None = None
        # Those that the image declares, see `FleetState`: the runner of the head writes them.
        self.declared_secrets: dict[str, str] = {}
        self._secrets = secrets or HeadSecrets()
        self.stream_handlers[calls.TASK_MESSAGE] = self.take_task
        self.records = Records(self)
        self.add_plugin(self.records)
        self.add_plugin(Adoption(claim))
        # Whether a job waits or runs: the runner of the head sets it.
        self.has_jobs: Callable[[], bool] = lambda: False
        self.use = FleetUse(self._busy)
        self._leases = Leases(self._slots_in_service, self.clients.__contains__, self._nodes_behind)
        own = rpc.handlers(
            services.layout.by(self._hand_on),
            services.reach.by(self.reach),
            services.promise.by(self.promise),
            services.leave.by(self.leave),
            services.report.by(self.sick.report),
            services.died.by(self._killers.tell),
            services.use.by(self.use.report),
            services.keep.by(self.use.keep),
            services.running.by(lambda: tasks_on_slots(self)),
            services.wait_inside.by(self.wait_inside),
            services.records.by(self.records.records),
            services.work.by(self.records.work),
            services.forget_topic.by(self.forget_topic),
            services.clock.by(lambda: time.time()),
        )
        self.handlers.update({**own, **self._leases.handlers, **Tunnel(self).handlers, **self._secrets.handlers})
        self.handlers.update(handlers or {})
        self.periodic_callbacks["skyinfra-spread"] = PeriodicCallback(self._look, _SPREAD_MS)
        self.periodic_callbacks["skyinfra-count"] = PeriodicCallback(self.records.count, PERIOD_S * 1000)
        self.handlers[PARK] = self.keep_parked
        self.handlers[forwarding.OPERATION] = Forwards(self.use.note).join

    async def listen(self, *arguments: Any, **keywords: Any) -> None:
        """Listens as Dask does; what others say runs no code here."""
        await super().listen(*arguments, **keywords, **dask_comms.read_data_only(self))

    def offer(self, layout: FleetLayout) -> None:
        """Gives nodes *layout* from now on, those that wait for another one at once."""
        if layout != self._offered:
            self._offered = layout
            self._changes.notify()

    async def reach(self, address: str) -> bool:
        """Returns whether the worker at *address* can be connected to; where not, it leaves connections here."""
        if await can_connect(address, _REACH_S, **self.connection_args):
            return True
        self._behind.add(address)
        self._leases.grant()
        return False

    async def keep_parked(self, comm: Comm, address: str) -> Status:
        """Keeps a connection that a worker leaves, if it is one that could not be connected to."""
        if address not in self._behind:
            await comm.close()
            return Status.dont_reply
        return await dask_comms.PARKED.keep(comm, address)

    def promise(self, node: str, slots: list[str] | tuple[str, ...]) -> None:
        """Notes the names of the slots that *node* is to have; a node with slots does not leave."""
        self._promised[node] = tuple(slots)
        self._boot_failures.pop(node, None)
        if slots:
            self._out_of_service.pop(node, None)

    def fail(self, node: str, failure: NodeFailure) -> None:
        """Notes that *node* could not be set up."""
        self._boot_failures[node] = failure, time.monotonic()

    def boot_failures(self, within_s: float = _REPLACED_S) -> dict[str, NodeFailure]:
        """Returns why nodes could not be set up that have said so in the last seconds, by their names."""
        since = time.monotonic() - within_s
        return {node: failure for node, (failure, said) in self._boot_failures.items() if said > since}

    def leave(self, node: str, why: str, if_others: bool = False) -> bool:
        """Notes that *node* leaves, and *why*. *if_others*: only where another node has a slot in service and stays;
        False where there is none. The first of two nodes may leave."""
        in_service = (str(w.name).rpartition("/")[0] for w in self.workers.values() if w.status == Status.running)
        if if_others and not any(each != node and each not in self._out_of_service for each in in_service):
            return False
        self._out_of_service[node] = why, time.monotonic()
        return True

    def _busy(self) -> bool:
        """Returns whether a task runs or waits, a job or a gang is there that has not ended, or a client sends one."""
        tasks = self.queued or self.unrunnable or any(worker.processing for worker in self.workers.values())
        return bool(tasks) or self._leases.any or self.has_jobs()

    def worker_objective(self, ts: Any, ws: Any) -> tuple[Any, ...]:
        """Dask's order of slots for a task, the least first; of those that would begin it at once, or equally late, the
        smallest that it fits comes first: a large task would wait for the others."""
        order = super().worker_objective(ts, ws)
        return order[0], ws.resources.get(GPU_MEMORY, 0.0), order[-1]

    def handle_worker_status_change(self, status: str | Status, worker: Any, stimulus_id: str) -> None:
        """Notes the state of a worker, which gets no task while its slot is sick."""
        address = worker if isinstance(worker, str) else worker.address
        if address in self.sick.held:
            self.sick.held[address] = Status[status] if isinstance(status, str) else status
        else:
            super().handle_worker_status_change(status, worker, stimulus_id)

    def _look(self) -> None:
        self.sick.enforce()
        for node in [node for node in self._promised if self.sick.is_gone(node, _REPLACED_S)]:
            # It died without a drain. What comes back says it again.
            del self._promised[node]
        dask_scheduler.spread(self, self.leased, self.sick.held)

    def wait_inside(self, slots: list[str]) -> list[str]:
        """Notes that the task on *slots* waits for other tasks, none of which runs; the slots of all such tasks."""
        now = time.monotonic()
        self._inside |= dict.fromkeys(slots, now)
        self._inside = {slot: said for slot, said in self._inside.items() if now - said < _INSIDE_S}
        return sorted(self._inside)

    def identity(self, n_workers: int = -1) -> dict[str, Any]:
        """Dask's description of itself and its workers, with the `FleetState`."""
        now = time.monotonic()
        out_of_service = {node: why for node, (why, said) in self._out_of_service.items() if now - said < _REPLACED_S}
        state = FleetState(
            fleet.STATE_VERSION,
            dict(self._promised),
            self._draining(),
            self.boot_failures(),
            out_of_service,
            self._nodes_behind(),
            self.follow_state,
            self.declared_secrets,
        )
        unwatched = {node: what for node, what in self.sick.unwatched.items() if node not in self._out_of_service}
        problems: dict[str, object] = {"sick": self.sick.slots(), "unwatched": unwatched}
        problems |= {"sick_for": self.sick.seconds()}
        problems |= {"ends": self.use.ends, "stops": self.use.announced, "idle_s": self.use.idle_s}
        problems |= {"size": self.size_state.to_json()} if self.size_state is not None else {}
        return {**super().identity(n_workers), STARTUP_KEY: state.to_json(), SICK_KEY: problems}

    async def handle_worker(self, comm: Comm, worker: str) -> None:
        """Serves a worker for as long as it is connected."""
        dask_client.send_soon(self.stream_comms[worker])
        self._leases.grant()
        heard = self._heard[worker] = asyncio.Event()
        self._streams[worker] = getattr(comm, "stream", None)
        try:
            await super().handle_worker(comm, worker)
        finally:
            heard.set()
            del self._heard[worker], self._streams[worker]

    async def add_worker(self, comm: Comm, **given: Any) -> None:
        """Takes on a worker. The one that its slot had before may still be there, until its runner tells of its end."""
        name = str(given["name"])
        if self._killers.restarted(name):
            for _ in range(_LOOKS):
                if name not in self.aliases:
                    break
                await asyncio.sleep(_LOOK_S)
        await super().add_worker(comm, **given)

    async def remove_worker(self, address: str, *arguments: Any, **keywords: Any) -> Any:
        """Forgets a worker, which may have died; the ranks on it are lost.

        The news that its process has ended may overtake what that said before: that a task had ended.
        """
        if address in self._heard and dask_scheduler.is_end_of_process(keywords.get("stimulus_id")):
            with contextlib.suppress(TimeoutError):
                await within(self._heard[address].wait(), _LAST_WORDS_S)
        died = not keywords.get("expected")
        closing = self.status in (Status.closing, Status.closed)
        cut = dask_scheduler.is_silent(keywords.get("stimulus_id")) or dask_client.was_cut(self._streams.get(address))
        if died and not cut and not closing and address in self.workers and self.workers[address].processing:
            await self._killers.heard(str(self.workers[address].name))
        if address in self.workers:
            dask_scheduler.forget_ended(self, address, died=died)
            self.sick.gone(address, expected=cut or not died)
            for task in list(self.workers[address].processing):
                if found := self._killers.ended_by(str(task.key)):
                    self._refuse_next(str(task.key), found)
        removed = await super().remove_worker(address, *arguments, **keywords)
        self._leases.worker_gone(address)
        self._behind.discard(address)
        dask_comms.PARKED.forget(address)
        return removed

    def _refuse_next(self, key: str, found: Sequence[Death]) -> None:
        """Has the next start of the task *key* fail for the processes that it has ended, on whichever nodes."""
        header = calls.Header.loads(dask_scheduler.header_of(self, key))
        header = replace(header, deaths=tuple((each.code, each.out_of_memory) for each in found))
        dask_scheduler.change_header(self, key, header.dumps())

    async def handle_stream(self, comm: Comm, extra: dict[str, Any] | None = None) -> None:
        """Takes the messages of a worker or a client for as long as it is connected."""
        client = str((extra or {}).get("client"))
        if client in self.client_comms:
            dask_client.send_soon(self.client_comms[client])
        stream = getattr(comm, "stream", None)
        await super().handle_stream(comm, extra)
        if client in self.clients and client.startswith(calls.CLIENT_ID) and not dask_client.was_cut(stream):
            self._end_later(client)

    def take_task(
        self,
        client: str,
        key: str,
        header: bytes,
        call: bytes | memoryview,
        resources: dict[str, float],
        waited: float = 0.0,
        submitter: str = "",
        **_: object,
    ) -> None:
        """Takes a task for a slot with *resources*: what Dask's `update_graph` does, which would unpickle here.

        waited: how long it did so before it was sent, in seconds. submitter: ``USER@HOST``, as the client says.
        """
        self.use.note()
        self.records.came(key, waited, str(submitter)[:_WORDS])
        given = execute.run, header, bytes(call)
        dask_scheduler.create_task(self, client, key, given, resources, once=calls.is_chunk(header))

    def log_worker_event(self, worker: str, topic: str | Collection[str], msg: Any) -> None:
        """Sends an event of a worker to the clients that listen; drops an event of ours without a listener."""
        if topic == calls.SLOT_FAILS:
            if worker in self.workers:
                self.sick.note(str(self.workers[worker].name), msg)
            return
        ours = isinstance(topic, str) and topic.startswith(calls.TOPIC)
        if not ours or dask_scheduler.has_listeners(self, str(topic)):
            super().log_worker_event(worker, topic, msg)
            if ours and isinstance(msg, list | tuple) and len(msg) == 3 and msg[0] in ("outcome", calls.ENDED):
                dask_scheduler.note_sent(self, msg[1])

    def stimulus_cancel(self, keys: Collection[str], client: str, *arguments: Any, **keywords: Any) -> None:
        """Cancels tasks as Dask does, and ends those that run: a client that has just sent one, or has one in the queue
        that starts in this moment, does not know where."""
        given = {key: task.processing_on for key in keys if (task := self.tasks.get(key)) is not None}
        super().stimulus_cancel(keys, client, *arguments, **keywords)
        for key, worker in given.items():
            if worker is not None and key not in self.tasks and worker.address in self.workers:
                self.abandon(worker.address, key, cancelled=True)

    def remove_client(self, client: str, stimulus_id: str | None = None) -> None:
        """Forgets a client, which may have died, and the events and secrets that were for it alone."""
        super().remove_client(client, stimulus_id)
        self._leases.client_gone(client)
        for topic in dask_scheduler.unsubscribe(self, client, calls.TOPIC):
            self._secrets.forget(topic)

    def _end_later(self, client: str) -> None:
        """Ends the tasks that run for *client* alone, which has ended or left, unless it comes back and wants them."""
        theirs = {
            str(task.key): task.processing_on.address
            for task in self.clients[client].wants_what
            if task.processing_on is not None and len(task.who_wants) == 1
        }

        def end() -> None:
            for key, worker in theirs.items():
                if key not in self.tasks and worker in self.workers:
                    self.abandon(worker, key)

        if theirs:
            self.loop.call_later(_CLIENT_BACK_S, end)

    def abandon(self, worker: str, key: str, *, cancelled: bool = False) -> None:
        """Ends the task *key* on *worker*, for which nobody waits any more. An earlier worker knows no such message.

        cancelled: nobody sends it again under its key, so it does not even begin.
        """
        if carried.KEY in self.workers[worker].extra:
            self.sick.ends_task(worker)
            self.worker_send(worker, {"op": calls.ABANDON_MESSAGE, "key": key, "cancelled": cancelled})

    def forget_topic(self, topic: str) -> None:
        """Drops the last events and the secrets of a client's *topic*, which leaves."""
        if topic.startswith(calls.TOPIC):
            dask_scheduler.drop_events(self, topic)
            self._secrets.forget(topic)

    async def close(self, *arguments: Any, **keywords: Any) -> None:
        """Ends the scheduler; nodes that wait for a layout get the present one."""
        self._ending = True
        self._changes.notify()
        self._killers.stop_waiting()
        await super().close(*arguments, **keywords)

    @property
    def leased(self) -> set[str]:
        """The slots that gangs have."""
        return self._leases.taken

    @property
    def gangs(self) -> dict[str, bool]:
        """The gangs that there are, and whether each has its slots."""
        return self._leases.gangs

    def _nodes_behind(self) -> tuple[str, ...]:
        """Returns the nodes with workers that cannot be connected to."""
        found = {str(self.workers[each].name).rpartition("/")[0] for each in self._behind if each in self.workers}
        return tuple(sorted(found))

    def _slots_in_service(self) -> dict[str, bool]:
        """Returns the slots that take tasks, and whether one runs there or waits to."""
        running = (worker for worker in self.workers.values() if worker.status == Status.running)
        return {str(worker.name): bool(worker.processing) for worker in running}

    def _draining(self) -> dict[str, tuple[str, ...]]:
        """Returns the tasks that still run on slots that go out of service: their runners have paused the workers."""
        return {
            str(worker.name): tuple(sorted(str(task.key).rpartition("-")[0] for task in worker.processing))
            for worker in self.workers.values()
            if worker.status == Status.paused
        }

    async def _hand_on(self, seen: str | None = None, wait_s: float = 0.0) -> FleetLayout:
        """Returns the layout, as soon as its digest is another than *seen*, or after *wait_s* seconds."""
        await self._changes.until(lambda: self._ending or self._offered.digest != seen, wait_s)
        return self._offered
