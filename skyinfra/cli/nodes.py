"""Asking the nodes of a fleet, all at once."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

from skyinfra.errors import InvalidField, NodeError, did_you_mean

if TYPE_CHECKING:
    from skyinfra.client import Pool

_AT_ONCE = 32


def chosen(pool: Pool, node: str | None) -> list[str]:
    """*node*, or all nodes. Raises `InvalidField` for a node that the fleet does not have."""
    names = pool.node_names()
    if node is None:
        return names
    if node not in names:
        hint = did_you_mean(node, names) or f"Nodes: {', '.join(names)}."
        raise InvalidField(f"{pool.manifest.fleet} has no node of that name", field="NODE", given=node, hint=hint)
    return [node]


def ask_all(
    pool: Pool, names: Sequence[str], question: str, *, wait_s: float = 30, **arguments: Any
) -> dict[str, Any | NodeError]:
    """What each of the nodes *names* answers, or why it does not."""

    def ask(name: str) -> Any | NodeError:
        try:
            return pool.ask(name, question, wait_s=wait_s, **arguments)
        except NodeError as error:
            return error

    return dict(zip(names, _each(ask, names), strict=True))


def _each(function: Callable[[str], Any], names: Sequence[str]) -> list[Any]:
    if not names:
        return []
    with ThreadPoolExecutor(min(_AT_ONCE, len(names))) as threads:
        return list(threads.map(function, names))
