"""Nodes that are cut off, or end, while tasks run: every task completes, and none is twice in the results."""

from __future__ import annotations

import itertools
import os
import random
import signal
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from namespaces.fleet import LAYOUT, RESULT_S, Fleet, Node, cut
from tasks_on_nodes.faults import count, started_again, starts
from terraform_projects.commands import until

# The fixture that all share is made once: the tests run in one process.
pytestmark = pytest.mark.xdist_group("faults-links")

TASKS = 600
# A silent link is noticed after 12 to 15 s, and that is nearly all of the time of a run. So four clients run at once
# through each of five cuts: 20 runs, each with its own 600 tasks and a node that is cut off in the middle of them.
CUTS = 5
CLIENTS = 4
# In the middle of each client's tasks some take so long that the node that is cut off has one that has not ended.
LONG, LONG_S = range(TASKS // 4, TASKS // 4 + 4), 4.0


class Run:
    """One client with its tasks, in a thread. *kept*: where the starts of its tasks are noted."""

    def __init__(self, fleet: Fleet, kept: Path, tasks: int, seconds: float, long: range = range(0)) -> None:
        self.kept = kept
        self.long = long
        self.tasks = tasks
        self.results: list[tuple[int, str]] = []
        self._seconds = seconds
        self._fleet = fleet

    def __call__(self) -> None:
        with self._fleet.connect() as pool:
            seconds = (LONG_S if number in self.long else self._seconds for number in itertools.count())
            arguments = (range(self.tasks), itertools.repeat(str(self.kept)), seconds)
            for result in pool.map(count, *arguments, ordered=False):
                self.results.append(result)

    @property
    def in_the_middle(self) -> bool:
        return len(self.results) >= self.tasks // 4

    def long_on(self, node: str) -> set[int]:
        """Those that take long and have started there."""
        return {number for number, slot in starts(self.kept) if number in self.long and slot.startswith(f"{node}/")}

    def check(self) -> None:
        assert sorted(number for number, _ in self.results) == list(range(self.tasks))


@pytest.mark.slow
@pytest.mark.parametrize("turn", range(CUTS))
def test_no_task_is_lost_when_a_node_is_cut_off(fleet: Fleet, tmp_path: Path, turn: int) -> None:
    runs = [Run(fleet, tmp_path / f"run{number}", TASKS, 0.05, LONG) for number in range(CLIENTS)]
    nodes = fleet.nodes[1:] if turn % 2 else fleet.nodes[:0:-1]

    def busy() -> list[Node]:
        return [node for node in nodes if any(run.long_on(node.name) for run in runs)]

    with ThreadPoolExecutor(CLIENTS) as threads:
        ends = [threads.submit(run) for run in runs]
        until(busy, seconds=RESULT_S)
        node = busy()[0]
        there = [(run, number) for run in runs for number in run.long_on(node.name)]
        with cut(node):
            before = [len(run.results) for run in runs]
            for end in ends:
                end.result(timeout=RESULT_S)
    for run in runs:
        run.check()
    assert max(before) < TASKS, "a run was over before the node was cut off"
    assert any(number in started_again(run.kept) for run, number in there), "the node had no task when it was cut off"


def test_no_task_is_lost_when_a_runner_is_killed(fleet: Fleet, tmp_path: Path) -> None:
    run = Run(fleet, tmp_path / "run", 200, 0.05)
    node = fleet.nodes[1]
    before = fleet.settled()
    with ThreadPoolExecutor(1) as threads:
        end = threads.submit(run)
        until(lambda: run.in_the_middle, seconds=RESULT_S)
        node.restart()
        end.result(timeout=RESULT_S)
    run.check()
    after = fleet.settled()
    slots = {f"{node.name}/{index}" for index in range(len(LAYOUT))}
    assert {slot for slot in after if after[slot] != before[slot]} == slots


@pytest.mark.slow
def test_no_task_is_lost_when_the_head_is_killed(fleet: Fleet, tmp_path: Path) -> None:
    # Two for each slot, so that the head's own slots have some: these have not ended when it is killed.
    run = Run(fleet, tmp_path / "run", 300, 0.1, range(75, 75 + 2 * len(fleet.nodes) * len(LAYOUT)))
    with ThreadPoolExecutor(1) as threads:
        end = threads.submit(run)
        until(lambda: run.long_on(fleet.head.name), seconds=RESULT_S)
        fleet.head.restart()
        end.result(timeout=RESULT_S)
    run.check()
    assert started_again(run.kept), "nothing ran when the head was killed"


@pytest.mark.slow
def test_no_task_is_lost_when_workers_are_killed(fleet: Fleet, tmp_path: Path) -> None:
    run = Run(fleet, tmp_path / "run", 300, 0.1)
    before = fleet.settled()
    victims = random.Random(0).sample(sorted(before), 6)
    with ThreadPoolExecutor(1) as threads:
        end = threads.submit(run)
        for part, slot in enumerate(victims):
            until(lambda part=part: len(run.results) >= 30 * (part + 1), seconds=RESULT_S)
            os.kill(before[slot], signal.SIGKILL)
        end.result(timeout=RESULT_S)
    run.check()
    after = fleet.settled()
    assert {slot for slot in after if after[slot] != before[slot]} == set(victims)
