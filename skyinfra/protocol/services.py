# mypy: disable-error-code="empty-body"
"""Every remote call between clients, nodes and the head. The scheduler of the head answers all but `drain`.

A call with *wait_s* waits for a change, and is answered after that many seconds at the latest.
"""

from __future__ import annotations

from typing import Any

from skyinfra.protocol.fleet import FleetLayout
from skyinfra.protocol.gang import Candidates, GangState
from skyinfra.protocol.jobs import JobInfo, Submission
from skyinfra.protocol.rpc import Envelope, call

# The fleet ----------------------------------------------------------------------------------------------------------


@call(read_only=True)
def layout(*, seen: str | None = None, wait_s: float = 0.0) -> FleetLayout:
    """The layout of the fleet, as soon as its digest is another than *seen*."""


@call()
def promise(*, node: str, slots: list[str] | tuple[str, ...]) -> None:
    """Tells the head the names of the slots that *node* is to have."""


@call()
def leave(*, node: str, why: str, if_others: bool = False) -> bool:
    """Tells the head that *node* leaves, and *why*. *if_others*: only where another node has a slot in service and
    stays; False where there is none."""


@call(read_only=True)
def running() -> dict[str, list[tuple[str, str, float]]]:
    """Key, name and seconds of the tasks that run on each slot, by its name."""


# Questions to nodes, by way of the head, see `skyinfra.head.relay` --------------------------------------------------


@call()
def ask_node(*, node: str, question: str, arguments: dict[str, Any], wait_s: float) -> Any:
    """The answer of *node* to a *question* of `skyinfra.protocol.questions`. Raises `NodeError` where there is none."""


@call()
def take_questions(*, node: str, wait_s: float) -> list[tuple[int, str, dict[str, Any]]]:
    """The questions for *node*, as soon as there are some: number, name and arguments."""


@call()
def answer_question(*, node: str, number: int, answer: Envelope) -> None:
    """Gives the head the answer of *node* to the question *number*."""


# Blobs, see `skyinfra.blobs.transfer` -------------------------------------------------------------------------------


@call()
def blobs_missing(*, digests: list[str]) -> list[str]:
    """Those of *digests* that the head does not have; the others count as used."""


@call()
def blobs_add(*, blobs: list[tuple[str, bytes]]) -> str | None:
    """Adds small blobs, each with its digest. The first digest that its content does not have, or None."""


@call()
def blobs_write(*, upload: str, digest: str, size: int, offset: int, data: bytes | memoryview) -> None:
    """Writes a part of a blob of *size* bytes. *upload*: unique to the sender."""


@call()
def blobs_finish(*, upload: str) -> bool:
    """Makes a blob of the parts of *upload*; False where they do not have the digest."""


@call()
def blobs_drop(*, upload: str) -> None:
    """Forgets the parts of *upload*, those on their way too."""


@call(read_only=True)
def blobs_read(*, parts: list[tuple[str, int, int]]) -> list[bytes | memoryview | None]:
    """Parts of blobs, each (digest, offset, length); None for those that the head does not have."""


@call()
def blobs_check(*, digest: str) -> None:
    """Removes a blob whose content does not have its digest: a loss of power may have damaged it."""


# Jobs. *job*: a name, an id, or the beginning of an id. A call may be made again where its answer was lost -----------


@call()
def job_part(*, job: str, offset: int, data: bytes) -> int:
    """Writes a part of a pickled call, before its submission; how many bytes have arrived."""


@call()
def job_submit(*, submission: Submission) -> JobInfo:
    """Submits a job."""


@call(read_only=True)
def job_list() -> list[JobInfo]:
    """Every job that is kept, in the order of submission."""


@call(read_only=True)
def job_wait(*, job: str, wait_s: float) -> JobInfo:
    """The job, as soon as it has ended."""


@call(read_only=True)
def job_outcome(*, job: str, offset: int, length: int) -> tuple[bytes, int]:
    """A part of the pickled `calls.Outcome` of a job that has ended, and the size of the whole in bytes."""


@call()
def job_cancel(*, job: str) -> bool:
    """Cancels a job; False where it had ended."""


@call()
def job_forget(*, job: str) -> None:
    """Forgets a job that has ended."""


# Gangs, see `skyinfra.protocol.gang` --------------------------------------------------------------------------------


@call()
def gang_ask(*, gang: str, client: str, nodes: int, candidates: Candidates, wait_s: float) -> GangState:
    """Asks for slots (see `Wish`), or goes on waiting for them."""


@call()
def gang_join(*, gang: str, rank: int, worker: str, address: str, port: int, wait_s: float) -> GangState:
    """Tells the head that *rank* has its slot, and waits for the other ranks."""


@call(read_only=True)
def gang_state(*, gang: str, seen: str, wait_s: float) -> GangState:
    """The state of the gang, as soon as its phase is another than *seen*."""


@call()
def gang_report(*, gang: str, rank: int, age: float = 0.0, died: bool = False, ok: bool = False) -> None:
    """Tells the head how *rank* ended: *ok*, or with a failure *age* seconds ago. *died*: its process did."""


@call()
def gang_release(*, gang: str) -> None:
    """Gives the slots of the gang back."""


# The dashboard: each connection of a client's browser is one here ---------------------------------------------------


@call()
def dashboard_open() -> int:
    """Opens a connection; its number."""


@call()
def dashboard_receive(*, number: int, wait_s: float) -> bytes | None:
    """What came on the connection: nothing after *wait_s* seconds; None where it has ended."""


@call()
def dashboard_send(*, number: int, data: bytes) -> bool:
    """Sends *data* on the connection; False where it has ended."""


@call()
def dashboard_close(*, number: int) -> None:
    """Closes the connection."""


# Workers ------------------------------------------------------------------------------------------------------------


@call()
def drain(*, on: bool) -> dict[str, Any]:
    """Takes a worker out of service, or into it again; see `SlotWorker.drain`."""
