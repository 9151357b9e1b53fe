"""A fleet that tasks can be shipped to."""

from __future__ import annotations

import concurrent.futures
import queue
import threading
import types
import uuid
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self, TypeVar, overload

from skyinfra._errors import FleetError, FleetUnreachable, NotSupported
from skyinfra.client import launching, pickling
from skyinfra.client.choice import Size
from skyinfra.client.connection import Connection
from skyinfra.client.dispatch import Dispatcher
from skyinfra.client.futures import Future
from skyinfra.client.gangs import Gangs, Launch
from skyinfra.client.loop import LoopThread
from skyinfra.client.snapshot import ANYWHERE, Snapshot, Target
from skyinfra.client.task import Compute, Task
from skyinfra.protocol.gang import Framework, RankEnd, Work
from skyinfra.protocol.instance import InstanceInfo
from skyinfra.protocol.manifest import Manifest, ManifestNode

T = TypeVar("T")

_PATIENCE_S = 30.0
_ANSWER_S = 30.0


def open_pool(manifest: Manifest, *, timeout: float = 15, patience: float = _PATIENCE_S) -> Pool:
    """Connects to the fleet of *manifest*.

    timeout: seconds for the connection. patience: seconds for which the head or a slot may be gone before those who
    wait for it get `FleetUnreachable` or `SlotLost`; worker processes and heads that restart are back before.
    Raises `FleetUnreachable`, `CredentialsRefused`, `VersionMismatch`, `InvalidManifest`.
    """
    return Pool(manifest, timeout=timeout, patience=patience)


@dataclass(frozen=True)
class RunningTask:
    """A task that runs: its unique key, the name of its function, and for how long, in seconds."""

    key: str
    name: str
    seconds: float


class Pool:
    """A connected fleet; a context manager. Closing it cancels what was not waited for. Use it from any thread."""

    def __init__(self, manifest: Manifest, *, timeout: float, patience: float) -> None:
        self.manifest = manifest
        self.target = ANYWHERE
        self._ended = threading.Event()
        self._line_sinks: dict[str, Callable[[list[list[str]]], object]] = {}
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

    # The fleet ------------------------------------------------------------------------------------------------------

    def slots(self) -> list[InstanceInfo]:
        """The slots that are there now, in slot order: by node as in the manifest, then by index.

        Slots that a changed layout takes away, on which tasks may still end, are not among them. Raises
        `FleetUnreachable` where the head does not answer.
        """
        return [slot for slot in self.look().slots if self.target.takes(slot)]

    def look(self) -> Snapshot:
        """The fleet as its head describes it now. Raises `FleetUnreachable`."""
        self._check_open()
        try:
            return self._loop.run(self._dispatcher.connection.look())
        except OSError as error:
            raise self._silent(error) from None

    def _silent(self, error: OSError) -> FleetUnreachable:
        return FleetUnreachable(
            f"the head of {self.manifest.fleet} does not answer at {self.manifest.head}: "
            f"{error or type(error).__name__}"
        )

    def ask(self, node: str, question: str, *, wait_s: float = _ANSWER_S, **arguments: Any) -> Any:
        """What the runner of *node* answers, by way of the head; see `skyinfra.protocol.questions`.

        Raises `NodeError` where it answers with an error, or not within *wait_s* seconds; `FleetUnreachable`.
        """
        self._check_open()
        try:
            return self._loop.run(self._dispatcher.connection.ask(node, question, arguments, wait_s))
        except OSError as error:
            raise self._silent(error) from None

    def running(self) -> dict[str, list[RunningTask]]:
        """The tasks that run on each slot, by its name, as the head knows it: about a second old."""
        self._check_open()
        try:
            found = self._loop.run(self._dispatcher.connection.running())
        except OSError as error:
            raise self._silent(error) from None
        return {slot: [RunningTask(*each) for each in tasks] for slot, tasks in found.items()}

    def node_names(self) -> list[str]:
        """The names of the nodes: those of the manifest, then those that the head knows besides."""
        now = self.look()
        told = now.state.slots if now.state is not None else {}
        known = [node.name for node in self.manifest.nodes]
        return list(dict.fromkeys([*known, *sorted({*told, *(slot.node for slot in (*now.slots, *now.draining))})]))

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

    def nodes(self) -> list[ManifestNode]:
        """The nodes of the fleet, as its manifest names them."""
        return list(self.manifest.nodes)

    # Tasks ----------------------------------------------------------------------------------------------------------

    @overload
    def submit(self, task: Task[T], /) -> Future[T]: ...
    @overload
    def submit(self, function: Compute[..., T], /, *args: object, **kwargs: object) -> Future[T]: ...
    @overload
    def submit(self, function: Callable[..., T], /, *args: object, **kwargs: object) -> Future[T]: ...
    def submit(self, task: Any, /, *args: object, **kwargs: object) -> Future[Any]:
        """Ships a task, or a function with its arguments, to one slot, and returns at once.

        As many tasks as the fleet has slots are sent to it; others wait here. Raises `TaskNotPicklable`.
        """
        if isinstance(task, Task):
            if args or kwargs:
                raise TypeError("a task has its arguments already; submit the function to give others")
        else:
            task = pickling.as_task(task, args, kwargs)
        return self.send(task, self.target)

    def broadcast(self, task: Task[T], *, slots: Sequence[InstanceInfo] | None = None) -> list[T]:
        """Runs *task* on every slot and gives one result per slot, in slot order; ``task @ pool`` is the same.

        slots: only on these; by default on all that the fleet is to have or that are there. A slot that is not there
        is waited for: `SlotLost` is raised when it stays away, and when the layout has it no more or gives it another
        profile than in *slots*. The first task that raises ends it; its exception is raised, the others are cancelled.
        """
        futures: list[Future[T]] = []
        try:
            for target in self._targets(slots, task.settings.profile):
                futures.append(self.send(task, target, windowed=False))
            self._raise_first(futures)
            return [future.result() for future in futures]
        finally:
            for future in futures:
                future.cancel()

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
        """
        if window is not None and window < 1:
            raise ValueError(f"window is at least 1, not {window}")
        if not iterables:
            raise TypeError("map() needs at least one iterable")
        tasks = (pickling.as_task(function, items, {}) for items in zip(*iterables, strict=False))
        return self.stream(tasks, window=window, ordered=ordered)

    def stream(self, tasks: Iterator[Task[T]], *, window: int | None = None, ordered: bool = True) -> Iterator[T]:
        """The results of *tasks*, which are taken as slots become free; see `map`."""
        finished: queue.SimpleQueue[Future[T]] = queue.SimpleQueue()
        kept: dict[Future[T], None] = {}  # submitted and not given out, in the order of submission
        running = 0
        exhausted = False
        try:
            while True:
                limit = window or self._dispatcher.window(self.target).limit
                while not exhausted and running < limit and len(kept) < 2 * limit:
                    task = next(tasks, None)
                    if task is None:
                        exhausted = True
                        break
                    future = self.send(task, self.target, windowed=False)
                    kept[future] = None
                    running += 1
                    future.when_done(finished.put)
                if not kept:
                    return
                first = next(iter(kept))
                if ordered and first.done():
                    del kept[first]
                    yield first.result()
                    continue
                ended = finished.get()
                running -= 1
                if not ordered:
                    del kept[ended]
                    yield ended.result()
        finally:
            for future in kept:
                future.cancel()

    def send(self, task: Task[T], target: Target, *, windowed: bool = True) -> Future[T]:
        """Ships *task* to *target*. windowed: wait here while the fleet has as many tasks as slots."""
        self._check_open()
        target = target.narrowed(profile=task.settings.profile)
        shipment = pickling.Shipment(task, topic=self.topic)
        if task.settings.slots > 1:
            return self._send_to_several(shipment, target)
        inner = self._loop.start(self._dispatcher.execute(shipment, target, windowed=windowed))
        return Future(shipment.name, inner, key=shipment.key)

    def _send_to_several(self, shipment: pickling.Shipment, target: Target) -> Future[Any]:
        settings = shipment.settings
        if target.slot is not None:
            raise NotSupported(
                "a task that takes several slots does not run on every slot", field="slots", given=settings.slots
            )
        launch = Launch(
            Work(shipment.name, shipment.call),
            framework=None,
            size=Size(nodes=1, per_node=settings.slots),
            target=target,
            timeout=settings.timeout,
            key=shipment.key,
        )
        inner = self._loop.start(self._gangs.several(launch, settings.retries))
        return Future(shipment.name, inner, key=shipment.key)

    # Gangs ----------------------------------------------------------------------------------------------------------

    def launch(
        self,
        target: Callable[..., Any] | Path,
        *args: Any,
        nodes: int | None = None,
        per_node: int | None = None,
        framework: Framework = "torch",
        max_restarts: int = 0,
        env: Mapping[str, str] | None = None,
        timeout: float | None = None,
        on_line: Callable[[int, str, str], object] | None = None,
        **kwargs: Any,
    ) -> list[Any]:
        """Runs *target* once on each of several slots, as the ranks of one program; the results in the order of ranks.

        All ranks start together, on *per_node* slots of each of *nodes* nodes (by default on all that are there), or
        none does; gangs whose slots are taken wait in the order in which they came. Each rank is a process of its own,
        with the environment that *framework* reads: ``torch.distributed.init_process_group()`` needs no arguments;
        ``jax.distributed.initialize()`` needs ``num_processes`` and ``process_id``, which `sky.gang` tells, as it tells
        everything else. Ranks on whole GPUs see all GPUs of their gang on their node, and take that of their
        ``local_rank``; a rank on a partition sees it alone.

        target: a function, called with *args* and *kwargs*; or the path of a script, whose arguments *args* are, and
        whose results are exit codes. max_restarts: how often the gang starts again after a failure: with
        `SpotCheckpointer` it goes on where it was. env: variables of every rank. timeout: seconds until all ranks must
        have their slots. on_line: called in this thread, while the ranks run, with the rank, ``stdout`` or ``stderr``,
        and the text of each line; without it the lines are in the output of the tasks.

        The first rank that fails ends all, at once. What it raised is raised here, with its remote traceback and a note
        that names the rank; `GangFailed` where it ended without an exception, and for a script. Ctrl-C ends all ranks.
        Raises `InvalidField`, `SlotLost`, `TaskNotPicklable`, `FleetUnreachable`, TimeoutError. Warns with
        `GangWarning` where ranks share a GPU. The start of a rank that a head or a connection forgets is repeated.
        """
        work = launching.work(target, args, kwargs)
        options = launching.Options(framework, max_restarts, timeout)
        return launching.launch(self, work, Size(nodes, per_node), options, env=env, on_line=on_line)

    def start_gang(self, launch: Launch) -> concurrent.futures.Future[list[RankEnd]]:
        """Starts a gang as `launch` says and returns at once; cancelling the future ends its ranks."""
        self._check_open()
        return self._loop.start(self._gangs.run(launch))

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
    def _raise_first(futures: Sequence[Future[T]]) -> None:
        """Waits until all have ended or one has failed, and raises what that one raised."""
        finished: queue.SimpleQueue[Future[T]] = queue.SimpleQueue()
        for future in futures:
            future.when_done(finished.put)
        for _ in futures:
            error = finished.get().exception()
            if error is not None:
                raise error

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
            self._dispatcher.arrived(name, content)
        elif name in self._line_sinks:
            self._line_sinks[name](content)

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
        await self._dispatcher.close()
        await self._dispatcher.connection.close()

    def _check_open(self) -> None:
        if self._ended.is_set():
            raise FleetError(f"the pool {self.manifest.fleet} is closed", hint="Use it inside its `with` block.")

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
