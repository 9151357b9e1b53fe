from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest
from booted_nodes.fleet import Bed, Fleet
from booted_nodes.image import Unavailable

import skyinfra as sky

# A boot under emulation takes minutes of both cores: `make test-vm`.
collect_ignore = [] if os.environ.get("SKYINFRA_TEST_VM") else ["test_virtual_machine.py"]


@pytest.fixture(autouse=True)
def _needs_terraform() -> None:
    """Terraform has no part in this."""


@pytest.fixture(scope="session")
def bed(fake_driver: Path) -> Iterator[Bed]:
    """What booted nodes share. Where they cannot be booted: a failure under CI, a skip elsewhere, with the reason."""
    try:
        made = Bed(fake_driver)
    except Unavailable as error:
        if os.environ.get("CI"):
            pytest.fail(str(error), pytrace=False)
        pytest.skip(str(error))
    try:
        yield made
    finally:
        made.close()


@pytest.fixture(scope="module")
def three(bed: Bed) -> Iterator[Fleet]:
    """A head and two workers, booted and ready. A test leaves them as it found them."""
    made = bed.fleet(bed.declare(3))
    try:
        yield made.boot()
    finally:
        made.close()


@pytest.fixture
def fleet(bed: Bed) -> Iterator[Callable[..., Fleet]]:
    """``fleet(pool, gpus=..., guest=...)``: a fleet of nodes, off; by default one node of `Bed.declare`."""
    with ExitStack() as stack:

        def make(pool: sky.ComputePool | None = None, **hardware: object) -> Fleet:
            made = bed.fleet(pool or bed.declare(), **hardware)
            stack.callback(made.close)
            return made

        yield make
