"""The head's part in the transfer of blobs, see `skyinfra.blobs.transfer`.

Files are read, written and hashed in threads: the scheduler goes on meanwhile.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Callable
from typing import Any

from skyinfra.blobs import transfer
from skyinfra.blobs.store import BlobStore, Incoming, WrongContent
from skyinfra.blobs.transfer import Answer
from skyinfra.errors import SkyinfraError

# Who has written nothing for that long is gone.
_IDLE_S = 120.0
# Parts of an upload that was dropped may still come; not for long.
_DROPPED = 1000


class HeadBlobs:
    """Answers the calls about the blobs of *store*. ``handlers`` are the scheduler's."""

    def __init__(self, store: BlobStore) -> None:
        self._store = store
        self._uploads: dict[str, tuple[Incoming, float]] = {}
        self._dropped: deque[str] = deque(maxlen=_DROPPED)
        self.handlers: dict[str, Callable[..., Any]] = {
            transfer.MISSING_CALL: self.missing,
            transfer.ADD_CALL: self.add,
            transfer.WRITE_CALL: self.write,
            transfer.FINISH_CALL: self.finish,
            transfer.DROP_CALL: self.drop,
            transfer.READ_CALL: self.read,
            transfer.CHECK_CALL: self.check,
        }

    async def missing(self, digests: list[str]) -> Answer:
        """Those of *digests* that are not here; the others count as used."""
        return await _answered(self._store.missing, list(digests))

    async def add(self, blobs: list[tuple[str, bytes]]) -> Answer:
        """Takes small blobs."""

        def add() -> None:
            for digest, data in blobs:
                self._store.add(digest, data)

        return await _answered(add)

    async def write(self, upload: str, digest: str, size: int, offset: int, data: bytes | memoryview) -> Answer:
        """Takes a part of a blob of *size* bytes. *upload*: unique to who sends it."""
        self._forget_idle()

        def write() -> None:
            if upload in self._dropped:
                return
            incoming = self._uploads[upload][0] if upload in self._uploads else self._store.begin(digest, size)
            # Another part of it may have been the first one meanwhile.
            incoming = self._uploads.setdefault(upload, (incoming, 0.0))[0]
            self._uploads[upload] = incoming, time.monotonic()
            try:
                incoming.write(offset, data)
            except SkyinfraError:
                self.drop(upload)
                raise
            if upload in self._dropped:  # meanwhile
                self.drop(upload)

        return await _answered(write)

    async def finish(self, upload: str) -> Answer:
        """Makes what was written a blob, where it is what its digest says."""

        def finish() -> None:
            if upload not in self._uploads:
                raise WrongContent(upload)
            self._uploads.pop(upload)[0].finish()

        return await _answered(finish)

    def drop(self, upload: str) -> Answer:
        """Forgets what was written, and what is on its way."""
        self._dropped.append(upload)
        found = self._uploads.pop(upload, None)
        if found is not None:
            found[0].drop()
        return {"value": None}

    async def read(self, parts: list[tuple[str, int, int]]) -> Answer:
        """Parts of blobs, each of (digest, offset, length); None for those that are not here."""

        def read() -> list[Any]:
            found = (self._store.read(*part) for part in parts)
            return [None if data is None else transfer.beside(data) for data in found]

        return await _answered(read)

    async def check(self, digest: str) -> Answer:
        """Removes a blob that is not what it should be: a loss of power may have done that."""
        return await _answered(self._store.check, digest)

    def _forget_idle(self) -> None:
        now = time.monotonic()
        for upload, (_, written) in list(self._uploads.items()):
            if now - written > _IDLE_S:
                self.drop(upload)


async def _answered(work: Callable[..., Any], *arguments: Any) -> Answer:
    try:
        return {"value": await asyncio.to_thread(work, *arguments)}
    except (SkyinfraError, WrongContent) as error:
        return transfer.refused(error)
