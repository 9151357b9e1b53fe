"""Jobs: tasks that the head keeps on its disk and runs without the client that submitted them."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import Literal

from skyinfra.errors import InvalidField, NodeError, TaskTooLarge
from skyinfra.protocol import _schema
from skyinfra.protocol._schema import Name, SlotName
from skyinfra.protocol.calls import Header
from skyinfra.protocol.readings import Figures

VERSION = 1

# Bytes of a pickled call, and of a pickled outcome: the head holds those of the jobs that run in its memory.
LARGEST = 256 * 2**20
# Bytes that travel in one message.
PART = 4 * 2**20
# Priorities of jobs lie within it, on both sides of 0.
MOST_PRIORITY = 1000

State = Literal["queued", "running", "done", "failed", "cancelled"]
Kind = Literal["function", "script"]

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,62}")
_ID = re.compile(r"[0-9a-f]{32}")


@dataclass(frozen=True)
class Notification(_schema.Document, error=NodeError, source="notification"):
    """A webhook that is told of the end of a job. problem: why it was not, or will not be, in one line."""

    host: str
    state: Literal["waiting", "sent", "failed"] = "waiting"
    problem: str | None = None


# Bytes of the files that the head keeps of what a job wrote: what is wanted of them is chosen when it is submitted.
LARGEST_FILES = LARGEST
# The streams in which a program's files are told to its client, in the lines of its output: a `Written` as JSON, one
# without a tree first where files are on their way.
WRITTEN = "written"
KEEPING = "keeping"


@dataclass(frozen=True)
class WrittenFile(_schema.Document, error=NodeError, source="file"):
    """A file that a program wrote: its path in the folder where it began, and its size."""

    path: str
    size: int


@dataclass(frozen=True)
class Written(_schema.Document, error=NodeError, source="written"):
    """The files that a program wrote, or changed, in its copy of the project.

    left: the largest of those that are removed with the copy; left_count, left_bytes: of all of those. tree: the name
    of the tree at the head with those that are wanted; kept_count, kept_bytes: of those. problem: why some that are
    wanted are not there.
    """

    left: tuple[WrittenFile, ...] = ()
    left_count: int = 0
    left_bytes: int = 0
    tree: str | None = None
    kept_count: int = 0
    kept_bytes: int = 0
    problem: str | None = None


@dataclass(frozen=True)
class JobInfo(_schema.Document, error=NodeError, source="job"):
    """A job, as the head knows it.

    name: unique among the jobs that the head keeps. id: unique for ever. task: name of the function, or of the script's
    file. submitter: ``USER@HOST``. priority: higher ones run first. submitted, started, ended: UNIX seconds, None
    before that; started is that of the last attempt. attempts: how often it was sent to a slot. slot: where it runs, or
    ran last. problem: why it failed, or waits, in one line. figures: what its last attempt used of the slot's device;
    None before it has ended, and where it was not measured: it took less than two seconds or so, or the device tells
    nothing. lacks: the names of the secrets that it waits for. notifications: of its end, by the head.
    written: the files of its last attempt, once that has ended; None where it wrote none. repeated: why it began again
    last after its head did, or on another fleet, in one line; None where it did not.
    """

    name: Name
    id: Name
    task: str
    kind: Kind
    submitter: str
    priority: int
    state: State
    submitted: float
    started: float | None = None
    ended: float | None = None
    attempts: int = 0
    slot: SlotName | None = None
    problem: str | None = None
    figures: Figures | None = None
    lacks: tuple[str, ...] = field(default=(), metadata={"later": True})
    notifications: tuple[Notification, ...] = field(default=(), metadata={"later": True})
    written: Written | None = field(default=None, metadata={"later": True})
    repeated: str | None = field(default=None, metadata={"later": True})

    @property
    def key(self) -> str:
        """The beginning of the keys of its tasks: ``skyinfra logs --task KEY``."""
        return f"{self.name}-{self.id}"

    @property
    def over(self) -> bool:
        """Whether it has ended."""
        return self.state in ("done", "failed", "cancelled")


def id_of(key: str) -> str:
    """Returns the id of the job one of whose attempts has *key*; for the key of another task, none that a job has."""
    return key.rpartition("-")[2].partition(".")[0]


@dataclass(frozen=True)
class Submission(
    _schema.Document,
    error=InvalidField,
    source="job",
    version=VERSION,
    hint=f"This head reads version {VERSION}: use the skyinfra that deployed the fleet.",
):
    """A job on its way to the head.

    header: that of the task, see `calls.Header`; its key is replaced for every attempt. size: bytes of the pickled
    call, which was sent in parts before. retries: how often it starts again after an exception. resources: what a slot
    must have to take it, as Dask counts it. replace: forget a job of the same name that has ended. repeated: see
    `JobInfo`, of a job that ran on another fleet.
    """

    version: int
    id: str
    name: str
    task: str
    kind: Kind
    submitter: str
    priority: int
    header: str
    size: int
    resources: dict[str, int]
    retries: int = 0
    replace: bool = False
    repeated: str | None = field(default=None, metadata={"later": True})

    def _check(self, source: str) -> None:
        check_id(self.id)
        check_name(self.name)
        check_priority(self.priority)
        self._refuse(self.retries < 0, "a number from 0", "retries", self.retries)
        self._refuse(self.size < 0, "a number from 0", "size", self.size)
        none = not self.resources or min(self.resources.values()) < 1
        self._refuse(none, "names what a slot must have, each at least once", "resources")
        try:
            Header.loads(self.header.encode())
        except (TypeError, ValueError):
            raise InvalidField("is not the header of a task", field="header") from None


def check_id(identity: str) -> None:
    """Raises `InvalidField` where *identity* is not the id of a job: it becomes the name of a folder."""
    if not _ID.fullmatch(identity):
        raise InvalidField("32 digits of a hexadecimal number", field="id", given=identity)


def check_name(name: str) -> None:
    """Raises `InvalidField` where a job cannot have this *name*."""
    if not _NAME.fullmatch(name):
        raise InvalidField(
            "at most 63 letters, digits, dots, dashes and underscores, the first one a letter or a digit",
            field="name",
            given=name,
        )


def check_priority(priority: int) -> None:
    """Raises `InvalidField` where a job cannot have this *priority*."""
    if not -MOST_PRIORITY <= priority <= MOST_PRIORITY:
        raise InvalidField(f"from {-MOST_PRIORITY} to {MOST_PRIORITY}", field="priority", given=priority)


def too_large(size: int) -> TaskTooLarge:
    """Returns the error of a call or an outcome of *size* bytes."""
    return TaskTooLarge(
        f"{size / 2**20:.0f} MiB are more than the head keeps of a job, which is {LARGEST // 2**20} MiB",
        hint="Let the task read and write large data in files, and give it their paths.",
    )
