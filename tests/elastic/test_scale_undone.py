"""``skyinfra scale``: the number in the file of places is that of before where its deploy has changed nothing."""

from __future__ import annotations

import errno
from pathlib import Path
from typing import Any

import pytest
import typer
from terraform_projects.synthesized import synthesized

import skyinfra as sky
from skyinfra.cli import stacks, upgrade
from skyinfra.places.choices import Choice, Choices
from skyinfra.terraform.program import Plan


@pytest.fixture
def scaled(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Scales a pool from 2 to 3 by a deploy that ends with an error, and returns the number in the file then."""
    pool = sky.ComputePool(name="t", provider=sky.Container(image="python:3.12"), nodes=sky.Range(1, 4))
    stack = synthesized(tmp_path, pool, backend={"local": {"path": str(tmp_path / "s.tfstate")}})
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(upgrade, "synthesized", lambda project: (stack,))
    monkeypatch.setattr(stacks, "synthesize", lambda *_: stack)
    monkeypatch.setattr(stacks, "keep_jobs", lambda *_: None)

    def scale(error: BaseException, *, applies: bool) -> int | None:
        def carry_out(_: object, *, before: Any, **others: object) -> None:
            if applies:
                before(Plan(tmp_path / "plan"))
            raise error

        monkeypatch.setattr(stacks, "carry_out", carry_out)
        Choices.read(tmp_path).having("s/t", Choice(nodes=2))
        with pytest.raises(type(error)):
            upgrade.scale("s/t", 3, auto_approve=True, wait=False)
        return Choices.read(tmp_path).of("s/t").nodes

    return scale


ENDS = [
    sky.StateLocked("the state is locked"),
    sky.CloudPermissionDenied("the plan was refused"),
    sky.PlaceChanged("it is elsewhere"),
    sky.DiskTooSmall("no disk shrinks"),
    sky.DeployInterrupted("terraform plan was interrupted"),
    KeyboardInterrupt(),
    SystemExit(143),
    typer.Exit(1),
]


@pytest.mark.parametrize("error", ENDS, ids=lambda each: type(each).__name__)
def test_a_deploy_that_did_not_begin_to_apply_leaves_the_number_of_before(scaled: Any, error: BaseException) -> None:
    assert scaled(error, applies=False) == 2


def test_a_full_disk_does_not_hide_why_a_deploy_did_not_begin(scaled: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    choose, chosen = upgrade._choose, list[int | None]()

    def full(project: Any, fleet: str, nodes: int | None) -> None:
        chosen.append(nodes)
        if len(chosen) == 2:
            raise OSError(errno.ENOSPC, "No space left on device")
        choose(project, fleet, nodes)

    monkeypatch.setattr(upgrade, "_choose", full)
    scaled(sky.StateLocked("the state is locked"), applies=False)
    assert chosen == [3, 2]


@pytest.mark.parametrize("error", [*ENDS, sky.ProjectError("cannot be read")], ids=lambda each: type(each).__name__)
def test_a_deploy_that_did_has_the_new_number(scaled: Any, error: BaseException) -> None:
    assert scaled(error, applies=True) == 3
