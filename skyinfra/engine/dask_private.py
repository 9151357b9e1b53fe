"""Every name of Dask that is not a public part of it, each with the reason for its use.

`make test-all` runs the client's tests with the oldest and the newest version of `distributed` that pyproject.toml
admits. Modules that only some processes need are imported where they are used: the process of a rank needs few.
"""

from __future__ import annotations

import asyncio
import collections
import errno
import functools
import importlib
import socket
import ssl
import struct
import time
from collections.abc import Callable, Mapping, Sequence
from contextvars import ContextVar
from ssl import SSLError
from typing import TYPE_CHECKING, Any

import distributed
import distributed.nanny
import msgpack
from distributed.comm import registry
from distributed.comm.core import CommClosedError, FatalCommClosedError
from distributed.comm.tcp import (
    TLS,
    BaseTCPConnector,
    TLSBackend,
    TLSConnector,
    TLSListener,
    convert_stream_closed_error,
    read_bytes_rw,
)
from distributed.protocol import Serialized as Serialized
from distributed.protocol.utils import msgpack_opts, unpack_frames
from tornado.iostream import IOStream, SSLIOStream, StreamClosedError
from tornado.tcpclient import TCPClient

from skyinfra.engine import clock
from skyinfra.engine.handshakes import HANDSHAKES
from skyinfra.engine.reverse_connections import Parked
from skyinfra.engine.waiting import within
from skyinfra.errors import FleetError, SkyinfraError, UnsafeAnswer
from skyinfra.protocol import calls

if TYPE_CHECKING:
    from distributed import Client, Nanny, Scheduler, Worker

# Dask gathers messages for 2 to 10 ms, which is most of a short task's round trip.
SEND_INTERVAL_S = 0.001
# From that size on, a message refers to a call; smaller ones are copied into it.
_LARGE_CALL = 1_000_000
# Tasks that come within that long have the same priority, as those of Dask's own client.
_FIFO_S = 0.1
# Errors of a connection whose peer is not known to have ended.
_CUT = frozenset((errno.ETIMEDOUT, errno.EHOSTUNREACH, errno.EHOSTDOWN, errno.ENETUNREACH, errno.ENETDOWN))
# What the peer of a new connection may take to say which compression it knows, as Dask does after TLS.
GREETING_S = 30.0

# Streams ------------------------------------------------------------------------------------------------------------


def send_soon(stream: Any) -> None:
    """Makes a stream of messages wait for 1 ms in place of up to 10 ms before it sends."""
    stream.interval = SEND_INTERVAL_S


def client_stream(client: Client) -> Any:
    """Returns the stream to the head; another object after each reconnect, so that what was set for it is set again."""
    return client.scheduler_comm


def prepare_client(client: Client) -> None:
    """Sets up the stream to the head."""
    stream = client_stream(client)
    send_soon(stream)
    # The last thousand messages of up to 1 MB, kept for debugging.
    stream.recent_message_log = collections.deque(maxlen=0)


def send_task(
    client: Client, key: str, header: bytes, call: bytes, resources: Mapping[str, int], waited: float = 0.0
) -> Any:
    """Sends a task as one message on the client's stream, which costs a quarter of a graph of one task; its future.

    waited: for how many seconds the task did so before.
    """
    from distributed import Future

    future = Future(key, client)
    carried = without_copy(call) if len(call) > _LARGE_CALL else call
    message = {"op": calls.TASK_MESSAGE, "key": key, "header": header, "call": carried, "resources": resources}
    message["waited"] = waited
    client._send_to_scheduler(message)
    return future


def was_cut(stream: Any) -> bool:
    """Whether the connection of *stream*, which is closed, broke; one whose peer ended was closed by its machine."""
    error = getattr(stream, "error", None)
    return isinstance(error, OSError) and error.errno in _CUT


async def run_on(client: Client, worker: str, function: Callable[..., object], *arguments: object) -> None:
    """Runs *function* in the process of *worker*, as `Client.run` does, and does not read what it gives."""
    from distributed.protocol.pickle import dumps

    call = {"function": dumps(function), "args": dumps(arguments), "kwargs": dumps({})}
    await client.scheduler.broadcast(
        msg={"op": "run", "wait": True, **call}, workers=[worker], on_error="return_pickle"
    )


# Topics of events: Dask keeps the last thousand of each topic for ever ----------------------------------------------


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


# Tasks without a graph ----------------------------------------------------------------------------------------------


def create_task(
    scheduler: Scheduler,
    client: str,
    key: str,
    call: tuple[Callable[..., object], bytes, bytes],
    resources: object,
    worker: str | None = None,
) -> None:
    """Makes the state of one task as `Scheduler.update_graph` does, without graph and thread.

    worker: the address of the one that gets it while it is there.
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


def _preferring(worker: str | None) -> dict[str, object]:
    return {} if worker is None else {"workers": [worker], "allow_other_workers": True}


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


# Tasks on a worker --------------------------------------------------------------------------------------------------


def give_back_waiting(worker: Worker) -> None:
    """Makes the scheduler place the tasks anew that *worker* was given and has not started."""
    from distributed.worker_state_machine import READY, CancelComputeEvent

    for key in [task.key for task in worker.state.tasks.values() if task.state in READY]:
        # Ordered: by the time the scheduler places the task anew, it knows that this worker is paused.
        stimulus = f"drain-{time.time()}"
        worker.handle_stimulus(CancelComputeEvent(key=key, stimulus_id=stimulus))
        worker.batched_send({"op": "reschedule", "key": key, "worker": worker.address, "stimulus_id": stimulus})


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


# Why Dask closes a worker that has lost its scheduler.
LOST = ("scheduler-close", "worker-handle-scheduler-connection-broken", "worker-heartbeat-missing")
# After a scheduler that still takes this worker to be connected.
_TAKEN_S = 0.5


class _Unseen(dict[Any, Any]):
    """The tasks of a worker, of which Dask sees none while it registers: it registers none that has some."""

    def __bool__(self) -> bool:
        return False


def lose_scheduler(worker: Worker) -> None:
    """Makes *worker* forget what its scheduler wanted, which is gone; a task that runs goes on."""
    from distributed.batched import BatchedSend
    from distributed.worker_state_machine import FreeKeysEvent

    worker.batched_stream.abort()
    worker.batched_stream = BatchedSend(interval="2ms", loop=worker.loop)
    worker.handle_stimulus(FreeKeysEvent(keys=list(worker.state.tasks), stimulus_id=f"lost-{time.monotonic()}"))


async def register_again(worker: Worker) -> None:
    """Registers *worker* with the next scheduler at the address of the one that it has lost, however late that comes.

    A task that still runs is one that Dask takes to be cancelled; when the scheduler asks for it, it is taken back.
    """
    worker.state.tasks = _Unseen(worker.state.tasks)
    try:
        while True:
            try:
                await worker._register_with_scheduler()
                return
            except ValueError:
                await asyncio.sleep(_TAKEN_S)
    finally:
        worker.state.tasks = dict(worker.state.tasks)


def is_cancelled(worker: Worker, key: object) -> bool:
    """Returns whether the scheduler has forgotten the task *key*, which still runs on *worker*."""
    task = worker.state.tasks.get(key)
    return task is not None and task.state == "cancelled"


async def unregister(worker: Worker) -> None:
    """Makes the scheduler forget *worker*, which blames no task for it: it places those anew that have not started."""
    stimulus = f"replace-{time.time()}"
    await worker.scheduler.unregister(address=worker.address, stimulus_id=stimulus, expected=True, close=False)


# The main thread of a worker ----------------------------------------------------------------------------------------


class _Led(distributed.nanny.WorkerProcess):  # type: ignore[misc]
    """The process of a worker, in the main thread of which its class does the first step."""

    @classmethod
    def _run(cls, **arguments: Any) -> None:
        arguments["worker_factory"].func.lead(functools.partial(super()._run, **arguments))


def lead_workers() -> None:
    """Makes the Nannies of this process call ``lead(run)`` of the class of their worker in the main thread of its
    process. *run* is Dask's side: it ends with the worker, and runs in any thread."""
    distributed.nanny.WorkerProcess = _Led


# The dashboard ------------------------------------------------------------------------------------------------------

# Clients listen on the loopback of their machines, at any port.
_ORIGINS = ("127.0.0.1:*", "localhost:*")


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


# Messages -----------------------------------------------------------------------------------------------------------

# The opcode of pickle that takes a buffer from outside of the stream (NEXT_BUFFER), and the end.
_NEXT_BUFFER = b"\x80\x05\x97."


def without_copy(data: bytes | memoryview) -> Any:
    """*data* as a part of a message that travels from where it lies to where it arrives.

    What `ToPickle` makes of a PickleBuffer. That itself, around a memoryview that is part of a garbage cycle, as the
    traceback of an error makes one, ends Python before 3.11.9 and 3.12.3 (python/cpython issue 77894).
    """
    from distributed.protocol.serialize import Pickled

    return Pickled({"pickled-obj": _NEXT_BUFFER}, [memoryview(data)])


def memory(size: int) -> memoryview:
    """Memory of *size* bytes; not filled with zeros first, as a bytearray is, where numpy is there."""
    from distributed.protocol.utils import host_array

    found: memoryview = host_array(size)
    return found


# Messages that are data ---------------------------------------------------------------------------------------------
# Dask unpickles what a peer marks as a pickle, whatever `deserializers` a caller names, in its scheduler too; and the
# exception of an answer that reports one: who speaks runs code where the message is read.

# Of the arguments of a connection: the class of its stream.
_STREAM = "skyinfra_stream"
# Mark objects in Dask's wire format.
_OBJECTS = frozenset(("__Pickled__", "__Serialized__", "__Enum__"))
_WORDS = 1000


def questions(address: str, security: Any, *, timeout: float) -> Any:
    """Returns the peer at *address* for questions: its answers are read as data, and no answer runs code here.

    Raises `UnsafeAnswer` for an answer that is something else.
    """
    install_connections()
    arguments = {**security.get_connection_args("client"), _STREAM: _Answers}
    # The exception of an answer is not deserialized either.
    return distributed.rpc(address, connection_args=arguments, timeout=timeout, deserialize=False)


async def data_connection(address: str, security: Any, *, timeout: float) -> Any:
    """Returns a new connection to *address* whose messages are read as data. Raises OSError."""
    install_connections()
    arguments = {**security.get_connection_args("client"), _STREAM: _Answers}
    return await distributed.comm.connect(address, timeout=timeout, **arguments)


def read_data_only(scheduler: Scheduler) -> dict[str, Any]:
    """Makes *scheduler* run nothing that others say: no worker, no client, no answer to a question of its own.

    Returns arguments for its `listen`.
    """
    install_connections()
    scheduler.rpc.connection_args = {**scheduler.rpc.connection_args, _STREAM: _Carried}
    return {_STREAM: _Carried}


async def carrying_client(scheduler: Scheduler, security: Any, *, timeout: float) -> Any:
    """Returns a client of *scheduler*, which is that of this process: nothing that a worker gives is unpickled here.

    Results are `Serialized`; of exceptions there is the text.
    """
    from distributed import Client, KilledWorker

    install_connections()

    class Carrying(Client):  # type: ignore[misc]
        connection_args: dict[str, Any]

        def __init__(self) -> None:
            address = scheduler.address
            super().__init__(address, security=security, asynchronous=True, set_as_default=False, timeout=timeout)
            # It has not begun to connect.
            self.connection_args[_STREAM] = _Carried
            # Nor the exception of an answer.
            self.rpc.deserialize = False

        def _handle_task_erred(self, key: Any = None, exception: object = None, traceback: object = None) -> None:
            task = scheduler.tasks.get(key)
            if task is not None and task.suspicious > scheduler.allowed_failures:
                super()._handle_task_erred(key, KilledWorker(key, None, scheduler.allowed_failures))
            else:
                text = getattr(task, "exception_text", None) or "its slot gave an exception"
                super()._handle_task_erred(key, FleetError(str(text)[:_WORDS]))

    return await Carrying()


class _Answers(TLS):  # type: ignore[misc]
    """A connection from which only data is read. Its own reading: what Dask changes in its own opens nothing here."""

    stream: Any
    carries = False

    async def read(self, deserializers: object = None) -> Any:
        try:
            message = read_data(await self._frames(), carries=self.carries)
            if not self.remote_info:  # a greeting that Dask could not use would leave this open
                self.handshake_configuration(self.handshake_info(), message)
            return message
        except OSError:
            raise
        except BaseException as error:
            # How much of the message has been read is not known.
            self.abort()
            if isinstance(error, SkyinfraError):
                raise error.at(str(self.peer_address)) from None
            if isinstance(error, Exception):
                raise _unsafe(f"it is no message: {error or type(error).__name__}").at(self.peer_address) from None
            raise

    async def _frames(self) -> list[memoryview]:
        # Whoever closes the connection between two of the reads takes it from this object.
        stream = self.stream
        if stream is None:
            raise CommClosedError
        try:
            (size,) = struct.unpack("Q", await stream.read_bytes(struct.calcsize("Q")))
            frames, sizes = unpack_frames(await read_bytes_rw(stream, size), partial=True)
            return [*frames, *[await read_bytes_rw(stream, size) for size in sizes]]
        except (StreamClosedError, SSLError) as error:
            self.stream = None
            self._closed = True
            convert_stream_closed_error(self, error)
            raise


class _Carried(_Answers):
    """A connection of the scheduler, which carries results and exceptions of tasks and does not read them."""

    carries = True


def read_data(frames: Sequence[memoryview], *, carries: bool = False) -> Any:
    """Returns the message of *frames*, of Dask's wire format: data of msgpack, sets, and what `without_copy` makes.

    carries: objects that Dask has serialized are left as they are, and the answer of a failed call is one like others.
    Raises `UnsafeAnswer` for other objects, what msgpack raises for what is none of its messages, and `FleetError` for
    an answer that reports an exception of the peer.
    """
    other: list[str] = []

    def read(found: dict[Any, Any]) -> Any:
        marks = found.keys() & _OBJECTS
        if marks == {"__Pickled__"} and (memory := _beside(frames, found["__Pickled__"])) is not None:
            return memory
        if carries and marks == {"__Serialized__"}:
            return _carried(frames, found["__Serialized__"])
        if marks:
            other.extend(marks)
            return None
        return set(found["as-list"]) if "__Set__" in found else found

    message = msgpack.loads(frames[0], object_hook=read, use_list=False, **msgpack_opts)
    if not carries and isinstance(message, dict) and message.get("status") == "uncaught-error":
        # With it comes the exception, pickled.
        raise FleetError(f"it failed: {str(message.get('exception_text'))[:_WORDS]}")
    if other:
        raise _unsafe(f"a part of it is {other[0].strip('_')}")
    return message


def _unsafe(why: str) -> UnsafeAnswer:
    return UnsafeAnswer(
        f"the answer is not plain data, and was not read: {why}; reading it could run code on this machine",
        hint="No head of skyinfra answers so: somebody with the fleet secret, a task for instance, has changed it, or "
        "something else has its address. Destroy the fleet and deploy it again.",
    )


def _beside(frames: Sequence[memoryview], offset: Any) -> memoryview | None:
    """Returns the memory that stands beside the message at *offset*; None for another pickle."""
    header = msgpack.loads(frames[offset], **msgpack_opts)
    return frames[offset + 1] if header == {"pickled-obj": _NEXT_BUFFER, "num-sub-frames": 1} else None


def _carried(frames: Sequence[memoryview], offset: Any) -> Any:
    """Returns the object that stands beside the message at *offset*, serialized."""
    from distributed.protocol.serialize import Serialized

    header = msgpack.loads(frames[offset], use_list=False, **msgpack_opts)
    return Serialized(header, frames[offset + 1 : offset + 1 + header["num-sub-frames"]])


# Connections --------------------------------------------------------------------------------------------------------
# Where the peer hangs up, or speaks, before the handshake, Tornado raises a ValueError, which `distributed` takes for a
# malformed address: what was to connect again once the head is back ends with it. It is a closed connection; one that
# is told at once, since what speaks there may be no fleet at all. Nor does Tornado close the socket then: that would
# be open until somebody collects garbage.

# What workers have left in this process, where it is the head's.
PARKED = Parked()
# The streams that the present call of `_Connector.connect` has made.
_made: ContextVar[list[Any]] = ContextVar("skyinfra_streams")


class _Client(TCPClient):
    """Tornado's, which notes the streams that it makes."""

    def _create_stream(self, *arguments: Any, **keywords: Any) -> Any:
        stream, connected = super()._create_stream(*arguments, **keywords)
        _made.get([]).append(stream)
        return stream, connected


class _Connector(TLSConnector):  # type: ignore[misc]
    client = _Client(resolver=BaseTCPConnector.client.resolver)

    async def connect(self, address: str, deserialize: bool = True, **connection_args: Any) -> Any:
        self.comm_class = connection_args.pop(_STREAM, TLS)
        if (left := await PARKED.take(address)) is not None:
            return self.comm_class(left.stream, left.local_address, f"tls://{address}", deserialize)
        made: list[Any] = []
        _made.set(made)
        try:
            return await super().connect(address, deserialize=deserialize, **connection_args)
        except BaseException as error:
            for stream in made:
                # One that TLS has taken over has no socket any more.
                if stream.socket is not None:
                    stream.close()
            if isinstance(error, ValueError) and "convert to SSL" in str(error):
                raise FatalCommClosedError(f"{address} speaks or hangs up before the handshake") from error
            raise


class _Listener(TLSListener):  # type: ignore[misc]
    """Dask waits for ever for a peer that says nothing, and writes a line about each that says something else."""

    def __init__(self, *arguments: Any, **keywords: Any) -> None:
        self.comm_class = keywords.pop(_STREAM, TLS)
        super().__init__(*arguments, **keywords)

    async def _prepare_stream(self, stream: SSLIOStream, address: str) -> SSLIOStream | None:
        # Tornado would wait for ever for the handshake of a stream that has been closed already.
        if stream.closed():
            return None
        try:
            with HANDSHAKES.one(address.rpartition(":")[0], stream.close):
                return await stream.wait_for_handshake()
        except OSError as error:
            reason = getattr(error, "real_error", None) or error
            # Not one who left or was closed here: a worker that ends leaves when it was about to report.
            if isinstance(reason, ssl.SSLError) and not isinstance(reason, ssl.SSLEOFError):
                HANDSHAKES.failed(address, str(reason))
            return None

    async def on_connection(self, comm: Any, handshake_overrides: dict[str, Any] | None = None) -> None:
        """Dask's own handshake, with a peer that has the fleet secret."""
        try:
            await within(super().on_connection(comm, handshake_overrides), GREETING_S)
        except TimeoutError as error:
            raise CommClosedError(f"{comm} says nothing") from error


class _Backend(TLSBackend):  # type: ignore[misc]
    _connector_class = _Connector
    _listener_class = _Listener


def install_connections() -> None:
    """Opens and accepts every ``tls://`` connection of this process as above, from now on."""
    clock.install()
    if not isinstance(registry.backends.get("tls"), _Backend):
        registry.backends["tls"] = _Backend()
