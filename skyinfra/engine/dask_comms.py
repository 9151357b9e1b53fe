"""Private names of Dask for connections and messages, each with the reason for its use.

`dask_client`, `dask_scheduler` and `dask_worker` hold what is private to those; no other file uses such names. `make
test-all` runs the client's tests with the oldest and the newest version of `distributed` that pyproject.toml admits.
Modules that only some processes need are imported where they are used: the process of a rank needs few.
"""

from __future__ import annotations

import select
import socket
import ssl
import struct
import traceback
from collections.abc import Sequence
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

if TYPE_CHECKING:
    from distributed import Scheduler

# What the peer of a new connection may take to say which compression it knows, as Dask does after TLS.
GREETING_S = 30.0

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


def carrying_client(scheduler: Scheduler, security: Any, *, timeout: float) -> Any:
    """Returns a client of *scheduler*, which is that of this process: nothing that a worker gives is unpickled here.

    It begins to connect. Results are `Serialized`; of exceptions there is the text.
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

    return Carrying()


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

    async def write(self, *arguments: Any, **keywords: Any) -> Any:
        """Sends a message as Dask does, but none to a peer that has left: Tornado would close the connection for that,
        and lose what the peer said before."""
        if self.stream is not None and _has_left(self.stream.socket):
            return 0
        return await super().write(*arguments, **keywords)


def _has_left(connection: socket.socket | None) -> bool:
    """Returns whether the peer has closed its end, although not everything that it sent may be read."""
    if connection is None or connection.fileno() < 0:
        return False
    looking = select.poll()
    looking.register(connection, getattr(select, "POLLRDHUP", 0))  # Linux alone has it
    return bool(looking.poll(0))


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


class _Stream(IOStream):
    """Tornado's, which notes the stream that takes its place with TLS: one that is cancelled as its handshake ends is
    in nobody's hands, and open until somebody collects garbage."""

    def start_tls(self, *arguments: Any, **keywords: Any) -> Any:
        descriptor = self.socket.fileno() if self.socket is not None else None
        connected = super().start_tls(*arguments, **keywords)
        loop: Any = self.io_loop
        if (found := loop.handlers.get(descriptor)) is not None:
            _made.get([]).append(found[1].__self__)
        return connected


class _Client(TCPClient):
    """Tornado's, which notes the streams that it makes."""

    def _create_stream(self, *arguments: Any, **keywords: Any) -> Any:
        stream, connected = super()._create_stream(*arguments, **keywords)
        stream.__class__ = _Stream
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
            # One that `ssl` of Python up to 3.11.7 has half made, as the peer was killed, is open, and nobody's.
            for frame, _ in traceback.walk_tb(error.__traceback__):
                if isinstance(half := frame.f_locals.get("self"), ssl.SSLSocket):
                    half.close()
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
