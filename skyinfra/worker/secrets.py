"""The secrets of a task on its slot: variables of its process while it runs, masked in its output and exceptions."""

from __future__ import annotations

import contextlib
import ctypes
import glob
import json
import os
import re
import threading
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import fields, is_dataclass, replace
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import quote

from skyinfra.protocol.secrets import SHORTEST, holding
from skyinfra.worker import output, task_folder

if TYPE_CHECKING:
    from skyinfra.protocol.failures import Failure

# Holds the names of the variables that are secrets: the processes of a task read it.
VARIABLE = "SKYINFRA_SECRETS"
MASK = b"***"
# A line of a secret with several is masked by itself, as a key in PEM comes out line by line, unless it is shorter.
_SHORTEST_LINE = 8
# Characters of a secret that is looked for in results.
_SHORTEST_SURE = 8
# Halves of pairs of surrogates; the others stand for bytes that are no UTF-8.
_HALVES = re.compile("[\ud800-\udc7f\udd00-\udfff]")
# Seconds between two reads of the output of a task.
EVERY_S = 0.05
_CHUNK = 256 * 1024
# Where the output of a task is before it is masked, in a file with the key of the task in its name, and how much room
# has to be there.
_IN_MEMORY = Path("/dev/shm")  # noqa: S108 - no other folder is in memory; the files are this user's
_LEFT = "skyinfra-output-"
_ROOM = 64 * 2**20
# fallocate(2): releases memory in the middle of a file.
_KEEP_SIZE, _PUNCH_HOLE = 1, 2
# prctl(2): without it only root looks into a process, see ptrace(2).
_PR_GET_DUMPABLE, _PR_SET_DUMPABLE = 3, 4
_is_closed = False


@contextlib.contextmanager
def given(values: Mapping[str, str], masker: Masker, key: str = "", held: Collection[str] = ()) -> Iterator[int]:
    """Sets the variables *values* of this process, and of those that it starts, in the body, and masks its output.

    *held*: those that are no variables; where there are such, other processes of this account cannot look into this one
    meanwhile. *key*: of the task, for what `recover` finds where the process dies. Yields the open file that has the
    output in the end: what is written there is not masked.
    """
    if not values:
        yield 2
        return
    variables = {name: value for name, value in values.items() if name not in held}
    kept = {name: value for name, value in values.items() if name in held}
    with (
        task_folder.variables({**variables, VARIABLE: ",".join(variables)}),
        _closed() if kept else contextlib.nullcontext(),
        holding(kept),
        _masked(masker, key) as target,
    ):
        yield target


@contextlib.contextmanager
def _closed() -> Iterator[None]:
    """Closes the memory, the environment and the open files of this process to others of its account, in the body.

    What it forks, such as processes of `multiprocessing`, is open: the runner has to find what a task leaves behind.
    """
    global _is_closed
    was_open = _libc().prctl(_PR_GET_DUMPABLE, 0, 0, 0, 0) == 1
    _is_closed = was_open
    _libc().prctl(_PR_SET_DUMPABLE, 0, 0, 0, 0)
    try:
        yield
    finally:
        _is_closed = False
        _libc().prctl(_PR_SET_DUMPABLE, int(was_open), 0, 0, 0)


def _open_fork() -> None:
    if _is_closed:
        _libc().prctl(_PR_SET_DUMPABLE, 1, 0, 0, 0)


os.register_at_fork(after_in_child=_open_fork)


@contextlib.contextmanager
def _masked(masker: Masker, key: str) -> Iterator[int]:
    """Masks what goes to the standard streams, which are one file, in the body."""
    target = os.dup(1)
    funnel = Funnel(masker, target, key)
    try:
        with output.redirected(funnel.handle):
            yield target
    finally:
        funnel.close()
        os.close(target)


def without(environ: Mapping[str, str]) -> dict[str, str]:
    """*environ* without secrets: for a program that needs none."""
    return {name: value for name, value in environ.items() if name not in environ.get(VARIABLE, "").split(",")}


def of_process() -> Masker:
    """Returns a masker of the secrets that this process was given."""
    names = os.environ.get(VARIABLE, "").split(",")
    return Masker(os.environ[name] for name in names if name in os.environ)


class Masker:
    """Masks *secrets*, as they are and as they stand in JSON, in the text of a Python value and in an address."""

    def __init__(self, secrets: Iterable[str]) -> None:
        forms = {form for secret in secrets for form in _forms(secret)}
        self._forms = sorted((form.encode("utf-8", "surrogateescape") for form in forms), key=len, reverse=True)
        self._pattern = re.compile(b"|".join(map(re.escape, self._forms)))

    def __bool__(self) -> bool:
        return bool(self._forms)

    def text(self, text: str) -> str:
        """*text* with `MASK` in place of each secret."""
        if not self:
            return text
        data = _HALVES.sub("\N{REPLACEMENT CHARACTER}", text).encode("utf-8", "surrogateescape")
        return self._pattern.sub(MASK, data).decode("utf-8", "surrogateescape")

    def data(self, data: bytes) -> bytes:
        """*data*, such as a pickle, with as many asterisks in place of each secret: lengths in it stay true."""
        return self._pattern.sub(lambda found: b"*" * len(found[0]), data) if self else data

    def failure(self, failure: Failure) -> Failure:
        """*failure* without secrets, also in the exceptions before it and in it."""
        if not self:
            return failure
        masked: Failure = self._part(failure)
        return masked

    def _part(self, value: Any) -> Any:
        """Returns a failure, or a part of one."""
        if isinstance(value, bytes):
            return self.data(value)
        if isinstance(value, str):
            return self.text(value)
        if isinstance(value, tuple):
            return tuple(map(self._part, value))
        if isinstance(value, dict):
            return {key: self._part(each) for key, each in value.items()}
        if is_dataclass(value) and not isinstance(value, type):
            return replace(value, **{each.name: self._part(getattr(value, each.name)) for each in fields(value)})
        return value

    def holds(self, pieces: Iterable[bytes | bytearray | memoryview]) -> bool:
        """Returns whether one of *pieces* holds a secret. Short ones, which any bytes may hold, do not count."""
        long = [form for form in self._forms if len(form) >= _SHORTEST_SURE]
        pattern = re.compile(b"|".join(map(re.escape, long)))
        return bool(long) and any(pattern.search(piece) for piece in pieces)

    def stream(self) -> Stream:
        """Masks bytes that come in pieces."""
        return Stream(self._forms, self._pattern)


class Stream:
    """Masks bytes that come in pieces; see `Masker.stream`. *forms*: what is masked, the longest first."""

    def __init__(self, forms: list[bytes], pattern: re.Pattern[bytes]) -> None:
        self._forms = forms
        self._pattern = pattern
        self._rest = b""

    @property
    def held(self) -> int:
        """How many bytes wait for the next."""
        return len(self._rest)

    def feed(self, data: bytes, *, final: bool = False) -> bytes:
        """The bytes that can be shown so far; an end that may be the beginning of a secret waits for the next."""
        if not self._forms:
            return data
        text, ready, start = self._rest + data, [], 0
        while True:
            held = len(text) if final else self._begun(text, start)
            found = self._pattern.search(text, start)
            # Of two secrets that begin alike, the longer one may still come.
            if found is None or held <= found.start():
                break
            ready += [text[start : found.start()], MASK]
            start = found.end()
        self._rest = text[held:]
        return b"".join([*ready, text[start:held]])

    def _begun(self, text: bytes, start: int) -> int:
        """Returns the position in *text*, from *start* on, of the first end of it that a secret begins with."""
        for at in range(max(start, len(text) - len(self._forms[0]) + 1), len(text)):
            end = text[at:]
            if any(len(form) > len(end) and form.startswith(end) for form in self._forms):
                return at
        return len(text)


class Funnel:
    """A file in memory, for the output of a task, from which it goes masked to the open file *target*.

    handle: of the file in memory. No disk has the output before it is masked; and a task whose native code holds the
    interpreter never waits for this thread, as it would with a pipe. *key*: of the task: what was written in the last
    moments before the process is killed stays in memory, for `recover`.
    """

    def __init__(self, masker: Masker, target: int, key: str = "") -> None:
        self._file: Path | None = None
        self.handle = self._open(key)
        self._stream = masker.stream()
        self._target = target
        self._offset = 0
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._run, name="skyinfra-mask", daemon=True)
        self._thread.start()

    def _open(self, key: str) -> int:
        with contextlib.suppress(OSError):  # there is no such folder, or it is nearly full
            disk = os.statvfs(_IN_MEMORY)
            if key and disk.f_bavail * disk.f_frsize >= _ROOM:
                file = _IN_MEMORY / f"{_LEFT}{key}.{os.getpid()}"
                handle = os.open(file, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_APPEND | os.O_CLOEXEC, 0o600)
                self._file = file
                return handle
        return os.memfd_create("output")

    def close(self) -> None:
        """Hands on what is left."""
        self._over.set()
        self._thread.join()
        os.close(self.handle)
        if self._file is not None:
            self._file.unlink(missing_ok=True)

    def _run(self) -> None:
        while not self._over.wait(EVERY_S):
            self._advance()
        self._advance(final=True)

    def _advance(self, *, final: bool = False) -> None:
        while data := os.pread(self.handle, _CHUNK, self._offset):
            self._write(self._stream.feed(data))
            self._offset += len(data)
        if final:
            self._write(self._stream.feed(b"", final=True))
        elif self._offset:
            # What is held back has not been handed on.
            _libc().fallocate(self.handle, _KEEP_SIZE | _PUNCH_HOLE, 0, self._offset - self._stream.held)

    def _write(self, data: bytes) -> None:
        # What a full disk does not take is lost, as without a mask.
        with contextlib.suppress(OSError):
            while data:
                data = data[os.write(self._target, data) :]


def recover(key: str, masker: Masker, file: Path) -> None:
    """Adds to *file*, the output of the task *key*, masked, what was in memory when a process of it died on this node.

    Where *masker* has no secrets, the task had none.
    """
    for left in _left_of(key) if masker else ():
        with contextlib.suppress(OSError):
            # What was handed on is zeros.
            shown = masker.stream().feed(left.read_bytes().lstrip(b"\0"), final=True)
            left.unlink()
            with file.open("ab") as output_file:
                output_file.write(shown)


def discard(key: str) -> None:
    """Removes what `recover` would add, of a task that has not started again on this node."""
    for left in _left_of(key):
        left.unlink(missing_ok=True)


def _left_of(key: str) -> list[Path]:
    """Returns the files of processes of the task *key* that have died."""
    found = (file for file in _IN_MEMORY.glob(f"{_LEFT}{glob.escape(key)}.*") if file.suffix[1:].isdigit())
    return [file for file in found if not Path(f"/proc/{file.suffix[1:]}").exists()]


@cache
def _libc() -> Any:
    library = ctypes.CDLL(None)
    library.fallocate.argtypes = (ctypes.c_int, ctypes.c_int, ctypes.c_int64, ctypes.c_int64)
    return library


def _forms(secret: str) -> Iterator[str]:
    lines = [line for line in map(str.strip, secret.splitlines()) if len(line) >= _SHORTEST_LINE]
    for text in [secret, *(lines if len(secret.splitlines()) > 1 else ())]:
        for form in (text, json.dumps(text)[1:-1], repr(text)[1:-1], quote(text, safe="")):
            if len(form) >= SHORTEST:
                yield form
