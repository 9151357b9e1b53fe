"""Content-addressed blobs in a folder: what was synced, and calls and results that are too large for one message.

The head keeps what clients and nodes send to it, a node what it has fetched; on the head both are the same folder. A
blob is a read-only file whose name is its SHA-256, or a random one for a result that only one client asks for. It is
written under another name, and gets its own when it is whole and its digest is right, so that nobody ever sees a part
of one. Any number of processes may use a folder.

Nothing is put on the disk with fsync: what a loss of power leaves of a blob is found by who fetches it, is
removed by `check`, and comes again from its client.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import functools
import hashlib
import os
import re
import secrets
import threading
import time
import uuid
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from skyinfra.errors import StateDirectoryError, TaskTooLarge, counted

FOLDER = "blobs"
# Of a folder, where the disk has as much; besides, it never takes more than half of what is free for it.
CAPACITY = 64 * 2**30
# What is left free on the disk, for the node's own files.
_RESERVE = 256 * 2**20
# Parts of blobs that nobody has written to for that long come from a process that is gone.
_ABANDONED_S = 900.0
# How old the sum of all blobs may be: other processes add some.
_COUNTED_S = 60.0
_LOCK_POLL_S = 0.02
_INCOMING = "incoming"
# Stays there, as locks do.
_PLACE = "place.lock"
_DIGEST = re.compile(r"[0-9a-f]{64}")


class WrongContent(ValueError):
    """The content of a blob does not have its digest."""


@dataclass
class Incoming:
    """A blob that is being written: parts in any order and from several threads, then `finish` or `close`.

    written: when its last part came, for who drops idle ones (``time.monotonic``).
    """

    store: BlobStore
    digest: str
    size: int
    path: Path
    written: float = 0.0
    _lock: threading.Lock = field(default_factory=threading.Lock, init=False)
    _sha: Any = field(default_factory=hashlib.sha256, init=False)
    # How much of it `_sha` has, and the lengths of parts that were written and that it has not, by their offsets.
    _hashed: int = field(default=0, init=False)
    _ahead: dict[int, int] = field(default_factory=dict, init=False)

    def write(self, offset: int, data: bytes | memoryview) -> None:
        """Writes a part. Raises `StateDirectoryError`."""
        with self.store.explained():
            handle = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
            try:
                write_at(handle, offset, data)
                self._hash(handle, offset, data)
            finally:
                os.close(handle)

    def _hash(self, handle: int, offset: int, data: bytes | memoryview) -> None:
        """Goes on with the digest as far as there is no gap: it is known when the last part was written."""
        with self._lock:
            self._ahead[offset] = len(data)
            while self._hashed in self._ahead:
                here, length = self._hashed, self._ahead.pop(self._hashed)
                self._sha.update(data if here == offset else os.pread(handle, length, here))
                self._hashed += length

    def finish(self) -> None:
        """Makes it a blob of the store. Raises `WrongContent` where it is not what it was said to be, and
        `StateDirectoryError`."""
        try:
            with self.store.explained():
                hashed = self._hashed == self.size and not self._ahead  # else parts overlapped
                digest = self._sha.hexdigest() if hashed else file_digest(self.path)
                if self.path.stat().st_size != self.size or digest != self.digest:
                    raise WrongContent(self.digest)
                self.store.adopt(self.path, self.digest)
        finally:
            self.close()

    def close(self) -> None:
        """Forgets what has come so far, unless it is a blob already."""
        self.path.unlink(missing_ok=True)


class BlobStore:
    """The blobs in *folder*, which is made when it is needed. The least recently used ones go when others come.

    received: how many bytes were added through this object.
    """

    def __init__(self, folder: Path, *, capacity: int = CAPACITY) -> None:
        self.folder = folder
        self.capacity = capacity
        self.received = 0
        self._incoming = folder / _INCOMING
        self._total = 0
        self._counted_at: float | None = None
        # Parts of several blobs come in several threads.
        self._counting = threading.Lock()

    def path(self, digest: str) -> Path:
        """Returns the path of the blob, which need not exist. Raises ValueError where that is no digest."""
        return self.folder / check_digest(digest)[:2] / digest

    def has(self, digest: str, size: int | None = None) -> bool:
        """Returns whether the blob is there; it counts as used then. One of another *size* was damaged, and goes."""
        path = self.path(digest)
        try:
            found = path.stat()
            if size is not None and found.st_size != size:
                path.unlink(missing_ok=True)
                return False
            # Not the time of its last change: what Python compiled goes by that.
            os.utime(path, ns=(time.time_ns(), found.st_mtime_ns))
        except OSError:
            return False
        return True

    def missing(self, digests: list[str]) -> list[str]:
        """Returns those of *digests* that are not there; the others count as used."""
        return [digest for digest in digests if not self.has(digest)]

    def add(self, digest: str, data: bytes | memoryview) -> None:
        """Adds a small blob at once. Raises `WrongContent`, `StateDirectoryError`, `TaskTooLarge`."""
        if not self.has(digest, len(data)):
            with contextlib.closing(self.begin(digest, len(data))) as incoming:
                incoming.write(0, data)
                incoming.finish()

    def begin(self, digest: str, size: int) -> Incoming:
        """Returns a new blob of *size* bytes, for which there is room. Raises `StateDirectoryError`, `TaskTooLarge`."""
        with self.explained():
            self._incoming.mkdir(parents=True, exist_ok=True)
            with self._counting:
                self._make_room(size)
        self.path(digest)
        return Incoming(self, digest, size, self._incoming / f"{digest}.{uuid.uuid4().hex}")

    def add_unnamed(self, pieces: Iterable[bytes | bytearray | memoryview], size: int) -> str:
        """Adds a blob of *size* bytes that nobody else can have, and returns its name: no digest of it is computed.

        Raises `StateDirectoryError`, `TaskTooLarge`.
        """
        name = secrets.token_hex(32)
        with contextlib.closing(self.begin(name, size)) as incoming, self.explained():
            with incoming.path.open("xb") as file:
                for piece in pieces:
                    file.write(piece)
            self.adopt(incoming.path, name)
        return name

    def adopt(self, path: Path, digest: str) -> None:
        """Makes the whole and right file *path* the blob *digest*. Raises OSError."""
        target = self.path(digest)
        target.parent.mkdir(exist_ok=True)
        path.chmod(0o444)
        size = path.stat().st_size
        path.replace(target)
        with self._counting:
            self.received += size
            self._total += size

    def read(self, digest: str, offset: int, length: int) -> bytes | None:
        """Returns a part of a blob; None where it is not there."""
        try:
            with self.path(digest).open("rb") as file:
                return os.pread(file.fileno(), length, offset)
        except FileNotFoundError:
            return None

    def check(self, digest: str) -> None:
        """Removes a blob that is not what its digest says."""
        path = self.path(digest)
        with contextlib.suppress(FileNotFoundError):
            if file_digest(path) != digest:
                path.unlink()

    @contextlib.contextmanager
    def locked(self, digest: str) -> Iterator[None]:
        """One process of the node at a time: what is fetched by one is there for the next. Raises
        `StateDirectoryError`."""
        with self.explained():
            self._incoming.mkdir(parents=True, exist_ok=True)
            # Some share a lock, so that there are no more than 256.
            handle = os.open(self._incoming / f"{digest[:2]}.lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        try:
            # Not in one call: a task that is stopped gets its interrupt between two.
            while True:
                try:
                    fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    break
                except BlockingIOError:
                    time.sleep(_LOCK_POLL_S)
            yield
        finally:
            os.close(handle)

    # On one machine -------------------------------------------------------------------------------------------------

    def shown(self) -> tuple[str, str, int]:
        """Returns the folder, what a file in it says, and the capacity: who reads that there has the same files; see
        `same`."""
        with self.explained():
            self._incoming.mkdir(parents=True, exist_ok=True)
            place = self._incoming / _PLACE
            with contextlib.suppress(FileNotFoundError):
                return str(self.folder), place.read_text(encoding="ascii"), self.capacity
            new = place.with_name(f"{uuid.uuid4().hex}.lock")
            new.touch(0o600)
            new.write_text(secrets.token_hex(16), encoding="ascii")
            with contextlib.suppress(FileExistsError):
                place.hardlink_to(new)
            new.unlink()
            return str(self.folder), place.read_text(encoding="ascii"), self.capacity

    @classmethod
    def same(cls, folder: str, said: str, capacity: int) -> BlobStore | None:
        """Returns the store in *folder*, where this account owns it and its `shown` would say the same; else None."""
        path = Path(folder)
        try:
            own = path.stat().st_uid == os.geteuid()
            if own and (path / _INCOMING / _PLACE).read_text(encoding="ascii") == said:
                return _at(path, capacity=capacity)
        except (OSError, ValueError):  # of another machine, or for others
            pass
        return None

    # Room -----------------------------------------------------------------------------------------------------------

    def _make_room(self, size: int) -> None:
        """Removes the least recently used blobs until *size* more bytes have room."""
        disk = os.statvfs(self.folder)
        reserve = min(_RESERVE, disk.f_blocks * disk.f_frsize // 20)
        space = disk.f_bavail * disk.f_frsize - reserve
        capacity, now = self.capacity, time.monotonic()
        counted = self._counted_at is not None and now - self._counted_at < _COUNTED_S
        most = min(capacity, max(0, (space + self._total) // 2))
        if counted and self._total + size <= most and size <= space:
            return
        self._sweep()
        blobs = sorted(self._blobs())
        self._total = sum(taken for _, taken, _ in blobs)
        self._counted_at = now
        # As if all blobs were gone: half of that is ours.
        room = max(0, (space + self._total) // 2)
        if size > capacity:
            raise TaskTooLarge(
                f"{in_words(size)} in one piece, of the {in_words(capacity)} that may be kept",
                field=str(self.folder),
                hint="Send less at once: parts of it, or the path of a file that tasks read.",
            )
        if size > room:
            raise StateDirectoryError(
                f"the disk has no room for {in_words(size)} more: {in_words(room)} at most may be used for that",
                field=str(self.folder),
                hint="Free space there, or give the node a larger disk (disk_gb).",
            ) from OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))  # as where the disk itself says so
        capacity = min(capacity, room)
        for _, taken, path in blobs:
            if self._total + size <= capacity and size <= space:
                break
            path.unlink(missing_ok=True)
            self._total -= taken
            space += taken

    def _blobs(self) -> Iterator[tuple[int, int, Path]]:
        """When it was used last (ns), size and path of every blob."""
        for folder in self.folder.iterdir():
            if folder == self._incoming:
                continue
            for path in folder.iterdir():
                with contextlib.suppress(FileNotFoundError):
                    found = path.stat()
                    yield found.st_atime_ns, found.st_size, path

    def _sweep(self) -> None:
        """Removes what processes that are gone have left half written."""
        for path in self._incoming.iterdir():
            with contextlib.suppress(FileNotFoundError):
                # A lock is an empty file that processes may hold.
                if path.suffix != ".lock" and time.time() - path.stat().st_mtime > _ABANDONED_S:
                    path.unlink()

    @contextlib.contextmanager
    def explained(self) -> Iterator[None]:
        """Turns an OSError of the body into a `StateDirectoryError`."""
        try:
            yield
        except OSError as error:
            full = error.errno in (errno.ENOSPC, errno.EDQUOT)
            raise StateDirectoryError(
                f"cannot be written: {error.strerror or error}",
                field=str(self.folder),
                hint="Free space there, or give the node a larger disk (disk_gb)."
                if full
                else "Look in the kernel log of the node for the reason.",
            ) from None


# The stores of others that this process uses: what they count is kept.
_at = functools.lru_cache(maxsize=8)(BlobStore)


def digest_of(data: bytes) -> str:
    """Returns the name of the blob *data*."""
    return hashlib.sha256(data).hexdigest()


def check_digest(text: str) -> str:
    """*text*, where it can be the name of a blob. Raises ValueError."""
    if not _DIGEST.fullmatch(text):
        raise ValueError(f"not a digest: {text!r}")
    return text


def write_at(handle: int, offset: int, data: bytes | memoryview) -> None:
    """Writes all of *data* at *offset* of an open file, whose position stays. Raises OSError."""
    view = memoryview(data)
    while view:
        written = os.pwrite(handle, view, offset)
        view, offset = view[written:], offset + written


def file_digest(path: Path) -> str:
    """Returns the name of the blob with the content of the file *path*. Raises OSError."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def in_words(size: int) -> str:
    """Returns a number of bytes for messages."""
    for unit, factor in (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if size >= factor:
            return f"{size / factor:.1f} {unit}"
    return counted(size, "byte")
