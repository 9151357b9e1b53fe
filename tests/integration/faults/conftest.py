from __future__ import annotations

import contextlib
from collections.abc import Iterator

import pytest
from namespaces.fleet import Fleet, links

NODES = 3


@pytest.fixture(autouse=True)
def _needs_terraform() -> None:
    """Terraform has no part in this."""


@pytest.fixture(scope="session")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet]:
    """Three nodes. Where they cannot be: a failure under CI, a skip elsewhere, with the reason."""
    with links() as made, contextlib.closing(Fleet(tmp_path_factory.mktemp("faults"), made, nodes=NODES)) as fleet:
        yield fleet


@pytest.fixture
def fleet(running: Fleet) -> Fleet:
    """The three nodes, ready: whatever the test before has done to them."""
    running.settled()
    return running
