"""A node of Google Cloud: set up, watched and taken back through the metadata service of its machine alone."""

from __future__ import annotations

import json
from collections.abc import Callable

import pytest
from booted_nodes.fleet import BOOT_S, Bed, Fleet
from booted_nodes.google import on_google
from tasks_on_nodes.booted import look
from terraform_projects.commands import until

import skyinfra as sky

pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("booted-more")]


def test_a_node_is_set_up_watched_and_taken_back_by_its_metadata(bed: Bed, fleet: Callable[..., Fleet]) -> None:
    made = fleet(bed.declare(provider=sky.GCP(flex_start_hours=1)))
    # Nothing but the packages comes from elsewhere.
    for machine in made.nodes:
        on_google(machine, made)
    for file in made.bucket.folder.iterdir():
        file.unlink()
    node = made.boot().head
    with made.connect() as pool:
        assert len(look() @ pool) == 4
        node.metadata.attributes["skyinfra-layout"] = "7g.80gb"
        until(lambda: len(node.status()["slots"]) == 1, seconds=BOOT_S)
        until(lambda: len(pool.slots()) == 1 and len(look() @ pool) == 1)
    assert [each["profile"] for gpu in node.gpus() for each in gpu["instances"]] == ["7g.80gb"]
    assert node.metadata.refused == 0
    node.metadata.preempted = "TRUE"
    status = until(lambda: (s := node.status()) and s.get("drain_reason") and s, seconds=60) or {}
    assert "Google Cloud takes the spot machine back" in json.dumps(status["drain_reason"])
