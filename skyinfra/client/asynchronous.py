"""The client for coroutines: the same fleet, nothing of which blocks the event loop."""

from __future__ import annotations

import asyncio
import functools
from collections.abc import (
    AsyncIterator,
    Awaitable,
    Callable,
    Coroutine,
    Generator,
    Iterable,
    Sequence,
)
from typing import Any, Concatenate, Generic, ParamSpec, Self, TypeAlias, TypeVar, Unpack, overload

from skyinfra.client.jobs import Job
from skyinfra.client.launching import How, Sender, no_task, signature_of
from skyinfra.client.lookup import connect
from skyinfra.client.pool import Pool
from skyinfra.client.ranks import Received
from skyinfra.engine.termination import leave_on_signals
from skyinfra.errors import refuses_unknown_options
from skyinfra.protocol.calls import Outcome
from skyinfra.protocol.instance import InstanceInfo
from skyinfra.protocol.jobs import State
from skyinfra.protocol.secrets import Secret
from skyinfra.submission.flow import Flow
from skyinfra.submission.futures import Future
from skyinfra.tasks.task import Compute, Gather, Task

P = ParamSpec("P")
R = TypeVar("R")
T = TypeVar("T")
# Of a task that is on its way to the head, as a job.
Detaching: TypeAlias = "Coroutine[Any, Any, AsyncJob[T]]"


def _in_thread(
    method: Callable[Concatenate[Any, P], R], blocking: str
) -> Callable[Concatenate[Any, P], Coroutine[Any, Any, R]]:
    """Returns *method* of the object that is the attribute *blocking*, for coroutines: it runs in a thread."""

    @functools.wraps(method)
    async def call(self: Any, /, *args: P.args, **kwargs: P.kwargs) -> R:
        return await asyncio.to_thread(method, getattr(self, blocking), *args, **kwargs)

    return call


@signature_of(connect)
def connect_async(*args: Any, **given: Any) -> Connecting:
    """Connects as `connect` does: ``async with sky.connect_async("inference", "mig") as pool``, or ``await``.

    In it, ``await (task >> pool)`` gives a result, ``await (task @ pool)`` a list, ``async for`` goes over `map`.
    """
    return Connecting(functools.partial(connect, *args, **given))


class Connecting:
    """A connection that is to be made: to be awaited, or entered with ``async with``."""

    def __init__(self, make: Callable[[], Pool]) -> None:
        self._make = make
        self._pool: AsyncPool | None = None

    def __await__(self) -> Any:
        return self._connect().__await__()

    async def __aenter__(self) -> AsyncPool:
        self._pool = await self._connect()
        return self._pool

    async def __aexit__(self, *raised: object) -> None:
        if self._pool is not None:
            await self._pool.close()

    async def _connect(self) -> AsyncPool:
        leave_on_signals()  # the thread may not
        connecting = asyncio.ensure_future(asyncio.to_thread(self._make))
        try:
            return AsyncPool(await asyncio.shield(connecting))
        except asyncio.CancelledError:
            # The thread cannot be interrupted; what it makes is not left open.
            connecting.add_done_callback(_close)
            raise


def _close(connecting: asyncio.Future[Pool]) -> None:
    if not connecting.cancelled() and connecting.exception() is None:
        # In a thread of its own: closing waits for the head.
        asyncio.get_running_loop().run_in_executor(None, connecting.result().close)


class AsyncPool(Sender):
    """A connected fleet, for coroutines: `Pool`, whose words have the same meaning here. Use it in one event loop.

    Cancelling a coroutine that waits for a task stops the task.
    """

    def __init__(self, pool: Pool) -> None:
        super().__init__(pool._fleet, pool.target)
        self.pool = pool
        # The loop goes on while large arguments are on their way; they must not be changed meanwhile.
        pool._fleet.brings_first = False

    @refuses_unknown_options("AsyncPool.select")
    def select(
        self, *, profile: str | None = None, node: str | None = None, accelerator: str | None = None
    ) -> AsyncPool:
        """See `Pool.select`."""
        return AsyncPool(self.pool.select(profile=profile, node=node, accelerator=accelerator))

    @overload
    def __rrshift__(self, given: Task[T]) -> Awaitable[T]: ...
    @overload
    def __rrshift__(self, given: Gather[Any]) -> Any: ...
    def __rrshift__(self, given: Any) -> Any:
        """``await (task >> pool)`` and ``await (gather >> pool)``; a stream is gone over with ``async for``."""
        if isinstance(given, Gather):
            results = self._stream(self._gathered(given))
            return results if given.stream else _all(results)
        if not isinstance(given, Task):
            raise no_task(given, ">>")
        return self.run(given)

    def __rmatmul__(self, task: Task[T]) -> Awaitable[list[T]]:
        """``await (task @ pool)``."""
        if not isinstance(task, Task):
            raise no_task(task, "@")
        return self.broadcast(task)

    slots = _in_thread(Pool.slots, "pool")
    running = _in_thread(Pool.running, "pool")

    @overload
    def submit(self, task: Task[T], /) -> Future[T]: ...
    @overload
    def submit(self, task: Task[T], /, *, detach: str) -> Detaching[T]: ...
    @overload
    def submit(self, call: Compute[..., T], /, *args: object, detach: str, **kwargs: object) -> Detaching[T]: ...
    @overload
    def submit(self, call: Callable[..., T], /, *args: object, detach: str, **kwargs: object) -> Detaching[T]: ...
    @overload
    def submit(self, call: Compute[..., T], /, *args: object, detach: None = None, **kwargs: object) -> Future[T]: ...
    @overload
    def submit(self, call: Callable[..., T], /, *args: object, detach: None = None, **kwargs: object) -> Future[T]: ...
    def submit(self, task: Any, /, *args: Any, detach: str | None = None, **kwargs: object) -> Awaitable[Any]:
        """Ships a task to one slot and returns at once; ``await`` the future for its result. See `Pool.submit`.

        detach: ``await`` for the job of that name, which the head has then.
        """
        if detach is None:
            return self.pool.submit(task, *args, **kwargs)
        return self.detach(self._task_of(task, args, kwargs, detach), detach)

    async def detach(
        self,
        task: Task[T],
        name: str | None = None,
        *,
        priority: int = 0,
        replace: bool = False,
        notify: Sequence[str | Secret] = (),
    ) -> AsyncJob[T]:
        """See `Pool.detach`."""
        job = await asyncio.to_thread(self.pool.detach, task, name, priority=priority, replace=replace, notify=notify)
        return AsyncJob(job)

    jobs = _in_thread(Pool.jobs, "pool")

    async def job(self, name: str) -> AsyncJob[Any]:
        """See `Pool.job`."""
        return AsyncJob(await asyncio.to_thread(self.pool.job, name))

    @signature_of(Sender._gang)
    async def launch(self, *args: Any, **given: Any) -> list[Any]:
        """See `Pool.launch`. *on_line* is called in the event loop. Cancelling it ends all ranks."""
        gang = self._gang(*args, **given)
        loop = asyncio.get_running_loop()
        received: asyncio.Queue[Received] = asyncio.Queue()
        future = gang.start(lambda found: loop.call_soon_threadsafe(received.put_nowait, found))
        try:
            while (found := await received.get()) is not None:
                gang.update(found)
            return gang.results(future.result())
        finally:
            future.cancel()

    async def run(self, task: Task[T]) -> T:
        """Runs *task* on one slot; ``await (task >> pool)`` is the same."""
        return await self.pool.submit(task)

    async def broadcast(self, task: Task[T], *, slots: Sequence[InstanceInfo] | None = None) -> list[T]:
        """Runs *task* on every slot; ``await (task @ pool)`` is the same. See `Pool.broadcast`."""
        futures = await asyncio.to_thread(self.pool.spread, task, slots=slots)
        try:
            return list(await asyncio.gather(*futures))
        finally:
            for future in futures:
                future.cancel()

    def map(
        self, function: Any, /, *iterables: Iterable[Any], return_exceptions: bool = False, **how: Unpack[How]
    ) -> AsyncIterator[Any]:
        """The results of *function* for the items of *iterables*: ``async for`` goes over them. See `Pool.map`."""
        return self._stream(self._mapped(function, iterables, how), return_exceptions)

    def starmap(
        self, function: Any, items: Iterable[Iterable[Any]], /, *, return_exceptions: bool = False, **how: Unpack[How]
    ) -> AsyncIterator[Any]:
        """See `Pool.starmap`."""
        return self._stream(self._mapped(function, [items], how, star=True), return_exceptions)

    async def _stream(
        self, made: functools.partial[Flow[T]], return_exceptions: bool = False
    ) -> AsyncIterator[T | Exception]:
        """See `Pool._stream`."""
        loop = asyncio.get_running_loop()
        ended: asyncio.Queue[Future[T]] = asyncio.Queue()
        with made(when_done=lambda future: loop.call_soon_threadsafe(ended.put_nowait, future)) as flow:
            while True:
                ready = flow.advance()
                if ready is not None:
                    yield ready.result_or_exception() if return_exceptions else await ready
                elif flow.over:
                    return
                else:
                    flow.take(await ended.get())

    sync = _in_thread(Pool.sync, "pool")
    put = _in_thread(Pool.put, "pool")
    get = _in_thread(Pool.get, "pool")
    close = _in_thread(Pool.close, "pool")

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *raised: object) -> None:
        await self.close()


async def _all(results: AsyncIterator[T]) -> tuple[T, ...]:
    return tuple([result async for result in results])


class AsyncJob(Generic[T]):
    """A task that was left with the head: `Job`, whose words have the same meaning here. ``await job`` is its result.

    Cancelling a coroutine that waits for a job ends the waiting alone: the job goes on.
    """

    def __init__(self, job: Job[T]) -> None:
        self.name = job.name
        self.id = job.id
        self._job = job

    info = _in_thread(Job.info, "_job")
    done = _in_thread(Job.done, "_job")

    async def state(self) -> State:
        """See `Job.state`."""
        return (await self.info()).state

    async def result(self, timeout: float | None = None) -> T:
        """See `Job.result`."""
        return self._job.result_of(await self.outcome(timeout))

    async def exception(self, timeout: float | None = None) -> BaseException | None:
        """See `Job.exception`."""
        return self._job.exception_of(await self.outcome(timeout))

    async def outcome(self, timeout: float | None = None) -> Outcome:
        """See `Job.outcome`."""
        return await asyncio.wrap_future(self._job.waiting(timeout))

    cancel = _in_thread(Job.cancel, "_job")
    give = _in_thread(Job.give, "_job")
    logs = _in_thread(Job.logs, "_job")
    fetch = _in_thread(Job.fetch, "_job")
    forget = _in_thread(Job.forget, "_job")

    def __await__(self) -> Generator[Any, None, T]:
        return self.result().__await__()

    def __repr__(self) -> str:
        return f"<Async{repr(self._job)[1:]}"
