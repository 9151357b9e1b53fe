"""The functions that slots run for the benchmarks. Nodes import this module, and nothing else of them."""

from __future__ import annotations

import importlib
import importlib.util
import os
import statistics
import sys
import time

LARGE = 100_000_000


def zeros(number: int) -> bytes:
    return number.to_bytes(8, "big") + bytes(LARGE - 8)


def array_of(number: int) -> object:
    import numpy

    array = numpy.zeros(LARGE // 8)
    array[:] = number
    return array


def fenced(runs: int = 2000) -> float:
    from skyinfra.worker import cancellation, fence, output, task_folder

    def once() -> None:
        log = output.Log("none")
        with task_folder.surrounded(None, None), output.logging_to(log):
            with cancellation.reachable():
                pass
            with fence.around(), cancellation.reachable(), fence.Call():
                pass

    # The task that measures is within a fence itself.
    def timed() -> float:
        start = time.perf_counter()
        once()
        return time.perf_counter() - start

    return statistics.median(timed() for _ in range(runs))


def import_something() -> float:
    start = time.perf_counter()
    importlib.import_module("scipy.stats")
    return time.perf_counter() - start


def process_with(*modules: str) -> tuple[int, bool]:
    return os.getpid(), all(name in sys.modules for name in modules)
