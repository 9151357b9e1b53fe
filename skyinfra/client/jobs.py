"""Jobs: tasks that the head keeps and runs, whatever becomes of the client that submitted them."""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import functools
import os
import re
import time
import uuid
from collections.abc import Sequence
from pathlib import Path
from typing import Generic, ParamSpec, TypeGuard, TypeVar

from skyinfra.client import files
from skyinfra.engine import dask_client
from skyinfra.engine.notifications import webhooks
from skyinfra.engine.waiting import within
from skyinfra.errors import InvalidField, JobCancelled, NodeError, NotSupported, SlotLost
from skyinfra.protocol import jobs, questions, services
from skyinfra.protocol.calls import Outcome
from skyinfra.protocol.jobs import JobInfo, Kind, State, Submission
from skyinfra.protocol.rpc import Call
from skyinfra.protocol.secrets import Secret, named
from skyinfra.submission.connection import Asker
from skyinfra.submission.fleet import AskedFleet, Fleet
from skyinfra.submission.snapshot import Target
from skyinfra.sync import bringing
from skyinfra.sync.bringing import Brought, Here
from skyinfra.tasks import outcomes, pickling
from skyinfra.tasks.secrets import look_up
from skyinfra.tasks.task import Task

P = ParamSpec("P")
T = TypeVar("T")

# One question to the head may take that long.
_ANSWER_S = 15.0
# A job that runs may not have ended on its slot yet when it is taken back; see `Execution.stop`.
_CANCEL_S = 20.0
# The head is asked anew that often, while somebody waits for a job.
_WAIT_S = 20.0
# A target of a notification: a command of this machine.
COMMAND = "command:"
# Between two questions.
_PAUSE_S = 0.1
# Where the slots of a fleet were looked at within that long, another job of the same program does not look again.
_RECENT_S = 5.0


class Job(Generic[T]):
    """A task that was left with the head. Made by `Pool.submit` with ``detach=``, and by `Pool.job`.

    It goes on when this client ends, and while the head restarts, but for one on the head's own node. It
    runs at least once: where its slot is lost, it starts again from its beginning, see `JobInfo.repeated`. name: unique
    among the jobs that the head keeps. id: unique for ever. The head keeps the last thousand jobs that have ended, of
    at most 2 GiB.
    """

    def __init__(self, fleet: AskedFleet, info: JobInfo) -> None:
        self.name = info.name
        self.id = info.id
        self._task = info.task
        self._fleet = fleet
        self._line = Line(fleet.connection)

    def info(self) -> JobInfo:
        """Returns the state of the job at the head. Raises `JobNotFound`, `FleetUnreachable`, as all methods do."""
        return self._fleet.in_loop(self._line.wait(self.id, 0))

    @property
    def state(self) -> State:
        """``queued``, ``running``, ``done``, ``failed`` or ``cancelled``."""
        return self.info().state

    def done(self) -> bool:
        """Returns whether the job has ended: with a result, an exception, or cancelled."""
        return self.info().over

    def result(self, timeout: float | None = None) -> T:
        """Waits for the result; raises what the task raised, with its remote traceback.

        timeout: seconds, None for ever. Raises TimeoutError after it, and `JobCancelled`. An interrupt of the waiting
        thread (Ctrl-C) ends the waiting alone: the job goes on.
        """
        return self.result_of(self.outcome(timeout))

    def exception(self, timeout: float | None = None) -> BaseException | None:
        """Waits for the end of the job; the exception that its task raised, or None. Raises as `result` does else."""
        return self.exception_of(self.outcome(timeout))

    def result_of(self, outcome: Outcome) -> T:
        """Returns the result that *outcome* holds; raises what the task raised."""
        value: T = outcomes.result(outcome, self._task)
        return value

    def exception_of(self, outcome: Outcome) -> BaseException | None:
        """Returns the exception that *outcome* holds, or None."""
        return outcomes.exception(outcome, self._task)

    def outcome(self, timeout: float | None = None) -> Outcome:
        """Waits for the end of the job; how it ended, as the node has pickled it."""
        return self._fleet.in_loop(self._ended(timeout))

    def waiting(self, timeout: float | None) -> concurrent.futures.Future[Outcome]:
        """Returns the future of what `outcome` waits for."""
        return self._fleet.in_loop_soon(self._ended(timeout))

    async def _ended(self, timeout: float | None) -> Outcome:
        with self._fleet.waits_inside(f"{self.name}-{self.id}", self._task):
            info = await self._line.wait(self.id, timeout)
        if not info.over:
            raise TimeoutError(f"job {self.name} is {info.state} after {timeout:g} s")
        if info.state == "cancelled":
            raise JobCancelled(f"job {self.name} was cancelled; there is no result")
        outcome = outcomes.read_outcome(await self._line.outcome(self.id))
        if outcome.failure is not None and outcome.failure.shortage is not None:
            with contextlib.suppress(OSError):
                return (await self._fleet.connection.look()).advised(outcome)
        return outcome

    def cancel(self) -> bool:
        """Takes the job back; False where it has ended already. A task that runs is ended as `Future.cancel` does."""
        return self._fleet.in_loop(self._line.ask(services.job_cancel, _CANCEL_S, job=self.id))

    def logs(self, lines: int = 1000) -> str:
        """The last *lines* that the task has printed, programs that it runs included; empty where it printed nothing.

        It is kept where the task ran: raises `NodeError` where that node does not answer.
        """
        info = self.info()
        if info.slot is None:
            return ""
        node = info.slot.rpartition("/")[0]
        ask = functools.partial(self._fleet.ask, node, questions.LOG, source="task", task=info.key)
        found = questions.last_lines(ask, lines)
        return str(found["text"]) if found is not None else ""

    def give(self, *secrets: str | Secret, notify: Sequence[str | Secret] = ()) -> JobInfo:
        """Gives the head the secrets again that the job waits for: one that starts anew has forgotten them.

        secrets: in place of those that it lacks, for instance with the files that they are in. notify: see
        `Pool.detach`; in place of the webhooks that the job had; where it has ended already, they are told at once.
        Returns the job as it is then. Raises `SecretNotFound`, `InvalidField`.
        """
        if notify:
            self._fleet.in_loop(self._line.notify(self.id, self._fleet.manifest.fleet, addresses(notify)))
        wanted = named(secrets or self.info().lacks)
        return self._give({secret.name: look_up(secret) for secret in wanted})

    def _give(self, values: dict[str, str]) -> JobInfo:
        """Gives the head the *values* of secrets of the job, by their names. See `give`."""
        return self._fleet.in_loop(self._line.ask(services.job_secrets, job=self.id, values=values))

    def fetch(self, path: str | Path = ".", *patterns: str) -> list[Path]:
        """Brings files that the script wrote, and that were kept of them, to the folder *path*; returns where they are.

        `skyinfra run --detach --fetch PATTERN` says which are kept, of at most 256 MiB. patterns: lines as in a
        .gitignore, for some of them only. A file that was changed here since the job was submitted stays, and the
        fetched one lies beside it, with ``.fetched`` behind its name. Raises `InvalidField` where the job has not
        ended, `NodeFailed` where the head has lost a file.
        """
        return [Path(path) / each.path for each in self.brought(path, patterns) if each.how != "refused"]

    def brought(self, path: str | Path, patterns: Sequence[str] = ()) -> list[Brought]:
        """Does what `fetch` does, and says what became of each file."""
        info, lines = self.info(), bringing.check_patterns(patterns)
        if not info.over:
            hint = "Its files can be fetched when it has ended."
            raise InvalidField(f"the job is {info.state}", field="job", given=self.name, hint=hint)
        tree = self._fleet.in_loop(self._line.ask(services.job_files, job=self.id))
        since = info.submitted + self._fleet.in_loop(self._line.ahead())
        here = Here(Path(path).expanduser().absolute(), since, {})
        return [] if tree is None else files.bring(self._fleet, tree, here, lines)

    def forget(self) -> None:
        """Makes the head forget the job and its result. Raises `InvalidField` where it has not ended."""
        self._fleet.in_loop(self._line.ask(services.job_forget, job=self.id))

    def __repr__(self) -> str:
        return f"<Job {self.name}: {self._task}>"


class Line:
    """Asks the head about jobs. Everything here runs in the event loop of a `LoopThread`."""

    def __init__(self, connection: Asker) -> None:
        self._connection = connection

    async def ask(self, call: Call[P, T], longest_s: float = 0.0, /, *_: P.args, **arguments: P.kwargs) -> T:
        """Returns the answer of the head within *longest_s* and some seconds; asks again while the head restarts.

        Raises the error of the answer, or `FleetUnreachable`.
        """
        longest_s += _ANSWER_S
        connection = self._connection
        return await connection.again(lambda head: within(call(head, *_, **arguments), longest_s), connection.patience)

    async def ahead(self) -> float:
        """For how many seconds the clock of this machine is ahead of that of the head; 0 where that does not say it."""
        with contextlib.suppress(NotSupported):
            return time.time() - await self.ask(services.clock)
        return 0.0

    async def submit(self, wanted: Submission, call: bytes) -> JobInfo:
        """Leaves a job with the head, which has it on its disk then."""
        arrived = 0
        while arrived < len(call):
            part = call[arrived : arrived + jobs.PART]
            arrived = await self.ask(services.job_part, job=wanted.id, offset=arrived, data=part)
        return await self.ask(services.job_submit, submission=wanted)

    async def notify(self, job: str, pool: str, urls: list[str]) -> None:
        """Gives the head the webhooks that it is to tell of the end of a job, which may not be submitted yet."""
        await self.ask(services.job_notify, job=job, pool=pool, urls=urls)

    async def wait(self, job: str, timeout: float | None) -> JobInfo:
        """Returns the job, once it has ended or after *timeout* seconds; None is for ever."""
        deadline = None if timeout is None else time.monotonic() + timeout
        while True:
            left = _WAIT_S if deadline is None else min(_WAIT_S, max(0.0, deadline - time.monotonic()))
            info = await self.ask(services.job_wait, left, job=job, wait_s=left)
            if info.over or (deadline is not None and time.monotonic() >= deadline):
                return info
            if info.state == "queued":
                with contextlib.suppress(OSError):
                    self._connection.lacks.tell((await self._connection.look()).state)
            # A head that is about to leave answers at once.
            await asyncio.sleep(_PAUSE_S)

    async def unfinished(self, job: str) -> tuple[Submission, bytes]:
        """Returns what another head needs of a job that has not ended: its submission and its pickled call.

        What was synced for it is among the blobs of the head then. Raises `InvalidField` where it has ended.
        """
        wanted = await self.ask(services.job_submission, job=job)
        if wanted.size > jobs.LARGEST:
            raise jobs.too_large(wanted.size)
        call = bytearray()
        while len(call) < wanted.size:
            part, _ = await self.ask(services.job_call, job=wanted.id, offset=len(call), length=jobs.PART)
            if not part:
                raise NodeError("the head gives less of a job than it says that there is", field=job)
            call += part
        return wanted, bytes(call)

    async def outcome(self, job: str) -> bytes:
        """Returns the pickled outcome of a job that has ended by itself."""
        data = bytearray()
        size = 1
        while len(data) < size:
            part, size = await self.ask(services.job_outcome, job=job, offset=len(data), length=jobs.PART)
            data += part
        return bytes(data)


def detach(
    fleet: Fleet,
    target: Target,
    task: Task[T],
    name: str | None = None,
    *,
    priority: int = 0,
    replace: bool = False,
    kind: Kind = "function",
    shown: str | None = None,
    notify: Sequence[str | Secret] = (),
) -> Job[T]:
    """Leaves *task* with the head of *fleet*; see `Pool.detach`. shown: its name in lists, else the function's."""
    shown = shown or task.name
    name = name if name is not None else _made_name(shown)
    jobs.check_name(name)
    jobs.check_priority(priority)
    if task.settings.slots != 1:
        raise NotSupported("a job takes one slot", field="slots", given=task.settings.slots)
    target = target.of(task.settings)
    urls = addresses(notify)
    identity = uuid.uuid4().hex
    secrets = fleet.secrets.of(identity)
    shipment = pickling.Shipment(
        task,
        topic="",
        included=fleet.included,
        whole=True,
        secrets=secrets,
        env=fleet.env,
        workdir=fleet.workdir,
    )
    if len(shipment.call) > jobs.LARGEST:
        raise jobs.too_large(len(shipment.call))
    _check_prospect(fleet, target)
    if shipment.included is not None:
        shipment.secrets = None  # they are the job's, and there is none yet
        fleet.in_loop(fleet.dispatcher.bring(shipment, files=True))
    wanted = Submission(
        version=jobs.VERSION,
        id=identity,
        name=name,
        task=shown,
        kind=kind,
        submitter=dask_client.submitter(),
        priority=priority,
        header=shipment.attempt(0)[1].decode(),
        size=len(shipment.call),
        resources=target.resources,
        retries=task.settings.retries,
        replace=replace,
    )
    line, pool = Line(fleet.connection), fleet.manifest.fleet
    if urls:
        fleet.in_loop(line.notify(identity, pool, urls))
    info = fleet.in_loop(line.submit(wanted, shipment.call))
    if urls and not info.notifications:  # the head started anew between both
        fleet.in_loop(line.notify(identity, pool, urls))
    job: Job[T] = Job(fleet, info)
    if shipment.uses:
        job._give(secrets.values(shipment.uses))
    return job


def targets(notify: Sequence[str | Secret]) -> list[str]:
    """Returns the addresses and commands of *notify*; a name stands for what is looked up here, as a secret is.

    Raises `InvalidField` and `SecretNotFound`, which show no address.
    """
    if isinstance(notify, str):
        raise InvalidField("expected a list", field="notify", hint='notify=["SLACK_URL"]')
    found = [each if is_target(each) else look_up(*named([each])) for each in notify]
    webhooks(each for each in found if not each.startswith(COMMAND))
    return found


def is_target(text: str | Secret) -> TypeGuard[str]:
    """Returns whether *text* is an address or a command, and no name of one."""
    return isinstance(text, str) and re.match("[a-z]+:", text) is not None


def addresses(notify: Sequence[str | Secret]) -> list[str]:
    """`targets` that the head can tell. Raises `NotSupported` for a command."""
    found = targets(notify)
    if any(each.startswith(COMMAND) for each in found):
        raise NotSupported(
            "a command runs where its client is, and a job runs without it",
            field="notify",
            hint=f"`skyinfra jobs result STACK/POOL JOB --notify {COMMAND}...` waits for the job, and runs it then.",
        )
    return found


def _check_prospect(fleet: Fleet, target: Target) -> None:
    """Raises `SlotLost` where no slot of the fleet will ever take the job; one that is away for now is waited for."""
    now = fleet.look(_RECENT_S)
    if now.prospect(target) == "gone" or now.unknown(target, fleet.manifest):
        now = fleet.look()
    if now.prospect(target) == "gone" or now.unknown(target, fleet.manifest):
        raise SlotLost(
            f"{fleet.manifest.fleet} has no slot{target.which}",
            hint=now.instead(target, fleet.manifest),
        )


def _made_name(shown: str) -> str:
    words = re.sub(r"[^A-Za-z0-9]+", "-", shown)[-50:].strip("-")
    return f"{words or 'job'}-{os.urandom(3).hex()}"
