"""The journal of the head's jobs: what is to survive its restart.

One folder in the node's directory, in it one for each job:

    jobs/ID/job.json   the job (`Record`)
    jobs/ID/call       its pickled call, until it has ended; never unpickled here
    jobs/ID/sent       the key of its last attempt, and the slot to which that was sent, until it has ended
    jobs/ID/outcome    its `calls.Ending`, once it has ended by itself; the pickle in it is never read here
    jobs/.ID           a job whose call is on its way
    jobs/.gone-ID      one that is being forgotten

Whatever the head is at when it ends, each job is there as a whole or not at all: what is written is put on the disk
under another name, and renamed.
"""

from __future__ import annotations

import contextlib
import json
import logging
import math
import os
import shutil
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path

from skyinfra.blobs import store
from skyinfra.blobs.store import BlobStore
from skyinfra.errors import InvalidField, SkyinfraError, StateDirectoryError
from skyinfra.head.kept_trees import KeptTrees
from skyinfra.node.folder import replace_file, sync_folder, writing
from skyinfra.protocol import _schema, jobs
from skyinfra.protocol.calls import Ending, Header
from skyinfra.protocol.jobs import JobInfo, Submission

logger = logging.getLogger("skyinfra.runner")

VERSION = 1

_GONE = ".gone-"
# A call whose parts stopped coming that long ago never comes.
_STALE_S = 3600.0
# Between two looks for such: there may be many jobs.
_CLEAR_S = 60.0


@dataclass(frozen=True)
class Record(_schema.Document, error=StateDirectoryError, source="job", version=VERSION, hint=f"Known: {VERSION}."):
    """A job on the disk.

    header, retries, resources: see `Submission`. failures: how many of its attempts ended with an exception.
    """

    version: int
    info: JobInfo
    header: str
    resources: dict[str, int]
    retries: int = 0
    failures: int = 0

    @classmethod
    def of(cls, wanted: Submission, *, now: float) -> Record:
        """Returns the record of a job that is submitted *now*, in UNIX seconds."""
        whose = wanted.submitter, wanted.priority
        info = JobInfo(wanted.name, wanted.id, wanted.task, wanted.kind, *whose, state="queued", submitted=now)
        info = replace(info, repeated=wanted.repeated)
        return cls(VERSION, info, wanted.header, dict(wanted.resources), wanted.retries)

    def submission(self, size: int) -> Submission:
        """Returns what another head is given to run the job, whose pickled call has *size* bytes."""
        info, left = self.info, max(0, self.retries - self.failures)
        whose = info.submitter, info.priority
        wanted = (info.id, info.name, info.task, info.kind, *whose, self.header, size, dict(self.resources), left)
        return Submission(jobs.VERSION, *wanted)

    @cached_property
    def task(self) -> Header:
        """The header as its client sent it."""
        return Header.loads(self.header.encode())

    def afresh(self) -> Record:
        """Returns the record of the job that runs in a process which has run no task before, from now on."""
        return replace(self, header=replace(self.task, fresh=True).dumps().decode())

    def attempt(self) -> Header:
        """The header of the attempt that is counted last. Each has a key of its own: the nodes count its starts."""
        return replace(self.task, key=f"{self.info.key}.{self.info.attempts}")


class Journal:
    """The jobs in *folder*, which is made for the first one. Every write that fails raises `StateDirectoryError`.

    What they need of what was synced is kept beside it, as are the files that they wrote. Both are taken from the blobs
    of the head, which are there as well.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._cleared = -math.inf
        self._trees = KeptTrees(folder.with_name("kept"), BlobStore(folder.with_name(store.FOLDER)))

    def load(self) -> list[Record]:
        """The jobs in the order of their submission. Removes what was half written; one that cannot be read stays."""
        if not self._folder.is_dir():
            return []
        self._clear()
        found: list[Record] = []
        for place in self._folder.glob("[!.]*"):
            try:
                found.append(self._read(place))
            except (SkyinfraError, OSError) as error:
                logger.warning("job %s is left alone: %s", place.name, error)
        return sorted(found, key=lambda record: (record.info.submitted, record.info.id))

    def _read(self, place: Path) -> Record:
        for left in place.glob(".*"):
            left.unlink()
        record = Record.load(place / "job.json")
        outcome = place / "outcome"
        if not record.info.over and outcome.exists():
            # It had ended, and the head did before it wrote that down.
            try:
                ending = Ending.loads(outcome.read_bytes())
            except ValueError:  # that of an earlier version: it runs again
                outcome.unlink()
            else:
                record = settled(record, ending, now=outcome.stat().st_mtime)
                _write(place, record)
        if record.info.over:
            _drop(place)
        elif (sent := place / "sent").exists():
            key, _, slot = sent.read_text(encoding="utf-8").strip().partition(" ")
            if slot and key == record.attempt().key:
                record = replace(record, info=replace(record.info, slot=slot))
        return record

    def stage(self, identity: str, offset: int, data: bytes) -> int:
        """Takes the part of a call that begins at *offset*; where the next one is to begin.

        That is earlier where what is before the part is not there, and nothing is taken then. Raises `TaskTooLarge`,
        `InvalidField`.
        """
        jobs.check_id(identity)
        if offset < 0:
            raise InvalidField("a number from 0", field="offset", given=offset)
        if offset + len(data) > jobs.LARGEST:
            raise jobs.too_large(offset + len(data))
        place = self._folder / f".{identity}"
        with writing(place):
            if offset == 0 and time.monotonic() - self._cleared > _CLEAR_S:
                self._clear()
            if not self._folder.is_dir():
                # What tasks are given may be nobody else's business.
                self._folder.mkdir(mode=0o700, exist_ok=True)
                sync_folder(self._folder.parent)
            place.mkdir(mode=0o700, exist_ok=True)
            handle = os.open(place / "call", os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o600)
            try:
                there = os.fstat(handle).st_size
                if offset > there:
                    return there
                store.write_at(handle, offset, data)
                os.fsync(handle)
                return offset + len(data)
            finally:
                os.close(handle)

    def add(self, record: Record, size: int) -> None:
        """Makes a job of the call that was staged, of *size* bytes. It is on the disk then, or nothing of it is.

        Raises `TaskInputsLost` where the files that were synced for it are gone already.
        """
        identity = record.info.id
        place = self._folder / f".{identity}"
        call = place / "call"
        there = call.stat().st_size if call.exists() else 0
        if there != size or not call.exists():
            raise InvalidField(
                f"{there} of its {size} bytes have arrived", field="call", hint="Submit the job again: it is not kept."
            )
        try:
            if (tree := record.task.tree) is not None:
                self._trees.hold(tree)
            _write(place, record)
            with writing(self._folder):
                place.rename(self._folder / identity)
                sync_folder(self._folder)
        except SkyinfraError:
            for each in (place, self._folder / identity):
                shutil.rmtree(each, ignore_errors=True)
            raise

    def save(self, record: Record) -> None:
        """Replaces what is written of the job."""
        _write(self._folder / record.info.id, record)

    def end(self, record: Record, outcome: bytes | None) -> None:
        """Writes that the job has ended; the outcome first, so that a job that has one never runs again."""
        place = self._folder / record.info.id
        if outcome is not None:
            replace_file(place / "outcome", outcome, durable=True)
        self.save(record)
        with writing(place):
            _drop(place)

    def sent(self, record: Record, slot: str) -> None:
        """Notes the slot to which the last attempt of the job was sent: the next head expects it there."""
        replace_file(self._folder / record.info.id / "sent", f"{record.attempt().key} {slot}\n".encode(), durable=False)

    def call(self, record: Record) -> bytes:
        """The pickled call of a job that is to start now; what it needs is there then. Raises `StateDirectoryError`."""
        if (tree := record.task.tree) is not None:
            self._trees.restore(tree)
        return self._part(record.info.id, "call", 0, -1)[0]

    def submission(self, record: Record) -> Submission:
        """Returns what another head needs of a job that has not ended; its files are among the blobs then. Raises
        `StateDirectoryError`."""
        if (tree := record.task.tree) is not None:
            self._trees.restore(tree)
        return record.submission(self._part(record.info.id, "call", 0, 0)[1])

    def part_of_call(self, identity: str, offset: int, length: int) -> tuple[bytes, int]:
        """Returns a part of the pickled call, and how many bytes the whole has. Raises `StateDirectoryError`."""
        return self._part(identity, "call", offset, length)

    def outcome(self, identity: str, offset: int, length: int) -> tuple[bytes, int]:
        """Returns a part of the outcome, and how many bytes the whole has. Raises `StateDirectoryError`."""
        return self._part(identity, "outcome", offset, length)

    def _part(self, identity: str, name: str, offset: int, length: int) -> tuple[bytes, int]:
        file = self._folder / identity / name
        try:
            with file.open("rb") as stream:
                size = os.fstat(stream.fileno()).st_size
                stream.seek(offset)
                return stream.read(length), size
        except OSError as error:
            raise StateDirectoryError(f"cannot be read: {error.strerror}", field=str(file)) from None

    def release_trees(self, records: Sequence[Record]) -> None:
        """Keeps only the files that *records*, those of all jobs, need until their end, and those that they wrote."""
        needed = {tree for record in records if not record.info.over and (tree := record.task.tree) is not None}
        written = {found.tree for record in records if (found := record.info.written) is not None and found.tree}
        self._trees.release(needed | written)

    def hold_written(self, tree: str) -> None:
        """Keeps the files that a job wrote. Raises `TaskInputsLost` where they are not at the head any more."""
        self._trees.hold(tree)

    def restore_written(self, tree: str) -> None:
        """Puts the files that a job wrote back among the head's blobs."""
        self._trees.restore(tree)

    def forget(self, identity: str) -> None:
        """Removes a job."""
        gone = self._folder / f"{_GONE}{identity}"
        with writing(gone):
            (self._folder / identity).rename(gone)
        shutil.rmtree(gone, ignore_errors=True)

    def size(self, identity: str) -> int:
        """Bytes that the job takes on the disk."""
        try:
            return sum(file.stat().st_size for file in (self._folder / identity).iterdir())
        except OSError:
            return 0

    def _clear(self) -> None:
        """Removes what is being forgotten, and calls that never came as a whole."""
        self._cleared = time.monotonic()
        for place in self._folder.glob(".*"):
            with contextlib.suppress(FileNotFoundError):  # it has come as a whole meanwhile, and is a job
                came = max(each.stat().st_mtime for each in (place, *place.glob("call")))
                if place.name.startswith(_GONE) or time.time() - came > _STALE_S:
                    shutil.rmtree(place, ignore_errors=True)


def _drop(place: Path) -> None:
    for name in ("call", "sent"):
        (place / name).unlink(missing_ok=True)


def _write(place: Path, record: Record) -> None:
    replace_file(place / "job.json", json.dumps(record.to_json()) + "\n", durable=True)


def settled(record: Record, ending: Ending, *, now: float) -> Record:
    """Returns the record of a job that has ended with *ending*."""
    state: jobs.State = "done" if ending.problem is None else "failed"
    return replace(record, info=replace(record.info, state=state, ended=now, problem=ending.problem))
