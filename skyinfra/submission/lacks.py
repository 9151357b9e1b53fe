"""Tells who waits for a task why there is no node for it, where the number of nodes follows the work."""

from __future__ import annotations

import math
import sys
import time

from skyinfra.errors.printable import printable
from skyinfra.protocol.fleet import FleetState

# Each reason is said that often at most.
_EVERY_S = 900.0


class Lacks:
    """When each reason was said last to who waits for nodes of *fleet*."""

    def __init__(self, fleet: str) -> None:
        self._fleet = fleet
        self._last: dict[str, float] = {}

    def tell(self, state: FleetState | None) -> None:
        """Says on the standard error why nodes are missing, by the *state* of the fleet; for who waits for a slot."""
        size = state.size if state is not None else None
        now = time.monotonic()
        if size is None or not size.lack or now - self._last.get(size.lack, -math.inf) < _EVERY_S:
            return
        self._last[size.lack] = now
        sys.stderr.write(printable(f"{self._fleet}: work waits: {size.said}\n", None))
        sys.stderr.flush()
