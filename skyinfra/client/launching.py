"""Scripts on a slot, and ``pool.launch``: a function or a script as the ranks of one program."""

from __future__ import annotations

import concurrent.futures
import pickle
import warnings
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, get_args

from skyinfra.client import ranks
from skyinfra.client.files import Files
from skyinfra.client.fleet import Fleet
from skyinfra.client.futures import Future
from skyinfra.client.gangs import Gangs, Launch, Lines
from skyinfra.client.ranks import Size
from skyinfra.client.snapshot import Target
from skyinfra.errors import InvalidField, NotSupported, did_you_mean
from skyinfra.protocol.gang import Framework, RankEnd, Work
from skyinfra.protocol.instance import InstanceInfo
from skyinfra.sync.sync import Included
from skyinfra.tasks import pickling

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
    """Starts gangs on *fleet*, whose ranks see what was synced in *files*."""

    def __init__(self, fleet: Fleet, files: Files) -> None:
        self._fleet = fleet
        self._files = files
        self._gangs = Gangs(fleet.dispatcher, fleet.topic)

    def gang_of(
        self,
        where: Target,
        call: tuple[Callable[..., Any] | Path, tuple[Any, ...], dict[str, Any]],
        size: Size,
        framework: Framework,
        max_restarts: int,
        env: Mapping[str, str] | None,
        timeout: float | None,
        watched: bool,
    ) -> Launch:
        """Returns the gang of `Pool.launch` on the slots *where*. watched: its lines are wanted."""
        known = get_args(Framework)
        if framework not in known:
            hint = did_you_mean(str(framework), known) or f"One of: {', '.join(known)}."
            raise InvalidField("no such framework", field="framework", given=framework, hint=hint)
        if max_restarts < 0:
            raise InvalidField("a number from 0", field="max_restarts", given=max_restarts)
        if timeout is not None and not 0 < timeout < float("inf"):
            raise InvalidField("seconds, more than 0", field="timeout", given=timeout)
        return Launch(
            _work(*call, self._files.included),
            framework,
            size,
            target=where,
            env=dict(env or {}),
            max_restarts=max_restarts,
            start_within=timeout,
            topic=self._fleet.topic if watched else "",
            echo=self._fleet.watcher.echoes,
            included=self._files.included,
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
            echo=self._fleet.watcher.echoes,
            included=shipment.included,
        )
        inner = self._fleet.loop.start(self._gangs.several(launch, settings.retries))
        return Future(shipment.name, inner, key=shipment.key)

    def start_gang(
        self, made: Launch, deliver: Callable[[Received], object]
    ) -> concurrent.futures.Future[list[RankEnd]]:
        """Starts a gang; cancelling the future ends it. *deliver* gets what `tell` takes, and None in the end.

        It is called in another thread.
        """
        if made.topic:
            made = replace(made, listen=self._fleet.listen, on_lines=lambda rank, lines: deliver((rank, lines)))
        self._fleet.check_open()
        future = self._fleet.loop.start(self._gangs.run(replace(made, on_slots=deliver)))
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
