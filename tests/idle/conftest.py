"""The node that the tests of its end share."""

from __future__ import annotations

from pathlib import Path

import pytest
from local_fleets.watched_node import World


@pytest.fixture
def world(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> World:
    return World(tmp_path, monkeypatch)
