"""The client for coroutines: the same fleet, nothing of which blocks the event loop."""

from __future__ import annotations

import asyncio
import functools
import types
from collections.abc import (
    AsyncIterator,
    Awaitable,
    Callable,
    Coroutine,
    Generator,
    Iterable,
    Iterator,
    Mapping,
    Sequence,
)
from pathlib import Path
from typing import Any, Concatenate, Generic, ParamSpec, Self, TypeAlias, TypeVar, overload

from skyinfra.client.flow import check_map, tasks_of, total_of
from skyinfra.client.futures import Future
from skyinfra.client.jobs import Job
from skyinfra.client.launching import OnLine, Received, results, tell
from skyinfra.client.lookup import connect
from skyinfra.client.pool import Pool
from skyinfra.client.ranks import Size
from skyinfra.client.watching import OnOutput
from skyinfra.protocol.calls import Outcome
from skyinfra.protocol.gang import Framework
from skyinfra.protocol.instance import InstanceInfo
from skyinfra.protocol.jobs import State
from skyinfra.protocol.manifest import Manifest, ManifestNode
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


def connect_async(
    fleet: str | Path | Manifest,
    pool: str | None = None,
    *,
    timeout: float = 15,
    output: bool | OnOutput = True,
    progress: bool = True,
    includes: Sequence[str | Path] = (),
    excludes: Sequence[str] = (),
) -> Connecting:
    """Connects as `connect` does: ``async with sky.connect_async("inference", "mig") as pool``, or ``await``.

    In it, ``await (task >> pool)`` gives a result, ``await (task @ pool)`` a list, ``async for`` goes over `map`.
    """
    return Connecting(
        lambda: connect(
            fleet, pool, timeout=timeout, output=output, progress=progress, includes=includes, excludes=excludes
        )
    )


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

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: types.TracebackType | None
    ) -> None:
        if self._pool is not None:
            await self._pool.close()

    async def _connect(self) -> AsyncPool:
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


class AsyncPool:
    """A connected fleet, for coroutines: `Pool`, whose words have the same meaning here. Use it in one event loop.

    Cancelling a coroutine that waits for a task stops the task.
    """

    def __init__(self, pool: Pool) -> None:
        self.pool = pool
        # The loop goes on while large arguments are on their way; they must not be changed meanwhile.
        pool._fleet.brings_first = False

    @property
    def manifest(self) -> Manifest:
        """The manifest of the fleet."""
        return self.pool.manifest

    def select(
        self, *, profile: str | None = None, node: str | None = None, accelerator: str | None = None
    ) -> AsyncPool:
        """See `Pool.select`."""
        return AsyncPool(self.pool.select(profile=profile, node=node, accelerator=accelerator))

    def nodes(self) -> list[ManifestNode]:
        """See `Pool.nodes`."""
        return self.pool.nodes()

    @overload
    def __rrshift__(self, given: Task[T]) -> Awaitable[T]: ...
    @overload
    def __rrshift__(self, given: Gather[Any]) -> Any: ...
    def __rrshift__(self, given: Any) -> Any:
        """``await (task >> pool)`` and ``await (gather >> pool)``; a stream is gone over with ``async for``."""
        if isinstance(given, Gather):
            ordered = given.ordered or not given.stream
            results = self.stream(iter(given.tasks), ordered=ordered, total=len(given.tasks))
            return results if given.stream else _all(results)
        return self.run(given) if isinstance(given, Task) else NotImplemented

    def __rmatmul__(self, task: Task[T]) -> Awaitable[list[T]]:
        """``await (task @ pool)``."""
        return self.broadcast(task) if isinstance(task, Task) else NotImplemented

    slots = _in_thread(Pool.slots, "pool")
    running = _in_thread(Pool.running, "pool")

    @overload
    def submit(self, task: Task[T], /) -> Future[T]: ...
    @overload
    def submit(self, task: Task[T], /, *, detach: str) -> Detaching[T]: ...
    @overload
    def submit(self, function: Compute[..., T], /, *args: object, detach: str, **kwargs: object) -> Detaching[T]: ...
    @overload
    def submit(self, function: Callable[..., T], /, *args: object, detach: str, **kwargs: object) -> Detaching[T]: ...
    @overload
    def submit(
        self, function: Compute[..., T], /, *args: object, detach: None = None, **kwargs: object
    ) -> Future[T]: ...
    @overload
    def submit(
        self, function: Callable[..., T], /, *args: object, detach: None = None, **kwargs: object
    ) -> Future[T]: ...
    def submit(
        self, task: Any, /, *args: object, detach: str | None = None, **kwargs: object
    ) -> Future[Any] | Detaching[Any]:
        """Ships a task to one slot and returns at once; ``await`` the future for its result. See `Pool.submit`.

        detach: ``await`` for the job of that name, which the head has then.
        """
        if detach is None:
            return self.pool.submit(task, *args, **kwargs)
        return self.detach(self.pool.task_of(task, args, kwargs), detach)

    async def detach(
        self, task: Task[T], name: str | None = None, *, priority: int = 0, replace: bool = False
    ) -> AsyncJob[T]:
        """See `Pool.detach`."""
        job = await asyncio.to_thread(self.pool.detach, task, name, priority=priority, replace=replace)
        return AsyncJob(job)

    jobs = _in_thread(Pool.jobs, "pool")

    async def job(self, name: str) -> AsyncJob[Any]:
        """See `Pool.job`."""
        return AsyncJob(await asyncio.to_thread(self.pool.job, name))

    async def launch(
        self,
        target: Callable[..., Any] | Path,
        *args: Any,
        nodes: int | None = None,
        per_node: int | None = None,
        framework: Framework = "torch",
        max_restarts: int = 0,
        env: Mapping[str, str] | None = None,
        timeout: float | None = None,
        on_line: OnLine | None = None,
        **kwargs: Any,
    ) -> list[Any]:
        """See `Pool.launch`. *on_line* is called in the event loop. Cancelling it ends all ranks."""
        made = self.pool._gangs.gang_of(
            self.pool.target,
            (target, args, kwargs),
            Size(nodes, per_node),
            framework,
            max_restarts,
            env,
            timeout,
            watched=on_line is not None,
        )
        loop = asyncio.get_running_loop()
        received: asyncio.Queue[Received] = asyncio.Queue()
        future = self.pool._gangs.start_gang(made, lambda found: loop.call_soon_threadsafe(received.put_nowait, found))
        try:
            while (found := await received.get()) is not None:
                tell(found, made, on_line)
            return results(future.result(), made)
        finally:
            future.cancel()

    async def run(self, task: Task[T]) -> T:
        """Runs *task* on one slot; ``await (task >> pool)`` is the same."""
        return await self.pool.submit(task)

    async def broadcast(self, task: Task[T], *, slots: Sequence[InstanceInfo] | None = None) -> list[T]:
        """Runs *task* on every slot; ``await (task @ pool)`` is the same. See `Pool.broadcast`."""
        futures = await asyncio.to_thread(self.pool.spread, task, slots=slots)
        waiting = [asyncio.ensure_future(_result(future)) for future in futures]
        try:
            return list(await asyncio.gather(*waiting))
        finally:
            for each in waiting:
                each.cancel()
            for future in futures:
                future.cancel()

    def map(
        self, function: Callable[..., Any], *iterables: Iterable[Any], window: int | None = None, ordered: bool = True
    ) -> AsyncIterator[Any]:
        """The results of *function* for the items of *iterables*: ``async for`` goes over them. See `Pool.map`."""
        check_map(window, iterables)
        return self.stream(tasks_of(function, iterables), window=window, ordered=ordered, total=total_of(iterables))

    async def stream(
        self, tasks: Iterator[Task[T]], *, window: int | None = None, ordered: bool = True, total: int | None = None
    ) -> AsyncIterator[T]:
        """The results of *tasks*, which are taken as slots become free. See `Pool.stream`."""
        loop = asyncio.get_running_loop()
        ended: asyncio.Queue[Future[T]] = asyncio.Queue()
        flow = self.pool.flow(
            tasks,
            window=window,
            ordered=ordered,
            total=total,
            when_done=lambda future: loop.call_soon_threadsafe(ended.put_nowait, future),
        )
        with flow:
            while True:
                ready = flow.advance()
                if ready is not None:
                    yield await ready
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

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: types.TracebackType | None
    ) -> None:
        await self.close()

    def __repr__(self) -> str:
        return f"<Async{repr(self.pool)[1:]}"


async def _all(results: AsyncIterator[T]) -> tuple[T, ...]:
    return tuple([result async for result in results])


async def _result(future: Future[T]) -> T:
    return await future


class AsyncJob(Generic[T]):
    """A task that was left with the head: `Job`, whose words have the same meaning here. ``await job`` is its result.

    Cancelling a coroutine that waits for a job ends the waiting alone: the job goes on.
    """

    def __init__(self, job: Job[T]) -> None:
        self._job = job

    @property
    def name(self) -> str:
        """Its name, unique among the jobs that the head keeps."""
        return self._job.name

    @property
    def id(self) -> str:
        """Unique for ever."""
        return self._job.id

    info = _in_thread(Job.info, "_job")

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
        return await asyncio.wrap_future(self._job.waiting(timeout))

    cancel = _in_thread(Job.cancel, "_job")
    logs = _in_thread(Job.logs, "_job")
    forget = _in_thread(Job.forget, "_job")

    def __await__(self) -> Generator[Any, None, T]:
        return self.result().__await__()

    def __repr__(self) -> str:
        return f"<Async{repr(self._job)[1:]}"
