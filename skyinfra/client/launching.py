"""Sends tasks, maps and gangs: what `Pool` and `AsyncPool` share."""

from __future__ import annotations

import concurrent.futures
import contextlib
import functools
import inspect
import pickle
import queue
import time
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Sized
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any, ParamSpec, TypedDict, TypeVar

from skyinfra.client import gangs, ranks
from skyinfra.client.ranks import Launch, Lines, Received
from skyinfra.errors import InvalidField, NotSupported, check_kind, check_options, counted, did_you_mean
from skyinfra.protocol.calls import PROGRAM_GRACE_S, SecretUse
from skyinfra.protocol.gang import Framework, RankEnd, Work
from skyinfra.protocol.instance import InstanceInfo
from skyinfra.protocol.manifest import Manifest, ManifestNode
from skyinfra.protocol.secrets import Secret, met
from skyinfra.submission.fleet import Fleet
from skyinfra.submission.flow import GATHER_S, Chunk, Flow, suits
from skyinfra.submission.futures import Future
from skyinfra.submission.items import Arrivals
from skyinfra.submission.snapshot import ANYWHERE, Target
from skyinfra.tasks import outcomes, pickling
from skyinfra.tasks.included import Included
from skyinfra.tasks.task import Gather, Options, Task, on_node

P = ParamSpec("P")
R = TypeVar("R")
T = TypeVar("T")
OnLine = Callable[[int, str, str], object]
_OF_LAUNCH = ("nodes", "per_node", "framework", "max_restarts", "env", "timeout", "on_line")


class GangWarning(UserWarning):
    """The ranks of a gang run where a library that they probably use cannot do all that it does elsewhere.

    NCCL identifies ranks by their GPU: two on MIG partitions of one GPU are "Duplicate GPU detected" up to NCCL 2.29.
    Since 2.30 that is allowed with ``NCCL_MULTI_RANK_GPU_ENABLE=1``; its support for MIG is experimental, and data goes
    through the memory of the host, as partitions have no peer-to-peer access over NVLink or PCIe (NVIDIA/nccl issue
    1716; MIG User Guide, application considerations). gloo works.
    """


def work_of(
    target: object, args: tuple[Any, ...], kwargs: dict[str, Any], included: Included | None
) -> tuple[Work, Options, list[str | Secret], Included | None]:
    """Returns what the ranks run, its options, the secrets that it names, and *included* with the modules it needs.

    Raises `InvalidField`, `TaskNotPicklable`, OSError for an unreadable script.
    """
    if not isinstance(target, Path):
        task = pickling.as_task(target, args, kwargs)
        _check_keywords(task, "launch", _OF_LAUNCH)
        with met() as named:
            call, included = pickling.dump_call(task, included)
        return Work(task.name, call), task.settings, [*task.settings.secrets, *named.values()], included
    if not target.is_file():
        raise InvalidField("there is no such file", field="target", given=str(target))
    if kwargs:
        raise InvalidField("a script has no named arguments", field="target", given=", ".join(kwargs))
    return Work(target.name, source=target.read_bytes(), args=tuple(map(str, args))), Options(), [], included


@dataclass(frozen=True)
class Gang:
    """The gang *launch* of `Pool.launch` on *fleet*. on_line: gets the lines of its ranks."""

    fleet: Fleet
    launch: Launch
    on_line: OnLine | None

    def start(self, deliver: Callable[[Received], object]) -> concurrent.futures.Future[list[RankEnd]]:
        """Starts it; cancelling the future ends it. *deliver* gets what `update` takes, and None in the end.

        It is called in another thread.
        """
        launch = replace(self.launch, watched=self.on_line is not None, deliver=deliver)

        async def run() -> list[RankEnd]:
            try:
                return await gangs.run(self.fleet, launch)
            finally:
                deliver(None)

        return self.fleet.in_loop_soon(run())

    def end(self, future: concurrent.futures.Future[list[RankEnd]], received: queue.SimpleQueue[Received]) -> None:
        """Ends it, and tells what its ranks still say, for some seconds at most."""
        future.cancel()
        deadline = time.monotonic() + PROGRAM_GRACE_S + gangs.last_words_s(self.launch)
        with contextlib.suppress(queue.Empty):
            while (found := received.get(timeout=max(0.0, deadline - time.monotonic()))) is not None:
                self.update(found)

    def update(self, found: tuple[int, Lines] | list[InstanceInfo]) -> None:
        """Warns about its slots, or calls *on_line* with the lines of a rank."""
        if isinstance(found, list):
            _warn(found, self.launch.framework)
        elif self.on_line is not None:
            rank, lines = found
            for stream, text in lines:
                self.on_line(rank, stream, text)

    def results(self, ends: list[RankEnd]) -> list[Any]:
        """Returns the results of the ranks, in their order. Raises what one of them raised."""
        return [
            # The fleet's own, over mutual TLS.
            end.code if end.outcome is None else outcomes.result(pickle.loads(end.outcome), self.launch.work.name)  # noqa: S301
            for end in ends
        ]


class How(TypedDict, total=False):
    """The keywords of `Pool.map`: at most *window* tasks are in flight; whether results come in the order of items."""

    window: int | None
    ordered: bool


def no_task(given: object, operator: str) -> TypeError:
    """Returns the error for what stands in front of ``>> pool`` or ``@ pool`` and is no task."""
    name = getattr(given, "__name__", None)
    if isinstance(given, Gather):
        text = f"tasks that are gathered run on one slot each: write sky.gather(...) >> pool, not {operator}"
    elif isinstance(given, Sequence) and any(isinstance(each, Task) for each in given):
        text = "several tasks go together as sky.gather(*tasks) >> pool"
    elif on_node() and not callable(given):
        text = (
            "on a node, calling a decorated function runs it, and this is what it gave: pool.submit(function, ...) and "
            "pool.map(function, ...) send tasks"
        )
    elif callable(given) and isinstance(name, str):
        text = f"{name} is a plain function: decorate it with @sky.compute, and call it: {name}(...) {operator} pool"
    else:
        text = (
            f"a pool takes tasks, and this is {type(given).__name__}: the function that gave it has run here already. "
            f"Decorate it with @sky.compute; function(...) {operator} pool ships it then"
        )
    return TypeError(text)


def _check_keywords(task: Task[Any], method: str, options: Sequence[str]) -> None:
    """Raises `InvalidField` for a keyword that neither the function of *task* nor *method* has.

    options: those of the method.
    """
    if not task.kwargs:
        return
    try:
        parameters = inspect.signature(task.function).parameters.values()
    except (TypeError, ValueError):
        return
    if any(each.kind == each.VAR_KEYWORD for each in parameters):
        return
    known = [each.name for each in parameters if each.kind in (each.KEYWORD_ONLY, each.POSITIONAL_OR_KEYWORD)]
    for name in task.kwargs:
        if name not in known:
            raise _misplaced(name, f"{method}, nor an argument of {task.name}", (*options, *known))


def _misplaced(name: str, where: str, known: Sequence[str]) -> InvalidField:
    of_task = [each.name for each in fields(Options)]
    if name in of_task:
        hint = f"It is one of a task: function(...).options({name}=...), or @sky.compute({name}=...)."
    else:
        near = did_you_mean(name, [*known, *of_task])
        hint = f"{near} Known here: {', '.join(known)}.".strip()
    return InvalidField(f"no option of {where}", field=name, hint=hint)


def _length(items: Iterable[Any]) -> int | None:
    """Returns the number of *items*, None where they do not know it, as a bar of tqdm over a generator."""
    try:
        return len(items) if isinstance(items, Sized) else None
    except (TypeError, NotImplementedError):
        return None


def _variables_alone(uses: tuple[SecretUse, ...]) -> tuple[SecretUse, ...]:
    """Returns the secrets of ranks, which are programs. Raises `NotSupported` where one is to be in no environment."""
    for use in uses:
        if use.held:
            raise NotSupported(
                "ranks, and tasks of several slots, have their secrets as variables",
                field=f"secret {use.name}",
                hint="Name it without environment=False, or read it in a task of one slot.",
            )
    return uses


def send_to_several(fleet: Fleet, shipment: pickling.Shipment, target: Target) -> Future[Any]:
    """Ships a task that takes several slots of one node."""
    settings = shipment.settings
    if target.slot is not None:
        raise NotSupported(
            "a task that takes several slots does not run on every slot", field="slots", given=settings.slots
        )
    launch = Launch(
        Work(shipment.name, shipment.call),
        target,
        nodes=1,
        per_node=settings.slots,
        settings=settings,
        key=shipment.key,
        included=shipment.included,
        secrets=_variables_alone(shipment.uses),
        env=fleet.variables(settings.env),
    )
    inner = fleet.in_loop_soon(gangs.run_task(fleet, launch))
    return Future(shipment.name, inner, key=shipment.key)


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


def signature_of(method: Callable[P, Any]) -> Callable[[Callable[..., R]], Callable[P, R]]:
    """Decorator: a function that passes on all that it is given takes what *method* does."""

    def decorate(function: Callable[..., R]) -> Callable[P, R]:
        returned = inspect.signature(function).return_annotation
        function.__signature__ = inspect.signature(method).replace(return_annotation=returned)  # type: ignore[attr-defined]
        return function

    return decorate


class Sender:
    """The base of `Pool` and `AsyncPool`: sends tasks and gangs to the slots *target* of *fleet*, waits for none."""

    # An array in front of ``>> pool`` is no task, rather than many operands.
    __array_ufunc__ = None

    def __init__(self, fleet: Fleet, target: Target = ANYWHERE) -> None:
        self.target = target
        self._fleet = fleet

    @property
    def manifest(self) -> Manifest:
        """The manifest of the fleet."""
        return self._fleet.manifest

    def nodes(self) -> list[ManifestNode]:
        """Returns the nodes of the fleet, as its manifest names them."""
        return list(self.manifest.nodes)

    @staticmethod
    def _task_of(task: Any, args: tuple[object, ...], kwargs: dict[str, object], detach: object) -> Task[Any]:
        """*task* itself, or that of a function with its arguments. Raises `InvalidField` for an unknown option."""
        if detach is not None:
            check_kind("detach", detach, str, "the name of the job")
        if isinstance(task, Task) and kwargs:
            raise _misplaced(next(iter(kwargs)), "submit", ("detach",))
        made = pickling.as_task(task, args, kwargs)
        _check_keywords(made, "submit", ("detach",))
        return made

    def _mapped(
        self, function: Any, iterables: Sequence[Iterable[Any]], how: How, *, star: bool = False
    ) -> functools.partial[Flow[Any]]:
        """Returns the flow of `map`, for `_stream`; with *star* that of `starmap`."""
        check_options(how, How.__annotations__, of="Pool.map")
        window = how.get("window")
        if window is not None and window < 1:
            raise ValueError(f"window is at least 1, not {window}")
        if not iterables:
            raise TypeError("map() needs at least one iterable")
        items = iterables[0] if star else zip(*iterables, strict=False)
        tasks = (pickling.as_task(function, tuple(each), {}) for each in items)
        lengths = [length for each in iterables if (length := _length(each)) is not None]
        total = min(lengths) if len(lengths) == len(iterables) else None
        return self._flow(tasks, window, how.get("ordered", True), total, "item {} of the map")

    def _gathered(self, given: Gather[Any]) -> functools.partial[Flow[Any]]:
        """Returns the flow of *given*, for `_stream`."""
        return self._flow(
            iter(given.tasks), None, given.ordered or not given.stream, len(given.tasks), "task {} of the gather"
        )

    def _flow(
        self, tasks: Iterator[Task[Any]], window: int | None, ordered: bool, total: int | None, place: str
    ) -> functools.partial[Flow[Any]]:
        return functools.partial(
            Flow,
            tasks,
            send=self._sending(windowed=window is None, known=total is not None),
            slots=lambda: self._fleet.dispatcher.window(self.target).limit,
            window=window,
            total=total,
            ordered=ordered,
            place=place,
            counting=self._fleet.watcher.counting("tasks", total),
        )

    def send(self, task: Task[T], target: Target, *, windowed: bool = True, name: str | None = None) -> Future[T]:
        """Ships *task* to *target*. windowed: wait here while the fleet has as many tasks as slots. name: for lists."""
        return self._ship(self._shipment(task, name), target, windowed=windowed)

    def _sending(self, *, windowed: bool, known: bool) -> Callable[[Sequence[Task[Any]], int], list[Future[Any]]]:
        """Returns what sends the tasks of a flow. known: how many there are."""
        # All of them are there from the beginning then, however late they are sent.
        came = time.monotonic() if known else None
        gathered: Chunk | None = None

        def send(tasks: Sequence[Task[Any]], most: int) -> list[Future[Any]]:
            nonlocal gathered
            shipments = [self._shipment(task) for task in tasks]
            for shipment in shipments:
                shipment.came = shipment.came if came is None else came
            targets = {self.target.of(shipment.settings) for shipment in shipments}
            if most == 1 or len(targets) > 1 or not all(map(suits, shipments)):
                return [self._ship(shipment, self.target, windowed=windowed) for shipment in shipments]
            target = targets.pop()
            if gathered is not None and gathered.target == target:
                # Nobody else sees that: the chunk of a connection that is gone would wait for ever.
                self._fleet.check_open()
                future = gathered.add(shipments[0], most)
                if future is not None:
                    return [future]
            gather_s = 0.0 if known else GATHER_S
            chunk = Chunk(shipments, target, self._fleet.dispatcher, windowed=windowed, gather_s=gather_s)
            gathered = None if known else chunk
            return chunk.send(self._fleet.in_loop_soon)

        return send

    def _shipment(self, task: Task[Any], name: str | None = None) -> pickling.Shipment:
        fleet = self._fleet
        return pickling.Shipment(
            task,
            topic=fleet.topic,
            echo=fleet.watcher.echoes,
            name=name,
            included=fleet.included,
            whole=task.settings.slots > 1,
            secrets=fleet.secrets,
            env=fleet.env,
            workdir=fleet.workdir,
            at_head=fleet.trees,
        )

    def _ship(self, shipment: pickling.Shipment, target: Target, *, windowed: bool) -> Future[Any]:
        target = target.of(shipment.settings)
        if shipment.settings.slots > 1:
            return send_to_several(self._fleet, shipment, target)
        if self._fleet.brings_first and not shipment.brought:
            # Now, while the arguments are what they were when the task was made: they are not copied.
            self._fleet.in_loop(self._fleet.dispatcher.bring(shipment))
        arrivals = Arrivals(self._fleet) if shipment.stream else None
        inner = self._fleet.in_loop_soon(
            self._fleet.dispatcher.execute(shipment, target, windowed=windowed, arrivals=arrivals)
        )
        return Future(shipment.name, inner, key=shipment.key, arrivals=arrivals)

    def _gang(
        self,
        target: Callable[..., Any] | Path,
        *args: Any,
        nodes: int | None = None,
        per_node: int | None = None,
        framework: Framework = "torch",
        max_restarts: int | None = None,
        env: Mapping[str, str] | None = None,
        timeout: float | None = None,
        on_line: OnLine | None = None,
        **kwargs: Any,
    ) -> Gang:
        """Returns the gang of `launch`, for callers that wait in another way."""
        fleet = self._fleet
        work, settings, named, included = work_of(target, args, kwargs, fleet.included)
        launch = Launch(
            work,
            self.target.of(settings),
            nodes,
            per_node,
            framework,
            fleet.variables({**(settings.env or {}), **(env or {})}),
            max_restarts,
            timeout,
            settings,
            included=included,
            secrets=_variables_alone(fleet.secrets.uses(named)),
        )
        launch = replace(launch, nodes=ranks.nodes_of(self.manifest, launch))
        return Gang(fleet, launch, on_line)

    def __reduce__(self) -> tuple[object, ...]:
        raise TypeError(
            "a pool is a connection of this process; pass what the task needs from it instead, or let the task call "
            "sky.current_pool()"
        )

    def __repr__(self) -> str:
        nodes, slots = self.manifest.node_count, self.manifest.node_count * len(self.manifest.slots)
        notes = [counted(nodes, "node"), counted(slots, "slot")]
        notes += ["simulated"] if self.manifest.simulated else []
        notes += ["closed"] if self._fleet.closed else []
        return f"<{type(self).__name__} {self.manifest.fleet}: {', '.join(notes)}>"
