"""The client: ships tasks to the slots of a fleet. Importing it imports Dask."""

from __future__ import annotations

from skyinfra.client.asynchronous import AsyncJob, AsyncPool, connect_async
from skyinfra.client.futures import Future
from skyinfra.client.jobs import Job
from skyinfra.client.launching import GangWarning
from skyinfra.client.lookup import connect, open_pool
from skyinfra.client.pool import Pool
from skyinfra.client.script import detach_script, run_script

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
