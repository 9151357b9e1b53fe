"""The scheduler of the head: Dask's, which also knows the layout of the fleet and which slots there are to be."""

from __future__ import annotations

import asyncio
import contextlib
from typing import Any

from distributed import Scheduler
from distributed.core import Status

from skyinfra.protocol import fleet
from skyinfra.protocol.fleet import FleetLayout, FleetState, NodeFailure
from skyinfra.protocol.instance import STARTUP_KEY

# An answer that nobody waits for any more is given up after that long.
_LONGEST_WAIT_S = 60.0


class FleetScheduler(Scheduler):  # type: ignore[misc]
    """A scheduler that hands *layout* to the nodes that ask, and tells clients what the fleet is to have.

    ``identity()`` has a `FleetState` under `instance.STARTUP_KEY`.
    """

    def __init__(self, *, layout: FleetLayout, **keywords: Any) -> None:
        super().__init__(**keywords)
        self._offered = layout
        self._changed = asyncio.Event()
        self._promised: dict[str, tuple[str, ...]] = {}
        self._boot_failures: dict[str, NodeFailure] = {}
        self.handlers[fleet.LAYOUT_CALL] = self._hand_on
        self.handlers[fleet.SLOTS_CALL] = self.promise

    def offer(self, layout: FleetLayout) -> None:
        """Hands *layout* on from now on; whoever waits for another one gets it at once."""
        if layout != self._offered:
            self._offered = layout
            self._wake()

    def promise(self, node: str, slots: list[str] | tuple[str, ...]) -> None:
        """Takes the names of the slots that *node* is to have."""
        self._promised[node] = tuple(slots)
        self._boot_failures.pop(node, None)

    def fail(self, node: str, failure: NodeFailure) -> None:
        """Takes that *node* could not be set up."""
        self._boot_failures[node] = failure

    def identity(self, n_workers: int = -1) -> dict[str, Any]:
        """What Dask says about itself and its workers, with the `FleetState`."""
        state = FleetState(fleet.VERSION, dict(self._promised), self._draining(), failed=dict(self._boot_failures))
        return {**super().identity(n_workers), STARTUP_KEY: state.to_json()}

    async def close(self, *arguments: Any, **keywords: Any) -> None:
        """Ends the scheduler; whoever waits for a layout gets the present one."""
        self._wake()
        await super().close(*arguments, **keywords)

    def _draining(self) -> dict[str, tuple[str, ...]]:
        """The runners pause the workers of the slots that go; what those still process they have started."""
        return {
            str(worker.name): tuple(sorted(key.rpartition("-")[0] for key in map(_key, worker.processing)))
            for worker in self.workers.values()
            if worker.status == Status.paused
        }

    async def _hand_on(self, seen: str | None = None, wait_s: float = 0.0) -> dict[str, object]:
        """The layout, at once where its digest is not *seen*, else when it changes or after *wait_s* seconds."""
        if self._offered.digest == seen and self.status == Status.running:
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._changed.wait(), min(wait_s, _LONGEST_WAIT_S))
        return self._offered.to_json()

    def _wake(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()


def _key(task: Any) -> str:
    return str(task.key)
