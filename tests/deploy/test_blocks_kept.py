"""The fleet of a ``with`` block that cannot be destroyed: its state stays where the command line finds it."""

from __future__ import annotations

import json
import resource
import stat
from contextlib import ExitStack
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from terraform_projects.synthesized import document_of

import skyinfra as sky
from skyinfra.deploy import last_run, session
from skyinfra.deploy.session import Session
from skyinfra.errors import MissingDependency, ProjectError, StateNotSaved
from skyinfra.terraform import blocks
from skyinfra.terraform.blocks import Opened
from skyinfra.terraform.program import Plan
from skyinfra.terraform.synthesized import read_stack

POOL = sky.ComputePool(name="cpu", provider=sky.Local())
STATE = {"version": 4, "outputs": {}, "resources": [{"mode": "managed", "type": "t", "name": "n", "instances": [{}]}]}


@pytest.fixture(autouse=True)
def _here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    tmp_path.chmod(0o755)
    monkeypatch.setattr(session, "find_program", lambda: ("terraform",))


def written(folder: Path) -> Path:
    """Writes what is synthesized for the block of `POOL` in *folder*; returns where Terraform runs."""
    at = folder / "cdktf.out" / "stacks" / "session"
    at.mkdir(parents=True, exist_ok=True)
    (at / "cdk.tf.json").write_text(json.dumps(document_of("session", [POOL])))
    return at


@pytest.fixture
def killed(tmp_path: Path) -> Path:
    """The folder of the block that a killed program has left."""
    folder = blocks.folder_of(tmp_path, "session")
    lock = blocks.hold(folder)
    assert lock is not None
    blocks.record(lock, Opened("train.py", 4711, "2026-11-25T09:40:00+00:00"))
    lock.close()
    written(folder)
    (folder / "terraform.tfstate").write_text(json.dumps(STATE))
    return folder


def library_that(folder: Path, error: BaseException) -> Any:
    """Returns a cdktf that fails while it writes the stack."""

    def app(outdir: str) -> None:
        (folder / "cdktf.out" / "stacks" / "session" / "cdk.tf.json").write_text("{")
        raise error

    return SimpleNamespace(App=app)


@pytest.mark.parametrize("error", [OSError(28, "No space left on device"), KeyboardInterrupt()])
def test_a_synthesis_that_fails_leaves_the_fleet_of_a_killed_program(
    killed: Path, tmp_path: Path, error: BaseException, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    monkeypatch.setattr(session, "node_environment", dict)
    monkeypatch.setattr("skyinfra.stack.load_library", lambda: library_that(killed, error))
    with pytest.raises(type(error)):
        Session(POOL).open()
    assert json.loads((killed / "terraform.tfstate").read_text()) == STATE
    (block,) = blocks.blocks(tmp_path)
    assert block.stack.pools[0]["name"] == "cpu" and not block.running
    assert "session: its fleet still exists. Destroy it with: skyinfra destroy session\n" in capsys.readouterr().err


def test_a_program_without_node_leaves_the_fleet_of_a_killed_one(killed: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def missing() -> dict[str, str]:
        raise MissingDependency("cdktf needs Node.js")

    monkeypatch.setattr(session, "node_environment", missing)
    with pytest.raises(MissingDependency):
        Session(POOL).open()
    assert (killed / "terraform.tfstate").exists()


def test_a_synthesis_that_fails_leaves_no_folder_where_there_was_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    def missing() -> dict[str, str]:
        raise MissingDependency("cdktf needs Node.js")

    monkeypatch.setattr(session, "node_environment", missing)
    with pytest.raises(MissingDependency):
        Session(POOL).open()
    assert not (tmp_path / ".skyinfra").exists() and "still exists" not in capsys.readouterr().err


def test_a_state_that_could_not_be_saved_stays_with_its_hint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    folder = blocks.folder_of(tmp_path, "session")
    carried_out: list[bool] = []

    def synthesize(_: Session) -> Any:
        at = written(folder)
        return read_stack("session", at, at / "cdk.tf.json")

    def carry_out(_: object, *, destroy: bool = False, **others: object) -> Plan:
        carried_out.append(destroy)
        if not destroy:
            (folder / "cdktf.out" / "stacks" / "session" / "errored.tfstate").write_text("{}")
            raise StateNotSaved("the state was not saved", hint="It is in errored.tfstate")
        return Plan(tmp_path / "plan")

    monkeypatch.setattr(Session, "_synthesize", synthesize)
    monkeypatch.setattr(session, "carry_out", carry_out)
    with pytest.raises(StateNotSaved) as caught:
        Session(POOL).open()
    assert caught.value.hint == "It is in errored.tfstate\nThen destroy the fleet with: skyinfra destroy session"
    assert carried_out == [False] and "destroyed" not in capsys.readouterr().err
    assert (folder / "cdktf.out" / "stacks" / "session" / "errored.tfstate").exists()
    (block,) = blocks.blocks(tmp_path)
    assert not block.running
    # The same program once more would make all of it again.
    with pytest.raises(ProjectError, match="could not save it") as refused:
        Session(POOL).open()
    assert "state push" in str(refused.value) and "skyinfra destroy session" in str(refused.value)
    assert carried_out == [False]


def test_a_disk_that_takes_nothing_does_not_hide_where_a_state_is(tmp_path: Path) -> None:
    at = written(blocks.folder_of(tmp_path, "session"))
    stack = read_stack("session", at, at / "cdk.tf.json")
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    with pytest.raises(StateNotSaved), ExitStack() as after, last_run.recorded(stack, "deploy"):
        kept = last_run.last_run(stack)
        after.callback(resource.setrlimit, resource.RLIMIT_FSIZE, before)
        resource.setrlimit(resource.RLIMIT_FSIZE, (0, before[1]))
        raise StateNotSaved("the state was not saved", hint="It is in errored.tfstate")
    assert kept is not None and kept.verb == "deploy" and kept.running
    assert stat.S_IMODE((at / "last-run.json").stat().st_mode) == 0o600


def test_a_destroy_whose_state_could_not_be_saved_keeps_its_hint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object, **__: object) -> None:
        raise StateNotSaved("the state was not saved", hint="It is in errored.tfstate")

    monkeypatch.setattr(session, "carry_out", fail)
    opened = Session(POOL)
    at = written(opened.folder)
    opened._synthesized = read_stack("session", at, at / "cdk.tf.json")
    with pytest.raises(StateNotSaved, match="not saved") as caught:
        opened.close()
    assert caught.value.hint == "It is in errored.tfstate\nThen destroy the fleet with: skyinfra destroy session"
    assert at.exists()
