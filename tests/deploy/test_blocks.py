"""The fleets of ``with`` blocks, found from the folder, also where their program was killed; projects above."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
from terraform_projects.synthesized import document_of, synthesized
from typer.testing import CliRunner

import skyinfra as sky
from skyinfra.cli.app import app
from skyinfra.deploy.orphans import stack_to_destroy
from skyinfra.deploy.session import Session
from skyinfra.deploy.spending import described, program_of
from skyinfra.terminal import names
from skyinfra.terraform import blocks, project
from skyinfra.terraform.blocks import Opened
from skyinfra.terraform.project import Project

POOL = sky.ComputePool(name="h100", provider=sky.AWS(region="us-east-1"), accelerator="H100:8")
MACHINE = {
    "mode": "managed",
    "type": "aws_instance",
    "name": "head",
    "module": "module.h100",
    "provider": 'module.h100.provider["registry.terraform.io/hashicorp/aws"]',
    "instances": [
        {"attributes": {"instance_type": "p5.48xlarge", "availability_zone": "us-east-1a", "arn": "arn:aws:ec2:x"}}
    ],
}


@pytest.fixture(autouse=True)
def _said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(project, "_said", set())


@pytest.fixture
def killed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Path]:
    """Makes the block that a program has left in a folder, with a machine of AWS."""

    def make(base: Path = tmp_path, stack: str = "session", hours: float = 2) -> Path:
        base.mkdir(exist_ok=True)
        base.chmod(0o755)
        folder = blocks.folder_of(base, stack)
        lock = blocks.hold(folder)
        assert lock is not None
        began = (datetime.now(UTC) - timedelta(hours=hours)).isoformat(timespec="seconds")
        blocks.record(lock, Opened("gpu_tests.py --all", 4711, began))
        lock.close()
        document = document_of(stack, [POOL])
        document.setdefault("terraform", {})["backend"] = {"local": {"path": "../../../terraform.tfstate"}}
        at = folder / "cdktf.out" / "stacks" / stack
        at.mkdir(parents=True)
        (at / "cdk.tf.json").write_text(json.dumps(document))
        (folder / "terraform.tfstate").write_text(json.dumps({"version": 4, "outputs": {}, "resources": [MACHINE]}))
        monkeypatch.chdir(base)
        return folder

    return make


def skyinfra(*words: str) -> str:
    result = CliRunner().invoke(app, list(words))
    assert result.exit_code == 0, result.output
    return result.stdout


def test_a_killed_programs_fleet_is_listed_with_its_price(killed: Callable[..., Path]) -> None:
    folder = killed()
    out = skyinfra()
    assert "session: partly deployed, at $55.04 an hour." in out
    assert "It is the fleet of gpu_tests.py --all, process 4711, which ended without destroying it; since 20" in out
    assert "(2.0 h). It has cost about $110." in out
    assert "skyinfra destroy session" in out
    (block,) = Project.find().blocks()
    assert block.folder == folder and not block.running
    assert described(block.stack.pools) == "1 node of aws p5.48xlarge, H100:8, $55.04/h"
    # Without a name, too, where it is the only one.
    assert stack_to_destroy(Project.find(), None).folder == block.stack.folder
    assert names.fleets() == ["session/h100"]


def test_whether_its_program_runs_is_known_by_its_lock(killed: Callable[..., Path]) -> None:
    lock = blocks.hold(killed())
    assert lock is not None
    (block,) = Project.find().blocks()
    assert "which still runs" in program_of(block)
    lock.close()
    (block,) = Project.find().blocks()
    assert "which still runs" not in program_of(block)


def test_a_second_program_is_told_which_one_has_the_name(killed: Callable[..., Path], tmp_path: Path) -> None:
    lock = blocks.hold(killed())
    with pytest.raises(sky.FleetError, match=r"under that name: gpu_tests\.py --all, process 4711") as raised:
        Session(sky.ComputePool(provider=sky.Local())).open()
    assert 'stack="..."' in str(raised.value)
    assert lock is not None
    lock.close()


def test_a_name_that_the_project_declares_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    synthesized(tmp_path, sky.ComputePool(provider=sky.Local()), name="lab")
    with pytest.raises(sky.FleetError, match="declares a stack of that name"):
        Session(sky.ComputePool(provider=sky.Local(), stack="lab")).open()
    assert not (tmp_path / ".skyinfra").exists()


def test_blocks_stand_beside_what_is_declared(
    killed: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    killed(tmp_path / "scripts", "sweep")
    synthesized(tmp_path, sky.ComputePool(provider=sky.Local()), name="lab")
    found = Project.find()  # in scripts
    assert found.folder == tmp_path and [each.stack.name for each in found.blocks()] == ["sweep"]
    assert found.stack("sweep").pools[0]["name"] == "h100" and found.stack("lab").name == "lab"
    assert found.base_of(found.stack("sweep")) == tmp_path / "scripts"
    assert found.base_of(found.stack("lab")) == tmp_path
    # Without a name it is the declared one.
    assert found.stack().name == stack_to_destroy(found, None).name == "lab"
    assert stack_to_destroy(found, "sweep").name == "sweep"
    with pytest.raises(sky.StackNotFound, match="Its stacks: lab, sweep"):
        found.stack("other")


def test_a_folder_of_blocks_alone_has_nothing_to_deploy(killed: Callable[..., Path]) -> None:
    killed()
    with pytest.raises(sky.ProjectNotFound, match=r"only the fleet of a `with` block \(session\)"):
        Project.find().synth()


def test_a_block_that_another_account_could_have_made_is_no_block(killed: Callable[..., Path], tmp_path: Path) -> None:
    folder = killed()
    folder.chmod(0o777)
    assert not Project.find().blocks() if (tmp_path / "cdktf.json").exists() else blocks.blocks(tmp_path) == ()
    folder.chmod(0o700)
    assert blocks.blocks(tmp_path)
    if os.geteuid() == 0:
        os.chown(folder.parent, 12345, -1)
        assert blocks.blocks(tmp_path) == ()
        with pytest.raises(sky.ProjectError, match="belongs to another account"):
            blocks.hold(folder)


def test_a_project_is_found_from_below_and_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    synthesized(tmp_path / "lab", sky.ComputePool(provider=sky.Local()), name="lab")
    below = tmp_path / "lab" / "src" / "deep"
    below.mkdir(parents=True)
    monkeypatch.chdir(below)
    assert Project.find().folder == tmp_path / "lab"
    assert Project.find().stack().name == "lab"
    assert capsys.readouterr().err == f"The project is that of {tmp_path / 'lab'}.\n"
    assert skyinfra().startswith("lab: ")
    # A folder that has one itself says nothing.
    synthesized(below, sky.ComputePool(provider=sky.Local()), name="own")
    assert Project.find().stack().name == "own" and capsys.readouterr().err == ""


def test_no_way_up_beyond_home_nor_into_the_folder_of_strangers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    above, home = tmp_path / "above", tmp_path / "above" / "me"
    synthesized(above, sky.ComputePool(provider=sky.Local()), name="lab")
    (home / "work").mkdir(parents=True)
    monkeypatch.chdir(home / "work")
    assert Project.find().folder == above
    monkeypatch.setenv("HOME", str(home))
    with pytest.raises(sky.ProjectNotFound, match="nor in a folder above"):
        Project.find()
    monkeypatch.setenv("HOME", "/nowhere")
    above.chmod(0o777)
    with pytest.raises(sky.ProjectNotFound, match="is not taken: another account owns it or may write to it"):
        Project.find()
    if os.geteuid() == 0:
        above.chmod(0o755)
        os.chown(above / "cdktf.json", 12345, -1)
        with pytest.raises(sky.ProjectNotFound, match="is not taken"):
            Project.find()
