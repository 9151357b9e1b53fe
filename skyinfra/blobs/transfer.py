"""Transfer of blobs between clients, the head and the nodes: in chunks, through calls of the head's scheduler.

Only the head's port has to be open, and the head holds a few chunks of a transfer in memory at most. Small blobs travel
together, a large one in chunks, two of them at a time. The sender asks first which blobs are missing. Where the head
is of the same account on the same machine, large blobs are written to its folder and read from there.
"""

from __future__ import annotations

import asyncio
import contextlib
import mmap
import uuid
from collections import deque
from collections.abc import Awaitable, Callable, Coroutine, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from skyinfra.blobs.store import BlobStore, WrongContent, write_at
from skyinfra.blobs.trees import Entry
from skyinfra.errors import SkyinfraError
from skyinfra.protocol import services
from skyinfra.protocol.rpc import Peer

CHUNK = 4 * 2**20
# Chunks of one transfer that are on their way.
_WINDOW = 2
# Digests in one question.
_MOST_DIGESTS = 5000
# Bytes from that size on travel beside the message they belong to, see `beside`.
_BESIDE = 256 * 2**10

T = TypeVar("T")


class BlobsMissing(LookupError):
    """The head does not have the blobs ``digests`` any more, or never had them. Who has them sends them again."""

    def __init__(self, digests: Sequence[str]) -> None:
        self.digests = tuple(digests)
        super().__init__(f"{len(self.digests)} blobs are not at the head: {', '.join(self.digests[:3])}")


@dataclass(frozen=True)
class Blob:
    """A blob to send. chunks: gives its content in pieces of at most `CHUNK` bytes, at every call from the start."""

    digest: str
    size: int
    chunks: Callable[[], Iterator[bytes | memoryview]]


@dataclass(frozen=True)
class Sent:
    """The numbers of blobs and bytes that were transferred; the others were there already."""

    blobs: int = 0
    bytes: int = 0


def chunked(pieces: Iterable[bytes | bytearray | memoryview]) -> Iterator[memoryview]:
    """The bytes of *pieces* in order, at most `CHUNK` at once, without a copy."""
    for piece in pieces:
        view = memoryview(piece).cast("B")
        for start in range(0, len(view), CHUNK):
            yield view[start : start + CHUNK]


def beside(data: bytes | memoryview) -> Any:
    """*data* for a message. Large data travels beside the message, from memory to memory without a copy."""
    if len(data) < _BESIDE:
        return data
    # Here, because the process of a rank needs the rest of this module alone.
    from skyinfra.engine import dask_comms

    return dask_comms.without_copy(data)


async def store_near(head: Peer) -> BlobStore | None:
    """Returns the store of *head*, where this process can use its files: both are of one account on one machine.

    Raises OSError where the head does not answer.
    """
    try:
        place = await services.blobs_place(head)
    except SkyinfraError:  # of a head of before, or whose disk is full
        return None
    return await asyncio.to_thread(BlobStore.same, *place)


# Sending ------------------------------------------------------------------------------------------------------------


async def send(head: Peer, blobs: Sequence[Blob]) -> Sent:
    """Sends those of *blobs* that the head does not have.

    Raises `WrongContent` where a content does not have its digest, `TaskTooLarge` or `StateDirectoryError` where the
    head cannot keep a blob, OSError where it does not answer.
    """
    digests, missing = [blob.digest for blob in blobs], set[str]()
    for start in range(0, len(digests), _MOST_DIGESTS):
        asked = digests[start : start + _MOST_DIGESTS]
        missing.update(await _at_head(services.blobs_missing(head, digests=asked)))
    wanted = {blob.digest: blob for blob in blobs if blob.digest in missing}
    sizes = {digest: blob.size for digest, blob in wanted.items()}
    for batch in _batches(sizes):
        small = [(digest, b"".join(wanted[digest].chunks())) for digest in batch]
        wrong = await _at_head(services.blobs_add(head, blobs=small))
        if wrong is not None:
            raise WrongContent(wrong)
    for blob in wanted.values():
        if blob.size > CHUNK:
            await _send_large(head, blob)
    return Sent(len(wanted), sum(sizes.values()))


async def _send_large(head: Peer, blob: Blob) -> None:
    if (store := await store_near(head)) is not None:
        await _at_head(asyncio.to_thread(_put, store, blob))
        return
    upload = uuid.uuid4().hex

    async def write(offset: int, data: bytes | memoryview) -> None:
        part = beside(data)
        call = services.blobs_write(head, upload=upload, digest=blob.digest, size=blob.size, offset=offset, data=part)
        await _at_head(call)

    def parts() -> Iterator[Coroutine[Any, Any, None]]:
        offset = 0
        for data in blob.chunks():
            yield write(offset, data)
            offset += len(data)

    try:
        await _some_at_once(parts())
        if not await _at_head(services.blobs_finish(head, upload=upload)):
            raise WrongContent(blob.digest)
    except (SkyinfraError, WrongContent, asyncio.CancelledError):
        # Where this does not arrive, the head drops the parts after a while.
        await asyncio.shield(asyncio.gather(services.blobs_drop(head, upload=upload), return_exceptions=True))
        raise


def _put(store: BlobStore, blob: Blob) -> None:
    with contextlib.closing(store.begin(blob.digest, blob.size)) as incoming:
        offset = 0
        for data in blob.chunks():
            incoming.write(offset, data)
            offset += len(data)
        incoming.finish()


async def send_unnamed(head: Peer, contents: Sequence[Sequence[bytes | bytearray | memoryview]]) -> list[str] | None:
    """Writes *contents*, the pieces of a blob each, to the folder of a head that is near, and returns their names.

    Returns None where the head is elsewhere. Raises `StateDirectoryError`, `TaskTooLarge`, OSError.
    """
    if (store := await store_near(head)) is None:
        return None
    sizes = [sum(memoryview(piece).nbytes for piece in pieces) for pieces in contents]
    work = (asyncio.to_thread(store.add_unnamed, *each) for each in zip(contents, sizes, strict=True))
    return [await _at_head(each) for each in work]


async def _at_head(answer: Awaitable[T]) -> T:
    """Returns the answer of the head; its errors say that they are about the head."""
    try:
        return await answer
    except SkyinfraError as error:
        error.field = f"head: {error.field}" if error.field else "head"
        raise


async def _some_at_once(work: Iterable[Coroutine[Any, Any, None]]) -> None:
    """Runs *work* in order, at most `_WINDOW` at once. The first one that fails ends the others."""
    running: deque[asyncio.Task[None]] = deque()
    try:
        for each in work:
            running.append(asyncio.create_task(each))
            if len(running) >= _WINDOW:
                await running.popleft()
        while running:
            await running.popleft()
    finally:
        for task in running:
            task.cancel()
        await asyncio.gather(*running, return_exceptions=True)


# Fetching -----------------------------------------------------------------------------------------------------------


async def fetch(head: Peer, store: BlobStore, wanted: dict[str, int]) -> Sent:
    """Fetches those of the blobs *wanted*, digest to size, that are not in *store*.

    Raises `BlobsMissing`, `StateDirectoryError`, `TaskTooLarge`, OSError where the head does not answer.
    """
    missing = {digest: size for digest, size in wanted.items() if not store.has(digest, size)}
    for digests in _batches(missing):
        found = await _read(head, [(digest, 0, missing[digest]) for digest in digests])
        unusable = await asyncio.to_thread(_keep, store, dict(zip(digests, found, strict=True)))
        if unusable:
            raise await _lost(head, unusable)
    for digest, size in missing.items():
        if size > CHUNK:
            await _fetch_large(head, store, digest, size)
    return Sent(len(missing), sum(missing.values()))


async def fetch_bytes(head: Peer, digest: str, size: int) -> memoryview:
    """Fetches one blob into memory. Raises `BlobsMissing`, OSError where the head does not answer."""
    if size > CHUNK and (store := await store_near(head)) is not None:
        return await asyncio.to_thread(mapped, store, digest, size)
    from skyinfra.engine import dask_comms  # as in `beside`

    content = dask_comms.memory(size)

    def put(offset: int, data: bytes | memoryview) -> None:
        content[offset : offset + len(data)] = data

    await _parts(head, digest, size, put)
    return content


def mapped(store: BlobStore, digest: str, size: int) -> memoryview:
    """Returns the pages of the file of a blob of *size* bytes; they are copied where somebody writes to them, and stay
    when the file goes. Raises `BlobsMissing`, OSError where they cannot be mapped."""
    try:
        with store.path(digest).open("rb") as file:
            return memoryview(mmap.mmap(file.fileno(), size, access=mmap.ACCESS_COPY))
    except (FileNotFoundError, ValueError):  # or it was damaged: who fetches it again sees its size
        raise BlobsMissing([digest]) from None


async def fetch_file(head: Peer, entry: Entry, path: Path) -> None:
    """Fetches the file *entry* to *path*, in place of what is there, as a whole. Raises `BlobsMissing`, OSError."""
    path.parent.mkdir(parents=True, exist_ok=True)
    new = path.with_name(f".{uuid.uuid4().hex}")
    try:
        with new.open("xb") as file:
            # Parts come from several threads.
            await _parts(head, entry.sha256, entry.size, partial(write_at, file.fileno()))
        if entry.executable:
            new.chmod(new.stat().st_mode | 0o111)
        new.replace(path)
    finally:
        new.unlink(missing_ok=True)


def _batches(sizes: dict[str, int]) -> Iterator[list[str]]:
    """The digests of small blobs, together at most `CHUNK` bytes."""
    batch: list[str] = []
    filled = 0
    for digest, size in sizes.items():
        if size > CHUNK:
            continue
        if batch and (filled + size > CHUNK or len(batch) >= _MOST_DIGESTS):
            yield batch
            batch, filled = [], 0
        batch.append(digest)
        filled += size
    if batch:
        yield batch


def _keep(store: BlobStore, found: dict[str, bytes | memoryview | None]) -> list[str]:
    """Adds the *found* blobs to *store*; the digests of those that are None or do not have their digest."""
    unusable = []
    for digest, data in found.items():
        try:
            if data is None:
                raise WrongContent(digest)
            store.add(digest, data)
        except WrongContent:
            unusable.append(digest)
    return unusable


async def _lost(head: Peer, digests: Sequence[str]) -> BlobsMissing:
    """Asks the head to remove those of *digests* that are damaged; returns the error to raise."""
    for digest in digests:
        await _at_head(services.blobs_check(head, digest=digest))
    return BlobsMissing(digests)


async def _fetch_large(head: Peer, store: BlobStore, digest: str, size: int) -> None:
    with contextlib.closing(store.begin(digest, size)) as incoming:
        await _parts(head, digest, size, incoming.write)
        try:
            await asyncio.to_thread(incoming.finish)
        except WrongContent:
            raise await _lost(head, [digest]) from None


async def _parts(head: Peer, digest: str, size: int, put: Callable[[int, bytes | memoryview], None]) -> None:
    store = await store_near(head) if size > CHUNK else None

    async def read(offset: int) -> None:
        part = (digest, offset, min(CHUNK, size - offset))
        data: bytes | memoryview | None
        (data,) = [await asyncio.to_thread(store.read, *part)] if store is not None else await _read(head, [part])
        if data is None or len(data) != min(CHUNK, size - offset):
            raise BlobsMissing([digest])
        await asyncio.to_thread(put, offset, data)

    await _some_at_once(read(offset) for offset in range(0, size, CHUNK))


async def _read(head: Peer, parts: list[tuple[str, int, int]]) -> list[bytes | memoryview | None]:
    return list(await _at_head(services.blobs_read(head, parts=parts)))
