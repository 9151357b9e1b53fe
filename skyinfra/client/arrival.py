"""Waiting until the cloud nodes of a fleet have booted, and saying what stands in their way."""

from __future__ import annotations

import time
from collections.abc import Callable

from skyinfra.client.connection import boot_failed
from skyinfra.client.lookup import open_pool
from skyinfra.client.pool import Pool
from skyinfra.client.snapshot import Snapshot
from skyinfra.errors import BootFailed, FleetUnreachable
from skyinfra.protocol.manifest import Manifest

_LOOK_S = 2.0
_CONNECT_S = 5.0


def wait_until_ready(manifest: Manifest, *, patience: float, on_change: Callable[[str], object]) -> None:
    """Waits until every slot that the fleet of *manifest* is to have takes tasks.

    patience: seconds. on_change: hears, in words, how far it is, whenever that changes. Raises `BootFailed` as soon as
    a node says that it could not be set up, `FleetUnreachable` after the patience, and what else connecting raises.
    """
    deadline = time.monotonic() + patience
    said = ""

    def say(text: str) -> None:
        nonlocal said
        if text != said:
            said = text
            on_change(text)

    say("boots")
    while True:
        try:
            with open_pool(manifest, timeout=_CONNECT_S, output=False, progress=False) as pool:
                if _served(pool, deadline, say):
                    return
        except BootFailed:
            raise
        except FleetUnreachable as error:
            if time.monotonic() > deadline:
                raise _late(manifest, patience, error.message) from None
        if time.monotonic() > deadline:
            raise _late(manifest, patience, said)
        time.sleep(_LOOK_S)


def _served(pool: Pool, deadline: float, say: Callable[[str], None]) -> bool:
    """Whether all slots came before the deadline. Raises `FleetUnreachable` where the head goes away meanwhile."""
    manifest = pool.manifest
    while True:
        now = pool.look()
        if now.state is not None and now.state.failed:
            node, failure = sorted(now.state.failed.items())[0]
            raise boot_failed(failure, node=node, fleet=manifest.fleet)
        there, wanted = len(now.slots), _wanted(manifest, now)
        say(f"{there} of {wanted} slots are ready")
        if there >= wanted:
            return True
        if time.monotonic() > deadline:
            return False
        time.sleep(_LOOK_S)


def _wanted(manifest: Manifest, now: Snapshot) -> int:
    """How many slots there are to be: what the nodes that are there say, and for the others what was declared."""
    told = now.state.slots if now.state is not None else {}
    counts = [len(names) for names in told.values() if names]
    others = max(0, manifest.node_count - len(counts))
    return sum(counts) + others * len(manifest.slots)


def _late(manifest: Manifest, patience: float, last: str) -> FleetUnreachable:
    return FleetUnreachable(
        f"{manifest.fleet} is not ready {patience:g} s after it was created: {last}",
        hint="It exists, and its nodes go on: `skyinfra status` shows them. A head that cannot be reached from here "
        "needs this machine's address in allow_cidrs; `skyinfra deploy --no-wait` does not wait.",
    )
