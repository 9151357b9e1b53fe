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
from skyinfra.deploy.spending import PricedHours, pool_spent, priced_hours, so_far, summed, with_kept
from skyinfra.errors import (
    FleetNotDeployed,
    FleetUnreachable,
    NodeError,
    PoolNotFound,
    ProjectError,
    ProjectNotFound,
    SkyinfraError,
    StackNotFound,
    counted,
)
from skyinfra.protocol import jobs, questions
from skyinfra.protocol.jobs import JobInfo
from skyinfra.protocol.manifest import Manifest
from skyinfra.protocol.readings import FleetHours
from skyinfra.terraform.program import Plan
from skyinfra.terraform.project import Project
from skyinfra.terraform.state import Resource
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
# The hours of the fleets of a pool, beside the folders of its jobs.
_SPENT = "spent.json"
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
    # What the fleet has cost so far, in words; empty where nobody pays, or nobody knows.
    spent: str = ""
    # The number of files that the head keeps of jobs, which are not copied.
    files: int = 0
    # Jobs that had not ended, and that another fleet can run.
    unfinished: int = 0

    @property
    def whole(self) -> bool:
        """Whether all jobs are kept."""
        return self.sent + self.already == self.total

    def __str__(self) -> str:
        """One line, for a person."""
        if self.total is None:
            return f"{self.fleet}: its jobs are not known, and were NOT kept: {self.problems[0]}"
        if not self.total and self.spent:
            return f"{self.fleet}: it has cost {self.spent}"
        text = f"{self.fleet}: {self.sent} of {counted(self.total, 'job')} kept in {self.where}"
        if self.already:
            text += f", {self.already} there already"
        if lost := self.total - self.sent - self.already:
            text += f"; {lost} were NOT kept: {self.problems[0]}"
        if self.notes:
            text += f"; {len(self.notes)} without the whole log: {self.notes[0]}"
        if self.unfinished:
            text += (
                f"; {self.unfinished} had not ended: `skyinfra jobs resume {self.fleet}` on the next fleet runs them"
            )
        if self.spent:
            text += f"; it has cost {self.spent}"
        if self.files:
            files = counted(self.files, "file")
            text += f"; {files} that they wrote will go with the fleet: `skyinfra jobs fetch` brings them"
        return text


def keep(
    manifest: Manifest,
    store: Store,
    *,
    patience: float = PATIENCE_S,
    stack: SynthesizedStack | None = None,
    resumed: bool = True,
) -> Keeping:
    """Copies the records and logs of the jobs of a fleet into *store*; those that are there as they are, it leaves.

    stack: its hours are copied too, with the prices that its machines have now. patience: seconds after which no other
    job is begun with. resumed: whether what another fleet needs of those that have not ended is copied too. Problems of
    the store and of single jobs stand in the result. Raises `FleetUnreachable` and what else connecting raises.
    """
    from skyinfra.client import open_questions

    deadline = time.monotonic() + patience
    with open_questions(manifest, timeout=min(_CONNECT_S, patience), patience=_CONNECT_S) as fleet:
        # Those that came last are kept first.
        found = sorted(fleet.jobs(), key=lambda job: -job.submitted)
        written = [job.written.kept_count for job in found if job.written is not None and job.written.tree is not None]
        done = Keeping(manifest.fleet, store.where, len(found), files=sum(written))
        if stack is not None and (hours := fleet.hours()) is not None:
            try:
                done.spent = _keep_hours(store, stack, manifest, hours)
            except (SkyinfraError, TypeError, ValueError) as error:
                done.notes.append(f"its hours were NOT kept: {_line(error)}")
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
        if resumed:
            _keep_unfinished(fleet, store, deadline, done)
    return done


def _keep_unfinished(fleet: Questions, store: Store, deadline: float, done: Keeping) -> None:
    from skyinfra.client.unfinished import keep_unfinished

    try:
        left = keep_unfinished(fleet, store, deadline)
    except SkyinfraError as error:
        done.notes.append(f"what another fleet needs of jobs is NOT kept: {_line(error)}")
        return
    done.notes += [f"{job}: another fleet cannot run it: {why}" for job, why in left.problems.items()]
    done.unfinished = left.waiting


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
        # Up to where no more comes: of a last line that is longer than a part, the size above is that of a part.
        while size and file.tell() < LARGEST_LOG:
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


def keep_before(
    stack: SynthesizedStack, plan: Plan, project: Path, *, destroy: bool = False, resumed: bool = True
) -> Iterator[Keeping]:
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
            left = max(0.0, deadline - time.monotonic())
            done = keep(fleets[pool], store, patience=left, stack=stack, resumed=resumed)
        except (SkyinfraError, OSError) as error:
            done = Keeping(fleets[pool].fleet, store.where, None, problems=[_line(error)])
        if done.total != 0 or done.spent:
            yield done


def kept_jobs(fleet: str, pool: str | None = None) -> list[KeptJob]:
    """Returns the jobs of a fleet that are kept for after it, oldest first: from the bucket of the stack's state, else
    from the folder of the project.

    fleet, pool: as for `connect`. Of a stack that the project does not declare, or where there is no project, those in
    the folder. Raises `CloudRefused`, `MissingDependency`, `ProjectError`.
    """
    store, pool = _store_for(fleet, pool)
    records = [each for each in store.names(pool) if each.endswith(f"/{_RECORD}")] if pool else []
    with ThreadPoolExecutor(_AT_ONCE) as threads:
        found = [each for each in threads.map(partial(_kept, store), records) if each is not None]
    return sorted(found, key=lambda each: (each.info.submitted, each.info.id))


def kept_spent(fleet: str) -> dict[str, Any] | None:
    """Returns in a few values what the fleets of ``STACK/POOL`` have cost that are gone, as it is kept beside their
    jobs; None where nothing is, as of free ones. Raises as `kept_jobs` does."""
    store, pool = _store_for(fleet)
    found = _kept_hours(store, pool) if pool else []
    spent = pool_spent(fleet, found)
    named = {name: spent[name] for name in ("at", "hours", "usd", "estimated", "unknown")}
    return {"where": store.where, **named} if found else None


def _store_for(fleet: str, pool: str | None = None) -> tuple[Store, str]:
    """Returns where things of a fleet are kept, and the name of its pool there; an empty one where it can have none."""
    name, _, named = fleet.partition("/")
    pool = pool or named
    try:
        project = Project.find()
        stack = project.stack(name)
        store, pool = store_of(stack, project.base_of(stack)), pool or stack.only_pool
    except (ProjectNotFound, StackNotFound, PoolNotFound):
        store = local_store(Path.cwd(), Path(name).name)
    return store, pool if pool and Path(pool).name == pool else ""


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
    manifest, store = stack.fleet(pool or stack.only_pool), store_of(stack, project.base_of(stack))
    return keep(manifest, store, patience=patience, stack=stack)


def _priced(stack: SynthesizedStack, manifest: Manifest, hours: FleetHours) -> PricedHours:
    """Returns *hours* with the prices of the machines of a fleet of *stack*."""
    undeclared = {"provider": manifest.provider, "machine_types": ["a machine of a pool that is not declared"]}
    pool = next((each for each in stack.pools if each["name"] == manifest.pool), undeclared)
    resources: tuple[Resource, ...] = ()
    with suppress(SkyinfraError):
        resources = stack.resources()
    return priced_hours(hours, pool, manifest, resources)


def _keep_hours(store: Store, stack: SynthesizedStack, manifest: Manifest, hours: FleetHours) -> str:
    """Writes the hours of a fleet beside those of earlier ones. Returns what it has cost, in words."""
    now = _priced(stack, manifest, hours)
    spent = pool_spent(manifest.fleet, (now,))
    if not spent["free"]:
        every = with_kept(now, _kept_hours(store, manifest.pool))
        ledgers = [{"hours": each.hours.to_json(), "machines": each.machines} for each in every]
        text = json.dumps({"version": VERSION, "ledgers": ledgers})
        store.write(f"{manifest.pool}/{_SPENT}", io.BytesIO(text.encode()))
    return so_far(spent)


def _kept_hours(store: Store, pool: str) -> list[PricedHours]:
    """Returns the hours of the fleets of a pool that were kept, the oldest first. Raises as the store does."""
    if f"{pool}/{_SPENT}" not in store.names(pool):
        return []
    try:
        ledgers = json.loads(store.read(f"{pool}/{_SPENT}"))["ledgers"]
        return [PricedHours(FleetHours.read(each["hours"]), each["machines"]) for each in ledgers]
    except (KeyError, TypeError, ValueError) as error:
        raise ProjectError(f"cannot be read: {_line(error)}", field=f"{store.where}/{pool}/{_SPENT}") from None


def stack_spent(stack: SynthesizedStack, base: Path, pool: str = "", since: float = 0.0) -> dict[str, Any]:
    """Returns what the pools of *stack*, or *pool* alone, have cost, see `pool_spent`: by their heads, and kept.

    base: the folder of the project, or of the program with its block. Raises what Terraform and the store raise.
    """
    fleets, store = stack.fleets(), store_of(stack, base)
    declared = {each["name"]: each for each in stack.pools}
    if pool and pool not in (*declared, *fleets) and not _kept_hours(store, pool):
        stack.fleet(pool)  # says what there is
    pools = []
    for name in [pool] if pool else dict.fromkeys([*declared, *fleets]):
        found, manifest, problem = _kept_hours(store, name), fleets.get(name), None
        if manifest is not None:
            live, problem = _asked_hours(stack, manifest)
            found = found if live is None else with_kept(live, found)
        of = f"{stack.name}/{name}"
        pools.append(pool_spent(of, found, pool=declared.get(name), manifest=manifest, since=since, problem=problem))
    return summed(stack.name, pools)


def _asked_hours(stack: SynthesizedStack, manifest: Manifest) -> tuple[PricedHours | None, str | None]:
    """Returns the hours of a fleet as its head says them; why it does not, where it does not."""
    from skyinfra.client import open_questions

    try:
        with open_questions(manifest, timeout=_CONNECT_S, patience=_CONNECT_S) as fleet:
            hours = fleet.hours()
    except SkyinfraError as error:
        return None, _line(error)
    return (None, "its head counts no hours") if hours is None else (_priced(stack, manifest, hours), None)


def gone_spent(base: Path, stack: str, pool: str = "", since: float = 0.0) -> dict[str, Any] | None:
    """Returns what a stack that nobody declares any more has cost, as the folder *base* keeps it; else None."""
    store = local_store(base, Path(stack).name)
    names = sorted(name.partition("/")[0] for name in store.names("") if name.endswith(f"/{_SPENT}"))
    found = {name: _kept_hours(store, name) for name in names if pool in ("", name)}
    pools = [pool_spent(f"{stack}/{name}", found, since=since) for name, found in found.items()]
    return summed(stack, pools) if pools else None


def gone_stacks(base: Path) -> set[str]:
    """Returns the stacks of which the folder *base* keeps what they have cost."""
    names = local_store(base, "").names("")
    return {name.partition("/")[0] for name in names if name.endswith(f"/{_SPENT}")}


def _folder(pool: str, info: JobInfo) -> str:
    return f"{pool}/{info.key}"


def _line(error: Exception) -> str:
    text = error.message if isinstance(error, SkyinfraError) else f"{type(error).__name__}: {error}"
    return " ".join(text.split())
