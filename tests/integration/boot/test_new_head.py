"""Two booted nodes whose head is replaced: its jobs are on the volume, and go on."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from booted_nodes.fleet import BOOT_S, Bed, Fleet
from terraform_projects.commands import until

import skyinfra as sky
from skyinfra.client import Pool

# One bed for each group: what its nodes are made of is built once for all of them.
pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("booted-first")]

ONE = {"7g.80gb": 1}
JOBS = ("a", "b", "c", "d")


@sky.compute
def wait(name: str, gate: str) -> str:
    """Notes its start, and ends when its node has the file *gate*; on every node for itself."""
    folder = Path(os.environ["SKYINFRA_NODE_DIR"])
    (folder / f"started-{name}").touch()
    while not (folder / gate).exists():
        time.sleep(0.1)
    return name


def states(pool: Pool) -> dict[str, str]:
    return {job.name: job.state for job in pool.jobs()}


def test_jobs_go_on_when_their_head_is_replaced(bed: Bed, fleet: Callable[..., Fleet]) -> None:
    made = fleet(bed.declare(2, sky.accelerators.H100(count=1, mig=ONE))).boot()
    with made.connect() as pool:
        until(lambda: len(pool.slots()) == 2, seconds=BOOT_S)
        assert pool.submit(sum, [3, 4], detach="over").result(timeout=60) == 7
        for name in JOBS:
            pool.detach(wait(name, "open"), name)
        until(lambda: list(states(pool).values()).count("running") == 2)
    old = made.head
    made.replace_head()
    made.head.start()
    made.wait(made.head)
    assert made.head.root != old.root
    with made.connect() as pool:
        assert set(states(pool)) == {"over", *JOBS}
        assert pool.job("over").result(timeout=60) == 7
        until(lambda: list(states(pool).values()).count("running") == 2, seconds=BOOT_S)
        for machine in made.nodes:
            machine.execute("touch", "/var/lib/skyinfra/open")
        assert [pool.job(name).result(timeout=BOOT_S) for name in JOBS] == list(JOBS)
    head = made.head
    assert head.execute("stat", "-c", "%U %a", "/var/lib/skyinfra-head/jobs").stdout.split() == ["skyinfra", "700"]
    assert head.execute("readlink", "/var/lib/skyinfra/jobs").stdout.strip() == "/var/lib/skyinfra-head/jobs"
    # Before the runner starts: without the volume there is no head that has lost its jobs.
    boot = head.execute("cat", "/var/log/skyinfra/boot.jsonl").stdout.splitlines()
    steps = [line.partition('"step": "')[2].partition('"')[0] for line in boot]
    assert steps.index("volume of the head") < steps.index("services")
