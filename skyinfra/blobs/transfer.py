"""Blobs on their way between clients, the head and the nodes: in chunks, through calls of the head's scheduler.

Only the head's port has to be open, and it never has more than a few chunks of a transfer in memory. Small blobs travel
together, a large one in chunks of which two are on their way at a time. Who sends asks first which blobs are missing.

The scheduler answers with ``{"value": ...}``, or ``{"error": [class name, message, field, hint]}``.

Travels to nodes: standard library and ``distributed`` only.
"""

from __future__ import annotations

import asyncio
import os
import uuid
from collections.abc import Awaitable, Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from skyinfra import errors
from skyinfra.blobs.store import BlobStore, WrongContent
from skyinfra.errors import NodeFailed, NotSupported, SkyinfraError

MISSING_CALL = "skyinfra_blobs_missing"
ADD_CALL = "skyinfra_blobs_add"
WRITE_CALL = "skyinfra_blobs_write"
FINISH_CALL = "skyinfra_blobs_finish"
DROP_CALL = "skyinfra_blobs_drop"
READ_CALL = "skyinfra_blobs_read"
CHECK_CALL = "skyinfra_blobs_check"

CHUNK = 4 * 2**20
# Chunks of one transfer that are on their way.
_WINDOW = 2
# Digests in one question.
_MOST = 5000
# Bytes from that size on travel beside the message they belong to, see `beside`.
_BESIDE = 256 * 2**10

Answer = dict[str, Any]


class BlobsMissing(LookupError):
    """Blobs are not at the head any more, or never were; ``digests`` are theirs. Who has them sends them again."""

    def __init__(self, digests: Sequence[str]) -> None:
        self.digests = tuple(digests)
        super().__init__(f"{len(self.digests)} blobs are not at the head: {', '.join(self.digests[:3])}")


class Head(Protocol):
    """The calls of the head's scheduler, as `distributed.rpc` offers them."""

    def __getattr__(self, name: str) -> Callable[..., Awaitable[Any]]: ...


@dataclass(frozen=True)
class Blob:
    """A blob to be sent. chunks: its content, in pieces of at most `CHUNK` bytes, again at every call."""

    digest: str
    size: int
    chunks: Callable[[], Iterator[bytes | memoryview]]


@dataclass(frozen=True)
class Sent:
    """How much of what was to be there had to be sent."""

    blobs: int = 0
    bytes: int = 0


def chunked(pieces: Iterable[bytes | bytearray | memoryview]) -> Iterator[memoryview]:
    """The bytes of *pieces* one after the other, none of them copied, at most `CHUNK` at once."""
    for piece in pieces:
        view = memoryview(piece).cast("B")
        for start in range(0, len(view), CHUNK):
            yield view[start : start + CHUNK]


def beside(data: bytes | memoryview) -> Any:
    """*data*, for a message: large ones travel beside it, from where they lie to where they arrive, without a copy."""
    if len(data) < _BESIDE:
        return data
    # Here, because the process of a rank needs the rest of this module alone.
    from skyinfra.engine import dask_private

    return dask_private.without_copy(data)


# Sending ------------------------------------------------------------------------------------------------------------


async def send(head: Head, blobs: Sequence[Blob]) -> Sent:
    """Makes sure that *blobs* are at the head.

    Raises `WrongContent` where one is not what its digest says, `TaskTooLarge` or `StateDirectoryError` where the head
    cannot keep one, OSError where it does not answer.
    """
    missing = set(await missing_of(head, [blob.digest for blob in blobs]))
    wanted = list({blob.digest: blob for blob in blobs if blob.digest in missing}.values())
    batch: list[tuple[str, bytes]] = []
    filled = 0
    for blob in wanted:
        if blob.size > CHUNK:
            await _send_large(head, blob)
            continue
        if filled + blob.size > CHUNK or len(batch) >= _MOST:
            await _add(head, batch)
            batch, filled = [], 0
        batch.append((blob.digest, b"".join(blob.chunks())))
        filled += blob.size
    if batch:
        await _add(head, batch)
    return Sent(len(wanted), sum(blob.size for blob in wanted))


async def missing_of(head: Head, digests: Sequence[str]) -> list[str]:
    """Those of *digests* that the head has not."""
    found: list[str] = []
    for start in range(0, len(digests), _MOST):
        found += _value(await head.skyinfra_blobs_missing(digests=list(digests[start : start + _MOST])))
    return found


async def _add(head: Head, batch: list[tuple[str, bytes]]) -> None:
    _value(await head.skyinfra_blobs_add(blobs=batch))


async def _send_large(head: Head, blob: Blob) -> None:
    upload = uuid.uuid4().hex

    async def write(offset: int, data: bytes | memoryview) -> None:
        answer = head.skyinfra_blobs_write(
            upload=upload, digest=blob.digest, size=blob.size, offset=offset, data=beside(data)
        )
        _value(await answer)

    async def parts() -> None:
        async with _Window() as window:
            offset = 0
            for data in blob.chunks():
                await window.start(write(offset, data))
                offset += len(data)

    try:
        await parts()
        _value(await head.skyinfra_blobs_finish(upload=upload))
    except (SkyinfraError, WrongContent, asyncio.CancelledError):
        # The head removes what came; one that is cut off does so after a while.
        await asyncio.shield(asyncio.gather(_call(head.skyinfra_blobs_drop(upload=upload)), return_exceptions=True))
        raise


async def _call(answer: Awaitable[Any]) -> Any:
    return await answer


class _Window:
    """Lets `_WINDOW` coroutines run at once; the first one that fails ends the others at the end of the block."""

    def __init__(self) -> None:
        self._running: list[asyncio.Task[None]] = []

    async def start(self, coroutine: Any) -> None:
        self._running.append(asyncio.create_task(coroutine))
        if len(self._running) >= _WINDOW:
            await self._running.pop(0)

    async def __aenter__(self) -> _Window:
        return self

    async def __aexit__(self, kind: type[BaseException] | None, *_: object) -> None:
        try:
            if kind is None:
                for task in self._running:
                    await task
        finally:
            for task in self._running:
                task.cancel()
            await asyncio.gather(*self._running, return_exceptions=True)


# Fetching -----------------------------------------------------------------------------------------------------------


async def fetch(head: Head, store: BlobStore, wanted: dict[str, int]) -> Sent:
    """Brings the blobs *wanted*, digest to size, into *store*, where they are not there yet.

    Raises `BlobsMissing`, `StateDirectoryError`, `TaskTooLarge`, OSError where the head does not answer.
    """
    missing = [digest for digest, size in wanted.items() if not store.has(digest, size)]
    small = [digest for digest in missing if wanted[digest] <= CHUNK]
    for digests in _batches(small, wanted):
        found = await _read(head, [(digest, 0, wanted[digest]) for digest in digests])
        unusable = await asyncio.to_thread(_keep, store, dict(zip(digests, found, strict=True)))
        if unusable:
            raise await _lost(head, unusable)
    for digest in missing:
        if wanted[digest] > CHUNK:
            await _fetch_large(head, store, digest, wanted[digest])
    return Sent(len(missing), sum(wanted[digest] for digest in missing))


async def fetch_bytes(head: Head, digest: str, size: int) -> memoryview:
    """One blob, in memory. Raises `BlobsMissing`, OSError where the head does not answer."""
    from skyinfra.engine import dask_private  # as in `beside`

    content = dask_private.memory(size)

    def put(offset: int, data: bytes | memoryview) -> None:
        content[offset : offset + len(data)] = data

    await _parts(head, digest, size, put)
    return content


async def fetch_file(head: Head, digest: str, size: int, path: Path) -> None:
    """One blob, into the new file *path*. Raises `BlobsMissing`, OSError."""
    with path.open("xb") as file:

        def put(offset: int, data: bytes | memoryview) -> None:
            # Parts come from several threads.
            os.pwrite(file.fileno(), data, offset)

        await _parts(head, digest, size, put)


def _batches(digests: list[str], sizes: dict[str, int]) -> Iterator[list[str]]:
    batch: list[str] = []
    filled = 0
    for digest in digests:
        if batch and (filled + sizes[digest] > CHUNK or len(batch) >= _MOST):
            yield batch
            batch, filled = [], 0
        batch.append(digest)
        filled += sizes[digest]
    if batch:
        yield batch


def _keep(store: BlobStore, found: dict[str, bytes | memoryview | None]) -> list[str]:
    """Adds what was *found*; the digests of what was not, or is something else."""
    unusable = []
    for digest, data in found.items():
        try:
            if data is not None:
                store.add(digest, data)
        except WrongContent:
            data = None
        if data is None:
            unusable.append(digest)
    return unusable


async def _lost(head: Head, digests: Sequence[str]) -> BlobsMissing:
    """The head looks at what it has under these names, and removes what is damaged."""
    for digest in digests:
        _value(await head.skyinfra_blobs_check(digest=digest))
    return BlobsMissing(digests)


async def _fetch_large(head: Head, store: BlobStore, digest: str, size: int) -> None:
    with store.begin(digest, size) as incoming:
        await _parts(head, digest, size, incoming.write)
        try:
            await asyncio.to_thread(incoming.finish)
        except WrongContent:
            raise await _lost(head, [digest]) from None


async def _parts(head: Head, digest: str, size: int, put: Callable[[int, bytes | memoryview], None]) -> None:
    async def read(offset: int) -> None:
        (data,) = await _read(head, [(digest, offset, min(CHUNK, size - offset))])
        if data is None or len(data) != min(CHUNK, size - offset):
            raise BlobsMissing([digest])
        await asyncio.to_thread(put, offset, data)

    async with _Window() as window:
        for offset in range(0, size, CHUNK):
            await window.start(read(offset))


async def _read(head: Head, parts: list[tuple[str, int, int]]) -> list[bytes | memoryview | None]:
    found: list[bytes | memoryview | None] = list(_value(await head.skyinfra_blobs_read(parts=parts)))
    return found


# Answers ------------------------------------------------------------------------------------------------------------


def refused(error: SkyinfraError | WrongContent) -> Answer:
    """The answer that *error* is."""
    if isinstance(error, WrongContent):
        return {"error": [WrongContent.__name__, str(error), None, None]}
    return {"error": [type(error).__name__, error.message, error.field, error.hint]}


def _value(answer: Answer | None) -> Any:
    """What the head answered. Raises what stood in its way."""
    if answer is None:
        raise NotSupported(
            "the head of the fleet keeps no blobs", hint="It is older than this client: deploy it again."
        )
    if "error" not in answer:
        return answer["value"]
    name, message, field, hint = answer["error"]
    if name == WrongContent.__name__:
        raise WrongContent(message)
    kind = getattr(errors, name, NodeFailed)
    where = f"head: {field}" if field else "head"
    raise kind(message, field=where, hint=hint)
