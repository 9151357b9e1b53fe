"""Pools whose number of nodes is declared as a range, and changes with an apply alone: `skyinfra scale`."""

from __future__ import annotations

from dataclasses import replace

from skyinfra.errors import InvalidField, NotSupported
from skyinfra.places.choices import NAME
from skyinfra.pool import ComputePool, Range
from skyinfra.providers import Request, elastic_providers


def scaled(pool: ComputePool, stack: str, nodes: int | None) -> tuple[ComputePool, Range | None]:
    """Returns *pool* with the number of *nodes*, and the range of it, where that changes with an apply alone: where no
    nodes follow the work, or do so on request and no ``idle_seconds`` asks for it.

    Raises `NotSupported` for nodes that are to follow the work there, or a head without nodes, `InvalidField` for a
    number outside of the range.
    """
    declared, elastic = pool.range, pool.provider.data.elastic
    if declared is None or (elastic is not None and (pool.idle_seconds is not None or not elastic.on_request)):
        return pool, None
    if declared.min < 1 or pool.idle_seconds is not None:
        able = [f"sky.{type.__name__}" for type in elastic_providers()]
        follows = "Declare idle_seconds=600, with which it follows the work. Or declare" if elastic else "Declare"
        raise NotSupported(
            f"the number of nodes of {pool.provider.data.about.called} changes with an apply alone",
            field="nodes" if declared.min < 1 else "idle_seconds",
            given=f"Range({declared.min}, {declared.max})" if declared.min < 1 else pool.idle_seconds,
            hint=f"{follows} nodes=sky.Range({max(1, declared.min)}, {max(2, declared.max)}) without idle_seconds: the "
            f"head is one of them, and `skyinfra scale {stack}/{pool.name} N` changes their number. Places whose nodes "
            f"follow the work: {', '.join(able)}.",
        )
    number = declared.min if nodes is None else nodes
    if not declared.min <= number <= declared.max:
        raise InvalidField(
            f"{NAME} has another number of nodes than sky.Range({declared.min}, {declared.max}) lets there be",
            field="nodes",
            given=number,
            hint=f"skyinfra scale {stack}/{pool.name} N, from {declared.min} to {declared.max}.",
        )
    return pool.model_copy(update={"nodes": number}), declared


def check_form(pool: ComputePool, request: Request, scale: Range) -> None:
    """Raises `InvalidField` where another number of nodes would be a machine group: it would make all nodes anew."""
    least, most = (pool.provider.select(replace(request, nodes=nodes)) for nodes in (scale.min, scale.max))
    if least.grouped != most.grouped:
        called = pool.provider.data.about.called
        raise InvalidField(
            f"one node of {called} is a machine, several are a group, which would make all of them anew",
            field="nodes",
            given=f"Range({scale.min}, {scale.max})",
            hint=f"Declare sky.Range(2, {max(3, scale.max)}), a group (group=True), or nodes that are not spot.",
        )
