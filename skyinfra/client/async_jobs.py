"""Jobs for coroutines."""

from __future__ import annotations

import asyncio
from collections.abc import Generator
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from skyinfra.client.jobs import Job
from skyinfra.protocol.calls import Outcome
from skyinfra.protocol.jobs import JobInfo, State

if TYPE_CHECKING:
    from skyinfra.client.pool import Pool

T = TypeVar("T")


class AsyncJob(Generic[T]):
    """A task that was left with the head: `Job`, whose words have the same meaning here. ``await job`` is its result.

    Cancelling a coroutine that waits for a job ends the waiting alone: the job goes on.
    """

    def __init__(self, pool: Pool, job: Job[T]) -> None:
        self._pool = pool
        self._job = job

    @property
    def name(self) -> str:
        """Its name, unique among the jobs that the head keeps."""
        return self._job.name

    @property
    def id(self) -> str:
        """Unique for ever."""
        return self._job.id

    async def info(self) -> JobInfo:
        """See `Job.info`."""
        return await asyncio.to_thread(self._job.info)

    async def state(self) -> State:
        """See `Job.state`."""
        return (await self.info()).state

    async def done(self) -> bool:
        """See `Job.done`."""
        return (await self.info()).over

    async def result(self, timeout: float | None = None) -> T:
        """See `Job.result`."""
        return self._job.result_of(await self.outcome(timeout))

    async def exception(self, timeout: float | None = None) -> BaseException | None:
        """See `Job.exception`."""
        return self._job.exception_of(await self.outcome(timeout))

    async def outcome(self, timeout: float | None = None) -> Outcome:
        """See `Job.outcome`."""
        return await asyncio.wrap_future(self._pool.in_loop_soon(self._job.ended(timeout)))

    async def cancel(self) -> bool:
        """See `Job.cancel`."""
        return await asyncio.to_thread(self._job.cancel)

    async def logs(self, lines: int = 1000) -> str:
        """See `Job.logs`."""
        return await asyncio.to_thread(self._job.logs, lines)

    async def forget(self) -> None:
        """See `Job.forget`."""
        await asyncio.to_thread(self._job.forget)

    def __await__(self) -> Generator[Any, None, T]:
        return self.result().__await__()

    def __repr__(self) -> str:
        return f"<Async{repr(self._job)[1:]}"
