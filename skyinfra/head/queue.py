"""The queue of the head's jobs: runs them on the fleet's slots, one after the other and again where need be.

As many run at once as there are slots that take them; which one is next, `FairShare` says.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cache, cached_property, partial

from skyinfra.engine.executor import Moves, may_pass, overdue
from skyinfra.engine.waiting import Changes, within
from skyinfra.errors import StateDirectoryError
from skyinfra.head.carried import Claim
from skyinfra.head.execution import Execution
from skyinfra.head.fair_share import FairShare, Needs
from skyinfra.head.journal import Journal, Record, settled
from skyinfra.head.secrets import HeadSecrets
from skyinfra.protocol import failures, jobs
from skyinfra.protocol.calls import Ending, Outcome
from skyinfra.protocol.jobs import JobInfo

logger = logging.getLogger("skyinfra.runner")

# How often slots that came or went are noticed, and tasks that are over their time, while jobs wait or run.
_LOOK_S = 1.0
# A job that was sent is at its slot within that long.
_SENT_S = 0.1
# Workers connect to a head that has started within that long: they try every few seconds, see `register_again`.
_BACK_S = 20.0
# Between two writes to a full disk.
_RETRY_S = 5.0
# Of `JobInfo.repeated`: how many attempts it names, the last ones.
_REPEATED, _AND = 5, "; "
# A write that has begun when the scheduler ends may take so long.
_END_S = 5.0


@dataclass
class Job:
    """A job in memory. number: of those that were submitted. size: its bytes on the disk, once it has ended. running:
    the task of asyncio that runs it.

    key: of its last attempt. sent: a key, and the slot that has it. settling: its end is being written. writing: held
    while its record is written. came: when this head got it (``time.monotonic``). secrets: those of all tasks.
    expected: it ran when the head ended, and may still run. adopted: its last attempt goes on, and is to be taken over.
    """

    record: Record
    number: int = 0
    size: int = 0
    running: asyncio.Task[None] | None = None
    key: str = ""
    sent: tuple[str, str] = "", ""
    settling: bool = False
    expected: bool = False
    adopted: bool = False
    changes: Changes = field(default_factory=Changes)
    writing: asyncio.Lock = field(default_factory=asyncio.Lock)
    came: float = field(default_factory=time.monotonic)
    secrets: HeadSecrets = field(default_factory=HeadSecrets)

    def __post_init__(self) -> None:
        self.needs: Needs = tuple(sorted(self.record.resources.items()))

    @property
    def info(self) -> JobInfo:
        """The information in its record."""
        return self.record.info

    @property
    def room(self) -> int:
        """The bytes that it takes, with the files that it wrote."""
        written = self.info.written
        return self.size + (written.kept_bytes if written is not None and written.tree is not None else 0)

    @property
    def waits(self) -> bool:
        """Whether it may be started."""
        return not (self.info.over or self.settling or self.running or self.lacks or self.expected)

    @property
    def lacks(self) -> tuple[str, ...]:
        """The names of the secrets that it waits for."""
        return self.secrets.lacks(self.record.task.secrets)

    def note(self, **changes: object) -> None:
        """Changes the information about the job; it is in the journal after the next write."""
        self.record = replace(self.record, info=replace(self.info, **changes))  # type: ignore[arg-type]


class View:
    """The fleet at one moment, of which a part is looked at once it is asked for. *execution*: None of one that is not
    there yet."""

    def __init__(self, execution: Execution | None) -> None:
        self._execution = execution
        self.takes = cache(self._takes)

    @cached_property
    def running(self) -> dict[str, tuple[str, float]]:
        """Slot and seconds of the tasks that run, also those of others, by their keys."""
        return {} if self._execution is None else self._execution.running()

    @cached_property
    def _slots(self) -> list[dict[str, float]]:
        return [] if self._execution is None else self._execution.slots()

    def _takes(self, needs: Needs) -> bool:
        """Returns whether a slot has what a job needs, as far as that is known."""
        return self._execution is None or _places(self._slots, needs) > 0


class Queue:
    """Runs jobs, which are those of *journal*. *on_over*: is awaited when one of them has ended.

    ``unfinished``: those that have not, by id, in the order of their submission.
    """

    def __init__(self, journal: Journal, *, on_over: Callable[[Job], Awaitable[None]]) -> None:
        self.unfinished: dict[str, Job] = {}
        self._journal = journal
        self._on_over = on_over
        self._fair_share = FairShare()
        self._running: dict[str, Job] = {}
        self._claimed: list[Job] = []
        # Whether jobs may be expected.
        self._expects = False
        self._woken = asyncio.Event()
        self._execution: Execution | None = None
        self._loop: asyncio.Task[None] | None = None
        self._broken: BaseException | None = None
        self._unwritten = ""
        self._since = time.monotonic()

    def add(self, job: Job) -> None:
        """Takes a job that was submitted, or that waited for its secrets, and runs it when its turn has come."""
        self.unfinished[job.info.id] = job
        self._fair_share.add(job)
        self.wake()

    def expect(self, job: Job) -> None:
        """Takes a job that had not ended when the head did: its last attempt may still run, and is waited for."""
        if job.info.attempts:
            job.key, job.expected = job.record.attempt().key, True
        self.add(job)

    def claim(self, key: str, slot: str) -> Claim | None:
        """Takes over the attempt *key*, which went on while the head was away and is carried on *slot*.

        Raises KeyError where it is not wanted: its job has ended, or began again.
        """
        job = self.unfinished.get(jobs.id_of(key))
        if job is None or job.key != key or job.settling:
            raise KeyError(key)
        if not job.expected:
            # The head was there all along, and the slot was not: the scheduler has given the attempt to another one.
            if job.running and (self._execution is None or self._execution.sent_to(key) is None):
                return None
            raise KeyError(key)
        job.expected, job.adopted = False, True
        self._claimed.append(job)
        job.note(slot=slot)
        logger.info("job %s still runs on %s", job.info.name, slot)
        self.wake()
        return Claim(replace(job.record.attempt(), adopted=True).dumps(), job.record.resources)

    def start(self, execution: Execution) -> None:
        """Runs jobs with *execution* from now on."""
        self._execution = execution
        self._since = time.monotonic()
        self._expects = True
        self._loop = asyncio.create_task(self._run_all(execution), name="jobs")
        self._loop.add_done_callback(self._done)

    async def stop(self) -> None:
        """Stops running jobs, except where their end is being written already. They go on where their workers do."""
        if self._loop is None or self._execution is None:
            return
        await _cancelled([self._loop])
        self._loop = None
        if settling := [job.running for job in self._running.values() if job.running and job.settling]:
            await asyncio.wait(settling, timeout=_END_S)
        for job in self._running.values():
            job.expected |= bool(job.key and not job.info.over)
        self._execution.leave([job.key for job in self.unfinished.values() if job.expected])
        await _cancelled([job.running for job in self._running.values() if job.running])
        for job in (*self._running.values(), *self._claimed):
            job.expected |= job.adopted
            job.settling, job.adopted, job.running = False, False, None
            self._fair_share.add(job)
        self._running.clear()
        self._claimed.clear()
        await self._execution.close()
        self._execution = None

    def check(self) -> None:
        """Raises the error of the runner itself, if one ended the queue."""
        if self._broken is not None:
            raise self._broken

    def wake(self) -> None:
        """Starts the jobs that can be started."""
        self._woken.set()

    def view(self) -> View:
        """Returns the fleet as it is now."""
        return View(self._execution)

    async def save(self, job: Job) -> None:
        """Writes the record of *job* as it is now. Raises `StateDirectoryError`."""
        await self._write(job, lambda: self._journal.save(job.record))

    # Their turns ----------------------------------------------------------------------------------------------------

    async def _run_all(self, execution: Execution) -> None:
        while True:
            self._woken.clear()
            self._miss(execution)
            for job in self._next(execution):
                self._running[job.info.id] = job
                job.running = asyncio.create_task(self._run(job, execution), name=f"job {job.info.name}")
                job.running.add_done_callback(self._done)
            with contextlib.suppress(TimeoutError):
                await within(self._woken.wait(), _LOOK_S if self.unfinished else None)
            await self._look()

    def _next(self, execution: Execution) -> Iterator[Job]:
        """Yields the jobs to start now; the caller starts each one before it asks for the next."""
        claimed, self._claimed = self._claimed, []
        yield from [job for job in claimed if job.adopted]
        slots = execution.slots()
        # One on a slot that drains, or is sick, takes none of the others.
        busy = Counter(job.needs for job in self._running.values() if not execution.on_closed_slot(job.key))
        places = cache(partial(_places, slots))
        while not execution.ended and busy.total() < len(slots):
            selected = self._fair_share.choose(lambda needs: busy[needs] < places(needs))
            if selected is None:
                return
            busy[selected.needs] += 1
            yield selected

    def _miss(self, execution: Execution) -> None:
        """Begins the jobs again that are expected, and whose worker did not come back with them."""
        if not self._expects or execution.ended:
            return
        late = time.monotonic() - self._since > _BACK_S
        expected = [each for each in self.unfinished.values() if each.expected]
        for job in expected:
            slot = job.info.slot
            if late or (slot is not None and execution.in_service(slot)):
                job.expected = False
                self._repeat(job)
                self._fair_share.add(job)
        self._expects = any(job.expected for job in expected)

    @staticmethod
    def _repeat(job: Job) -> None:
        if not job.info.over:
            where = f" on {job.info.slot}" if job.info.slot else ""
            why = f"attempt {job.info.attempts}{where} was lost while the head was away: it began again"
            logger.warning("job %s: %s", job.info.name, why)
            # Heads that end soon after each other know of the last attempt less than of the one before.
            before = job.info.repeated.split(_AND)[1 - _REPEATED :] if job.info.repeated else []
            job.note(repeated=_AND.join([*before, why]))

    def _done(self, task: asyncio.Task[None]) -> None:
        if not task.cancelled() and task.exception() is not None:
            self._broken = task.exception()

    async def _look(self) -> None:
        """Notes where jobs run, and ends those that are over their time."""
        if self._execution is None or not self._running:
            return
        for job in [each for each in self._running.values() if not each.settling]:
            slot = self._execution.sent_to(job.key)
            if slot is not None and (job.key, slot) != job.sent:
                job.sent = job.key, slot
                with contextlib.suppress(StateDirectoryError):  # the next head waits longer for it then
                    await self._write(job, partial(self._journal.sent, job.record, slot))
        running = self.view().running
        for job in [each for each in self._running.values() if each.key in running]:
            slot, seconds = running[job.key]
            if job.info.slot != slot:
                job.note(slot=slot, started=time.time() - seconds)
            late = overdue(job.record.task.name, job.record.task.timeout, seconds)
            if late is not None:
                ending = _failed(late)
                with contextlib.suppress(StateDirectoryError):  # there may be room for it the next time
                    await self.take_back(job, settled(job.record, ending, now=time.time()), ending)

    # One of them ----------------------------------------------------------------------------------------------------

    async def _run(self, job: Job, execution: Execution) -> None:
        """Runs the job to its end, with its retries; a slot that fails it costs none, nor one without room. One that
        has to start again without its secrets, which the head before had, waits for them."""
        moves = Moves()
        try:
            while not (job.settling or job.info.over):
                if job.lacks and not job.adopted:
                    return
                ending = await self._attempt(job, execution)
                if ending is None and job.key and execution.ended:
                    job.expected = True
                    return
                if ending is None or job.settling or job.info.over:
                    continue
                if ending.slot_failed is not None and moves.may_go_on(
                    ending.slot_failed, execution.nodes(job.record.resources)
                ):
                    continue
                if ending.crowded and not job.record.task.fresh:
                    job.record = job.record.afresh()
                    continue
                if job.record.failures >= job.record.retries or not may_pass(ending):
                    await self._settle(job, ending)
                    return
                job.record = replace(job.record, failures=job.record.failures + 1)
        finally:
            job.running = None
            self._running.pop(job.info.id, None)
            if not job.info.over:
                self._fair_share.add(job)
            self.wake()

    async def _attempt(self, job: Job, execution: Execution) -> Ending | None:
        """Returns the end of one attempt; None where it was lost or cancelled."""
        if job.adopted:
            return await self._take_over(job, execution)
        job.key = ""
        job.note(attempts=job.info.attempts + 1, started=time.time(), slot=None, figures=None, written=None)
        await self._written(job, lambda: self._journal.save(job.record), ends=False)
        if job.settling or job.info.over:
            return None
        header = job.record.attempt()
        job.key = header.key
        try:
            call = await asyncio.to_thread(self._journal.call, job.record)
            waited = time.monotonic() - job.came if job.info.attempts == 1 else 0.0
            asyncio.get_running_loop().call_later(_SENT_S, self.wake)
            ended = await execution.run(header, call, job.record.resources, waited)
        except StateDirectoryError as error:
            return _failed(error)
        if ended is None:
            return None
        ending, slot = ended
        job.note(slot=slot or job.info.slot)
        return ending

    async def _take_over(self, job: Job, execution: Execution) -> Ending | None:
        """Returns the end of the attempt that went on while the head was away; None where its worker has lost it."""
        job.adopted = False
        header = replace(job.record.attempt(), adopted=True)
        try:
            ended = await execution.run(header, b"", job.record.resources)
        finally:
            execution.release(header.key)
        if ended is None:
            if not execution.ended:
                self._repeat(job)
            return None
        job.note(slot=ended[1] or job.info.slot)
        return ended[0]

    async def _settle(self, job: Job, ending: Ending) -> None:
        """Writes the end of a job that ended by itself."""
        job.settling = True
        size = len(ending.outcome)
        if size > jobs.LARGEST:
            ending = _failed(jobs.too_large(size))
        record = await self._measured(job, settled(job.record, ending, now=time.time()))
        await self._written(job, lambda: self._journal.end(record, ending.dumps()), ends=True)
        await self._over(job, record)

    async def take_back(self, job: Job, record: Record, ending: Ending | None) -> bool:
        """Ends the job before its time, with *record* and *ending*; False where it has ended already.

        It is written before it is ended on its slot. Raises `StateDirectoryError`; it goes on then.
        """
        if job.settling or job.info.over:
            return False
        job.settling = True
        record = await self._measured(job, record)
        data = ending.dumps() if ending is not None else None
        try:
            await self._write(job, lambda: self._journal.end(record, data))
        except StateDirectoryError:
            job.settling = False
            self._fair_share.add(job)
            raise
        running, execution = job.running, self._execution
        await self._over(job, record, running)
        if running is not None and execution is not None:
            await execution.all_stopped()
        return True

    async def _measured(self, job: Job, record: Record) -> Record:
        """*record* with what the last attempt of *job* used, where it ran and its node says that."""
        if self._execution is None or not job.key:
            return record
        # Since the last look it may have begun to run.
        slot = job.info.slot or self._execution.running().get(job.key, (None, 0.0))[0]
        if slot is None:
            return record
        figures = await self._execution.figures(slot, job.key)
        return replace(record, info=replace(record.info, figures=figures))

    async def _over(self, job: Job, record: Record, running: asyncio.Task[None] | None = None) -> None:
        job.record, job.settling = record, False
        self.unfinished.pop(record.info.id, None)
        job.size = await asyncio.to_thread(self._journal.size, record.info.id)
        await self._on_over(job)
        if running is not None:
            await _cancelled([running])
        job.changes.notify()

    async def _written(self, job: Job, write: Callable[[], None], *, ends: bool) -> None:
        """Writes until there is room for it: what a job has done is not lost to a full disk.

        What does not end the job is not written any more when something else ends it meanwhile.
        """
        while ends or not (job.settling or job.info.over):
            try:
                return await self._write(job, write)
            except StateDirectoryError as error:
                if str(error) != self._unwritten:
                    logger.warning("jobs wait: %s", error)
                self._unwritten = str(error)
                await asyncio.sleep(_RETRY_S)

    @staticmethod
    async def _write(job: Job, write: Callable[[], None]) -> None:
        """Writes in a thread, one write of a job after the other, also when cancelled: a thread cannot be."""
        async with job.writing:
            done = asyncio.ensure_future(asyncio.to_thread(write))
            try:
                await asyncio.shield(done)
            except asyncio.CancelledError:
                await asyncio.wait({done})
                raise


def _failed(error: Exception) -> Ending:
    return Ending.of(Outcome(failure=failures.of(error, below=__file__)))


async def _cancelled(tasks: Sequence[asyncio.Task[None]]) -> None:
    for task in tasks:
        task.cancel()
    if tasks:
        await asyncio.wait(tasks)


def _places(slots: list[dict[str, float]], needs: Needs) -> int:
    """Returns the number of *slots* that have what is needed."""
    return sum(all(slot.get(name, 0) >= count for name, count in needs) for slot in slots)
