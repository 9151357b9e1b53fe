"""Calls and results as bytes: in one message where they are small, as blobs of the head where they are large.

Pickle's protocol 5 leaves the memory of arrays out of the stream, and hands large byte strings over as they are: a
large value is sent from where it lies. On a node its blobs are files, and arrays are mapped from there: the slots of a
node share the memory of what they do not change.

Large byte strings are left out of the stream, too: calls that have the same one send it once.
"""

from __future__ import annotations

import hashlib
import operator
import pickle
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from functools import cached_property, partial
from typing import BinaryIO

from skyinfra.blobs.store import BlobStore
from skyinfra.blobs.transfer import Blob, BlobsMissing, chunked, mapped
from skyinfra.protocol.calls import Part
from skyinfra.protocol.pickles import Pickler

# Up to that many bytes travel as a part of the message about the task.
INLINE = 4 * 2**20
# Memory of an object is left out of the stream from that size on; a blob for every small array would take longer.
_OUT_OF_BAND = 256 * 2**10
# Byte strings whose digests are remembered stay in memory, so many bytes of them.
_REMEMBERED_BYTES = 256 * 2**20

# By the identity of a byte string, which is kept, so that nothing else has it.
_digests: dict[int, tuple[bytes, str]] = {}


class _Pieces:
    """A file to pickle into, which keeps the pieces as they are written: large byte strings are not copied.

    leave_out: is called with each of these, and says whether it is not to be a part of the stream.
    """

    def __init__(self, leave_out: Callable[[bytes], bool] = lambda data: False) -> None:
        self.pieces: list[bytes | bytearray | memoryview] = []
        self._leave_out = leave_out

    def write(self, data: bytes | bytearray | memoryview | pickle.PickleBuffer) -> int:
        piece = data.raw() if isinstance(data, pickle.PickleBuffer) else data
        announced = self._announced(piece)
        if announced and isinstance(piece, bytes) and self._leave_out(piece):
            self.pieces[-1:] = [self.pieces[-1][:-announced], _FROM_BUFFER]
        else:
            self.pieces.append(piece)
        return len(piece)

    def _announced(self, piece: bytes | bytearray | memoryview) -> int:
        """Returns how many bytes before *piece* say that it is a byte string that is pickled; 0 where it is not.

        A pickler writes a large one as it is, outside of the frames of the stream, behind its opcode and length.
        """
        before = self.pieces[-1] if self.pieces and len(piece) >= _OUT_OF_BAND else b""
        for opcode, size in ((pickle.BINBYTES, 4), (pickle.BINBYTES8, 8)):
            said = opcode + len(piece).to_bytes(8, "little")[:size]
            if len(piece) < 1 << 8 * size and bytes(before[-len(said) :]) == said:
                return len(said)
        return 0


# Opcodes that make a byte string of the next buffer: ``bytes(buffer)``.
_FROM_BUFFER = b"".join(
    [
        *(pickle.SHORT_BINUNICODE + bytes([len(word)]) + word for word in (b"builtins", b"bytes")),
        *(pickle.STACK_GLOBAL, pickle.NEXT_BUFFER, pickle.READONLY_BUFFER, pickle.TUPLE1, pickle.REDUCE),
    ]
)


@dataclass(frozen=True)
class Payload:
    """A pickled value. pieces: of the stream. buffers: the memory that it refers to, which is that of the value.

    again: whether others may have the same byte strings, whose digests are remembered then.
    """

    pieces: list[bytes | bytearray | memoryview]
    buffers: list[memoryview] = field(default_factory=list)
    again: bool = False

    @cached_property
    def size(self) -> int:
        """In bytes."""
        return sum(map(len, [*self.pieces, *self.buffers]))

    @property
    def small(self) -> bool:
        """Whether it travels in one message."""
        return self.size <= INLINE

    def joined(self) -> bytes:
        """Returns the stream, in one piece."""
        return b"".join(self.pieces)

    @cached_property
    def parts(self) -> tuple[Part, ...]:
        """The parts from which a node unpickles the value."""
        return tuple(Part(_sha256(pieces, self.again), sum(map(len, pieces))) for pieces in self.contents)

    def blobs(self) -> list[Blob]:
        """Returns the content of its parts, to send."""
        return [
            Blob(part.digest, part.size, partial(chunked, pieces))
            for part, pieces in zip(self.parts, self.contents, strict=True)
        ]

    @property
    def contents(self) -> list[Sequence[bytes | bytearray | memoryview]]:
        """The pieces of each part."""
        return [self.pieces, *([buffer] for buffer in self.buffers)]


@dataclass(frozen=True)
class Apart:
    """A value that is pickled by itself already: in what it is pickled with, it is a part of its own."""

    pickled: bytes

    def __reduce__(self) -> tuple[object, ...]:
        return pickle.loads, (self.pickled,)


@dataclass(frozen=True)
class Member:
    """A value of the mapping that is *apart*, by its name there."""

    apart: Apart
    name: object

    def __reduce__(self) -> tuple[object, ...]:
        return operator.getitem, (self.apart, self.name)


def pack(
    value: object, pickler: Callable[..., Pickler] = Pickler, *, whole: bool = False, again: bool = False
) -> Payload:
    """*value* pickled; a large one keeps its memory, unless it is to be *whole*. *again*: see `Payload`.

    Raises what pickling it raises.
    """
    buffers: list[memoryview] = []

    def left_out(data: bytes) -> bool:
        if not whole:
            buffers.append(memoryview(data))
        return not whole

    file = _Pieces(left_out)

    def leave_out(buffer: pickle.PickleBuffer) -> bool:
        """Returns whether it is to be a part of the stream all the same."""
        try:
            raw = buffer.raw()
        except BufferError:  # not in one piece
            return True
        if whole or raw.nbytes < _OUT_OF_BAND:
            return True
        buffers.append(raw)
        return False

    pickler(file, protocol=pickle.HIGHEST_PROTOCOL, buffer_callback=leave_out).dump(value)
    payload = Payload(file.pieces, buffers, again)
    if buffers and payload.small:
        file = _Pieces()
        pickler(file, protocol=pickle.HIGHEST_PROTOCOL).dump(value)
        return Payload(file.pieces)
    return payload


# Is entered while the files of a value are opened, mapped or read, and not while code of the value runs.
Opening = Callable[[], AbstractContextManager[object]]


class _Stream:
    """The open *file* with the stream of a value, for an unpickler."""

    def __init__(self, file: BinaryIO, opening: Opening) -> None:
        self._file = file
        self._opening = opening

    def read(self, size: int) -> bytes:
        with self._opening():
            return self._file.read(size)

    def readline(self) -> bytes:
        with self._opening():
            return self._file.readline()


def unpack(parts: Sequence[Part], store: BlobStore, opening: Opening = nullcontext) -> object:
    """The value whose *parts* are in *store*. Raises `BlobsMissing` where one is not, and what unpickling raises."""
    stream, *rest = parts
    with opening():
        # Pickle makes them read-only where they were.
        buffers = [mapped(store, part.digest, part.size) for part in rest]
        file = _opened(stream, store)
    with file:
        return pickle.load(_Stream(file, opening), buffers=buffers)  # noqa: S301 - the fleet's own, over mutual TLS


def _opened(part: Part, store: BlobStore) -> BinaryIO:
    try:
        return store.path(part.digest).open("rb")
    except FileNotFoundError:
        raise BlobsMissing([part.digest]) from None


def _sha256(pieces: Sequence[bytes | bytearray | memoryview], again: bool) -> str:
    # That of a byte string does not change: tasks that are sent one after the other have the same ones.
    first = pieces[0].obj if len(pieces) == 1 and isinstance(pieces[0], memoryview) else None
    constant = first if again and isinstance(first, bytes) and len(first) <= _REMEMBERED_BYTES else None
    if constant is not None and (known := _digests.get(id(constant))) is not None:
        return known[1]
    digest = hashlib.sha256()
    for piece in pieces:
        digest.update(piece)
    found = digest.hexdigest()
    if constant is not None:
        while _digests and len(constant) + sum(len(each) for each, _ in _digests.values()) > _REMEMBERED_BYTES:
            del _digests[next(iter(_digests))]
        _digests[id(constant)] = constant, found
    return found
