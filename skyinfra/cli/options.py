"""Errors of functions that the command line calls, said of the options that a person gave."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from skyinfra.errors import DeclarationError

OPTIONS = {
    "count": "--count",
    "fraction": "--fraction",
    "max_nodes": "--max-nodes",
    "max_price": "--max-price",
    "max_restarts": "--max-restarts",
    "memory_gb": "--memory",
    "nodes": "--nodes",
    "per_node": "--per-node",
    "provider": "--provider",
    "ram_gib": "--ram",
    "region": "--region",
    "vcpus": "--vcpus",
}


@contextmanager
def said_of_options() -> Iterator[None]:
    """A `DeclarationError` about an argument names the option in its place."""
    try:
        yield
    except DeclarationError as error:
        error.field = OPTIONS.get(error.field or "", error.field)
        raise
