"""The client: ships tasks to the slots of a fleet.

Importing this package imports no Dask; the parts that need it are imported on first use.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from skyinfra.client.asynchronous import AsyncJob, AsyncPool, connect_async
    from skyinfra.client.futures import Future
    from skyinfra.client.jobs import Job, detach_script
    from skyinfra.client.launching import GangWarning, run_script
    from skyinfra.client.lookup import connect
    from skyinfra.client.pool import Pool, open_pool

_LAZY = {
    "AsyncJob": "skyinfra.client.asynchronous",
    "AsyncPool": "skyinfra.client.asynchronous",
    "connect_async": "skyinfra.client.asynchronous",
    "Future": "skyinfra.client.futures",
    "GangWarning": "skyinfra.client.launching",
    "Job": "skyinfra.client.jobs",
    "Pool": "skyinfra.client.pool",
    "connect": "skyinfra.client.lookup",
    "detach_script": "skyinfra.client.jobs",
    "open_pool": "skyinfra.client.pool",
    "run_script": "skyinfra.client.launching",
}

__all__ = [
    "AsyncJob",
    "AsyncPool",
    "Future",
    "GangWarning",
    "Job",
    "Pool",
    "connect",
    "connect_async",
    "detach_script",
    "open_pool",
    "run_script",
]


def __getattr__(name: str) -> Any:
    if name not in _LAZY:
        raise AttributeError(f"module 'skyinfra.client' has no attribute {name!r}")
    value = getattr(importlib.import_module(_LAZY[name]), name)
    globals()[name] = value
    return value
