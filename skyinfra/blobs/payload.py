"""Calls and results as bytes: in one message where they are small, as blobs of the head where they are large.

Pickle's protocol 5 leaves the memory of arrays out of the stream, and hands large byte strings over as they are: a
large value is sent from where it lies. On a node its blobs are files, and arrays are mapped from there: the slots of a
node share the memory of what they do not change.
"""

from __future__ import annotations

import hashlib
import mmap
import pickle
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cached_property, partial
from typing import BinaryIO

from skyinfra.blobs.store import BlobStore
from skyinfra.blobs.transfer import Blob, BlobsMissing, chunked
from skyinfra.protocol.calls import Part
from skyinfra.protocol.pickles import Pickler

# Up to that many bytes travel as a part of the message about the task.
INLINE = 4 * 2**20
# Memory of an object is left out of the stream from that size on; a blob for every small array would take longer.
_OUT_OF_BAND = 256 * 2**10


class _Pieces:
    """A file to pickle into, which keeps the pieces as they are written: large byte strings are not copied."""

    def __init__(self) -> None:
        self.pieces: list[bytes | bytearray | memoryview] = []

    def write(self, data: bytes | bytearray | memoryview | pickle.PickleBuffer) -> int:
        piece = data.raw() if isinstance(data, pickle.PickleBuffer) else data
        self.pieces.append(piece)
        return len(piece)


@dataclass(frozen=True)
class Payload:
    """A pickled value. pieces: of the stream. buffers: the memory that it refers to, which is that of the value."""

    pieces: list[bytes | bytearray | memoryview]
    buffers: list[memoryview] = field(default_factory=list)

    @cached_property
    def size(self) -> int:
        """In bytes."""
        return sum(map(len, [*self.pieces, *self.buffers]))

    @property
    def small(self) -> bool:
        """Whether it travels in one message."""
        return self.size <= INLINE

    def joined(self) -> bytes:
        """The stream, in one piece."""
        return b"".join(self.pieces)

    @cached_property
    def parts(self) -> tuple[Part, ...]:
        """The parts from which a node unpickles the value."""
        return tuple(Part(_sha256(pieces), sum(map(len, pieces))) for pieces in self._all())

    def blobs(self) -> list[Blob]:
        """The content of its parts, to send."""
        return [
            Blob(part.digest, part.size, partial(chunked, pieces))
            for part, pieces in zip(self.parts, self._all(), strict=True)
        ]

    def _all(self) -> list[Sequence[bytes | bytearray | memoryview]]:
        return [self.pieces, *([buffer] for buffer in self.buffers)]


def pack(value: object, pickler: Callable[..., Pickler] = Pickler, *, whole: bool = False) -> Payload:
    """*value* pickled; a large one keeps its memory, unless it is to be *whole*. Raises what pickling it raises."""
    file = _Pieces()
    buffers: list[memoryview] = []

    def leave_out(buffer: pickle.PickleBuffer) -> bool:
        """Whether it is to be a part of the stream all the same."""
        try:
            raw = buffer.raw()
        except BufferError:  # not in one piece
            return True
        if whole or raw.nbytes < _OUT_OF_BAND:
            return True
        buffers.append(raw)
        return False

    pickler(file, protocol=pickle.HIGHEST_PROTOCOL, buffer_callback=leave_out).dump(value)
    payload = Payload(file.pieces, buffers)
    if buffers and payload.small:
        file = _Pieces()
        pickler(file, protocol=pickle.HIGHEST_PROTOCOL).dump(value)
        return Payload(file.pieces)
    return payload


def unpack(parts: Sequence[Part], store: BlobStore) -> object:
    """The value whose *parts* are in *store*. Raises `BlobsMissing` where one is not, and what unpickling raises."""
    stream, *rest = parts
    buffers = [_mapped(part, store) for part in rest]
    with _opened(stream, store) as file:
        return pickle.load(file, buffers=buffers)  # noqa: S301 - the fleet's own, over mutual TLS


def _mapped(part: Part, store: BlobStore) -> memoryview:
    """The content of a part: pages of its file, which are copied where somebody writes to them."""
    with _opened(part, store) as file:
        # Pickle makes it read-only where it was.
        return memoryview(mmap.mmap(file.fileno(), part.size, access=mmap.ACCESS_COPY))


def _opened(part: Part, store: BlobStore) -> BinaryIO:
    try:
        return store.path(part.digest).open("rb")
    except FileNotFoundError:
        raise BlobsMissing([part.digest]) from None


def _sha256(pieces: Sequence[bytes | bytearray | memoryview]) -> str:
    digest = hashlib.sha256()
    for piece in pieces:
        digest.update(piece)
    return digest.hexdigest()
