"""The fleet of a pool: its slots and nodes, and the answers of its head and its nodes."""

from __future__ import annotations

import concurrent.futures
import threading
from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from typing import Any, TypeVar

from skyinfra.client.connection import Connection
from skyinfra.client.dashboard import Dashboard
from skyinfra.client.dispatch import Dispatcher
from skyinfra.client.loop import LoopThread
from skyinfra.client.snapshot import Snapshot, Target
from skyinfra.errors import FleetError, FleetUnreachable
from skyinfra.protocol.instance import InstanceInfo
from skyinfra.protocol.manifest import Manifest, ManifestNode
from skyinfra.protocol.rpc import Peer

T = TypeVar("T")

_ANSWER_S = 30.0


@dataclass(frozen=True)
class RunningTask:
    """A task that runs: its unique key, the name of its function, and for how long, in seconds."""

    key: str
    name: str
    seconds: float


class WithFleet:
    """The part of a pool that is about its fleet."""

    manifest: Manifest
    target: Target
    _loop: LoopThread
    _dispatcher: Dispatcher
    _dashboards: list[Dashboard]
    _ended: threading.Event

    # Slots, nodes, tasks ---------------------------------------------------------------------------------------------

    def slots(self) -> list[InstanceInfo]:
        """The slots that are there now, in slot order: by node as in the manifest, then by index.

        Slots that a changed layout takes away, on which tasks may still end, are not among them. Raises
        `FleetUnreachable` where the head does not answer.
        """
        return [slot for slot in self.look().slots if self.target.takes(slot)]

    def nodes(self) -> list[ManifestNode]:
        """The nodes of the fleet, as its manifest names them."""
        return list(self.manifest.nodes)

    def node_names(self) -> list[str]:
        """The names of the nodes: those of the manifest, then those that the head knows besides."""
        now = self.look()
        told = now.state.slots if now.state is not None else {}
        known = [node.name for node in self.manifest.nodes]
        return list(dict.fromkeys([*known, *sorted({*told, *(slot.node for slot in (*now.slots, *now.draining))})]))

    def running(self) -> dict[str, list[RunningTask]]:
        """The tasks that run on each slot, by its name, as the head knows it: about a second old."""
        self._check_open()
        try:
            found = self._loop.run(self._dispatcher.connection.running())
        except OSError as error:
            raise self._silent(error) from None
        return {slot: [RunningTask(*each) for each in tasks] for slot, tasks in found.items()}

    def look(self) -> Snapshot:
        """The fleet as its head describes it now. Raises `FleetUnreachable`."""
        self._check_open()
        try:
            return self._loop.run(self._dispatcher.connection.look())
        except OSError as error:
            raise self._silent(error) from None

    def dashboard(self, port: int = 0) -> str:
        """The address, on this machine, of the dashboard of the fleet's scheduler: there until the pool is closed.

        What connects to it goes through this pool's connection: no port of the fleet has to be open for it. port: on
        which to listen; 0 is any. Raises `MissingDependency` where the head lacks what draws it, `PortTaken`.
        """
        self._check_open()
        dashboard = Dashboard(self._dispatcher.connection)
        self._loop.run(dashboard.start(port))
        self._dashboards.append(dashboard)
        return dashboard.url

    # Answers ------------------------------------------------------------------------------------------------

    def ask(self, node: str, question: str, *, wait_s: float = _ANSWER_S, **arguments: Any) -> Any:
        """The answer of the runner of *node*, by way of the head; see `skyinfra.protocol.questions`.

        Raises `NodeError` where it answers with an error, or not within *wait_s* seconds; `FleetUnreachable`.
        """
        self._check_open()
        try:
            return self._loop.run(self._dispatcher.connection.ask(node, question, arguments, wait_s))
        except OSError as error:
            raise self._silent(error) from None

    def with_head(self, work: Callable[[Peer], Coroutine[Any, Any, T]]) -> T:
        """The result of *work*, which calls the scheduler of the head. Raises `FleetUnreachable`."""
        self._check_open()
        try:
            return self._loop.run(work(self._dispatcher.connection.client.scheduler))
        except OSError as error:
            if error.errno is not None:  # of a file here; what Dask says of a connection has no number
                raise
            raise self._silent(error) from None

    @property
    def connection(self) -> Connection:
        """The connection to the head, for what runs in its event loop; see `in_loop`."""
        return self._dispatcher.connection

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
        self._check_open()
        return self._loop.start(coroutine)

    def _silent(self, error: OSError) -> FleetUnreachable:
        return FleetUnreachable(
            f"the head of {self.manifest.fleet} does not answer at {self.manifest.head}: "
            f"{error or type(error).__name__}"
        )

    def _check_open(self) -> None:
        if self._ended.is_set():
            raise FleetError(f"the pool {self.manifest.fleet} is closed", hint="Use it inside its `with` block.")
