"""Jobs that had not ended, for another fleet to run: their calls and files, in the store of kept jobs.

POOL/NAME-ID/call              the pickled call; never unpickled here
POOL/NAME-ID/submission.json   the job; written last, removed first: where it is, all that the job needs is there
POOL/files/SHA256              the files that were synced for such jobs, and their listings
"""

from __future__ import annotations

import io
import json
import tempfile
import time
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path

from skyinfra.blobs import transfer
from skyinfra.blobs.store import BlobStore, digest_of
from skyinfra.blobs.transfer import Blob, BlobsMissing, chunked
from skyinfra.blobs.trees import Tree, parse_name
from skyinfra.client.jobs import Line
from skyinfra.client.questions import Questions
from skyinfra.errors import CloudRefused, InvalidField, NodeError, NotSupported, ProjectError, TaskError, TaskInputsLost
from skyinfra.protocol import jobs
from skyinfra.protocol.calls import Header
from skyinfra.protocol.jobs import JobInfo, Submission
from skyinfra.submission.fleet import AskedFleet
from skyinfra.terraform.stores import Store

VERSION = 1
_SUBMISSION, _CALL, _FILES = "submission.json", "call", "files"
# What stands in the file of a job that has ended, until it is removed.
_ENDED = b"{}"
_REPEATED = "the fleet that it ran on is gone"
_NONE = "nothing is kept of it that this version of skyinfra can read"


@dataclass(frozen=True)
class Unfinished:
    """A job that had not ended when it was kept. info: as its head knew it then. submission: what a head is given."""

    info: JobInfo
    submission: Submission

    @property
    def tree(self) -> str | None:
        """The name of the tree with the files that were synced for it."""
        return Header.loads(self.submission.header.encode()).tree

    @property
    def again(self) -> Submission:
        """The submission for the next head."""
        return replace(self.submission, repeated=_REPEATED) if self.info.attempts else self.submission


@dataclass
class Kept:
    """Jobs that had not ended: the names of those that were *done*, and *problems* by the names of the others.

    already: how many were there before.
    """

    done: list[str] = field(default_factory=list)
    problems: dict[str, str] = field(default_factory=dict)
    already: int = 0

    @property
    def waiting(self) -> int:
        """The number of jobs that another fleet can run."""
        return len(self.done) + self.already


def keep_unfinished(fleet: Questions, store: Store, deadline: float) -> Kept:
    """Copies what another fleet needs of the jobs that have not ended, once, and removes that of those that have.

    deadline: time.monotonic() after which no other job is begun with. Raises what the store raises, and
    `FleetUnreachable`.
    """
    pool, found, kept = fleet.manifest.pool, fleet.jobs(), Kept()
    there = store.names(pool)
    over = [each for each in found if each.over and _name(pool, each, _SUBMISSION) in there]
    try:
        for each in over:
            _forget(store, pool, each)
        if over:
            _clear(store, pool)
    except CloudRefused as error:  # who may write there need not be allowed to remove
        kept.problems[", ".join(each.name for each in over)] = f"has ended, and is still kept: {error.message}"
    there = store.names(pool) if over else there
    for each in found:
        if each.over:
            continue
        if _name(pool, each, _SUBMISSION) in there:
            kept.already += 1
            continue
        if time.monotonic() > deadline:
            kept.problems[each.name] = "the time was up"
            continue
        try:
            _keep(fleet._fleet, store, each, there)
        except (InvalidField, NotSupported):  # it has ended meanwhile; or its head is of an earlier version
            continue
        except NodeError as error:
            kept.problems[each.name] = error.message
            continue
        kept.done.append(each.name)
    return kept


def unfinished(store: Store, pool: str) -> list[Unfinished]:
    """Returns the jobs of *pool* that had not ended, in the order of their submission. Raises what the store does."""
    return _readable(store, pool)[0]


def resume(fleet: Questions, store: Store, selected: Collection[str] = ()) -> Kept:
    """Leaves the kept jobs that had not ended, or those *selected* by name, by id or by how that begins, with the head
    of *fleet*.

    Those that it has already, it leaves alone, and a job that could not be left with it stays kept. Raises what the
    store raises, and `FleetUnreachable`.
    """
    pool, kept = fleet.manifest.pool, Kept()
    known = {each.id for each in fleet.jobs()}
    readable, others = _readable(store, pool)
    kept.problems = dict.fromkeys(() if selected else others, "this version of skyinfra cannot read what is kept of it")
    wanted = {word: _named(readable, word) for word in selected}
    kept.problems |= dict.fromkeys((word for word in wanted if not wanted[word]), _NONE)
    for each in readable:
        if selected and not any(each in found for found in wanted.values()):
            continue
        if each.info.id in known:
            kept.already += 1
            continue
        try:
            _give(fleet._fleet, store, pool, each)
        except (InvalidField, NodeError, ProjectError, TaskError) as error:
            kept.problems[each.info.name] = error.message
        else:
            kept.done.append(each.info.name)
    return kept


def _named(among: Sequence[Unfinished], word: str) -> list[Unfinished]:
    """Returns those that have this name or id; else the one whose id begins so."""
    begin = [each for each in among if word and each.info.id.startswith(word)]
    return [each for each in among if word in (each.info.name, each.info.id)] or (begin if len(begin) == 1 else [])


def _name(pool: str, info: JobInfo, file: str) -> str:
    return f"{pool}/{info.key}/{file}"


def _keep(fleet: AskedFleet, store: Store, info: JobInfo, there: set[str]) -> None:
    pool = fleet.manifest.pool
    jobs.check_id(info.id)
    jobs.check_name(info.name)
    submission, call = fleet.in_loop(Line(fleet.connection).unfinished(info.id))
    made = Unfinished(info, submission)
    if made.tree is not None:
        _keep_tree(fleet, store, made.tree, there)
    store.write(_name(pool, info, _CALL), io.BytesIO(call))
    document = {"version": VERSION, "job": info.to_json(), "submission": submission.to_json()}
    store.write(_name(pool, info, _SUBMISSION), io.BytesIO(json.dumps(document).encode()))


def _keep_tree(fleet: AskedFleet, store: Store, name: str, there: set[str]) -> None:
    """Copies the listing and the files of a tree that are not *there*. Raises `NodeError` where the head lacks some."""
    pool, head, (listing, size) = fleet.manifest.pool, fleet.connection.head, parse_name(name)
    with tempfile.TemporaryDirectory() as folder:
        blobs = BlobStore(Path(folder))
        try:
            fleet.from_head(transfer.fetch(head, blobs, {listing: size}))
            wanted = Tree.loads(blobs.path(listing).read_bytes()).blobs()
            wanted = {each: size for each, size in wanted.items() if f"{pool}/{_FILES}/{each}" not in there}
            fleet.from_head(transfer.fetch(head, blobs, wanted))
        except BlobsMissing:
            raise NodeError("its head does not have all of its files any more") from None
        for each in (*wanted, listing):
            with blobs.path(each).open("rb") as stream:
                store.write(f"{pool}/{_FILES}/{each}", stream)
            there.add(f"{pool}/{_FILES}/{each}")


def _give(fleet: AskedFleet, store: Store, pool: str, job: Unfinished) -> None:
    call = store.read(_name(pool, job.info, _CALL))
    fleet.from_head(transfer.send(fleet.connection.head, list(_blobs(store, pool, job.tree))))
    fleet.in_loop(Line(fleet.connection).submit(job.again, call))


def _readable(store: Store, pool: str) -> tuple[list[Unfinished], list[str]]:
    """Returns the jobs that are kept, by their submission, and the folders of those that this version cannot read."""
    found: list[Unfinished] = []
    others: list[str] = []
    for name in sorted(each for each in store.names(pool) if each.endswith(f"/{_SUBMISSION}")):
        if (content := store.read(name)) == _ENDED:
            continue
        try:
            given = json.loads(content)
            if given["version"] != VERSION:
                raise ValueError(given["version"])
            found.append(Unfinished(JobInfo.read(given["job"]), Submission.read(given["submission"])))
        except (ValueError, KeyError, TypeError, NodeError, InvalidField):
            others.append(name.split("/")[-2])
    return sorted(found, key=lambda each: (each.info.submitted, each.info.id)), others


def _forget(store: Store, pool: str, info: JobInfo) -> None:
    # From here on it is none, whatever becomes of the rest.
    store.write(_name(pool, info, _SUBMISSION), io.BytesIO(_ENDED))
    for file in (_CALL, _SUBMISSION):
        store.remove(_name(pool, info, file))


def _clear(store: Store, pool: str) -> None:
    """Removes the files that no kept job needs; none where nobody knows what one needs."""
    readable, others = _readable(store, pool)
    if others:
        return
    needed: set[str] = set()
    for tree in {each.tree for each in readable} - {None}:
        needed |= {blob.digest for blob in _blobs(store, pool, tree)}
    for name in store.names(f"{pool}/{_FILES}"):
        if name.rpartition("/")[2] not in needed:
            store.remove(name)


def _blobs(store: Store, pool: str, tree: str | None) -> Iterator[Blob]:
    """Yields what is kept of a *tree*: its listing and its files. Raises `TaskInputsLost`, and what the store does."""
    if tree is None:
        return
    digest, size = parse_name(tree)
    yield Blob(digest, size, partial(_chunks, store, pool, digest))
    for each, length in Tree.loads(_content(store, pool, digest)).blobs().items():
        yield Blob(each, length, partial(_chunks, store, pool, each))


def _chunks(store: Store, pool: str, digest: str) -> Iterator[memoryview]:
    return chunked([_content(store, pool, digest)])


def _content(store: Store, pool: str, digest: str) -> bytes:
    content = store.read(f"{pool}/{_FILES}/{digest}")
    if digest_of(content) != digest:
        raise TaskInputsLost("a file was damaged where it is kept", field=digest)
    return content
