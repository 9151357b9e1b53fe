"""Fetches the inputs and secrets of a task to its node, and sends a large result to the head, from the worker process.

A node fetches a blob once for all of its slots.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import time
from collections.abc import Callable, Collection, Coroutine, Iterable, Iterator, Sequence
from functools import cache, lru_cache, partial
from pathlib import Path
from typing import Any, TypeVar

from skyinfra.blobs import store as blobs
from skyinfra.blobs import transfer
from skyinfra.blobs.payload import Payload, unpack
from skyinfra.blobs.store import BlobStore
from skyinfra.blobs.transfer import Blob, BlobsMissing
from skyinfra.blobs.trees import Tree, parse_name
from skyinfra.engine.waiting import interruptible
from skyinfra.errors import StateDirectoryError
from skyinfra.node import faults, probe
from skyinfra.program.views import Views
from skyinfra.protocol import services
from skyinfra.protocol.calls import Part, SecretUse
from skyinfra.protocol.instance import NODE_DIRECTORY
from skyinfra.protocol.rpc import Peer
from skyinfra.worker import cancellation

T = TypeVar("T")

# A head that is away for longer loses the task: its client sends it again.
_PATIENCE_S = 30.0
_RETRY_S = 0.5
# Another process of the node may remove a blob between fetching and using it.
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
    """Makes the tree *name*, or none, visible to the task. Raises `BlobsMissing`, `StateDirectoryError`."""
    if name is None and not _views.cache_info().currsize:
        return
    views = _views()
    if views.tree == name:
        return
    try:
        tree = _tree(name) if name is not None else None
        _repeatedly(tree.blobs() if tree is not None else {}, lambda: views.use(tree))
    except OSError as error:
        raise StateDirectoryError(
            f"what was synced cannot be put there: {error.strerror or error}",
            field=os.environ[NODE_DIRECTORY],
            hint="Free space on the node's disk, or replace the node.",
        ) from None


@contextlib.contextmanager
def importing(given: Collection[str]) -> Iterator[None]:
    """Keeps apart what the modules of a task set in the environment as they are imported, in the body.

    given: the names of those that the task has by itself, such as its secrets: nothing of them is kept.
    """
    # As it lies there: through its methods it takes thirty times as long.
    environ: Any = os.environ
    before = environ._data.copy()
    try:
        yield
    finally:
        if environ._data != before:
            _views().note_set({os.fsdecode(name): os.fsdecode(value) for name, value in before.items()}, given)


def has_other_code() -> bool:
    """Returns whether other code than that of the task was loaded in this process."""
    return bool(_views.cache_info().currsize) and _views().has_others()


def load(parts: Sequence[Part]) -> object:
    """Returns the value of *parts*. Raises `BlobsMissing`, what unpickling raises, and `SlotFailed` where this node
    cannot fetch, open, map or read them."""
    opening = partial(faults.raised_by_node, OSError)
    return _repeatedly({part.digest: part.size for part in parts}, lambda: unpack(parts, _store(), opening))


def keep(payload: Payload) -> tuple[Part, ...]:
    """Sends a large result to the head, and returns its parts there. Raises `TaskTooLarge`, `StateDirectoryError`,
    `BlobsMissing`, and `SlotFailed` where this node has not what it takes."""
    with faults.raised_by_node():
        if (names := call_head(lambda head: transfer.send_unnamed(head, payload.contents))) is not None:
            sizes = (sum(map(len, pieces)) for pieces in payload.contents)
            return tuple(map(Part, names, sizes))
        parcels = payload.blobs()
        _patiently(lambda head: transfer.send(head, parcels), [part.digest for part in payload.parts])
        return payload.parts


def send(parcels: Sequence[Blob]) -> None:
    """Sends files to the head. Raises `TaskTooLarge`, `StateDirectoryError`, `BlobsMissing`, `WrongContent`."""
    _patiently(lambda head: transfer.send(head, parcels), [parcel.digest for parcel in parcels])


def call_head(call: Callable[[Peer], Coroutine[Any, Any, T]]) -> T:
    """Returns the answer of the head to *call*. Raises its error, and `BlobsMissing` where it is away."""
    return _patiently(call, ())


def secrets(uses: Sequence[SecretUse]) -> dict[str, str]:
    """Returns the values of secrets, which the head has in its memory, by their variables. Raises `BlobsMissing`."""
    if not uses:
        return {}
    refs = [use.ref for use in uses]
    values = _patiently(lambda head: services.secrets_take(head, refs=refs), refs)
    found = {use.variable: value for use, value in zip(uses, values, strict=True) if value is not None}
    if len(found) < len(uses):
        raise BlobsMissing([use.ref for use in uses if use.variable not in found])
    return found


def fetch(wanted: dict[str, int]) -> None:
    """Fetches blobs, digest to size. Raises `BlobsMissing`, `TaskTooLarge`, and `SlotFailed` where they find no place
    on this node."""
    store = _store()
    missing = {digest: size for digest, size in wanted.items() if not store.has(digest, size)}
    if missing:
        with faults.raised_by_node(StateDirectoryError), store.locked(min(missing)):
            _patiently(lambda head: transfer.fetch(head, store, missing), missing)


def _repeatedly(wanted: dict[str, int], use: Callable[[], T]) -> T:
    """Fetches *wanted* and calls *use*, again where a blob was removed meanwhile."""
    for attempt in range(_ATTEMPTS):
        fetch(wanted)
        try:
            return use()
        except BlobsMissing:
            if attempt + 1 == _ATTEMPTS:
                raise
    raise AssertionError  # the last attempt has returned or raised


def _patiently(start: Callable[[Peer], Coroutine[Any, Any, T]], digests: Iterable[str]) -> T:
    """Returns the result of *start*, which is called again while the head is away."""
    # Imported here: the process of a rank does not need it, and would wait for the import.
    from distributed import get_worker

    worker = get_worker()
    deadline = time.monotonic() + _PATIENCE_S
    while True:
        try:
            # In the worker's event loop; an interrupt of the task ends it.
            with cancellation.reachable():
                loop = worker.loop.asyncio_loop
                return interruptible(asyncio.run_coroutine_threadsafe(start(worker.scheduler), loop))
        except OSError as error:
            if probe.lacks(error):  # it is not the head that is away
                raise
            if time.monotonic() > deadline:
                raise BlobsMissing([*digests]) from None
            time.sleep(_RETRY_S)
