"""Sends short tasks of one `Pool.map` in one message; see `skyinfra.worker.execute`.

A task without an outcome from the chunk, for whatever reason, is sent again alone.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import contextvars
import pickle
from collections.abc import Callable, Coroutine, Iterable, Sequence
from dataclasses import replace
from typing import Any

from skyinfra.client.dispatch import Dispatcher
from skyinfra.client.futures import Future
from skyinfra.client.snapshot import Target
from skyinfra.errors import TaskAttemptsExceeded
from skyinfra.protocol.calls import Outcome
from skyinfra.tasks.pickling import Shipment
from skyinfra.tasks.task import Options

# Calls of more bytes are sent alone.
_SMALL_CALL = 8192


def suits(shipment: Shipment) -> bool:
    """Whether a task may travel with others."""
    # Only options that choose the slot, and variables; whatever else there is is heeded for a task alone.
    plain = replace(shipment.settings, **Options().of("place"), env=None) == Options()
    return plain and shipment.brought and not shipment.uses and len(shipment.call) <= _SMALL_CALL


class Chunk:
    """Sends *shipments* to *target* in one message. windowed: as in `Dispatcher.execute`, also for those sent alone."""

    def __init__(
        self, shipments: Sequence[Shipment], target: Target, dispatcher: Dispatcher, *, windowed: bool
    ) -> None:
        self._target = target
        self._dispatcher = dispatcher
        self._windowed = windowed
        self._key, self._name, self._header = shipments[0].chunk()
        self._shipments = {shipment.key: shipment for shipment in shipments}
        self._waiting = set(self._shipments)
        self._inner: dict[str, concurrent.futures.Future[Outcome]] = {
            key: concurrent.futures.Future() for key in self._shipments
        }

    def send(self, start: Callable[[Coroutine[Any, Any, None]], concurrent.futures.Future[None]]) -> list[Future[Any]]:
        """Sends them, in the loop of *start*. Returns a future for each; cancelling one cancels all of them."""
        whole = start(self._execute())

        def ended(inner: concurrent.futures.Future[Outcome]) -> None:
            if inner.cancelled():
                whole.cancel()

        for inner in self._inner.values():
            inner.add_done_callback(ended)
        return [Future(self._shipments[key].name, inner, key=key) for key, inner in self._inner.items()]

    async def _execute(self) -> None:
        """Sets the futures. Raises CancelledError only."""
        # That of who submitted the tasks; outcomes come in another one.
        self._context = contextvars.copy_context()
        try:
            async with asyncio.TaskGroup() as self._alone:
                try:
                    await self._together()
                except Exception as error:  # noqa: BLE001 - whoever waits for a task is told
                    for key in list(self._waiting):
                        self._settle(key, error)
                for key in list(self._waiting):
                    self._send_alone(key)
        finally:
            # Those sent alone too: a pool that closes cancels them one by one.
            for inner in self._inner.values():
                inner.cancel()

    async def _together(self) -> None:
        waiting = self._dispatcher.waiting_for(self._key, self._name, self._target)
        with contextlib.suppress(TaskAttemptsExceeded), waiting:
            async with self._dispatcher.place(self._target, windowed=self._windowed):
                await self._run()

    async def _run(self) -> None:
        rows = [(shipment.attempt(0)[1], shipment.call) for shipment in self._shipments.values()]
        call = pickle.dumps(rows, protocol=pickle.HIGHEST_PROTOCOL)
        with self._dispatcher.shown(self._shipments):
            ended = await self._dispatcher.executor.attempt(
                self._name, self._key, self._header, call, self._target.resources, self._take
            )
        for key, outcome in ended if isinstance(ended, list | tuple) else ():  # those that are large
            fetched = await self._dispatcher.fetched(outcome)
            if key in self._waiting and fetched is not None and not fetched.missing:
                self._settle(key, fetched)

    def _take(self, ended: Iterable[tuple[str, bytes]]) -> bool | None:
        """Takes outcomes of the chunk. Returns True once all have come."""
        for key, data in ended:
            if key not in self._waiting:
                continue
            outcome = pickle.loads(data) if data else None  # noqa: S301 - the fleet's own, over mutual TLS
            if outcome is None or outcome.missing:
                self._send_alone(key)
            else:
                self._settle(key, self._dispatcher.snapshot.advised(outcome))
        return None if self._waiting else True

    def _send_alone(self, key: str) -> None:
        self._waiting.remove(key)
        self._alone.create_task(self._execute_alone(key), context=self._context.copy())

    async def _execute_alone(self, key: str) -> None:
        try:
            outcome = await self._dispatcher.execute(self._shipments[key], self._target, windowed=self._windowed)
            self._settle(key, outcome)
        except Exception as error:  # noqa: BLE001 - as above
            self._settle(key, error)

    def _settle(self, key: str, outcome: Outcome | Exception) -> None:
        self._waiting.discard(key)
        # It may have been cancelled in this moment.
        with contextlib.suppress(concurrent.futures.InvalidStateError):
            if isinstance(outcome, Exception):
                self._inner[key].set_exception(outcome)
            else:
                self._inner[key].set_result(outcome)
