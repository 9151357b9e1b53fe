"""The client: ships tasks to the slots of a fleet. Importing it imports Dask."""

from __future__ import annotations

from skyinfra.client.asynchronous import AsyncJob, AsyncPool, connect_async
from skyinfra.client.jobs import Job
from skyinfra.client.launching import GangWarning
from skyinfra.client.lookup import ask, connect, current_pool, open_pool, open_questions
from skyinfra.client.pool import Pool
from skyinfra.client.questions import Questions
from skyinfra.client.script import Fetching, detach_script, run_script, ship
from skyinfra.submission.futures import Future, wait

__all__ = [
    "AsyncJob",
    "AsyncPool",
    "Fetching",
    "Future",
    "GangWarning",
    "Job",
    "Pool",
    "Questions",
    "ask",
    "connect",
    "connect_async",
    "current_pool",
    "detach_script",
    "open_pool",
    "open_questions",
    "run_script",
    "ship",
    "wait",
]
