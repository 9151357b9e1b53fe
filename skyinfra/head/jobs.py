"""The jobs of the head: takes them from clients, keeps them in the journal, and has them run.

A job that ran when the head ended goes on, and the next head takes it over; one whose worker does not come back runs
again, from its beginning: at least once is what a job is promised.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
import time
from dataclasses import replace

from skyinfra.engine.notifications import Notice, node_notice
from skyinfra.errors import InvalidField, JobNameTaken, JobNotFound, StateDirectoryError, did_you_mean
from skyinfra.head.execution import Execution
from skyinfra.head.journal import Journal, Record
from skyinfra.head.notices import Notices, forgotten
from skyinfra.head.queue import Job, Queue, View
from skyinfra.head.secrets import HeadSecrets
from skyinfra.protocol import jobs, rpc, services
from skyinfra.protocol.jobs import JobInfo, Notification, Submission, Written

logger = logging.getLogger("skyinfra.runner")

# Of the jobs that have ended, so many of the last ones are kept.
KEPT_JOBS = 1000
KEPT_BYTES = 2 * 2**30
# Jobs that have not ended; more are refused.
_MOST_JOBS = 100_000
# Those that a size of the fleet is chosen by, and a name that is not there is compared with.
_LOOKED_AT = 10_000
# The end of a job is written within that long, unless the disk is full.
_WRITTEN_S = 5.0


class Jobs:
    """The jobs of *journal*; `load` them first. ``handlers``: answer the calls about jobs. ``check``, ``claim``: see
    `Queue`."""

    def __init__(self, journal: Journal, *, kept_jobs: int = KEPT_JOBS, kept_bytes: int = KEPT_BYTES) -> None:
        self._journal = journal
        self._kept = kept_jobs, kept_bytes
        self._jobs: dict[str, Job] = {}  # by id, in the order of submission
        self._by_name: dict[str, Job] = {}  # the last one
        self._over: dict[str, Job] = {}
        self._numbers = itertools.count()
        self._queue = Queue(journal, on_over=self._prune)
        self._adding = asyncio.Lock()
        self.secrets = HeadSecrets()
        self._notices = Notices()
        self._closing = False
        self.check = self._queue.check
        self.claim = self._queue.claim
        self.handlers = rpc.handlers(
            services.job_part.by(self._take_part),
            services.job_submit.by(self._submit),
            services.job_secrets.by(self._take_secrets),
            services.job_notify.by(self._take_webhooks),
            services.job_list.by(self._list),
            services.job_wait.by(self._wait),
            services.job_outcome.by(self._outcome),
            services.job_cancel.by(self._cancel),
            services.job_forget.by(self._forget),
            services.job_written.by(self._take_written),
            services.job_files.by(self._files),
            services.job_submission.by(self._submission),
            services.job_call.by(self._call),
        )

    async def load(self) -> None:
        """Reads the journal. Of those that had not ended, the queue expects the workers back that ran them."""
        try:
            found = await asyncio.to_thread(self._journal.load)
        except OSError as error:
            logger.warning("the journal of jobs cannot be read: %s", error)
            return
        for record in found:
            job = self._keep(record)
            job.note(notifications=forgotten(record.info))
            if not job.info.over:
                self._queue.expect(job)
        await self._release_trees()
        if self._queue.unfinished:
            logger.info("jobs that had not ended: %d", len(self._queue.unfinished))

    def start(self, execution: Execution) -> None:
        """See `Queue.start`."""
        self._closing = False
        self._queue.start(execution)

    def waiting(self) -> dict[str, dict[str, int]]:
        """Returns the resources that each of the first jobs asks for which wait to be started, by id."""
        waiting = (each for each in self._queue.unfinished.items() if each[1].waits)
        return {identity: job.record.resources for identity, job in itertools.islice(waiting, _LOOKED_AT)}

    @property
    def any(self) -> bool:
        """Whether a job runs, or waits for a slot; one that waits for a secret alone does not count."""
        return any(not job.lacks for job in self._queue.unfinished.values())

    def submitter_of(self, key: str) -> str | None:
        """Returns who submitted the job whose attempt has *key*; None where that is no job's."""
        job = self._jobs.get(jobs.id_of(key))
        return None if job is None else job.info.submitter

    async def stop(self) -> None:
        """See `Queue.stop`. Clients that wait are answered: their scheduler is about to close."""
        await self._queue.stop()
        self._closing = True
        for job in self._jobs.values():
            job.changes.notify()
        await self._notices.stop()

    # What clients ask -----------------------------------------------------------------------------------------------

    async def _take_part(self, job: str, offset: int, data: bytes) -> int:
        return await asyncio.to_thread(self._journal.stage, job, offset, data)

    async def _submit(self, submission: Submission) -> JobInfo:
        async with self._adding:
            known = self._jobs.get(submission.id)
            if known is not None:  # the answer to it was lost
                return self._info(known)
            before = self._named(submission.name)
            if before is not None and not (submission.replace and before.info.over):
                raise _taken(before.info)
            if len(self._queue.unfinished) >= _MOST_JOBS:
                raise StateDirectoryError(
                    f"{_MOST_JOBS} jobs wait already", hint="Submit more when some of them have ended, or cancel some."
                )
            record = Record.of(submission, now=time.time())
            record = replace(record, info=replace(record.info, notifications=self._notices.waiting(record.info.id)))
            await asyncio.to_thread(self._journal.add, record, submission.size)
            added = self._keep(record)
            self._queue.add(added)
            if before is not None:
                with contextlib.suppress(StateDirectoryError):  # the later one is found by the name
                    await self._remove(before)
        return self._info(added)

    async def _take_secrets(self, job: str, values: dict[str, str]) -> JobInfo:
        found = self._find(job)
        uses = found.record.task.secrets
        others = values.keys() - {use.name for use in uses}
        if others:
            raise InvalidField("the job has no such secret", field="secrets", given=", ".join(sorted(others)))
        if not found.info.over:
            self.secrets.keep(found.info.id, {use.ref: values[use.name] for use in uses if use.name in values})
            self._queue.add(found)
        return self._info(found)

    async def _take_webhooks(self, job: str, pool: str, urls: list[str]) -> None:
        jobs.check_id(job)
        found = self._jobs.get(job)
        if found is not None:
            await found.changes.until(lambda: not found.settling, _WRITTEN_S)
            if found.info.over and any(each.state != "failed" for each in found.info.notifications):
                raise InvalidField("its end was notified already", field="notify", given=found.info.name)
        waiting = self._notices.keep(job, pool, urls, self._jobs)
        if found is None:  # it is about to be submitted
            return
        found.note(notifications=waiting)
        await self._queue.save(found)
        if found.info.over:
            self._send_notices(found)

    def tell_sick(self, node: str, why: str) -> None:
        """Tells the webhooks of jobs that have not ended that *node* is sick, and *why*."""
        self._notices.of_node(lambda pool: Notice(pool, f"node {node}", "sick", problem=why))

    def tell_stops(self, node: str, text: str) -> None:
        """Tells the webhooks of jobs that have not ended that *node* ends itself soon, or what is spent."""
        self._notices.of_node(lambda pool: node_notice(pool, node, text))

    def _send_notices(self, job: Job) -> None:
        """Tells the webhooks of *job*, which has ended; its record says what became of it then."""

        async def delivered(notifications: tuple[Notification, ...]) -> None:
            job.note(notifications=notifications)
            with contextlib.suppress(StateDirectoryError):  # it was forgotten, or the disk is full
                await self._queue.save(job)

        self._notices.over(job.info, delivered)

    async def _list(self) -> list[JobInfo]:
        view = self._queue.view()
        return [self._info(job, view) for job in self._jobs.values()]

    async def _wait(self, job: str, wait_s: float) -> JobInfo:
        found = self._find(job)
        await found.changes.until(lambda: found.info.over or self._closing, wait_s)
        return self._info(found)

    async def _outcome(self, job: str, offset: int, length: int) -> tuple[bytes, int]:
        identity = self._find(job).info.id
        return await asyncio.to_thread(self._journal.outcome, identity, offset, min(length, jobs.PART))

    async def _submission(self, job: str) -> Submission:
        return await asyncio.to_thread(self._journal.submission, self._unfinished(job).record)

    async def _call(self, job: str, offset: int, length: int) -> tuple[bytes, int]:
        identity = self._unfinished(job).info.id
        return await asyncio.to_thread(self._journal.part_of_call, identity, offset, max(0, min(length, jobs.PART)))

    def _unfinished(self, job: str) -> Job:
        found = self._find(job)
        if found.info.over:
            raise InvalidField(f"the job is {found.info.state}", field="job", given=found.info.name)
        return found

    async def _cancel(self, job: str) -> bool:
        found = self._find(job)
        await found.changes.until(lambda: not found.settling, _WRITTEN_S)
        info = replace(found.info, state="cancelled", ended=time.time())
        return await self._queue.take_back(found, replace(found.record, info=info), None)

    async def _forget(self, job: str) -> None:
        found = self._find(job)
        if not found.info.over:
            state = self._info(found).state
            raise InvalidField(f"the job is {state}", field="job", given=found.info.name, hint="Cancel it first.")
        await self._remove(found)
        if found.info.written is not None:
            await self._release_trees()

    async def _take_written(self, key: str, written: Written) -> bool:
        """Keeps the files that the attempt *key* wrote; False where that is no job's last attempt."""
        found = self._jobs.get(jobs.id_of(key))
        if found is None or found.key != key:
            return False
        await found.changes.until(lambda: not found.settling, _WRITTEN_S)
        async with self._adding:  # as with what a job needs that is being added
            if written.tree is not None:
                await asyncio.to_thread(self._journal.hold_written, written.tree)
            found.note(written=written)
        await self._queue.save(found)
        return True

    async def _files(self, job: str) -> str | None:
        """Returns the name of the tree with the files that were kept of a job; None where none were."""
        written = self._find(job).info.written
        if written is None or written.tree is None:
            return None
        await asyncio.to_thread(self._journal.restore_written, written.tree)
        return written.tree

    # Keeping them ---------------------------------------------------------------------------------------------------

    def _find(self, job: str) -> Job:
        """By its name, its id, or how that begins. Raises `JobNotFound`."""
        found = self._named(job) or self._jobs.get(job)
        if found is not None:
            return found
        matching = [each for identity, each in self._jobs.items() if job and identity.startswith(job)]
        if len(matching) == 1:
            return matching[0]
        if matching:
            raise JobNotFound(f"the ids of {len(matching)} jobs begin so", given=job, hint="Give more of it.")
        hint = did_you_mean(job, list(itertools.islice(reversed(self._by_name), _LOOKED_AT)))
        raise JobNotFound(
            "the head keeps no such job",
            given=job,
            hint=hint or "`skyinfra jobs STACK/POOL` lists those that it keeps; the oldest that have ended go.",
        )

    def _named(self, name: str) -> Job | None:
        """Returns the job of that name; the last one, where the head ended while it replaced one."""
        return self._by_name.get(name)

    def _info(self, job: Job, view: View | None = None) -> JobInfo:
        if job.info.over:
            return job.info
        view = view or self._queue.view()
        if job.key and job.key in view.running:
            slot, seconds = view.running[job.key]
            return replace(job.info, state="running", slot=slot, started=time.time() - seconds)
        if job.running and job.info.slot is not None:
            return replace(job.info, state="running")
        problem = None if view.takes(job.needs) else "no slot of the fleet takes it now"
        if job.expected:
            problem = f"it ran on {job.info.slot or 'a slot'} when the head ended, which is waited for"
            return replace(job.info, started=None, problem=problem)
        if job.lacks:
            lacks = ", ".join(job.lacks)
            problem = f"waits for {lacks}, as its head started anew: `skyinfra jobs give STACK/POOL {job.info.name}`"
        return replace(job.info, started=None, problem=problem, lacks=job.lacks)

    def _keep(self, record: Record) -> Job:
        job = self._jobs[record.info.id] = Job(record, next(self._numbers), secrets=self.secrets)
        self._by_name[record.info.name] = job
        if record.info.over:
            job.size = self._journal.size(record.info.id)
            self._over[record.info.id] = job
        return job

    async def _prune(self, ended: Job) -> None:
        """Forgets the oldest ended jobs above the limits, never the last one, and releases their trees."""
        self.secrets.forget(ended.info.id)
        self._send_notices(ended)
        if self._jobs.get(ended.info.id) is ended:
            self._over[ended.info.id] = ended
        # Of those that ended at once, the one that was submitted last stays.
        over = sorted(self._over.values(), key=lambda job: (job.info.ended or 0.0, job.number), reverse=True)
        removed, (most, room) = False, self._kept
        for number, job in enumerate(over):
            room -= job.room
            if number > 0 and (number >= most or room < 0):
                removed = True
                with contextlib.suppress(StateDirectoryError):  # it is forgotten the next time
                    await self._remove(job)
        tree = ended.record.task.tree
        needed = tree is None or any(job.record.task.tree == tree for job in self._queue.unfinished.values())
        if removed or not needed:
            await self._release_trees()

    async def _release_trees(self) -> None:
        async with self._adding:  # what a job needs that is being added is held before it is one of them
            await asyncio.to_thread(self._journal.release_trees, [job.record for job in self._jobs.values()])

    async def _remove(self, job: Job) -> None:
        if self._jobs.get(job.info.id) is job:
            await asyncio.to_thread(self._journal.forget, job.info.id)
            for kept in (self._jobs, self._over):
                kept.pop(job.info.id, None)
            if self._by_name.get(job.info.name) is job:
                del self._by_name[job.info.name]


def _taken(info: JobInfo) -> JobNameTaken:
    hint = "Give it another name, or cancel that job first."
    if info.over:
        hint = "Give it another name, or replace that job, whose result is forgotten then (replace=True, --replace)."
    state = info.state if info.over else "not over"
    return JobNameTaken(f"a job of that name is there, and is {state}", field="name", given=info.name, hint=hint)
