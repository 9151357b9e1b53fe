"""A task on its way: the header that a client sends with a pickled call, and the outcome that comes back.

A client ships a task as two byte strings: a header (`Header`, JSON) and the pickled call. A worker executes it and
gives an `Outcome` back, see `skyinfra.worker.execute`.
"""

from __future__ import annotations

import json
import pickle
from dataclasses import asdict, dataclass
from typing import NamedTuple

from skyinfra.protocol import failures

# The topics of our clients begin so: the head keeps nothing of them once their client is gone.
TOPIC = "skyinfra-"
# The names of clients, with which their ids begin: a connection that a program forwards may end before its client does.
CLIENT = "direct"
FORWARDED_CLIENT = "forwarded"
CLIENT_ID = f"Client-{CLIENT}-"
# A client's message on its stream to the head, with ``key``, ``header``, ``call`` and ``resources``.
TASK_MESSAGE = "skyinfra-task"
# The head's message on its stream to a worker, with ``key``: nobody waits for that task any more.
ABANDON_MESSAGE = "skyinfra-abandon"
# Outcomes of at most that many bytes travel as events, of which the head keeps the last thousand of each client.
SMALL_OUTCOME = 8192
# The event of a chunk, see `skyinfra.worker.execute`: the keys of tasks with their pickled outcomes, or `GIVEN_BACK`.
ENDED = "outcomes"
GIVEN_BACK = b""
# The event of an item of a generator: an `Item`.
ITEM = "item"
# The topic of the events with which a worker says why its slot takes no tasks for now, or None where it does again.
SLOT_FAILS = "skyinfra-slot-fails"
# Of the items of one task, its client has not taken so many at most.
MOST_ITEMS = 64
# A task with so many starts and no end is not started again on a node.
ATTEMPTS = 3
# Between SIGTERM and SIGKILL of a program.
PROGRAM_GRACE_S = 5.0
# In the variables of a script: the path in the tree of the folder that its working directory is a copy of, and the
# path of the script below that, where it is not the file's name alone.
BESIDE = "SKYINFRA_BESIDE"
PLACE = "SKYINFRA_PLACE"
# Which of the files that the script writes its client wants: a JSON list of lines as in a .gitignore, perhaps empty.
FETCH = "SKYINFRA_FETCH"
# For how many seconds the script may run. Of its task it is no timeout: its files may be on their way for longer.
LIMIT = "SKYINFRA_LIMIT"
# Fields of a header that earlier nodes do not know.
_LATE = ("secrets", "env", "workdir", "fresh", "stream", "adopted", "deaths")
# Characters of the problem of a job.
_PROBLEM = 300


@dataclass(frozen=True)
class Part:
    """A blob of a large value. The first one is the pickle stream, the others memory that it refers to, in order."""

    digest: str
    size: int


@dataclass(frozen=True)
class SecretUse:
    """A secret of a task: the *variable* that holds its value, its name, and the reference that the head knows it by.

    The reference begins with its owner, the topic of a client or the id of a job, and says nothing of the value. held:
    the value stands in no environment; *variable* is its name then.
    """

    variable: str
    name: str
    ref: str
    held: bool = False

    def to_json(self) -> dict[str, object]:
        """As JSON. Earlier nodes know nothing of what came later."""
        fields = asdict(self)
        return fields if self.held else {name: value for name, value in fields.items() if name != "held"}


@dataclass(frozen=True)
class Header:
    """The description of a task that a node reads before it unpickles the call.

    key: unique. name: of the function. topic: the scheduler's topic that its client listens to; empty where nobody
    does. timeout: for how many seconds the task may run, None for ever. echo: whether the client wants what it prints.
    tree: the name of what its client has synced, or None. parts: of a large call, whose byte string is empty then.
    whole: it is a job, whose result is a part of the outcome, however large it is. chunk: it stands for several short
    tasks, see `skyinfra.worker.execute`. secrets: those that the node asks the head for. env: variables of the process
    while it runs. workdir: the path in the tree of the folder that its working directory is a copy of. fresh: it runs
    in a process that has run no task before, and runs none after it. stream: its function is a generator, whose items
    are sent as they come. adopted: an attempt of a job that began before its head did: its outcome is wanted, and it is
    not started. deaths: the exit codes of the processes that it has ended, on whichever nodes, and whether the kernel
    did so as memory ran out; it is not started for them.
    """

    key: str
    name: str
    topic: str
    timeout: float | None = None
    echo: bool = False
    tree: str | None = None
    parts: tuple[Part, ...] = ()
    whole: bool = False
    chunk: bool = False
    secrets: tuple[SecretUse, ...] = ()
    env: dict[str, str] | None = None
    workdir: str | None = None
    fresh: bool = False
    stream: bool = False
    adopted: bool = False
    deaths: tuple[tuple[int, bool], ...] = ()

    def dumps(self) -> bytes:
        """One line of JSON. Earlier nodes know nothing of what came later, and get no word of what is not used."""
        late = {name for name in _LATE if not getattr(self, name)}
        given = asdict(self) | {"secrets": [each.to_json() for each in self.secrets]}
        return json.dumps({name: value for name, value in given.items() if name not in late}).encode()

    @classmethod
    def loads(cls, data: bytes) -> Header:
        """Returns the inverse of `dumps`."""
        fields = json.loads(data)
        parts = tuple(Part(**part) for part in fields.get("parts", ()))
        secrets = tuple(SecretUse(**each) for each in fields.get("secrets", ()))
        deaths = tuple((code, out_of_memory) for code, out_of_memory in fields.get("deaths", ()))
        return cls(**fields | {"parts": parts, "secrets": secrets, "deaths": deaths})


def is_chunk(header: bytes) -> bool:
    """Returns whether the header that `Header.dumps` has made is that of a chunk, without reading the rest."""
    # A quote within a text has a backslash before it.
    return b'"chunk": true' in header


@dataclass(frozen=True)
class Outcome:
    """The end of a task: a pickled ``result``, or a ``failure``.

    parts: of a large result, in place of it; with ``buffers``, the memory that it refers to, once they were fetched.
    missing: the digests of what the head has not any more; the task has not run, or its result is lost. seconds: how
    long loading it, running it and keeping its result took. items: how many items were sent before, of a generator,
    whose result is None. slot_failed: the name of the slot, where that could not run the task for a reason of its own,
    which the failure says.
    """

    result: bytes | memoryview | None = None
    failure: failures.Failure | None = None
    parts: tuple[Part, ...] = ()
    missing: tuple[str, ...] = ()
    buffers: tuple[memoryview, ...] = ()
    seconds: float | None = None
    items: int | None = None
    slot_failed: str | None = None

    @property
    def problem(self) -> str | None:
        """Class and message of the failure, in one line; None for a result."""
        return self.failure.summary if self.failure is not None else None

    @property
    def crowded(self) -> bool:
        """Whether the device had no more memory, of which tasks before it in the same process held a part."""
        return self.failure is not None and bool((self.failure.shortage or {}).get("held"))


class Item(NamedTuple):
    """An event: one of the items of a generator.

    number: from 0. worker: the address of its process. outcome: the pickled `Outcome` that stands for it.
    """

    number: int
    worker: str
    outcome: bytes


@dataclass(frozen=True)
class Ending:
    """The end of a job, whose head never unpickles what a slot gives: the pickled `Outcome`, and what the head reads.

    problem, slot_failed, crowded: as those of the outcome. missing: whether inputs of the task were lost.
    """

    problem: str | None
    missing: bool
    outcome: bytes
    slot_failed: str | None = None
    crowded: bool = False

    @classmethod
    def of(cls, outcome: Outcome) -> Ending:
        """Returns the end of a job with *outcome*."""
        missing, data = bool(outcome.missing), pickle.dumps(outcome)
        return cls(outcome.problem, missing, data, outcome.slot_failed, outcome.crowded)

    def dumps(self) -> bytes:
        """One line of JSON, and the outcome."""
        said = {"problem": self.problem, "missing": self.missing}
        later = {"slot_failed": self.slot_failed, "crowded": self.crowded}
        later = {name: value for name, value in later.items() if value}
        return json.dumps({**said, **later}).encode() + b"\n" + self.outcome

    @classmethod
    def loads(cls, data: bytes) -> Ending:
        """Returns the inverse of `dumps`. Raises ValueError."""
        line, _, outcome = data.partition(b"\n")
        said = json.loads(line)
        names = ("problem", "missing", "slot_failed")
        problem, missing, slot = (said.get(name) for name in names) if isinstance(said, dict) else (None, None, None)
        if not isinstance(problem, str | None) or not isinstance(missing, bool) or not isinstance(slot, str | None):
            raise ValueError(f"no end of a job: {line[:100]!r}")
        crowded = said.get("crowded") is True
        return cls(problem and problem[:_PROBLEM], missing, outcome, slot and slot[:_PROBLEM], crowded)
