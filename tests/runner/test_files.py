"""The files of a node that clients put and get: for how long they pass."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest

from skyinfra.node.folder import NodeDirectory
from skyinfra.runner import files
from skyinfra.runner.files import Files


def test_files_that_pass_are_a_use_until_they_have(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    passed = threading.Event()

    def put(_: Files, name: str) -> str:
        passed.wait()
        return name

    monkeypatch.setattr(files, "_WAIT_S", 0.0)
    monkeypatch.setattr(Files, "_put", put)
    found = Files(tmp_path / "node.json", NodeDirectory(tmp_path))
    assert not found.active
    try:
        assert found.put("tree") == {"done": False, "tree": None}
        assert found.active
    finally:
        passed.set()
    # Nobody asks for it any more, as its client has gone.
    found._workers.shutdown()
    assert not found.active
