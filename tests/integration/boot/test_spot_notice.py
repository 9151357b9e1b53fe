"""EC2 takes a booted node back while tasks run there."""

from __future__ import annotations

import datetime
from collections.abc import Callable

import pytest
from booted_nodes.fleet import Bed, Fleet
from booted_nodes.machine import Machine
from tasks_on_nodes.booted import look, stay
from terraform_projects.commands import until

# The fixture that all share is made once: the tests run in one process.
pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("booted-more")]

SLOTS = 4
NOTICE = datetime.timedelta(seconds=40)


def named(machine: Machine, what: str) -> set[str]:
    """The files that tasks have left there."""
    return {file.name for file in (machine.root / "var/lib/skyinfra").glob(f"{what}-*")}


def test_tasks_of_a_node_that_is_taken_back_finish_elsewhere(bed: Bed, fleet: Callable[..., Fleet]) -> None:
    made = fleet(bed.declare(2)).boot()
    head, taken = made.nodes
    with made.connect() as pool:
        futures = [pool.submit(stay(number, taken.name)) for number in range(SLOTS * 3)]
        until(lambda: len(named(taken, "started")) == SLOTS)
        ends = datetime.datetime.now(datetime.UTC) + NOTICE
        taken.metadata.notice("terminate", ends.strftime("%Y-%m-%dT%H:%M:%SZ"))
        until(lambda: len(named(taken, "interrupted")) == SLOTS, seconds=NOTICE.total_seconds())
        results = [future.result(timeout=120) for future in futures]
        # It has left before its time was up, and what was there is done again elsewhere; nothing new came.
        assert datetime.datetime.now(datetime.UTC) < ends
        assert {slot.node for slot in pool.slots()} == {head.name}
        taken.kill()
        assert {node for node, *_ in look() @ pool.select(node=head.name)} == {head.name}
    assert results == [(number, head.name) for number in range(SLOTS * 3)]
    assert len(named(taken, "started")) == SLOTS
