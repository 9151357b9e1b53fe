"""Fifteen thousand tasks: what they leave behind."""

from __future__ import annotations

import gc
import itertools
import os

import psutil
import pytest
from namespaces.fleet import Fleet
from tasks_on_nodes.faults import echo

# The fixture that all share is made once: the tests run in one process.
pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("faults-tasks")]

ROUNDS = 6
TASKS = 2_500
# Argument and result of a task. What kept either would grow by 10 MB in each round; the head and the workers may
# grow by a part of that, for allocators give memory back late.
PAYLOAD = bytes(4_000)
GROWTH = TASKS * len(PAYLOAD) // 3
# The folders of a node for its tasks.
LEFT = ("attempts", "tasks")


def test_further_thousands_of_tasks_take_no_more_memory(fleet: Fleet) -> None:
    workers = fleet.settled()
    # Of attempts that ended with a node that another test has killed.
    before = {file for node in fleet.nodes for name in LEFT for file in (node.folder / name).iterdir()}
    sizes = []
    with fleet.connect() as pool:
        for _ in range(ROUNDS):
            results = pool.map(echo, itertools.repeat(PAYLOAD, TASKS), window=4 * fleet.size, ordered=False)
            assert sum(len(result) for result in results) == TASKS * len(PAYLOAD)
            gc.collect()
            sizes.append((fleet.head.memory(), rss(*workers.values()), rss(os.getpid())))
    assert fleet.settled() == workers, "a worker was replaced"
    # A leak grows in each round; an allocator that other tests have left in pieces grows in some: by 6 MB, then by 0.3
    # to 3 MB in each of five rounds of 5,000 tasks, all workers together, on a busy machine (2026-11-25).
    grown = [min(b - a for a, b in itertools.pairwise(column)) for column in zip(*sizes, strict=True)]
    named = dict(zip(("head", "workers", "client"), grown, strict=True))
    assert {name: size for name, size in named.items() if size > GROWTH} == {}
    for node in fleet.nodes:
        assert {file for name in LEFT for file in (node.folder / name).iterdir()} <= before


def rss(*pids: int) -> int:
    """Bytes of memory of these processes."""
    return sum(int(psutil.Process(pid).memory_info().rss) for pid in pids)
