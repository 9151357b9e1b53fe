"""Bringing what a task needs to its node before it starts, and a large result to the head, from its worker process.

A blob comes to a node once, whichever of its slots needs it.

Travels to nodes: standard library and ``distributed`` only.
"""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Callable, Coroutine, Sequence
from functools import cache, lru_cache
from pathlib import Path
from typing import Any, TypeVar

from skyinfra.blobs import store as blobs
from skyinfra.blobs import transfer
from skyinfra.blobs.payload import Payload, unpack
from skyinfra.blobs.store import BlobStore
from skyinfra.blobs.transfer import BlobsMissing
from skyinfra.blobs.trees import Tree, parse_name
from skyinfra.errors import StateDirectoryError
from skyinfra.protocol.calls import Part
from skyinfra.protocol.instance import NODE_DIRECTORY
from skyinfra.protocol.rpc import Peer
from skyinfra.worker.views import Views

T = TypeVar("T")

# A head that is gone for longer loses the task: its client sends it again.
_PATIENCE_S = 30.0
_RETRY_S = 0.5
# How often a task that waits here can be interrupted.
_POLL_S = 0.1
# Somebody else on the node may make room between fetching and using.
_ATTEMPTS = 3


@cache
def _store() -> BlobStore:
    return BlobStore(Path(os.environ[NODE_DIRECTORY], blobs.FOLDER))


@cache
def _views() -> Views:
    return Views(Path(os.environ[NODE_DIRECTORY]), _store())


@lru_cache(maxsize=8)
def _tree(name: str) -> Tree:
    digest, size = parse_name(name)
    fetch({digest: size})
    data = _store().read(digest, 0, size)
    if data is None:
        raise BlobsMissing([digest])
    return Tree.loads(data)


def use_tree(name: str | None) -> None:
    """Lets the task of this process see the tree *name*, or none. Raises `BlobsMissing`, `StateDirectoryError`."""
    if name is None and not _views.cache_info().currsize:
        return
    views = _views()
    if views.using(name):
        return
    try:
        if name is None:
            views.use(None)
        else:
            tree = _tree(name)
            _repeatedly(tree.blobs(), lambda: views.use(tree))
    except OSError as error:
        raise StateDirectoryError(
            f"what was synced cannot be put there: {error.strerror or error}",
            field=os.environ[NODE_DIRECTORY],
            hint="Free space on the node's disk, or replace the node.",
        ) from None


def load(parts: Sequence[Part]) -> object:
    """The value that *parts* make. Raises `BlobsMissing`, and what unpickling raises."""
    return _repeatedly({part.digest: part.size for part in parts}, lambda: unpack(parts, _store()))


def keep(payload: Payload) -> None:
    """Sends a large result to the head. Raises `TaskTooLarge`, `StateDirectoryError`, `BlobsMissing`."""
    parcels = payload.blobs()
    _patiently(lambda head: transfer.send(head, parcels), payload.parts)


def fetch(wanted: dict[str, int]) -> None:
    """Brings blobs, digest to size, to this node. Raises `BlobsMissing`, `StateDirectoryError`, `TaskTooLarge`."""
    store = _store()
    missing = {digest: size for digest, size in wanted.items() if not store.has(digest, size)}
    if missing:
        with store.locked(min(missing)):
            parts = [Part(digest, size) for digest, size in missing.items()]
            _patiently(lambda head: transfer.fetch(head, store, missing), parts)


def _repeatedly(wanted: dict[str, int], use: Callable[[], T]) -> T:
    """Fetches *wanted* and calls *use*, again where somebody has made room meanwhile."""
    for attempt in range(_ATTEMPTS):
        fetch(wanted)
        try:
            return use()
        except BlobsMissing:
            if attempt + 1 == _ATTEMPTS:
                raise
    raise AssertionError  # the last attempt has returned or raised


def _patiently(start: Callable[[Peer], Coroutine[Any, Any, T]], parts: Sequence[Part]) -> T:
    """The result of what *start* gives, again while the head is away."""
    deadline = time.monotonic() + _PATIENCE_S
    while True:
        try:
            return _with_head(start)
        except OSError:
            if time.monotonic() > deadline:
                raise BlobsMissing([part.digest for part in parts]) from None
            time.sleep(_RETRY_S)


def _with_head(start: Callable[[Peer], Coroutine[Any, Any, T]]) -> T:
    """Runs what *start* gives in the worker's event loop; an interrupt of the task ends it."""
    # Here, because the process of a rank needs none of this, and would wait for the import.
    from distributed import get_worker

    worker = get_worker()
    future = asyncio.run_coroutine_threadsafe(start(worker.scheduler), worker.loop.asyncio_loop)
    try:
        while True:
            try:
                return future.result(_POLL_S)
            except TimeoutError:
                if future.done():
                    return future.result()
    finally:
        future.cancel()
