"""A fleet that tasks can be shipped to."""

from __future__ import annotations

import functools
import queue
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, TypeVar, Unpack, overload

from skyinfra.client import files, jobs
from skyinfra.client.jobs import Job
from skyinfra.client.launching import How, Sender, no_task, signature_of
from skyinfra.client.questions import Questions
from skyinfra.client.ranks import Received
from skyinfra.errors import SkyinfraError, refuses_unknown_options
from skyinfra.protocol.instance import InstanceInfo
from skyinfra.protocol.secrets import Secret
from skyinfra.submission.fleet import Fleet
from skyinfra.submission.flow import Flow
from skyinfra.submission.futures import Future, cancel_all
from skyinfra.submission.snapshot import ANYWHERE, Target
from skyinfra.sync.sync import Synced
from skyinfra.tasks.task import Compute, Gather, Options, Task

T = TypeVar("T")


class Pool(Sender, Questions):
    """A connected fleet; a context manager. Closing it cancels what was not waited for. Use it from any thread."""

    _fleet: Fleet

    @refuses_unknown_options("Pool.select")
    def select(self, *, profile: str | None = None, node: str | None = None, accelerator: str | None = None) -> Pool:
        """Returns the same fleet, of which only the slots of *profile*, of *node* and of *accelerator* are used.

        ``train(0) >> pool.select(profile="3g.40gb")``. It shares the connection: closing one closes both. A task that
        waits there while the layout is being changed goes on waiting; it gets `SlotLost` where no slot of the fleet is
        such a one, or none is left after a change. Raises `InvalidField` where this selection leaves nothing of an
        earlier one.
        """
        return Pool(self._fleet, self.target.narrowed(node=node, profile=profile, accelerator=accelerator))

    # The fleet ------------------------------------------------------------------------------------------------------

    def slots(self) -> list[InstanceInfo]:
        """Returns the slots that are there now, in slot order: by node as in the manifest, then by index.

        Slots that a changed layout takes away, on which tasks may still end, are not among them. Raises
        `FleetUnreachable` where the head does not answer.
        """
        return [slot for slot in self.look().slots if self.target.takes(slot)]

    def _repr_html_(self) -> str:
        """Returns the fleet in the cell of a notebook; where the head does not answer, what is declared, and that."""
        from skyinfra.notebook import pictures

        slots: list[InstanceInfo] = []
        running: dict[str, list[str]] = {}
        nodes, note = [node.name for node in self.manifest.nodes], ""
        try:
            nodes, slots = self.node_names(), self.slots()
            running = {slot: [task.name for task in tasks] for slot, tasks in self.running().items()}
        except SkyinfraError as error:
            note = error.message
        shown = [name for name in nodes if self.target.node in (None, name)]
        return pictures.fleet(self.manifest, shown, slots, running, note)

    # Files ----------------------------------------------------------------------------------------------------------

    def sync(self, *paths: str | Path, excludes: Sequence[str] = ()) -> Synced:
        """Sends these files and folders, and those of earlier calls, to the fleet as they are now; what is there
        already is not sent again.

        Tasks that are submitted from now on see them: as `sky.synced` says, and as modules, which they import from
        there. Their processes keep loaded modules, and what is in them, where only other files than Python's have
        changed. excludes: lines as in a .gitignore, added to `includes.EXCLUDED`. A path stands there as below the
        working directory, or else below the folder that Python imports it from, or else by its last part.

        Raises `InvalidInclude`, `StateDirectoryError` where the head has no room, `FleetUnreachable`.
        """
        return files.send(self._fleet, paths, excludes)

    def put(self, path: str | Path, remote: str | Path | None = None, node: str | None = None) -> str:
        """Copies a file or a folder into the folder `sky.files` of every node that is there now; returns that path.

        remote: that path, by default the last part of *path*. node: only of this one. Files that are there and not here
        stay. The files go through the head, once, and what a node has already is not sent again. Left out of a folder
        is what may hold a secret: `.env`, `.git`, `.skyinfra`, Terraform's folders and state. A node that has no slot
        now and does not answer is left out.
        Raises `InvalidInclude`, `InvalidField`, `NodeError`, `StateDirectoryError`, `FleetUnreachable`.
        """
        return super().put(path, remote, node or self.target.node)

    def get(self, remote: str | Path, path: str | Path, node: str | None = None) -> Path:
        """Copies *remote*, a file or a folder in `sky.files` of *node*, to *path*, and returns that.

        node: may be left out where the fleet has one. Where *path* is a folder, it comes into that.
        Raises `InvalidField`, `NodeError`, `FleetUnreachable`, OSError where *path* cannot be written.
        """
        return super().get(remote, path, node or self.target.node)

    # Operators ------------------------------------------------------------------------------------------------------

    @overload
    def __rrshift__(self, given: Task[T]) -> T: ...
    @overload
    def __rrshift__(self, given: Gather[T]) -> T: ...
    def __rrshift__(self, given: Any) -> Any:
        """``task >> pool`` and ``gather >> pool``."""
        __tracebackhide__ = True
        if isinstance(given, Gather):
            results = self._stream(self._gathered(given))
            return results if given.stream else tuple(results)
        if not isinstance(given, Task):
            raise no_task(given, ">>")
        return self.submit(given).result()

    def __rmatmul__(self, task: Task[T]) -> list[T]:
        """``task @ pool``."""
        __tracebackhide__ = True
        if not isinstance(task, Task):
            raise no_task(task, "@")
        return self.broadcast(task)

    # Tasks ----------------------------------------------------------------------------------------------------------

    @overload
    def submit(self, task: Task[T], /) -> Future[T]: ...
    @overload
    def submit(self, task: Task[T], /, *, detach: str) -> Job[T]: ...
    @overload
    def submit(self, call: Compute[..., T], /, *args: object, detach: str, **kwargs: object) -> Job[T]: ...
    @overload
    def submit(self, call: Callable[..., T], /, *args: object, detach: str, **kwargs: object) -> Job[T]: ...
    @overload
    def submit(self, call: Compute[..., T], /, *args: object, detach: None = None, **kwargs: object) -> Future[T]: ...
    @overload
    def submit(self, call: Callable[..., T], /, *args: object, detach: None = None, **kwargs: object) -> Future[T]: ...
    def submit(self, task: Any, /, *args: Any, detach: str | None = None, **kwargs: Any) -> Future[Any] | Job[Any]:
        """Ships a task, or a function with its arguments, to one slot, and returns at once.

        As many tasks as the fleet has slots are sent to it; others wait here. detach: leave it with the head as a job
        of that name, which goes on without this client; see `detach`. Raises `TaskNotPicklable`.
        """
        task = self._task_of(task, args, kwargs, detach)
        if detach is not None:
            return self.detach(task, detach)
        return self.send(task, self.target)

    def detach(
        self,
        task: Task[T],
        name: str | None = None,
        *,
        priority: int = 0,
        replace: bool = False,
        notify: Sequence[str | Secret] = (),
    ) -> Job[T]:
        """Leaves *task* with the head as a job, which goes on when this client ends and when the head restarts.

        As many jobs run at once as the fleet has slots: higher priorities first (from -1000 to 1000), those who submit
        in turns, and of each the oldest. name: of the job; None makes one. Names are unique among the jobs that the
        head keeps; replace: unless that job has ended, which is forgotten then with its result.

        notify: webhooks, such as Slack's incoming ones, that the head tells of the end of the job; each an address, or
        the name of the variable, or of the entry of the keyring, that holds it, as with `Secret`.

        A job runs at least once: again, from its beginning, where its slot or the head was lost before it had ended.
        ``timeout`` and ``retries`` of the task hold. Raises `JobNameTaken`, `TaskNotPicklable`, `TaskTooLarge` (above
        256 MiB), `SlotLost` where the fleet has no such slot, `StateDirectoryError` where the head's disk is full.
        """
        return jobs.detach(self._fleet, self.target, task, name, priority=priority, replace=replace, notify=notify)

    def broadcast(self, task: Task[T], *, slots: Sequence[InstanceInfo] | None = None) -> list[T]:
        """Runs *task* on every slot and gives one result per slot, in slot order; ``task @ pool`` is the same.

        slots: only on these; by default on all that the fleet is to have or that are there. A slot that is not there
        is waited for: `SlotLost` is raised when it stays away, and when the layout has it no more or gives it another
        profile than in *slots*. The first task that raises ends it; its exception is raised, the others are cancelled.
        """
        __tracebackhide__ = True
        futures = self.spread(task, slots=slots)
        try:
            with self._fleet.watcher.counting(task.name, len(futures)) as advance:
                self._raise_first(futures, advance)
            return [future.result() for future in futures]
        except BaseException as error:
            cancel_all(futures, error)
            raise

    def spread(self, task: Task[T], *, slots: Sequence[InstanceInfo] | None = None) -> list[Future[T]]:
        """Returns the futures of `broadcast`, one per slot. The caller cancels those that are not needed."""
        futures: list[Future[T]] = []
        try:
            for target in self._targets(slots, task.settings):
                futures.append(self.send(task, target, windowed=False))
        except BaseException:
            for future in futures:
                future.cancel()
            raise
        return futures

    @overload
    def map(self, function: Compute[..., T], /, *iterables: Iterable[Any], **how: Unpack[How]) -> Iterator[T]: ...
    @overload
    def map(self, function: Callable[..., T], /, *iterables: Iterable[Any], **how: Unpack[How]) -> Iterator[T]: ...
    @overload
    def map(
        self, function: Any, /, *iterables: Iterable[Any], return_exceptions: bool, **how: Unpack[How]
    ) -> Iterator[Any]: ...
    def map(
        self, function: Any, /, *iterables: Iterable[Any], return_exceptions: bool = False, **how: Unpack[How]
    ) -> Iterator[Any]:
        """The results of *function* for the items of *iterables*, which may be infinite.

        window: how many tasks are in flight at most, by default one per slot. Besides, as many finished results are
        kept when they are asked for slowly. ordered=False gives results in the order in which tasks complete.
        Nothing starts before the first result is asked for. The first task that raises ends it: its exception is
        raised, with a note of the number of its item, and the rest is cancelled, as it is when the iterator is closed.
        return_exceptions: an exception of a task is given in place of its result, and ends nothing; only those of the
        fleet itself, such as `FleetUnreachable`, are raised.

        Tasks of some milliseconds travel together, up to 64 in a message, once the first ones have shown that they
        are so short; each is still a task of its own. By default each slot has two such messages then, so that also of
        an iterator without a length as many items are taken ahead; none waits for an item that has not come.
        """
        return self._stream(self._mapped(function, iterables, how), return_exceptions)

    @overload
    def starmap(
        self, function: Compute[..., T], items: Iterable[Iterable[Any]], /, **how: Unpack[How]
    ) -> Iterator[T]: ...
    @overload
    def starmap(
        self, function: Callable[..., T], items: Iterable[Iterable[Any]], /, **how: Unpack[How]
    ) -> Iterator[T]: ...
    @overload
    def starmap(
        self, function: Any, items: Iterable[Iterable[Any]], /, *, return_exceptions: bool, **how: Unpack[How]
    ) -> Iterator[Any]: ...
    def starmap(
        self, function: Any, items: Iterable[Iterable[Any]], /, *, return_exceptions: bool = False, **how: Unpack[How]
    ) -> Iterator[Any]:
        """As `map`, where each item has all arguments of a call: ``pool.starmap(train, [(0, "sgd"), (1, "adam")])``."""
        return self._stream(self._mapped(function, [items], how, star=True), return_exceptions)

    def _stream(self, made: functools.partial[Flow[T]], return_exceptions: bool = False) -> Iterator[T | Exception]:
        """The results of a flow, which lacks ``when_done``."""
        __tracebackhide__ = True
        ended: queue.SimpleQueue[Future[T]] = queue.SimpleQueue()
        with made(when_done=ended.put) as flow:
            while True:
                ready = flow.advance()
                if ready is not None:
                    yield ready.result_or_exception() if return_exceptions else ready.result()
                elif flow.over:
                    return
                else:
                    flow.take(ended.get())

    def _targets(self, slots: Sequence[InstanceInfo] | None, settings: Options) -> list[Target]:
        selected = self.target.of(settings)
        if slots is None and selected == ANYWHERE:
            return [Target(slot=name) for name in self.look().promised(self.manifest)]
        if slots is None:
            slots = [slot for slot in self.look().slots if selected.takes(slot)]
            if not slots:
                return [selected]  # waits for the first one, or says that there is none
        return [Target(slot.slot, profile=slot.profile) for slot in slots]

    @staticmethod
    def _raise_first(futures: Sequence[Future[T]], advance: Callable[[], None]) -> None:
        """Waits until all have ended or one has failed, and raises what that one raised."""
        __tracebackhide__ = True
        finished: queue.SimpleQueue[Future[T]] = queue.SimpleQueue()
        for future in futures:
            future.when_done(finished.put)
        for _ in futures:
            error = finished.get().exception()
            if error is not None:
                raise error
            advance()

    @signature_of(Sender._gang)
    def launch(self, *args: Any, **given: Any) -> list[Any]:
        """Runs *target* once on each of several slots, as the ranks of one program; the results in the order of ranks.

        All ranks start together, on *per_node* slots of each of *nodes* nodes (by default on all that are there), or
        none does; gangs whose slots are taken wait in the order in which they came. Each rank is a process of its own,
        with the environment that *framework* reads: ``torch.distributed.init_process_group()`` needs no arguments;
        ``jax.distributed.initialize()`` needs ``num_processes`` and ``process_id``, which `sky.gang` tells, as it tells
        everything else, unless `sky.plugins.jax` has called it. A gang on a TPU slice has all hosts. Ranks on whole
        GPUs see all GPUs of their gang on their node, and take that of their ``local_rank``; a rank on a partition sees
        it alone.

        target: a function, called with *args* and *kwargs*; a task; or the path of a script, whose arguments *args*
        are, and whose results are exit codes. max_restarts: how often the gang starts again after a failure: with
        `SpotCheckpointer` it goes on where it was. env: variables of every rank. timeout: seconds until all ranks must
        have their slots. on_line: called in this thread, while the ranks run, with the rank, ``stdout`` or ``stderr``,
        and the text of each line; without it the lines are in the output of the tasks.

        The options of the function hold for each rank: ``timeout`` is the time for which it may run; ``profile``,
        ``gpu_memory_gb`` and ``slot`` narrow the slots; ``env`` counts below that given here; with ``retries`` the gang
        starts again where a rank raises, unless *max_restarts* is given. ``slots`` is refused.

        The first rank that fails ends all, at once. What it raised is raised here, with its remote traceback and a note
        that names the rank; `GangFailed` where it ended without an exception, and for a script. Ctrl-C ends all ranks.
        Raises `InvalidField`, `SlotLost`, `TaskNotPicklable`, `FleetUnreachable`, TimeoutError. Where the slot of a
        rank fails it for a reason of its node, the gang starts elsewhere, which is no restart; `SlotFailed` where it
        cannot. Warns with `GangWarning` where ranks share a GPU. The start of a rank that a head or a connection
        forgets is repeated.
        """
        gang = self._gang(*args, **given)
        received: queue.SimpleQueue[Received] = queue.SimpleQueue()
        future = gang.start(received.put)
        try:
            while (found := received.get()) is not None:
                gang.update(found)
            return gang.results(future.result())
        except KeyboardInterrupt:
            if gang.on_line is not None:
                gang.end(future, received)
            raise
        finally:
            future.cancel()

    # Closing --------------------------------------------------------------------------------------------------------

    def close(self) -> None:
        """Cancels what was not waited for and leaves the fleet, which stays as it is. May be called again."""
        super().close()
