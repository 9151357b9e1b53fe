"""A fleet that tasks can be shipped to."""

from __future__ import annotations

import functools
import queue
import threading
import types
import uuid
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, Self, TypeVar, overload

from skyinfra.client import chunks, jobs
from skyinfra.client.connection import Connection
from skyinfra.client.dashboard import Dashboard
from skyinfra.client.dispatch import Dispatcher
from skyinfra.client.files import FilesState, WithFiles
from skyinfra.client.fleet import WithFleet
from skyinfra.client.flow import Flow, check_map, tasks_of, total_of
from skyinfra.client.futures import Future
from skyinfra.client.gangs import Gangs
from skyinfra.client.jobs import Job
from skyinfra.client.launching import Launcher
from skyinfra.client.loop import LoopThread
from skyinfra.client.snapshot import ANYWHERE, Target
from skyinfra.client.watching import OnOutput, Watcher
from skyinfra.protocol.instance import InstanceInfo
from skyinfra.protocol.jobs import JobInfo
from skyinfra.protocol.manifest import Manifest
from skyinfra.tasks import pickling
from skyinfra.tasks.task import Compute, Gather, Task
from skyinfra.worker.execute import ENDED

T = TypeVar("T")

_PATIENCE_S = 30.0
_ANSWER_S = 30.0


def open_pool(
    manifest: Manifest,
    *,
    timeout: float = 15,
    patience: float = _PATIENCE_S,
    output: bool | OnOutput = True,
    progress: bool = True,
    includes: Sequence[str | Path] = (),
    excludes: Sequence[str] = (),
) -> Pool:
    """Connects to the fleet of *manifest*, and syncs *includes* without *excludes*, see `Pool.sync`.

    output, progress: see `connect`. timeout: seconds for the connection. patience: seconds for which the head or a slot
    may be gone before those who wait for it get `FleetUnreachable` or `SlotLost`; worker processes and heads that
    restart are back before. Raises `FleetUnreachable`, `CredentialsRefused`, `VersionMismatch`, `InvalidManifest`,
    `InvalidInclude`.
    """
    pool = Pool(manifest, timeout=timeout, patience=patience, watcher=Watcher(output, progress=progress))
    if includes:
        try:
            pool.sync(*includes, excludes=excludes)
        except BaseException:
            pool.close()
            raise
    return pool


class Pool(WithFleet, Launcher, WithFiles):
    """A connected fleet; a context manager. Closing it cancels what was not waited for. Use it from any thread."""

    def __init__(self, manifest: Manifest, *, timeout: float, patience: float, watcher: Watcher) -> None:
        self.manifest = manifest
        self._watcher = watcher
        self.target = ANYWHERE
        # Whether large arguments are at the head before `send` is back, so that they may be changed then.
        self.brings_first = True
        self._ended = threading.Event()
        self._dashboards: list[Dashboard] = []
        self._line_sinks: dict[str, Callable[[list[list[str]]], object]] = {}
        self._files = FilesState()
        self.topic = f"skyinfra-{uuid.uuid4().hex}"
        self._loop = LoopThread()
        try:
            self._dispatcher = self._loop.run(self._open(timeout, patience))
            self._gangs = Gangs(self._dispatcher, self.topic)
        except BaseException:
            self._loop.close()
            raise

    async def _open(self, timeout: float, patience: float) -> Dispatcher:
        connection = Connection(
            self.manifest, timeout=timeout, patience=patience, topic=self.topic, on_event=self._on_event
        )
        await connection.open()
        dispatcher = Dispatcher(connection)
        await dispatcher.start()
        return dispatcher

    def select(self, *, profile: str | None = None, node: str | None = None, accelerator: str | None = None) -> Pool:
        """The same fleet, of which only the slots of *profile*, of *node* and of *accelerator* are used.

        ``train(0) >> pool.select(profile="3g.40gb")``. It shares the connection: closing one closes both. A task that
        waits there while the layout is being changed goes on waiting; it gets `SlotLost` where no slot of the fleet is
        such a one, or none is left after a change. Raises `InvalidField` where this selection leaves nothing of an
        earlier one.
        """
        chosen = object.__new__(Pool)
        chosen.__dict__.update(self.__dict__)
        chosen.target = self.target.narrowed(node=node, profile=profile, accelerator=accelerator)
        return chosen

    # Operators ------------------------------------------------------------------------------------------------------

    @overload
    def __rrshift__(self, given: Task[T]) -> T: ...
    @overload
    def __rrshift__(self, given: Gather[T]) -> T: ...
    def __rrshift__(self, given: Any) -> Any:
        """``task >> pool`` and ``gather >> pool``."""
        if isinstance(given, Gather):
            ordered = given.ordered or not given.stream
            results = self.stream(iter(given.tasks), ordered=ordered, total=len(given.tasks))
            return results if given.stream else tuple(results)
        return self.submit(given).result() if isinstance(given, Task) else NotImplemented

    def __rmatmul__(self, task: Task[T]) -> list[T]:
        """``task @ pool``."""
        return self.broadcast(task) if isinstance(task, Task) else NotImplemented

    # Tasks ----------------------------------------------------------------------------------------------------------

    @overload
    def submit(self, task: Task[T], /) -> Future[T]: ...
    @overload
    def submit(self, task: Task[T], /, *, detach: str) -> Job[T]: ...
    @overload
    def submit(self, function: Compute[..., T], /, *args: object, detach: str, **kwargs: object) -> Job[T]: ...
    @overload
    def submit(self, function: Callable[..., T], /, *args: object, detach: str, **kwargs: object) -> Job[T]: ...
    @overload
    def submit(
        self, function: Compute[..., T], /, *args: object, detach: None = None, **kwargs: object
    ) -> Future[T]: ...
    @overload
    def submit(
        self, function: Callable[..., T], /, *args: object, detach: None = None, **kwargs: object
    ) -> Future[T]: ...
    def submit(
        self, task: Any, /, *args: object, detach: str | None = None, **kwargs: object
    ) -> Future[Any] | Job[Any]:
        """Ships a task, or a function with its arguments, to one slot, and returns at once.

        As many tasks as the fleet has slots are sent to it; others wait here. detach: leave it with the head as a job
        of that name, which goes on without this client; see `detach`. Raises `TaskNotPicklable`.
        """
        task = self.task_of(task, args, kwargs)
        if detach is not None:
            return self.detach(task, detach)
        return self.send(task, self.target)

    @staticmethod
    def task_of(task: Any, args: tuple[object, ...], kwargs: dict[str, object]) -> Task[Any]:
        """*task* itself, or that of a function with its arguments."""
        if not isinstance(task, Task):
            return pickling.as_task(task, args, kwargs)
        if args or kwargs:
            raise TypeError("a task has its arguments already; submit the function to give others")
        return task

    def detach(self, task: Task[T], name: str | None = None, *, priority: int = 0, replace: bool = False) -> Job[T]:
        """Leaves *task* with the head as a job, which goes on when this client ends and when the head restarts.

        As many jobs run at once as the fleet has slots: higher priorities first (from -1000 to 1000), those who submit
        in turns, and of each the oldest. name: of the job; None makes one. Names are unique among the jobs that the
        head keeps; replace: unless that job has ended, which is forgotten then with its result.

        A job runs at least once: again, from its beginning, where its slot or the head was lost before it had ended.
        ``timeout`` and ``retries`` of the task hold. Raises `JobNameTaken`, `TaskNotPicklable`, `TaskTooLarge` (above
        256 MiB), `SlotLost` where the fleet has no such slot, `StateDirectoryError` where the head's disk is full.
        """
        self._check_open()
        return jobs.detach(self, task, name, priority=priority, replace=replace)

    def bring(self, shipment: pickling.Shipment) -> None:
        """Makes sure that the head has what was synced for *shipment*. Raises what sending does."""
        self.in_loop(self._dispatcher.bring(shipment, files=True))

    def jobs(self) -> list[JobInfo]:
        """The jobs that the head keeps, in the order of their submission: queued, running and ended ones."""
        return self.in_loop(jobs.Line(self.connection).kept())

    def job(self, name: str) -> Job[Any]:
        """The job of that name, or id, or whose id begins so. Raises `JobNotFound`."""
        return jobs.Job(self, self.in_loop(jobs.Line(self.connection).wait(name, 0)))

    def broadcast(self, task: Task[T], *, slots: Sequence[InstanceInfo] | None = None) -> list[T]:
        """Runs *task* on every slot and gives one result per slot, in slot order; ``task @ pool`` is the same.

        slots: only on these; by default on all that the fleet is to have or that are there. A slot that is not there
        is waited for: `SlotLost` is raised when it stays away, and when the layout has it no more or gives it another
        profile than in *slots*. The first task that raises ends it; its exception is raised, the others are cancelled.
        """
        futures = self.spread(task, slots=slots)
        try:
            with self._watcher.counting(task.name, len(futures)) as advance:
                self._raise_first(futures, advance)
            return [future.result() for future in futures]
        finally:
            for future in futures:
                future.cancel()

    def spread(self, task: Task[T], *, slots: Sequence[InstanceInfo] | None = None) -> list[Future[T]]:
        """What `broadcast` waits for: one future per slot. Whoever calls this cancels those that are not needed."""
        futures: list[Future[T]] = []
        try:
            for target in self._targets(slots, task.settings.profile):
                futures.append(self.send(task, target, windowed=False))
        except BaseException:
            for future in futures:
                future.cancel()
            raise
        return futures

    @overload
    def map(
        self,
        function: Compute[..., T],
        *iterables: Iterable[Any],
        window: int | None = None,
        ordered: bool = True,
    ) -> Iterator[T]: ...
    @overload
    def map(
        self, function: Callable[..., T], *iterables: Iterable[Any], window: int | None = None, ordered: bool = True
    ) -> Iterator[T]: ...
    def map(
        self, function: Any, *iterables: Iterable[Any], window: int | None = None, ordered: bool = True
    ) -> Iterator[Any]:
        """The results of *function* for the items of *iterables*, which may be infinite.

        window: how many tasks are in flight at most, by default one per slot. Besides, as many finished results are
        kept when they are asked for slowly. ordered=False gives results in the order in which tasks complete.
        Nothing starts before the first result is asked for. The first task that raises ends it: its exception is
        raised, the rest is cancelled, as it is when the iterator is closed.

        Tasks of some milliseconds travel together, up to 64 in a message, once the first ones have shown that they
        are so short and where all iterables have a length; each is still a task of its own. By default each slot has
        such a message then, and another one is ready.
        """
        check_map(window, iterables)
        return self.stream(tasks_of(function, iterables), window=window, ordered=ordered, total=total_of(iterables))

    def stream(
        self, tasks: Iterator[Task[T]], *, window: int | None = None, ordered: bool = True, total: int | None = None
    ) -> Iterator[T]:
        """The results of *tasks*, which are taken as slots become free; see `map`. total: how many, where known."""
        ended: queue.SimpleQueue[Future[T]] = queue.SimpleQueue()
        with self.flow(tasks, window=window, ordered=ordered, total=total, when_done=ended.put) as flow:
            while True:
                ready = flow.advance()
                if ready is not None:
                    yield ready.result()
                elif flow.over:
                    return
                else:
                    flow.take(ended.get())

    def flow(
        self,
        tasks: Iterator[Task[T]],
        *,
        window: int | None,
        ordered: bool,
        total: int | None,
        when_done: Callable[[Future[T]], object],
    ) -> Flow[T]:
        """What `stream` goes by, for whoever waits in another way."""
        return Flow(
            tasks,
            send=functools.partial(self._send_together, windowed=window is None),
            slots=lambda: self._dispatcher.window(self.target).limit,
            window=window,
            total=total,
            ordered=ordered,
            when_done=when_done,
            counting=self._watcher.counting("tasks", total),
        )

    def send(self, task: Task[T], target: Target, *, windowed: bool = True) -> Future[T]:
        """Ships *task* to *target*. windowed: wait here while the fleet has as many tasks as slots."""
        return self._ship(self._shipment(task), target, windowed=windowed)

    def _send_together(self, tasks: Sequence[Task[T]], *, windowed: bool) -> list[Future[T]]:
        shipments = [self._shipment(task) for task in tasks]
        profiles = {shipment.settings.profile for shipment in shipments}
        if len(shipments) == 1 or len(profiles) > 1 or not all(map(chunks.suits, shipments)):
            return [self._ship(shipment, self.target, windowed=windowed) for shipment in shipments]
        target = self.target.narrowed(profile=profiles.pop())
        return chunks.Chunk(shipments, target, self._dispatcher, windowed=windowed).send(self._loop)

    def _shipment(self, task: Task[Any]) -> pickling.Shipment:
        self._check_open()
        several = task.settings.slots > 1
        return pickling.Shipment(
            task, topic=self.topic, echo=self._watcher.echoes, included=self.included, whole=several
        )

    def _ship(self, shipment: pickling.Shipment, target: Target, *, windowed: bool) -> Future[Any]:
        target = target.narrowed(profile=shipment.settings.profile)
        if shipment.settings.slots > 1:
            return self.send_to_several(shipment, target)
        if self.brings_first and not shipment.brought:
            # Now, while the arguments are what they were when the task was made: they are not copied.
            self._loop.run(self._dispatcher.bring(shipment))
        inner = self._loop.start(self._dispatcher.execute(shipment, target, windowed=windowed))
        return Future(shipment.name, inner, key=shipment.key)

    def _targets(self, slots: Sequence[InstanceInfo] | None, profile: str | None) -> list[Target]:
        chosen = self.target.narrowed(profile=profile)
        if slots is None and chosen == ANYWHERE:
            return [Target(slot=name) for name in self.look().promised(self.manifest)]
        if slots is None:
            slots = [slot for slot in self.look().slots if chosen.takes(slot)]
            if not slots:
                return [chosen]  # waits for the first one, or says that there is none
        return [Target(slot.slot, profile=slot.profile) for slot in slots]

    @staticmethod
    def _raise_first(futures: Sequence[Future[T]], advance: Callable[[], None]) -> None:
        """Waits until all have ended or one has failed, and raises what that one raised."""
        finished: queue.SimpleQueue[Future[T]] = queue.SimpleQueue()
        for future in futures:
            future.when_done(finished.put)
        for _ in futures:
            error = finished.get().exception()
            if error is not None:
                raise error
            advance()

    # Lines of scripts -----------------------------------------------------------------------------------------------

    def listen(self, run_id: str, sink: Callable[[list[list[str]]], object] | None) -> None:
        """Hands the lines of the script run *run_id* to *sink*, in another thread; None ends it."""
        if sink is None:
            self._line_sinks.pop(run_id, None)
        else:
            self._line_sinks[run_id] = sink

    def _on_event(self, message: tuple[str, str, Any]) -> None:
        kind, name, content = message
        if kind == "outcome":
            self._watcher.ended(name)
            self._dispatcher.executor.arrived(name, content)
        elif kind == ENDED:
            for key, _ in content:
                self._watcher.ended(key)
            self._dispatcher.executor.arrived(name, content)
        elif kind == "lines":
            if name in self._line_sinks:
                self._line_sinks[name](content)
        else:
            self._watcher.told(kind, name, content)

    # Closing --------------------------------------------------------------------------------------------------------

    def close(self) -> None:
        """Cancels what was not waited for and leaves the fleet, which stays as it is. May be called again."""
        if not self._ended.is_set():
            self._ended.set()
            try:
                self._loop.run(self._leave())
            finally:
                self._loop.close()

    async def _leave(self) -> None:
        for dashboard in self._dashboards:
            await dashboard.close()
        await self._dispatcher.close()
        await self._dispatcher.connection.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: types.TracebackType | None
    ) -> None:
        self.close()

    def __reduce__(self) -> tuple[object, ...]:
        raise TypeError("a pool is a connection of this process; pass what the task needs from it instead")

    def __repr__(self) -> str:
        nodes, slots = self.manifest.node_count, self.manifest.node_count * len(self.manifest.slots)
        notes = [f"{nodes} nodes", f"{slots} slots"]
        notes += ["simulated"] if self.manifest.simulated else []
        notes += ["closed"] if self._ended.is_set() else []
        return f"<Pool {self.manifest.fleet}: {', '.join(notes)}>"
