"""Variables of an image reach the processes of tasks alone: not the runner, which has the fleet's secret, nor root."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

from local_fleets.running_node import RunningNode

import skyinfra as sky

PRELOADED = "/nonexistent/ours.so"


@sky.compute
def variables() -> dict[str, str]:
    return dict(os.environ)


def test_an_image_changes_nothing_but_tasks(make_node: Callable[..., RunningNode]) -> None:
    """Of a declaration of a version before, too, which was not checked."""
    elsewhere = "/nonexistent/elsewhere"
    env = {"LD_PRELOAD": PRELOADED, "PATH_OF_MINE": "/x", "SKYINFRA_NODE_DIR": elsewhere, "SKYINFRA_TREE": elsewhere}
    node = make_node(cpu_slots=1, env=env)
    runner_pid = node.boot().pid
    with node.pool() as pool:
        found = variables() >> pool
    assert (found["LD_PRELOAD"], found["PATH_OF_MINE"]) == (PRELOADED, "/x")
    assert Path(found["SKYINFRA_NODE_DIR"]).exists() and elsewhere not in found.values()
    runner = Path(f"/proc/{runner_pid}/environ").read_bytes()
    assert b"ours.so" not in runner and b"PATH_OF_MINE" not in runner
