"""The connection to the head of a fleet: opening it, noticing that it is gone, opening it again.

Everything here runs in the event loop of a `LoopThread`.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
import warnings
from collections.abc import Callable
from typing import Any

import distributed
from distributed.versions import VersionMismatchWarning

from skyinfra.client.asking import ANSWER_S, PAUSE_S, Asker
from skyinfra.engine import dask_private
from skyinfra.engine.waiting import within
from skyinfra.errors import SkyinfraError
from skyinfra.protocol import services
from skyinfra.protocol.manifest import Manifest
from skyinfra.protocol.rpc import Peer


class Connection(Asker):
    """A Dask client of one fleet. Unlike what an `Asker` asks, it unpickles: results and exceptions of tasks.

    timeout: seconds for the first connection. patience: seconds for which the head may be gone before everybody who
    waits for it hears `FleetUnreachable`. topic: the scheduler's topic whose events go to *on_event*.
    """

    def __init__(
        self, manifest: Manifest, *, timeout: float, patience: float, topic: str, on_event: Callable[[Any], None]
    ) -> None:
        super().__init__(manifest, timeout=timeout, patience=patience)
        self._topic = topic
        self._on_event = on_event
        self._client: Any = None
        self._prepared: Any = None  # the stream to the head that has been prepared; a reconnected one is another
        self._reopening = asyncio.Lock()

    async def open(self) -> None:
        """Connects to a head that an `Asker` may ask. Raises as that does."""
        await super().open()
        await super().close()
        async with self._explained():
            await self._connect(self._timeout)

    async def _connect(self, timeout: float) -> None:
        # Of the packages that matter, `_check_versions` has refused what differs; the rest is the user's.
        warnings.filterwarnings("ignore", category=VersionMismatchWarning)
        self._client = await distributed.Client(
            str(self.manifest.head),
            security=self._security,
            asynchronous=True,
            set_as_default=False,
            timeout=timeout,
        )
        self._prepare()

    def _prepare(self) -> None:
        dask_private.prepare_client(self._client)
        self._prepared = dask_private.client_stream(self._client)
        self._client.subscribe_topic(self._topic, lambda event: self._on_event(event[1]))

    def submit(self, key: str, header: bytes, call: bytes, resources: dict[str, int]) -> distributed.Future[Any]:
        """Sends a task; its future is done when it has ended, see `calls.run`."""
        return dask_private.send_task(self._client, key, header, call, resources)

    @property
    def client(self) -> Any:
        """The Dask client. Its ``status`` is ``running`` unless the head is gone."""
        return self._client

    @property
    def head(self) -> Peer:
        """The scheduler of the head, whose calls `skyinfra.protocol.services` declares."""
        peer: Peer = self._client.scheduler
        return peer

    @property
    def alive(self) -> bool:
        """Whether the head is connected, as far as anybody has noticed."""
        return bool(self._client.status == "running")

    async def ready(self) -> None:
        """Waits until the head is connected, again if need be. Raises `FleetUnreachable` after the patience."""
        if self.alive and dask_private.client_stream(self._client) is self._prepared:
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
                await asyncio.sleep(PAUSE_S)
            self._prepare()

    async def close(self) -> None:
        """Leaves the fleet. A head that is gone is not waited for."""
        if self._client is None:
            return
        if self.alive:
            with contextlib.suppress(OSError, SkyinfraError):
                await within(services.forget_topic(self.head, topic=self._topic), ANSWER_S)
        with contextlib.suppress(OSError):
            await within(self._client.close(), ANSWER_S)
