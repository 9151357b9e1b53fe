"""Scripts on a slot, and ``pool.launch``: a function or a script as the ranks of one program."""

from __future__ import annotations

import concurrent.futures
import pickle
import queue
import uuid
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, get_args

from skyinfra.client import ranks
from skyinfra.client.futures import Future
from skyinfra.client.gangs import Gangs, Launch, Lines
from skyinfra.client.loop import LoopThread
from skyinfra.client.ranks import Size
from skyinfra.client.snapshot import Target
from skyinfra.client.watching import Watcher
from skyinfra.errors import InvalidField, NotSupported, SlotLost, did_you_mean
from skyinfra.protocol.gang import Framework, RankEnd, Work
from skyinfra.protocol.instance import InstanceInfo
from skyinfra.protocol.manifest import Manifest
from skyinfra.sync.sync import Included
from skyinfra.tasks import pickling
from skyinfra.tasks.task import Task
from skyinfra.worker import scripts

OnLine = Callable[[int, str, str], object]
# While a gang runs: the slots that it has, lines of a rank; None is its end.
Received = tuple[int, Lines] | list[InstanceInfo] | None


class GangWarning(UserWarning):
    """The ranks of a gang run where a library that they probably use cannot do all that it does elsewhere.

    NCCL identifies ranks by their GPU: two on MIG partitions of one GPU are "Duplicate GPU detected" up to NCCL 2.29.
    Since 2.30 that is allowed with ``NCCL_MULTI_RANK_GPU_ENABLE=1``; its support for MIG is experimental, and data goes
    through the memory of the host, as partitions have no peer-to-peer access over NVLink or PCIe (NVIDIA/nccl issue
    1716; MIG User Guide, application considerations). gloo works.
    """


def _work(target: object, args: tuple[Any, ...], kwargs: dict[str, Any], included: Included | None) -> Work:
    """Returns what the ranks run. Raises `InvalidField`, `TaskNotPicklable`, OSError for an unreadable script."""
    if not isinstance(target, Path):
        task = pickling.as_task(target, args, kwargs)
        return Work(task.name, pickling.dump_call(task, included))
    if not target.is_file():
        raise InvalidField("there is no such file", field="target", given=str(target))
    if kwargs:
        raise InvalidField("a script has no named arguments", field="target", given=", ".join(kwargs))
    return Work(target.name, source=target.read_bytes(), args=tuple(map(str, args)))


class Launcher:
    """The part of a pool that starts gangs."""

    topic: str
    target: Target
    manifest: Manifest
    _loop: LoopThread
    _gangs: Gangs
    _watcher: Watcher

    if TYPE_CHECKING:  # what the rest of the pool has

        def listen(self, run_id: str, sink: Callable[[Lines], object] | None) -> None: ...
        def send(self, task: Task[Any], target: Target) -> Future[Any]: ...
        def node_names(self) -> list[str]: ...
        def _check_open(self) -> None: ...
        @property
        def included(self) -> Included | None: ...

    def launch(
        self,
        target: Callable[..., Any] | Path,
        *args: Any,
        nodes: int | None = None,
        per_node: int | None = None,
        framework: Framework = "torch",
        max_restarts: int = 0,
        env: Mapping[str, str] | None = None,
        timeout: float | None = None,
        on_line: Callable[[int, str, str], object] | None = None,
        **kwargs: Any,
    ) -> list[Any]:
        """Runs *target* once on each of several slots, as the ranks of one program; the results in the order of ranks.

        All ranks start together, on *per_node* slots of each of *nodes* nodes (by default on all that are there), or
        none does; gangs whose slots are taken wait in the order in which they came. Each rank is a process of its own,
        with the environment that *framework* reads: ``torch.distributed.init_process_group()`` needs no arguments;
        ``jax.distributed.initialize()`` needs ``num_processes`` and ``process_id``, which `sky.gang` tells, as it tells
        everything else. Ranks on whole GPUs see all GPUs of their gang on their node, and take that of their
        ``local_rank``; a rank on a partition sees it alone.

        target: a function, called with *args* and *kwargs*; or the path of a script, whose arguments *args* are, and
        whose results are exit codes. max_restarts: how often the gang starts again after a failure: with
        `SpotCheckpointer` it goes on where it was. env: variables of every rank. timeout: seconds until all ranks must
        have their slots. on_line: called in this thread, while the ranks run, with the rank, ``stdout`` or ``stderr``,
        and the text of each line; without it the lines are in the output of the tasks.

        The first rank that fails ends all, at once. What it raised is raised here, with its remote traceback and a note
        that names the rank; `GangFailed` where it ended without an exception, and for a script. Ctrl-C ends all ranks.
        Raises `InvalidField`, `SlotLost`, `TaskNotPicklable`, `FleetUnreachable`, TimeoutError. Warns with
        `GangWarning` where ranks share a GPU. The start of a rank that a head or a connection forgets is repeated.
        """
        made = self.gang_of(
            (target, args, kwargs), Size(nodes, per_node), framework, max_restarts, env, timeout, on_line is not None
        )
        received: queue.SimpleQueue[Received] = queue.SimpleQueue()
        future = self.start_gang(made, received.put)
        try:
            while (found := received.get()) is not None:
                tell(found, made, on_line)
            return results(future.result(), made)
        finally:
            future.cancel()

    def gang_of(
        self,
        call: tuple[Callable[..., Any] | Path, tuple[Any, ...], dict[str, Any]],
        size: Size,
        framework: Framework,
        max_restarts: int,
        env: Mapping[str, str] | None,
        timeout: float | None,
        watched: bool,
    ) -> Launch:
        """Returns what `launch` starts. watched: its lines are wanted."""
        known = get_args(Framework)
        if framework not in known:
            hint = did_you_mean(str(framework), known) or f"One of: {', '.join(known)}."
            raise InvalidField("no such framework", field="framework", given=framework, hint=hint)
        if max_restarts < 0:
            raise InvalidField("a number from 0", field="max_restarts", given=max_restarts)
        if timeout is not None and not 0 < timeout < float("inf"):
            raise InvalidField("seconds, more than 0", field="timeout", given=timeout)
        return Launch(
            _work(*call, self.included),
            framework,
            size,
            target=self.target,
            env=dict(env or {}),
            max_restarts=max_restarts,
            start_within=timeout,
            topic=self.topic if watched else "",
            echo=self._watcher.echoes,
            included=self.included,
        )

    def send_to_several(self, shipment: pickling.Shipment, target: Target) -> Future[Any]:
        """Ships a task that takes several slots of one node."""
        settings = shipment.settings
        if target.slot is not None:
            raise NotSupported(
                "a task that takes several slots does not run on every slot", field="slots", given=settings.slots
            )
        launch = Launch(
            Work(shipment.name, shipment.call),
            framework=None,
            size=Size(nodes=1, per_node=settings.slots),
            target=target,
            timeout=settings.timeout,
            key=shipment.key,
            echo=self._watcher.echoes,
            included=shipment.included,
        )
        inner = self._loop.start(self._gangs.several(launch, settings.retries))
        return Future(shipment.name, inner, key=shipment.key)

    def start_gang(
        self, made: Launch, deliver: Callable[[Received], object]
    ) -> concurrent.futures.Future[list[RankEnd]]:
        """Starts a gang; cancelling the future ends it. *deliver* gets what `tell` takes, and None in the end.

        It is called in another thread.
        """
        if made.topic:
            made = replace(made, listen=self.listen, on_lines=lambda rank, lines: deliver((rank, lines)))
        self._check_open()
        future = self._loop.start(self._gangs.run(replace(made, on_slots=deliver)))
        future.add_done_callback(lambda _: deliver(None))
        return future


def tell(found: tuple[int, Lines] | list[InstanceInfo], made: Launch, on_line: OnLine | None) -> None:
    """Warns about the slots of a gang, or calls *on_line* with the lines of a rank."""
    if isinstance(found, list):
        _warn(found, made.framework)
    elif on_line is not None:
        rank, lines = found
        for stream, text in lines:
            on_line(rank, stream, text)


def results(ends: list[RankEnd], made: Launch) -> list[Any]:
    """The results of the ranks, in their order. Raises what one of them raised."""
    return [_result(end, made.work) for end in ends]


def _result(end: RankEnd, work: Work) -> Any:
    if end.outcome is None:
        return end.code
    return pickling.result(pickle.loads(end.outcome), work.name)  # noqa: S301 - the fleet's own, over mutual TLS


def _warn(slots: list[InstanceInfo], framework: Framework | None) -> None:
    shared = ranks.shared_gpus(slots)
    if shared and framework != "none":
        warnings.warn(
            f"ranks share a GPU on MIG partitions: {'; '.join(shared)}. NCCL before 2.30 refuses that (Duplicate GPU "
            "detected); later ones need NCCL_MULTI_RANK_GPU_ENABLE=1 and have no peer-to-peer between partitions. "
            "gloo works. With per_node=1 each rank has a node of its own.",
            GangWarning,
            # The caller of Pool.launch.
            stacklevel=4,
        )


# A script on one slot ------------------------------------------------------------------------------------------------


def run_script(
    pool: Launcher,
    path: Path | str,
    args: Sequence[str] = (),
    *,
    node: str | None = None,
    env: Mapping[str, str] | None = None,
    on_line: Callable[[str, str], object],
) -> int:
    """Runs ``python -u FILE ARGS`` on a slot and waits for it; returns its exit code, negative for a signal.

    The file's text travels; it runs in a new, empty folder with the slot's environment and *env*. node: on a slot of
    that node. on_line: called in this thread, while the program runs, with ``stdout`` or ``stderr`` and the text of
    each line, and with every line before this returns. Ctrl-C, or an exception of *on_line*, ends the program. Like
    any task it starts again when its slot dies. Raises OSError where the file cannot be read.
    """
    path = Path(path)
    run_id = uuid.uuid4().hex
    task = Task(scripts.script, (path.read_bytes(), path.name, list(args), dict(env or {}), pool.topic, run_id))
    received: queue.SimpleQueue[list[list[str]] | None] = queue.SimpleQueue()
    pool.listen(run_id, received.put)
    try:
        future: Future[int] = pool.send(task, _target_on(pool, node))
        future.when_done(lambda _: received.put(None))
        try:
            while (lines := received.get()) is not None:
                for stream, text in lines:
                    on_line(stream, text)
            return future.result()
        finally:
            future.cancel()
    finally:
        pool.listen(run_id, None)


def _target_on(pool: Launcher, node: str | None) -> Target:
    if node is None:
        return pool.target
    names = pool.node_names()
    if node not in names:
        hint = did_you_mean(node, names) or f"Nodes: {', '.join(names)}."
        raise SlotLost(f"{pool.manifest.fleet} has no node of that name", given=node, hint=hint)
    return Target(node=node, profile=pool.target.profile)
