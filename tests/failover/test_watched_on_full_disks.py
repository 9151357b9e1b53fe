"""``skyinfra watch`` on a disk that takes nothing: the error of a deploy is the one that is said."""

from __future__ import annotations

import errno
from pathlib import Path
from types import SimpleNamespace
from typing import IO, Any

import pytest
from terraform_projects.synthesized import synthesized

import skyinfra as sky
from skyinfra.cli import watch
from skyinfra.failover.watching import Look, Seen
from skyinfra.terraform.project import Project
from skyinfra.terraform.stores import local_store


def test_what_a_deploy_refuses_is_not_hidden_by_the_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    stack = synthesized(tmp_path, sky.ComputePool(name="t", provider=sky.Local()))
    written: list[str] = []
    store = local_store(tmp_path, "s")
    write = store.write

    def full(name: str, content: IO[bytes]) -> None:
        written.append(name)
        if len(written) == 2:
            raise OSError(errno.ENOSPC, "No space left on device")
        write(name, content)

    def deploy() -> None:
        raise sky.StateLocked("the state is locked")

    monkeypatch.setattr(store, "write", full)
    failover: Any = SimpleNamespace(refuse_elsewhere=lambda: None, deploy=deploy)
    monkeypatch.setattr(watch, "failover_of", lambda *_, **__: failover)
    watching = watch._Watching(Project.find(tmp_path), stack, 900.0, True, 0.0, ())
    with pytest.raises(sky.StateLocked):
        watching._bring_back("t", store, Look("t", Seen(), "no slot"), "again", "no nodes")
    assert len(written) == 2
