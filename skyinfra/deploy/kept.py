"""Jobs that outlive their fleet: the records and logs that its head and nodes have, copied into a store and read there.

The store is the bucket of the stack's state, else a folder of the project, see `skyinfra.terraform.stores`. The copy is
made by the client, with the credentials that reach the state: nodes have no right on it.
"""

from __future__ import annotations

import io
import json
import tempfile
import time
from collections.abc import Collection, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

from skyinfra.deploy.affected_nodes import losing_pools
from skyinfra.errors import (
    FleetNotDeployed,
    FleetUnreachable,
    NodeError,
    PoolNotFound,
    ProjectNotFound,
    SkyinfraError,
    StackNotFound,
    counted,
)
from skyinfra.protocol import jobs, questions
from skyinfra.protocol.jobs import JobInfo
from skyinfra.protocol.manifest import Manifest
from skyinfra.terraform.program import Plan
from skyinfra.terraform.project import Project
from skyinfra.terraform.stores import Store, local_store, store_of
from skyinfra.terraform.synthesized import SynthesizedStack

if TYPE_CHECKING:
    from skyinfra.client import Questions

VERSION = 1
# Bytes of a log that are kept: its last ones.
LARGEST_LOG = 64 * 2**20
# A destroy waits so long for the jobs of all its pools.
PATIENCE_S = 120.0
_CONNECT_S = 5.0
_ANSWER_S = 10.0
_AT_ONCE = 8
_RECORD, _LOG = "record.json", "output.log"
# Raised where a fleet is not there: its jobs are those that are kept.
GONE = (FleetNotDeployed, FleetUnreachable, ProjectNotFound, StackNotFound, PoolNotFound)


def why_gone(error: SkyinfraError) -> str:
    """Returns why the fleet is not there, which raised one of `GONE`."""
    return "its head does not answer" if isinstance(error, FleetUnreachable) else "the fleet is gone"


@dataclass(frozen=True)
class KeptJob:
    """A job that is kept for after its fleet.

    info: as the head knew it at *kept*, UNIX seconds. where: the bucket or the folder. note: what of its log is not
    kept, and why; None where it is whole. simulated: whether its fleet was; None where that is not known.
    """

    info: JobInfo
    kept: float
    where: str
    note: str | None
    simulated: bool | None
    _logged: bool = field(repr=False)
    _folder: str = field(repr=False)
    _store: Store = field(repr=False, compare=False)

    @classmethod
    def _read(cls, store: Store, record: str) -> KeptJob:
        """Reads the record of that name. Raises `NodeError`, ValueError, KeyError, TypeError where it is none."""
        given = json.loads(store.read(record))
        info, folder = JobInfo.read(given["job"]), record.rpartition("/")[0]
        kept, note, simulated = float(given["kept"]), given["note"], given.get("simulated")
        return cls(info, kept, store.where, note, simulated, bool(given["logged"]), folder, store)

    def logs(self, lines: int = 1000) -> str:
        """Returns the last *lines* that its last attempt has printed; empty where nothing is kept of that.

        Raises `CloudRefused`, or `ProjectError` where it is kept in a folder.
        """
        text = self._store.read(f"{self._folder}/{_LOG}").decode(errors="replace") if self._logged else ""
        return "".join(text.splitlines(keepends=True)[-lines:])


@dataclass
class Keeping:
    """The jobs of *fleet*: *sent* to the store *where* now, *already* there, or not, for *problems*.

    total: None where nobody could be asked.
    """

    fleet: str
    where: str
    total: int | None
    sent: int = 0
    already: int = 0
    problems: list[str] = field(default_factory=list)
    # Of jobs that are kept without their whole log.
    notes: list[str] = field(default_factory=list)
    # The number of files that the head keeps of jobs, which are not copied.
    files: int = 0

    @property
    def whole(self) -> bool:
        """Whether all jobs are kept."""
        return self.sent + self.already == self.total

    def __str__(self) -> str:
        """One line, for a person."""
        if self.total is None:
            return f"{self.fleet}: its jobs are not known, and were NOT kept: {self.problems[0]}"
        text = f"{self.fleet}: {self.sent} of {counted(self.total, 'job')} kept in {self.where}"
        if self.already:
            text += f", {self.already} there already"
        if lost := self.total - self.sent - self.already:
            text += f"; {lost} were NOT kept: {self.problems[0]}"
        if self.notes:
            text += f"; {len(self.notes)} without the whole log: {self.notes[0]}"
        if self.files:
            text += (
                f"; {counted(self.files, 'file')} that they wrote go with the fleet: `skyinfra jobs fetch` brings them"
            )
        return text


def keep(manifest: Manifest, store: Store, *, patience: float = PATIENCE_S) -> Keeping:
    """Copies the records and logs of the jobs of a fleet into *store*; those that are there as they are, it leaves.

    patience: seconds after which no other job is begun with. Problems of the store and of single jobs stand in the
    result. Raises `FleetUnreachable` and what else connecting raises.
    """
    from skyinfra.client import open_questions

    deadline = time.monotonic() + patience
    with open_questions(manifest, timeout=min(_CONNECT_S, patience), patience=_CONNECT_S) as fleet:
        # Those that came last are kept first.
        found = sorted(fleet.jobs(), key=lambda job: -job.submitted)
        written = [job.written.kept_count for job in found if job.written is not None and job.written.tree is not None]
        done = Keeping(manifest.fleet, store.where, len(found), files=sum(written))
        if not found:
            return done
        try:
            copy = _Copy(fleet, store, manifest, deadline, store.names(manifest.pool), done.notes)
        except SkyinfraError as error:
            done.problems.append(_line(error))
            return done
        threads = ThreadPoolExecutor(_AT_ONCE)
        try:
            for sent in threads.map(copy.attempt, found):
                done.sent += sent is True
                done.already += sent is False
                done.problems += [sent] if isinstance(sent, str) else []
        finally:
            threads.shutdown(cancel_futures=True)
    return done


class _Timed(io.RawIOBase):
    """A file that cannot be read after the *deadline*: a slow upload ends there."""

    def __init__(self, file: IO[bytes], deadline: float) -> None:
        super().__init__()
        self._file, self._deadline = file, deadline
        self.seek, self.tell = file.seek, file.tell  # type: ignore[method-assign]

    def readable(self) -> bool:
        """Returns whether it can be read."""
        return True

    def readinto(self, buffer: Any, /) -> int:
        """Reads as any file does. Raises TimeoutError."""
        if time.monotonic() > self._deadline:
            raise TimeoutError("the time was up")
        data = self._file.read(len(buffer))
        buffer[: len(data)] = data
        return len(data)


@dataclass
class _Copy:
    """Copies jobs one by one, in several threads.

    there: the names of what the store has of the pool. notes: those of `Keeping`.
    """

    fleet: Questions
    store: Store
    manifest: Manifest
    deadline: float
    there: Collection[str]
    notes: list[str]

    def attempt(self, info: JobInfo) -> bool | str:
        """Copies a job. Returns False where it is there as it is; a line about why it could not be copied."""
        if time.monotonic() > self.deadline:
            return "the time was up; `skyinfra jobs keep` beforehand takes the time that it needs"
        try:
            return self._job(info)
        # The last three: a node that was taken over may answer anything, and must not keep a fleet from its end.
        except (SkyinfraError, OSError, KeyError, TypeError, ValueError) as error:
            return _line(error)

    def _job(self, info: JobInfo) -> bool:
        jobs.check_id(info.id)
        jobs.check_name(info.name)
        name = f"{_folder(self.manifest.pool, info)}/{_RECORD}"
        if info.over and name in self.there and self._same(name, info):
            return False
        with tempfile.TemporaryFile() as file:
            note = None
            try:
                left_out = self._log(info, file)
                if left_out:
                    note = f"the first {left_out} bytes are left out: {LARGEST_LOG // 2**20} MiB are kept of a log"
            except NodeError as error:
                note = f"the log could not be read: {_line(error)}"
            logged = file.tell() > 0
            if logged:
                file.seek(0)
                self.store.write(f"{_folder(self.manifest.pool, info)}/{_LOG}", _Timed(file, self.deadline + _ANSWER_S))
        about = {"version": VERSION, "kept": time.time(), "simulated": self.manifest.simulated}
        record = about | {"job": info.to_json(), "logged": logged, "note": note}
        # Last: where it is, the log is.
        self.store.write(name, io.BytesIO(json.dumps(record, indent=2).encode()))
        self.notes += [] if note is None else [f"{info.name}: {note}"]
        return True

    def _same(self, name: str, info: JobInfo) -> bool:
        kept = _kept(self.store, name)
        return kept is not None and kept.info == info and (kept._logged or kept.note is None)

    def _log(self, info: JobInfo, file: IO[bytes]) -> int:
        """Writes the log of the last attempt to *file*. Returns how many bytes of its begin are left out."""
        size = self._part(info, None)[1] if info.slot is not None else 0
        offset = left_out = max(0, size - LARGEST_LOG)
        while offset < size and file.tell() < LARGEST_LOG:
            text, following = self._part(info, offset)
            if following <= offset:
                break
            file.write(text.encode())
            offset = following
        return left_out

    def _part(self, info: JobInfo, offset: int | None) -> tuple[str, int]:
        if time.monotonic() > self.deadline + _ANSWER_S:
            raise NodeError("the time was up")
        found = self.fleet.ask(
            str(info.slot).rpartition("/")[0],
            questions.LOG,
            wait_s=_ANSWER_S,
            source="task",
            task=f"{info.key}.{info.attempts}.log",
            offset=offset,
            lines=1,
        )
        if found is None:
            raise NodeError("its node does not have it any more")
        return str(found["text"]), int(found["offset"])


def keep_before(stack: SynthesizedStack, plan: Plan, project: Path, *, destroy: bool = False) -> Iterator[Keeping]:
    """Keeps the jobs of the fleets that lose some by *plan*, see `keep`; never raises `SkyinfraError`.

    Yields what became of those of each fleet that has any. Takes two minutes at most, or what is under way then.
    """
    deadline = time.monotonic() + PATIENCE_S
    store = store_of(stack, project)
    try:
        fleets = stack.known_fleets() if stack.state_file is not None else stack.fleets()
    except SkyinfraError as error:
        yield Keeping(stack.name, store.where, None, problems=[_line(error)])
        return
    for pool in fleets if destroy else losing_pools(plan) & set(fleets):
        try:
            done = keep(fleets[pool], store, patience=max(0.0, deadline - time.monotonic()))
        except (SkyinfraError, OSError) as error:
            done = Keeping(fleets[pool].fleet, store.where, None, problems=[_line(error)])
        if done.total != 0:
            yield done


def kept_jobs(fleet: str, pool: str | None = None) -> list[KeptJob]:
    """Returns the jobs of a fleet that are kept for after it, oldest first: from the bucket of the stack's state, else
    from the folder of the project.

    fleet, pool: as for `connect`. Of a stack that the project does not declare, or where there is no project, those in
    the folder. Raises `CloudRefused`, `MissingDependency`, `ProjectError`.
    """
    name, _, named = fleet.partition("/")
    pool = pool or named
    try:
        project = Project.find()
        stack = project.stack(name)
        store, pool = store_of(stack, project.base_of(stack)), pool or stack.only_pool
    except (ProjectNotFound, StackNotFound, PoolNotFound):
        store = local_store(Path.cwd(), Path(name).name)
    if not pool or Path(pool).name != pool:
        return []
    records = [each for each in store.names(pool) if each.endswith(f"/{_RECORD}")]
    with ThreadPoolExecutor(_AT_ONCE) as threads:
        found = [each for each in threads.map(partial(_kept, store), records) if each is not None]
    return sorted(found, key=lambda each: (each.info.submitted, each.info.id))


def _kept(store: Store, record: str) -> KeptJob | None:
    """Returns the job of that record; None where this version cannot read it."""
    with suppress(ValueError, KeyError, TypeError, NodeError):
        return KeptJob._read(store, record)
    return None


def keep_now(fleet: str, *, patience: float) -> Keeping:
    """Keeps the jobs of ``STACK/POOL``, see `keep`. Raises what finding a fleet and connecting raise."""
    project = Project.find()
    name, _, pool = fleet.partition("/")
    stack = project.stack(name)
    return keep(stack.fleet(pool or stack.only_pool), store_of(stack, project.base_of(stack)), patience=patience)


def _folder(pool: str, info: JobInfo) -> str:
    return f"{pool}/{info.key}"


def _line(error: Exception) -> str:
    text = error.message if isinstance(error, SkyinfraError) else f"{type(error).__name__}: {error}"
    return " ".join(text.split())
