"""The blobs of the head, as clients and nodes send and fetch them; see `skyinfra.blobs.transfer`.

Files are read, written and hashed in threads, so that the scheduler goes on meanwhile.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque

from skyinfra.blobs import transfer
from skyinfra.blobs.store import BlobStore, Incoming, WrongContent
from skyinfra.errors import SkyinfraError
from skyinfra.protocol import rpc, services

# An upload to which nothing was written for that long is dropped.
_IDLE_S = 120.0
# Parts of an upload that was dropped may still come; not for long.
_DROPPED = 1000


class HeadBlobs:
    """Answers the calls about the blobs of *store*, see `skyinfra.protocol.services`. ``handlers``: by call."""

    def __init__(self, store: BlobStore) -> None:
        self._store = store
        self._uploads: dict[str, tuple[Incoming, float]] = {}
        self._dropped: deque[str] = deque(maxlen=_DROPPED)
        self.handlers = rpc.handlers(
            services.blobs_missing.by(self.missing),
            services.blobs_add.by(self.add),
            services.blobs_write.by(self.write),
            services.blobs_finish.by(self.finish),
            services.blobs_drop.by(self.drop),
            services.blobs_read.by(self.read),
            services.blobs_check.by(self.check),
        )

    async def missing(self, digests: list[str]) -> list[str]:
        """Returns those of *digests* that are not here; the others count as used."""
        return await asyncio.to_thread(self._store.missing, digests)

    async def add(self, blobs: list[tuple[str, bytes]]) -> str | None:
        """Adds small blobs. The first digest that its content does not have, or None."""

        def add() -> str | None:
            for digest, data in blobs:
                try:
                    self._store.add(digest, data)
                except WrongContent:
                    return digest
            return None

        return await asyncio.to_thread(add)

    async def write(self, upload: str, digest: str, size: int, offset: int, data: bytes | memoryview) -> None:
        """Writes a part of a blob of *size* bytes. *upload*: unique to the sender."""
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

        await asyncio.to_thread(write)

    async def finish(self, upload: str) -> bool:
        """Makes a blob of the parts of *upload*; False where they do not have the digest."""
        found = self._uploads.pop(upload, None)
        if found is None:
            return False
        try:
            await asyncio.to_thread(found[0].finish)
        except WrongContent:
            return False
        return True

    def drop(self, upload: str) -> None:
        """Forgets the parts of *upload*, those on their way too."""
        self._dropped.append(upload)
        found = self._uploads.pop(upload, None)
        if found is not None:
            found[0].drop()

    async def read(self, parts: list[tuple[str, int, int]]) -> list[bytes | memoryview | None]:
        """Parts of blobs, each (digest, offset, length); None for those that are not here."""

        def read() -> list[bytes | memoryview | None]:
            found = (self._store.read(*part) for part in parts)
            return [None if data is None else transfer.beside(data) for data in found]

        return await asyncio.to_thread(read)

    async def check(self, digest: str) -> None:
        """Removes a blob whose content does not have its digest: a loss of power may have damaged it."""
        await asyncio.to_thread(self._store.check, digest)

    def _forget_idle(self) -> None:
        now = time.monotonic()
        for upload, (_, written) in list(self._uploads.items()):
            if now - written > _IDLE_S:
                self.drop(upload)
