"""The files of a node that clients put and get: for how long they pass."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest
from local_fleets.running_node import until

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


def test_what_a_client_has_left_answers_no_other(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    begun: list[threading.Event] = []

    def get(_: Files, path: str) -> str:
        begun.append(threading.Event())
        begun[-1].wait(60)
        return f"tree of get {len(begun)}"

    monkeypatch.setattr(files, "_WAIT_S", 0.01)
    monkeypatch.setattr(Files, "_get", get)
    found = Files(tmp_path / "node.json", NodeDirectory(tmp_path))

    def ended(number: int) -> dict[str, object]:
        begun[number].set()
        until(lambda: not found.active, "it has passed")
        return found.get("out")

    until(lambda: found.get("out") and begun, "it passes")
    # Who waits asks again at once, and gets it.
    assert ended(0) == {"done": True, "tree": "tree of get 1"}
    monkeypatch.setattr(files, "_ABANDONED_S", 0.0)
    until(lambda: found.get("out") and len(begun) > 1, "it passes again, and its client goes")
    assert ended(1) == {"done": False, "tree": None}, "the files are looked at again"
    until(lambda: len(begun) > 2, "for the client that asks now")
    begun[2].set()
