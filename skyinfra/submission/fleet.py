"""The connection to a fleet: its state, questions to its head and nodes, and events of tasks."""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import os
import secrets
import threading
import time
import uuid
from collections.abc import Callable, Coroutine, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from skyinfra.engine.forwarding import Listener, join
from skyinfra.engine.loop import LoopThread
from skyinfra.errors import FleetError, FleetUnreachable
from skyinfra.port_forward import forwarding
from skyinfra.protocol import questions
from skyinfra.protocol.calls import BESIDE, ENDED, ITEM, Item, Outcome
from skyinfra.protocol.manifest import Manifest
from skyinfra.protocol.secrets import Secret
from skyinfra.submission.connection import Asker, Connection, Limits
from skyinfra.submission.dispatch import Dispatcher
from skyinfra.submission.items import forked
from skyinfra.submission.snapshot import Snapshot
from skyinfra.submission.watching import Watcher
from skyinfra.sync.includes import Includes
from skyinfra.tasks.included import Included
from skyinfra.tasks.secrets import Secrets

T = TypeVar("T")

# The runner of a node answers a question within that long.
ANSWER_S = 30.0


@dataclass(frozen=True)
class RunningTask:
    """A task that runs: its unique key, the name of its function, and for how long, in seconds."""

    key: str
    name: str
    seconds: float


class AskedFleet:
    """A fleet that this process asks, and sends nothing that runs. No answer of it runs code here.

    connection: to the head, for coroutines that run in its event loop; see `in_loop`. Use it from any thread. Raises
    `FleetUnreachable`, `CredentialsRefused`, `VersionMismatch`, `InvalidManifest`, `UnsafeAnswer`.
    """

    connection: Asker

    def __init__(self, manifest: Manifest, limits: Limits) -> None:
        self._forwarding = forwarding(manifest)
        self.manifest = self._forwarding.manifest if self._forwarding is not None else manifest
        self.loop = LoopThread()
        self._process = os.getpid()
        self._ended = threading.Event()
        self._seen: tuple[float, Snapshot] | None = None
        self._listening: list[Listener] = []
        try:
            self.loop.run(self._open(limits))
        except BaseException:
            self.loop.close()
            self._stop_forwarding()
            raise

    async def _open(self, limits: Limits) -> None:
        self.connection = Asker(self.manifest, limits)
        await self.connection.open()

    # State of the fleet ---------------------------------------------------------------------------------------------

    def look(self, within_s: float = 0.0) -> Snapshot:
        """Returns the fleet as its head describes it now, or has described it here in the last seconds.

        Raises `FleetUnreachable`.
        """
        if self._seen is None or time.monotonic() - self._seen[0] >= within_s:
            self._seen = time.monotonic(), self.from_head(self.connection.look())
        return self._seen[1]

    def listen(self, listener: Listener, port: int, *, field: str, hint: str | None = None) -> None:
        """Starts *listener* at *port* until the fleet is left. Raises `PortTaken`."""
        self.in_loop(listener.start(port, field=field, hint=hint))
        self._listening.append(listener)

    async def way_to(self, node: str, port: int) -> Any:
        """A connection to the head that leads on to *port* of *node*. Raises `NodeError`, `NotSupported`, OSError."""
        ticket = secrets.token_urlsafe(32)
        # Both at once: each takes some round trips.
        connecting = asyncio.ensure_future(self.connection.another())
        try:
            await self.connection.ask(node, questions.FORWARD, {"port": port, "ticket": ticket}, ANSWER_S)
            comm = await connecting
            await join(comm, ticket)
        except BaseException:
            connecting.cancel()
            connecting.add_done_callback(_abort)
            raise
        return comm

    # Questions ------------------------------------------------------------------------------------------------------

    def ask(self, node: str, question: str, *, wait_s: float = ANSWER_S, **arguments: Any) -> Any:
        """See `Pool.ask`."""
        return self.from_head(self.connection.ask(node, question, arguments, wait_s))

    def from_head(self, asked: Coroutine[Any, Any, T]) -> T:
        """Returns the result of *asked*, which calls the head. Raises `FleetUnreachable`."""
        try:
            return self.in_loop(asked)
        except OSError as error:
            # Those of a file here have a number; what Dask says of a connection has none.
            if error.errno is not None and not isinstance(error, ConnectionError | TimeoutError):
                raise
            raise FleetUnreachable(
                f"the head of {self.manifest.fleet} does not answer at {self.manifest.head}: "
                f"{error or type(error).__name__}"
            ) from None

    def in_loop(self, coroutine: Coroutine[Any, Any, T]) -> T:
        """The result of *coroutine*, which runs in the event loop of the connection; an interrupt cancels it."""
        return self.loop.run(self._if_open(coroutine))

    def in_loop_soon(self, coroutine: Coroutine[Any, Any, T]) -> concurrent.futures.Future[T]:
        """Starts *coroutine* as `in_loop` does, without waiting; cancelling the future cancels it."""
        return self.loop.start(self._if_open(coroutine))

    def _if_open(self, coroutine: Coroutine[Any, Any, T]) -> Coroutine[Any, Any, T]:
        try:
            self.check_open()
        except FleetError:
            coroutine.close()
            raise
        return coroutine

    def check_open(self) -> None:
        """Raises `ConnectionForked` in a child of the process that connected, and `FleetError` after `close`."""
        if os.getpid() != self._process:
            raise forked(self.manifest.fleet)
        if self._ended.is_set():
            raise FleetError(f"the pool {self.manifest.fleet} is closed", hint="Use it inside its `with` block.")

    def waits_inside(self, key: str, name: str) -> contextlib.AbstractContextManager[object]:
        """While it lasts, a task waits for the job *key*; who only asks knows of no others."""
        return contextlib.nullcontext()

    # Closing --------------------------------------------------------------------------------------------------------

    @property
    def closed(self) -> bool:
        """Whether `close` was called."""
        return self._ended.is_set()

    def close(self) -> None:
        """Leaves the fleet. May be called again. A forked process leaves nothing: the connection is its parent's."""
        if not self._ended.is_set() and os.getpid() == self._process:
            self._ended.set()
            try:
                self.loop.run(self._leave())
            finally:
                self.loop.close()
                self._stop_forwarding()

    def _stop_forwarding(self) -> None:
        if self._forwarding is not None:
            self._forwarding.close()

    async def _leave(self) -> None:
        for each in self._listening:
            await each.close()
        await self.connection.close()


def _abort(connected: asyncio.Future[Any]) -> None:
    if not connected.cancelled() and connected.exception() is None:
        connected.result().abort()


class Fleet(AskedFleet):
    """The connection of this process to a fleet, which all pools share that are selected from one another.

    topic: of the scheduler; its events are for this client. brings_first: whether large arguments are at the head
    before a task has been sent, so that they may be changed then. includes: what `Pool.sync` was called with; included:
    the files that were synced last, which tasks see. trees: the names of the trees that the head was sent. secrets:
    those of its tasks, of all of them those that were *given*. env: variables of all tasks. workdir: the path among
    these files of the folder that the working directory of each task is a copy of. Closing it cancels all tasks that
    were not waited for.
    """

    connection: Connection

    def __init__(
        self, manifest: Manifest, limits: Limits, *, watcher: Watcher, secrets: Sequence[str | Secret] = ()
    ) -> None:
        self.watcher = watcher
        self.brings_first = True
        self.includes: Includes | None = None
        self.included: Included | None = None
        self.trees: set[str] = set()
        self.env: dict[str, str] = {}
        self.workdir: str | None = None
        self.topic = f"skyinfra-{uuid.uuid4().hex}"
        self.secrets = Secrets(self.topic, secrets, lambda: self.dispatcher.declared_secrets)
        self._line_sinks: dict[str, Callable[[list[list[str]]], object]] = {}
        super().__init__(manifest, limits)

    async def _open(self, limits: Limits) -> None:
        self.connection = Connection(
            self.manifest,
            limits,
            topic=self.topic,
            on_event=self._on_event,
            forwarded=self._forwarding is not None,
        )
        await self.connection.open()
        self.dispatcher = Dispatcher(self.connection, self.watcher, self.trees)
        await self.dispatcher.start()

    async def _leave(self) -> None:
        await self.dispatcher.close()
        await super()._leave()

    def waits_inside(self, key: str, name: str) -> contextlib.AbstractContextManager[object]:
        """See `Dispatcher.waits_inside`."""
        return self.dispatcher.waits_inside(key, name)

    def variables(self, env: Mapping[str, str] | None) -> dict[str, str]:
        """The variables of a process of its own: those of all tasks, *env*, and where its working directory is."""
        beside = {} if self.workdir is None else {BESIDE: self.workdir}
        return {**self.env, **beside, **(env or {})}

    # Items of generators, see `skyinfra.submission.items` ------------------------------------------------------------

    async def run_on(self, worker: str, function: Callable[..., object], *arguments: object) -> None:
        """Calls *function* in the process at the address *worker*. Raises OSError."""
        await self.dispatcher.executor.run_on(worker, function, *arguments)

    async def whole(self, outcome: Outcome) -> Outcome:
        """Returns *outcome* with its result, where that stayed at the head. Raises `FleetUnreachable`."""
        while (found := await self.dispatcher.fetched(outcome)) is None:
            await self.connection.ready()
        return found

    # Events ---------------------------------------------------------------------------------------------------------

    @contextlib.contextmanager
    def listening(self, run_id: str, sink: Callable[[list[list[str]]], object]) -> Iterator[None]:
        """While it lasts, hands the lines of the script run *run_id* to *sink*, in another thread."""
        self._line_sinks[run_id] = sink
        try:
            yield
        finally:
            del self._line_sinks[run_id]

    def _on_event(self, message: tuple[str, str, Any]) -> None:
        kind, name, content = message
        if kind in ("outcome", ENDED):
            for key in [name] if kind == "outcome" else [key for key, _ in content]:
                self.watcher.ended(key)
            self.dispatcher.executor.arrived(name, content)
        elif kind == ITEM:
            self.dispatcher.executor.arrived(name, Item(*content))
        elif kind != "lines":
            self.watcher.handle(kind, name, content)
        elif name in self._line_sinks:
            self._line_sinks[name](content)
