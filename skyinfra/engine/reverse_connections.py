"""Connections for the head to workers that it cannot connect to: behind NAT, a firewall, or in a container.

Dask's scheduler opens connections to workers, for their results and to end tasks. A worker asks the head whether it can
(`services.reach`); where it cannot, the worker opens a connection itself and leaves it at the head, which takes it when
it would have opened one. The worker leaves another then.
"""

from __future__ import annotations

import asyncio
import contextlib
from typing import Any

import distributed
from distributed import Worker
from distributed.comm import Comm
from distributed.comm.core import Listener
from distributed.core import Status

# A worker's message on a connection that it leaves.
PARK = "skyinfra_park"
# After a head that does not answer.
_PAUSE_S = 1.0


class Parked:
    """The connections that wait in this process, by the address of their worker, as HOST:PORT."""

    def __init__(self) -> None:
        self._waiting: dict[str, asyncio.Queue[Any]] = {}

    async def keep(self, comm: Any, address: str) -> Status:
        """Answers a worker that leaves *comm*, which waits for use until it is closed."""
        place = address.rpartition("://")[2]
        closed = asyncio.Event()
        comm.stream.set_close_callback(closed.set)
        self._waiting.setdefault(place, asyncio.Queue()).put_nowait(comm)
        await closed.wait()
        return Status.dont_reply

    async def take(self, place: str) -> Any | None:
        """Returns a connection to the worker at *place*, waiting for one; None where its worker leaves none."""
        while (waiting := self._waiting.get(place)) is not None:
            comm = await waiting.get()
            if not comm.stream.closed():
                return comm
        return None

    def forget(self, address: str) -> None:
        """Closes the connections of a worker that is gone."""
        waiting = self._waiting.pop(address.rpartition("://")[2], None)
        while waiting is not None and not waiting.empty():
            waiting.get_nowait().abort()


async def leave(worker: Worker) -> None:
    """Leaves a connection of *worker* at its head, and another one as soon as that is used; does not return."""
    while True:
        try:
            comm = await distributed.comm.connect(worker.scheduler.address, **worker.connection_args)
            await comm.write({"op": PARK, "address": worker.address, "reply": False})
            # From here on this side is the one that was connected to: it returns when the head begins to speak.
            await Listener.on_connection(worker.listener, comm)
            worker.handle_comm(comm)
        except OSError:
            await asyncio.sleep(_PAUSE_S)


async def can_connect(address: str, within_s: float, **arguments: Any) -> bool:
    """Returns whether this process can connect to *address*."""
    with contextlib.suppress(OSError, TimeoutError):
        comm: Comm = await distributed.comm.connect(address, timeout=within_s, **arguments)
        await comm.close()
        return True
    return False
