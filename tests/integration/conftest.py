from __future__ import annotations

import os
from collections.abc import Iterator

import pytest
from booted_nodes.image import Unavailable
from booted_nodes.podman import Engine


@pytest.fixture(autouse=True)
def _needs_terraform(terraform_program: str) -> None:
    """Every test here drives a real Terraform."""


@pytest.fixture(scope="session")
def engine() -> Iterator[Engine]:
    """Podman. Where there can be none: a failure under CI, a skip elsewhere, with the reason."""
    try:
        made = Engine()
    except Unavailable as error:
        if os.environ.get("CI"):
            pytest.fail(str(error), pytrace=False)
        pytest.skip(str(error))
    try:
        yield made
    finally:
        made.close()


@pytest.fixture
def clean(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> Iterator[Engine]:
    """Podman without anything but images, before and after the test."""
    for name, value in engine.environment.items():
        monkeypatch.setenv(name, value)
    assert not engine.left()
    yield engine
    left = engine.left()
    engine.run("rm", "-f", "-a", "-v", "-t", "0")
    engine.run("network", "prune", "-f")
    engine.run("volume", "prune", "-f")
    assert not left
