"""Private names of Dask for its client and the streams of messages, each with the reason for its use."""

from __future__ import annotations

import collections
import contextlib
import errno
import getpass
import os
import socket
from collections.abc import Callable, Mapping
from functools import cache
from typing import TYPE_CHECKING, Any

from skyinfra.engine.dask_comms import without_copy
from skyinfra.engine.waiting import within
from skyinfra.protocol import calls

if TYPE_CHECKING:
    from distributed import Client

# Dask gathers messages for 2 to 10 ms, which is most of a short task's round trip. Sending each at once was measured,
# and is no faster than this.
SEND_INTERVAL_S = 0.001
_CLOSE_S = 5.0
# From that size on, a message refers to a call; smaller ones are copied into it.
_LARGE_CALL = 1_000_000
# Errors of a connection whose peer is not known to have ended.
_CUT = frozenset((errno.ETIMEDOUT, errno.EHOSTUNREACH, errno.EHOSTDOWN, errno.ENETUNREACH, errno.ENETDOWN))


def send_soon(stream: Any) -> None:
    """Makes a stream of messages wait for 1 ms in place of up to 10 ms before it sends."""
    stream.interval = SEND_INTERVAL_S


def is_used_by_others() -> bool:
    """Returns whether this process uses Dask besides for our clients: clients and clusters of the user, or a node."""
    from distributed import Client, Nanny, Scheduler, SpecCluster, Worker

    if any(map(len, (SpecCluster._instances, Scheduler._instances, Worker._instances, Nanny._instances))):
        return True
    ours = tuple(f"Client-{name}-" for name in (calls.CLIENT, calls.FORWARDED_CLIENT))
    with contextlib.suppress(RuntimeError):  # another thread makes one
        return not all(client.id.startswith(ours) for client in [*Client._instances])
    return True


async def connected(client: Client) -> Client:
    """Returns *client* once it is connected. Raises what connecting raises; of one that is given up nothing is left."""
    try:
        return await client
    except BaseException:
        await end_client(client, _CLOSE_S)
        raise


async def end_client(client: Client, seconds: float) -> None:
    """Closes *client*, in whichever state it is, for at most *seconds*.

    One that is not closed Dask begins to close when Python collects it, which no loop carries out: Python warns of
    coroutines that were never awaited then.
    """
    try:
        with contextlib.suppress(OSError):
            await within(client.close(), seconds)
    finally:
        client.status = "closed"


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
    client: Client,
    key: str,
    header: bytes,
    call: bytes,
    resources: Mapping[str, int],
    waited: float = 0.0,
    submitter: str = "",
) -> Any:
    """Sends a task as one message on the client's stream, which costs a quarter of a graph of one task; its future.

    waited: for how many seconds the task did so before. submitter: whose it is, ``USER@HOST``.
    """
    from distributed import Future

    future = Future(key, client)
    carried = without_copy(call) if len(call) > _LARGE_CALL else call
    message = {"op": calls.TASK_MESSAGE, "key": key, "header": header, "call": carried, "resources": resources}
    message["waited"] = waited
    if submitter:
        message["submitter"] = submitter
    client._send_to_scheduler(message)
    return future


@cache
def submitter() -> str:
    """Returns who submits tasks and jobs of this process, ``USER@HOST``."""
    user = str(os.getuid())
    with contextlib.suppress(OSError, KeyError):  # an account without a name, as containers have
        user = getpass.getuser()
    return f"{user}@{socket.gethostname()}"


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
