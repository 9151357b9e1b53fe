"""The blobs of the head, as clients and nodes send and fetch them; see `skyinfra.blobs.transfer`.

Files are read, written and hashed in threads, so that the scheduler goes on meanwhile.
"""

from __future__ import annotations

import asyncio
import functools
import time
from collections import deque
from collections.abc import Callable, Coroutine
from typing import Any, ParamSpec, TypeVar

from skyinfra.blobs import transfer
from skyinfra.blobs.store import BlobStore, Incoming, WrongContent
from skyinfra.errors import SkyinfraError
from skyinfra.protocol import rpc, services

P = ParamSpec("P")
T = TypeVar("T")

# An upload to which nothing was written for that long is dropped.
_IDLE_S = 120.0
# Parts of an upload that was dropped may still come; not for long.
_DROPPED = 1000


def _in_thread(work: Callable[P, T]) -> Callable[P, Coroutine[Any, Any, T]]:
    """*work* as a coroutine function, which runs it in a thread."""

    @functools.wraps(work)
    async def start(*arguments: P.args, **keywords: P.kwargs) -> T:
        return await asyncio.to_thread(work, *arguments, **keywords)

    return start


class HeadBlobs:
    """Answers the calls about the blobs of *store*, see `skyinfra.protocol.services`. ``handlers``: by call.

    note: is called when bytes are sent or fetched.
    """

    def __init__(self, store: BlobStore) -> None:
        self.note: Callable[[], object] = lambda: None
        self._store = store
        self._uploads: dict[str, Incoming] = {}
        self._dropped: deque[str] = deque(maxlen=_DROPPED)
        self.handlers = rpc.handlers(
            services.blobs_missing.by(_in_thread(store.missing)),
            services.blobs_add.by(self.add),
            services.blobs_write.by(self.write),
            services.blobs_finish.by(self.finish),
            services.blobs_drop.by(self.drop),
            services.blobs_read.by(self.read),
            # A loss of power may have damaged one.
            services.blobs_check.by(_in_thread(store.check)),
            services.blobs_place.by(_in_thread(store.shown)),
        )

    @_in_thread
    def add(self, blobs: list[tuple[str, bytes]]) -> str | None:
        """Adds small blobs. The first digest that its content does not have, or None."""
        self.note()
        for digest, data in blobs:
            try:
                self._store.add(digest, data)
            except WrongContent:
                return digest
        return None

    @_in_thread
    def write(self, upload: str, digest: str, size: int, offset: int, data: bytes | memoryview) -> None:
        """Writes a part of a blob of *size* bytes. *upload*: unique to the sender."""
        self.note()
        now = time.monotonic()
        for name, idle in list(self._uploads.items()):
            if now - idle.written > _IDLE_S:
                self.drop(name)
        if upload in self._dropped:
            return
        incoming = self._uploads.get(upload) or self._store.begin(digest, size)
        incoming.written = now
        # Another part of it may have been the first one meanwhile.
        incoming = self._uploads.setdefault(upload, incoming)
        try:
            incoming.write(offset, data)
        except SkyinfraError:
            self.drop(upload)
            # Where another part has dropped it meanwhile, this one may have made its file again.
            incoming.close()
            raise
        if upload in self._dropped:  # meanwhile, and its file may have been made again
            self.drop(upload)
            incoming.close()

    @_in_thread
    def finish(self, upload: str) -> bool:
        """Makes a blob of the parts of *upload*; False where they do not have the digest."""
        found = self._uploads.pop(upload, None)
        try:
            if found is not None:
                found.finish()
        except WrongContent:
            return False
        return found is not None

    def drop(self, upload: str) -> None:
        """Forgets the parts of *upload*, those on their way too."""
        self._dropped.append(upload)
        found = self._uploads.pop(upload, None)
        if found is not None:
            found.close()

    @_in_thread
    def read(self, parts: list[tuple[str, int, int]]) -> list[bytes | memoryview | None]:
        """Parts of blobs, each (digest, offset, length); None for those that are not here."""
        self.note()
        found = (self._store.read(*part) for part in parts)
        return [None if data is None else transfer.beside(data) for data in found]
