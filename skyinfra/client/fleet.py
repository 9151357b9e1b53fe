"""The connection to a fleet: its state, questions to its head and nodes, and events of tasks."""

from __future__ import annotations

import concurrent.futures
import threading
import uuid
from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from typing import Any, TypeVar

from skyinfra.client.connection import Connection
from skyinfra.client.dashboard import Dashboard
from skyinfra.client.dispatch import Dispatcher
from skyinfra.client.loop import LoopThread
from skyinfra.client.snapshot import Snapshot
from skyinfra.client.watching import Watcher
from skyinfra.errors import FleetError, FleetUnreachable
from skyinfra.protocol.manifest import Manifest
from skyinfra.protocol.rpc import Peer
from skyinfra.worker.execute import ENDED

T = TypeVar("T")

_ANSWER_S = 30.0


@dataclass(frozen=True)
class RunningTask:
    """A task that runs: its unique key, the name of its function, and for how long, in seconds."""

    key: str
    name: str
    seconds: float


class Fleet:
    """The connection of this process to a fleet, which all pools share that are selected from one another.

    topic: of the scheduler; its events are for this client. brings_first: whether large arguments are at the head
    before a task has been sent, so that they may be changed then. Use it from any thread.
    """

    def __init__(self, manifest: Manifest, *, timeout: float, patience: float, watcher: Watcher) -> None:
        self.manifest = manifest
        self.watcher = watcher
        self.brings_first = True
        self.topic = f"skyinfra-{uuid.uuid4().hex}"
        self.loop = LoopThread()
        self._ended = threading.Event()
        self._dashboards: list[Dashboard] = []
        self._line_sinks: dict[str, Callable[[list[list[str]]], object]] = {}
        try:
            self.dispatcher = self.loop.run(self._open(timeout, patience))
        except BaseException:
            self.loop.close()
            raise

    async def _open(self, timeout: float, patience: float) -> Dispatcher:
        connection = Connection(
            self.manifest, timeout=timeout, patience=patience, topic=self.topic, on_event=self._on_event
        )
        await connection.open()
        dispatcher = Dispatcher(connection)
        await dispatcher.start()
        return dispatcher

    # State of the fleet ---------------------------------------------------------------------------------------------

    def node_names(self) -> list[str]:
        """The names of the nodes: those of the manifest, then those that the head knows besides."""
        now = self.look()
        told = now.state.slots if now.state is not None else {}
        known = [node.name for node in self.manifest.nodes]
        return list(dict.fromkeys([*known, *sorted({*told, *(slot.node for slot in (*now.slots, *now.draining))})]))

    def running(self) -> dict[str, list[RunningTask]]:
        """Returns the tasks that run on each slot, by its name. Raises `FleetUnreachable`."""
        found = self._from_head(lambda connection: connection.running())
        return {slot: [RunningTask(*each) for each in tasks] for slot, tasks in found.items()}

    def look(self) -> Snapshot:
        """The fleet as its head describes it now. Raises `FleetUnreachable`."""
        return self._from_head(Connection.look)

    def dashboard(self, port: int = 0) -> str:
        """Opens the dashboard at *port* of this machine; returns its address. See `Pool.dashboard`."""
        self.check_open()
        dashboard = Dashboard(self.dispatcher.connection)
        self.loop.run(dashboard.start(port))
        self._dashboards.append(dashboard)
        return dashboard.url

    # Questions ------------------------------------------------------------------------------------------------------

    def ask(self, node: str, question: str, *, wait_s: float = _ANSWER_S, **arguments: Any) -> Any:
        """The answer of the runner of *node*, by way of the head; see `skyinfra.protocol.questions`.

        Raises `NodeError` where it answers with an error, or not within *wait_s* seconds; `FleetUnreachable`.
        """
        return self._from_head(lambda connection: connection.ask(node, question, arguments, wait_s))

    def with_head(self, work: Callable[[Peer], Coroutine[Any, Any, T]]) -> T:
        """The result of *work*, which calls the scheduler of the head. Raises `FleetUnreachable`."""
        self.check_open()
        try:
            return self.loop.run(work(self.dispatcher.connection.client.scheduler))
        except OSError as error:
            if error.errno is not None:  # of a file here; what Dask says of a connection has no number
                raise
            raise self._silent(error) from None

    def _from_head(self, ask: Callable[[Connection], Coroutine[Any, Any, T]]) -> T:
        self.check_open()
        try:
            return self.loop.run(ask(self.connection))
        except OSError as error:
            raise self._silent(error) from None

    def _silent(self, error: OSError) -> FleetUnreachable:
        return FleetUnreachable(
            f"the head of {self.manifest.fleet} does not answer at {self.manifest.head}: "
            f"{error or type(error).__name__}"
        )

    @property
    def connection(self) -> Connection:
        """The connection to the head, for coroutines that run in its event loop; see `in_loop`."""
        return self.dispatcher.connection

    def in_loop(self, coroutine: Coroutine[Any, Any, T]) -> T:
        """The result of *coroutine*, which runs in the event loop of the connection; an interrupt cancels it."""
        future = self.in_loop_soon(coroutine)
        try:
            return future.result()
        finally:
            future.cancel()

    def in_loop_soon(self, coroutine: Coroutine[Any, Any, T]) -> concurrent.futures.Future[T]:
        """Starts *coroutine* as `in_loop` does, without waiting; cancelling the future cancels it."""
        if self._ended.is_set():
            coroutine.close()
        self.check_open()
        return self.loop.start(coroutine)

    def check_open(self) -> None:
        if self._ended.is_set():
            raise FleetError(f"the pool {self.manifest.fleet} is closed", hint="Use it inside its `with` block.")

    # Events ---------------------------------------------------------------------------------------------------------

    def listen(self, run_id: str, sink: Callable[[list[list[str]]], object] | None) -> None:
        """Hands the lines of the script run *run_id* to *sink*, in another thread; None ends it."""
        if sink is None:
            self._line_sinks.pop(run_id, None)
        else:
            self._line_sinks[run_id] = sink

    def _on_event(self, message: tuple[str, str, Any]) -> None:
        kind, name, content = message
        if kind in ("outcome", ENDED):
            for key in [name] if kind == "outcome" else [key for key, _ in content]:
                self.watcher.ended(key)
            self.dispatcher.executor.arrived(name, content)
        elif kind != "lines":
            self.watcher.told(kind, name, content)
        elif name in self._line_sinks:
            self._line_sinks[name](content)

    # Closing --------------------------------------------------------------------------------------------------------

    @property
    def closed(self) -> bool:
        """Whether `close` was called."""
        return self._ended.is_set()

    def close(self) -> None:
        """Cancels all tasks that were not waited for and leaves the fleet. May be called again."""
        if not self._ended.is_set():
            self._ended.set()
            try:
                self.loop.run(self._leave())
            finally:
                self.loop.close()

    async def _leave(self) -> None:
        for dashboard in self._dashboards:
            await dashboard.close()
        await self.dispatcher.close()
        await self.connection.close()
