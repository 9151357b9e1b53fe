"""``pool.launch``: a function or a script as the ranks of one program."""

from __future__ import annotations

import pickle
import queue
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, get_args

from skyinfra._errors import InvalidField, did_you_mean
from skyinfra.client import choice, pickling
from skyinfra.client.choice import Size
from skyinfra.client.gangs import Launch, Lines
from skyinfra.protocol.gang import Framework, RankEnd, Work
from skyinfra.protocol.instance import InstanceInfo

if TYPE_CHECKING:
    from skyinfra.client.pool import Pool

OnLine = Callable[[int, str, str], object]


class GangWarning(UserWarning):
    """The ranks of a gang run where a library that they probably use cannot do all that it does elsewhere.

    NCCL identifies ranks by their GPU: two on MIG partitions of one GPU are "Duplicate GPU detected" up to NCCL 2.29.
    Since 2.30 that is allowed with ``NCCL_MULTI_RANK_GPU_ENABLE=1``; its support for MIG is experimental, and data goes
    through the memory of the host, as partitions have no peer-to-peer access over NVLink or PCIe (NVIDIA/nccl issue
    1716; MIG User Guide, application considerations). gloo works.
    """


@dataclass(frozen=True)
class Options:
    """Of a launch. Raises `InvalidField`."""

    framework: Framework
    max_restarts: int
    timeout: float | None

    def __post_init__(self) -> None:
        known = get_args(Framework)
        if self.framework not in known:
            hint = did_you_mean(str(self.framework), known) or f"One of: {', '.join(known)}."
            raise InvalidField("no such framework", field="framework", given=self.framework, hint=hint)
        if self.max_restarts < 0:
            raise InvalidField("a number from 0", field="max_restarts", given=self.max_restarts)
        if self.timeout is not None and not 0 < self.timeout < float("inf"):
            raise InvalidField("seconds, more than 0", field="timeout", given=self.timeout)


def work(target: object, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Work:
    """What the ranks run. Raises `InvalidField`, `TaskNotPicklable`, and OSError for a script that cannot be read."""
    if not isinstance(target, Path):
        task = pickling.as_task(target, args, kwargs)
        return Work(task.name, pickling.Shipment(task, topic="").call)
    if not target.is_file():
        raise InvalidField("there is no such file", field="target", given=str(target))
    if kwargs:
        raise InvalidField("a script has no named arguments", field="target", given=", ".join(kwargs))
    return Work(target.name, source=target.read_bytes(), args=tuple(map(str, args)))


def launch(
    pool: Pool, work: Work, size: Size, options: Options, *, env: Mapping[str, str] | None, on_line: OnLine | None
) -> list[Any]:
    """Runs *work* as a gang, see `Pool.launch`. *on_line* is called, and warnings are given, in this thread."""
    received: queue.SimpleQueue[tuple[int, Lines] | list[InstanceInfo] | None] = queue.SimpleQueue()
    future = pool.start_gang(
        Launch(
            work,
            options.framework,
            size,
            target=pool.target,
            env=dict(env or {}),
            max_restarts=options.max_restarts,
            start_within=options.timeout,
            topic=pool.topic if on_line is not None else "",
            listen=pool.listen,
            on_lines=(lambda rank, lines: received.put((rank, lines))) if on_line is not None else None,
            on_slots=received.put,
        )
    )
    future.add_done_callback(lambda _: received.put(None))
    try:
        while (found := received.get()) is not None:
            if isinstance(found, list):
                _warn(found, options.framework)
            elif on_line is not None:
                rank, lines = found
                for stream, text in lines:
                    on_line(rank, stream, text)
        ends = future.result()
    finally:
        future.cancel()
    return [_result(end, work) for end in ends]


def _result(end: RankEnd, work: Work) -> Any:
    if end.outcome is None:
        return end.code
    return pickling.result(pickle.loads(end.outcome), work.name)  # noqa: S301 - the fleet's own, over mutual TLS


def _warn(slots: list[InstanceInfo], framework: Framework) -> None:
    shared = choice.shared_gpus(slots)
    if shared and framework != "none":
        warnings.warn(
            f"ranks share a GPU on MIG partitions: {'; '.join(shared)}. NCCL before 2.30 refuses that (Duplicate GPU "
            "detected); later ones need NCCL_MULTI_RANK_GPU_ENABLE=1 and have no peer-to-peer between partitions. "
            "gloo works. With per_node=1 each rank has a node of its own.",
            GangWarning,
            # The caller of Pool.launch.
            stacklevel=4,
        )
