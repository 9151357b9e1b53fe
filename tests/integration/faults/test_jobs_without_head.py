"""The head is killed while jobs run on three nodes: those on healthy nodes go on, and what is repeated is said."""

from __future__ import annotations

from pathlib import Path

import pytest
from namespaces.fleet import RESULT_S, Fleet
from tasks_on_nodes.faults import count, starts
from terraform_projects.commands import until

from skyinfra.client.jobs import Job

# The fixture that all share is made once: the tests run in one process.
pytestmark = pytest.mark.xdist_group("faults-links")

# One on the machine of the head, and one on each slot of the others.
PLACES = ("n0", *["n1"] * 4, *["n2"] * 4)
SECONDS = 8.0


@pytest.mark.slow
@pytest.mark.parametrize("kills", [1, 2])
def test_jobs_of_healthy_nodes_go_on_when_the_head_is_killed(fleet: Fleet, tmp_path: Path, kills: int) -> None:
    note = tmp_path / "starts"
    with fleet.connect() as pool:
        jobs: list[Job[tuple[int, str]]] = [
            pool.select(node=node).detach(count(number, str(note), SECONDS * kills), f"{tmp_path.name}-{number}")
            for number, node in enumerate(PLACES)
        ]
        until(lambda: len(starts(note)) == len(PLACES), seconds=RESULT_S)
        until(lambda: all(job.info().slot for job in jobs), seconds=RESULT_S)
        for _ in range(kills):
            fleet.head.restart()
            fleet.head.wait()
        assert [job.result(timeout=RESULT_S) for job in jobs] == list(enumerate(PLACES))
        found = [job.info() for job in jobs]
    begun = [[number for number, _ in starts(note)].count(each) for each in range(len(PLACES))]
    assert begun[1:] == [info.attempts for info in found[1:]] == [1] * 8
    # It may not have begun when the head is killed again.
    assert 2 <= begun[0] <= found[0].attempts <= 1 + kills
    assert [info.repeated is not None for info in found] == [True] + [False] * 8
    assert "on n0/" in str(found[0].repeated)
