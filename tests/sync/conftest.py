"""The project that tests of this folder sync."""

from __future__ import annotations

import sys

import pytest
from local_fleets.synced_project import make_project


@pytest.fixture
def project(tmp_path, monkeypatch):
    """A project with a package in src/ and data, as the working directory."""
    root = tmp_path / "project"
    make_project(root)
    monkeypatch.chdir(root)
    monkeypatch.syspath_prepend(str(root / "src"))
    yield root
    for name in [name for name in sys.modules if name.partition(".")[0] == "shiny"]:
        del sys.modules[name]
