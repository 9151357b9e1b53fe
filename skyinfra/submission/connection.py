"""The connection to the head of a fleet: to ask it, or to run tasks, where it is opened again when it is gone.

Everything here runs in the event loop of a `LoopThread`.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import math
import os
import platform
import socket
import ssl
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import distributed

from skyinfra.engine import dask_client, dask_comms, forwarding
from skyinfra.engine.credentials import Credentials
from skyinfra.engine.waiting import within
from skyinfra.errors import (
    BootFailed,
    CredentialsRefused,
    FleetUnreachable,
    InvalidManifest,
    NodeError,
    SkyinfraError,
    VersionMismatch,
)
from skyinfra.first_boot import report_client
from skyinfra.protocol import calls, rpc, services
from skyinfra.protocol.fleet import STATE_VERSION, FleetState, NodeFailure, SizeState
from skyinfra.protocol.instance import SICK_KEY, STARTUP_KEY, InstanceInfo
from skyinfra.protocol.manifest import Manifest
from skyinfra.protocol.rpc import Peer
from skyinfra.submission.lacks import Lacks
from skyinfra.submission.snapshot import Snapshot

T = TypeVar("T")

# One question to the head may take that long.
_ANSWER_S = 10.0
_PROBE_S = 3.0
# After a connection that failed; Dask needs time to notice that.
_PAUSE_S = 0.1

# A head whose port is closed for that long is not waited for: one that starts again takes five seconds and more, which
# those wait that were connected, and those that are told to.
_REFUSED_S = 0.5

# What to do about a head that does not answer. That of a cloud's machine is started again by its systemd.
_CLOSED = (
    "Its machine answers, and nothing listens at that port: it boots, or its runner ended, which systemd starts again "
    "within seconds. `skyinfra ssh {fleet}` leads there, and `journalctl -u skyinfra-runner` says why it ended."
)
_ELSEWHERE = "Check that its machine runs and that the pool's allow_cidrs hold this client's address."
# In place of the above, by provider.
_HINTS = {
    "local": "It is a process of this machine: one that was killed is back within seconds; else `skyinfra deploy` "
    "starts it again, with its jobs, after a reboot for instance.",
    "container": "It is a container: `docker logs {head}` (or podman) on its host says how it is; `skyinfra deploy` "
    "starts it again, with its jobs. That of another machine is reached at that port of it: a firewall may refuse you.",
}


@dataclass(frozen=True)
class Limits:
    """For how long a head is waited for, in seconds, and which one.

    timeout: for a connection. patience: for a head that is gone, until everybody who waits for it hears
    `FleetUnreachable`. closed: whether the first connection waits as long for a head whose port is closed.
    any_version: whether one that speaks another version of the protocol is asked too.
    """

    timeout: float
    patience: float
    closed: bool = True
    any_version: bool = False


class Asker:
    """Asks the head of the fleet of *manifest*, and the nodes by way of it. Answers are read as data.

    lacks: tells who waits here for nodes that are missing.
    """

    def __init__(self, manifest: Manifest, limits: Limits) -> None:
        self.manifest = manifest
        self.patience = limits.patience
        self.lacks = Lacks(manifest.fleet)
        self._timeout = limits.timeout
        self._waits = limits.closed
        self._any_version = limits.any_version
        try:
            credentials = Credentials.derive(manifest.secret, role="client", name=socket.gethostname())
        except ValueError as error:
            raise InvalidManifest(str(error), field="manifest.secret") from None
        self._security = credentials.security()
        self._line = dask_comms.questions(str(manifest.head), self._security, timeout=limits.timeout)

    async def open(self) -> None:
        """Raises `FleetUnreachable`, `CredentialsRefused`, `VersionMismatch` or `UnsafeAnswer`."""
        if self.manifest.head.port == 0:
            raise FleetUnreachable(
                f"the head of {self.manifest.fleet} has no port yet",
                hint="Deploy the fleet again, and connect with the manifest that it gives then.",
            )
        try:
            async with self._explained():
                await self._unless_refused(self._check_versions())
        except BaseException:
            await self._line.close_rpc()
            raise

    async def _unless_refused(self, question: Coroutine[Any, Any, None]) -> None:
        """Awaits *question*, for which Dask tries to connect until the timeout, unless the head's port is closed."""
        task = asyncio.ensure_future(question)
        try:
            while not self._waits and not (await asyncio.wait((task,), timeout=_REFUSED_S))[0]:
                try:
                    await self._touch()
                    break
                except ConnectionRefusedError:
                    raise
                except OSError:  # nothing answers yet
                    continue
            await task
        finally:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)

    async def _check_versions(self) -> None:
        """Raises `VersionMismatch` where questions and answers would be read otherwise than they were meant."""
        identity = await within(self._line.identity(n_workers=0), self._timeout + _ANSWER_S)
        spoken = (identity.get(STARTUP_KEY) or {}).get("version")
        if spoken != STATE_VERSION and not self._any_version:
            raise VersionMismatch(
                f"another version of skyinfra deployed {self.manifest.fleet}: its head speaks version {spoken} of the "
                f"protocol, this client version {STATE_VERSION}",
                hint="Use the skyinfra that deployed it, or bring it to this one with "
                f"`skyinfra upgrade {self.manifest.fleet}`.",
            )

    @contextlib.asynccontextmanager
    async def _explained(self) -> AsyncIterator[None]:
        """Turns what Dask and TLS say about a failed connection into what a person can act on."""
        try:
            yield
        except OSError as error:  # TimeoutError and Dask's CommClosedError are OSErrors
            reason = _root(error)
            if isinstance(reason, ssl.SSLCertVerificationError):
                raise CredentialsRefused(
                    f"the head of {self.manifest.fleet} at {self.manifest.head} has another fleet secret",
                    hint="The fleet was deployed again, or this is the manifest of another one: read it again.",
                ) from None
            if isinstance(reason, ssl.SSLError):
                raise await self._no_fleet(str(reason.reason)) from None
            if isinstance(reason.__cause__, ValueError):  # Tornado's, see `skyinfra.engine.dask_comms`
                raise await self._no_fleet("it speaks or hangs up before the handshake") from None
            why, hint = await self._why_silent()
            raise FleetUnreachable(
                f"the head of {self.manifest.fleet} does not answer at {self.manifest.head}: {why}",
                hint=self._hint(hint),
            ) from None

    def _hint(self, otherwise: str) -> str:
        """Says what to do about a head that does not answer."""
        head = next((node.id for node in self.manifest.nodes if node.head), "")
        return _HINTS.get(self.manifest.provider, otherwise).format(head=head)

    async def _no_fleet(self, why: str) -> FleetUnreachable:
        """Why no fleet answers there: a head whose first boot failed says so, to whoever has the fleet secret."""
        head = self.manifest.head
        failure = await asyncio.to_thread(
            report_client.ask, head.address, head.port, self.manifest.secret, timeout=_PROBE_S
        )
        if failure is not None:
            return boot_failed(NodeFailure.of(failure), node=str(failure.get("node")), fleet=self.manifest.fleet)
        return FleetUnreachable(
            f"what listens at {self.manifest.head} does not speak TLS as a fleet does: {why}",
            hint="Another program has the port now, or the manifest is an old one: read it again.",
        )

    async def _why_silent(self) -> tuple[str, str]:
        """Returns the words of the network about the head, and what to do. Dask's own error is the last of many
        attempts, cut short."""
        try:
            await self._touch()
        except ConnectionRefusedError:
            return os.strerror(errno.ECONNREFUSED), _CLOSED.format(fleet=self.manifest.fleet)
        except TimeoutError:
            return "no answer from that address", _ELSEWHERE
        except OSError as error:
            # asyncio words the system's errors anew; resolvers' errors have negative numbers.
            number = error.errno or 0
            return os.strerror(number) if number > 0 else error.strerror or str(error), _ELSEWHERE
        return "its port is open, and nothing answers there", _ELSEWHERE

    async def _touch(self) -> None:
        """Connects to the head's port, and leaves. Raises OSError."""
        head = self.manifest.head
        _, writer = await within(asyncio.open_connection(head.address, head.port), _PROBE_S)
        writer.close()
        with contextlib.suppress(OSError):
            await writer.wait_closed()

    @property
    def head(self) -> Peer:
        """The scheduler of the head, whose calls `skyinfra.protocol.services` declares."""
        peer: Peer = self._line
        return peer

    async def ready(self) -> None:
        """Waits until the head can be asked: each question makes the connection anew where it is lost."""

    async def again(self, work: Callable[[Peer], Awaitable[T]], patience: float = math.inf) -> T:
        """Returns the result of *work* with the head, which is repeated where the head or the connection restarts.

        patience: seconds after the first failure; those of the connection count in any case while it is lost. Raises
        the error of the answer, or `FleetUnreachable`.
        """
        lost = math.inf
        while True:
            await self.ready()
            try:
                return await work(self.head)
            except OSError:
                lost = min(lost, time.monotonic())
                if time.monotonic() - lost > patience:
                    raise self.gone() from None
                await asyncio.sleep(_PAUSE_S)

    def gone(self) -> FleetUnreachable:
        """Returns the error for a head that was there and is not any more."""
        return FleetUnreachable(
            f"the head of {self.manifest.fleet} at {self.manifest.head} is gone for more than {self.patience:g} s",
            hint="Its machine ended or cannot be reached; what ran on the fleet has to be started again.",
        )

    async def look(self) -> Snapshot:
        """Returns the fleet as it is now. Raises OSError where the head does not answer."""
        identity = await within(self.head.identity(n_workers=-1), _ANSWER_S)
        workers = identity["workers"].values()
        described = rpc.lists([(w["status"], w[STARTUP_KEY]) for w in workers if STARTUP_KEY in w])
        document = rpc.lists(identity.get(STARTUP_KEY))
        if self._any_version and document is not None and document.get("version") != STATE_VERSION:
            document = None
        state = FleetState.read(document) if document is not None else None
        problems = {
            "sick": {},
            "unwatched": {},
            "stops": {},
            "ends": False,
            "sick_for": {},
            "size": None,
            "idle_s": None,
            **(identity.get(SICK_KEY) or {}),
        }
        idle_s = problems["idle_s"]
        return Snapshot(
            slots=self._slots(described, "running"),
            # The runner pauses the workers of the slots that go.
            draining=self._slots(described, "paused"),
            state=state
            and replace(
                state,
                sick=dict(problems["sick"]),
                unwatched=dict(problems["unwatched"]),
                ends=bool(problems["ends"]),
                stops=dict(problems["stops"]),
                sick_for=dict(problems["sick_for"]),
                size=SizeState.read(rpc.lists(problems["size"])) if problems["size"] is not None else None,
                idle_s=None if idle_s is None else float(idle_s),
            ),
        )

    async def ask(self, node: str, question: str, arguments: dict[str, Any], wait_s: float) -> Any:
        """The answer of *node*. Raises `NodeError` for its error, or where it does not answer; OSError where the head
        does not."""
        call = services.ask_node(self.head, node=node, question=question, arguments=arguments, wait_s=wait_s)
        try:
            return rpc.lists(await within(call, wait_s + _ANSWER_S))
        except SkyinfraError as error:
            text = str(error) if type(error) is NodeError else f"{type(error).__name__}: {error}"
            raise NodeError(text, field=node) from None

    async def keep(self, seconds: float) -> float:
        """See `FleetUse.keep`. Raises OSError where the head does not answer, `NotSupported` where it knows no end."""
        return await within(services.keep(self.head, seconds=seconds), _ANSWER_S)

    async def another(self) -> Any:
        """Another connection to the head, on which messages are data. Raises OSError where it does not answer."""
        return await forwarding.connect(str(self.manifest.head), self._security)

    async def running(self) -> dict[str, list[tuple[str, str, float]]]:
        """Key, name and seconds of the tasks that run on each slot. Raises OSError where the head does not answer."""
        return await within(services.running(self.head), _ANSWER_S)

    def _slots(self, described: list[tuple[str, object]], status: str) -> tuple[InstanceInfo, ...]:
        order = {node.name: index for index, node in enumerate(self.manifest.nodes)}
        slots = [InstanceInfo.read(each, source="worker") for found, each in described if found == status]
        return tuple(sorted(slots, key=lambda slot: (order.get(slot.node, len(order)), slot.node, slot.worker)))

    async def close(self) -> None:
        """Leaves the head."""
        with contextlib.suppress(OSError):
            await within(self._line.close_rpc(), _ANSWER_S)


class Connection(Asker):
    """A Dask client of one fleet. Unlike what an `Asker` asks, it unpickles: results and exceptions of tasks.

    topic: the scheduler's topic whose events go to *on_event*. forwarded: whether a program here forwards the port of
    the head.
    """

    def __init__(
        self,
        manifest: Manifest,
        limits: Limits,
        *,
        topic: str,
        on_event: Callable[[Any], None],
        forwarded: bool = False,
    ) -> None:
        super().__init__(manifest, limits)
        self._forwarded = forwarded
        self._topic = topic
        self._on_event = on_event
        self._client: Any = None
        self._prepared: Any = None  # the stream to the head that has been prepared; a reconnected one is another
        self._reopening = asyncio.Lock()

    async def open(self) -> None:
        """Connects to a head that an `Asker` may ask, with workers of the same versions. Raises as that does."""
        await super().open()
        await super().close()
        async with self._explained():
            await self._connect(self._timeout)

    async def _check_versions(self) -> None:
        """Raises `VersionMismatch` also where client and workers could not pickle for each other."""
        await super()._check_versions()
        versions = await within(self._line.versions(), self._timeout + _ANSWER_S)
        ours = {"Python": _minor(platform.python_version()), "distributed": distributed.__version__}
        theirs = {
            "Python": _minor(versions["host"]["python"]),
            "distributed": versions["packages"]["distributed"],
        }
        for what, version in theirs.items():
            if version != ours[what]:
                raise VersionMismatch(
                    f"the nodes of {self.manifest.fleet} run {what} {version}, this client {ours[what]}",
                    hint=f"Use {what} {version} here, or bring the fleet to the versions of this skyinfra with "
                    f"`skyinfra upgrade {self.manifest.fleet}`. Its status, logs and jobs can be asked for as it is.",
                )

    async def _connect(self, timeout: float) -> None:
        client = distributed.Client(
            str(self.manifest.head),
            security=self._security,
            asynchronous=True,
            set_as_default=False,
            timeout=timeout,
            name=calls.FORWARDED_CLIENT if self._forwarded else calls.CLIENT,
        )
        self._client = await dask_client.connected(client)
        self._prepare()

    def _prepare(self) -> None:
        dask_client.prepare_client(self._client)
        self._prepared = dask_client.client_stream(self._client)
        self._client.subscribe_topic(self._topic, lambda event: self._on_event(event[1]))

    def submit(
        self, key: str, header: bytes, call: bytes, resources: dict[str, int], waited: float
    ) -> distributed.Future[Any]:
        """Sends a task; its future is done when it has ended, see `calls.run`."""
        return dask_client.send_task(self._client, key, header, call, resources, waited, dask_client.submitter())

    @property
    def client(self) -> Any:
        """The Dask client. Its ``status`` is ``running`` unless the head is gone."""
        return self._client

    @property
    def head(self) -> Peer:
        """The scheduler of the head, whose calls `skyinfra.protocol.services` declares."""
        peer: Peer | None = self._client.scheduler
        if peer is None:
            raise ConnectionError("the connection to the head was given up")
        return peer

    @property
    def alive(self) -> bool:
        """Whether the head is connected, as far as anybody has noticed."""
        return bool(self._client.status == "running")

    async def ready(self) -> None:
        """Waits until the head is connected, again if need be. Raises `FleetUnreachable` after the patience."""
        if self.alive and dask_client.client_stream(self._client) is self._prepared:
            return
        async with self._reopening:
            deadline = time.monotonic() + self.patience
            while not self.alive:
                if self._client.status == "closed":
                    async with self._explained():
                        await self._connect(max(1.0, deadline - time.monotonic()))
                    return
                if time.monotonic() > deadline:
                    raise self.gone()
                await asyncio.sleep(_PAUSE_S)
            self._prepare()

    async def close(self) -> None:
        """Leaves the fleet. A head that is gone is not waited for."""
        if self._client is None:
            return
        if self.alive:
            with contextlib.suppress(OSError, SkyinfraError):
                await within(services.forget_topic(self.head, topic=self._topic), _ANSWER_S)
        await dask_client.end_client(self._client, _ANSWER_S)


def boot_failed(failure: NodeFailure, *, node: str, fleet: str) -> BootFailed:
    """Returns the error of a node that was not set up."""
    lines = "\n".join(failure.lines)
    hint = f"{node} still tries. On it, /var/log/skyinfra/boot.jsonl has all of it."
    return BootFailed(
        f"{node} of {fleet} was not set up: step {failure.step}: {failure.error}",
        hint=f"{lines}\n{hint}" if lines else hint,
    )


def _minor(version: str) -> str:
    return ".".join(version.split(".")[:2])


def _root(error: BaseException) -> BaseException:
    """Returns the exception that tells most: the innermost one that says something."""
    best: BaseException = error
    cause: BaseException | None = error
    while cause is not None:
        if isinstance(cause, OSError) and str(cause):
            best = cause
        cause = cause.__cause__
    return best
