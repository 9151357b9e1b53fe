"""A head that is replaced keeps its jobs: with real Terraform, on this machine."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
from support import ROOT
from terraform_projects.commands import left, processes, skyinfra, until

import skyinfra as sky
from skyinfra.client import Pool, open_pool
from skyinfra.tasks import Task
from skyinfra.terraform.project import Project

PROGRAM = """
import skyinfra as sky
from cdktf import App
app = App()
sky.FleetStack(app, "here", pools=[sky.ComputePool(name="cpu", nodes=2, provider=sky.Local())])
app.synth()
"""
SCRIPT = ROOT / "modules" / "local" / "node.sh"
WORDS = "data/words.txt"


def wait_for(path: str) -> tuple[str, str]:
    """Notes every start, and ends when somebody has made the file *path*."""
    with open(f"{path}.starts", "a") as file:  # noqa: PTH123
        file.write(".")
    while not os.path.exists(path):  # noqa: PTH110
        time.sleep(0.02)
    return os.path.basename(path), sky.synced(WORDS).read_text()  # noqa: PTH119


def starts(gate: Path) -> int:
    file = gate.with_name(f"{gate.name}.starts")
    return len(file.read_text()) if file.exists() else 0


def states(pool: Pool) -> dict[str, str]:
    return {job.name: job.state for job in pool.jobs()}


@pytest.mark.slow
def test_jobs_go_on_when_their_head_is_replaced(tmp_path: Path) -> None:
    here, gates = tmp_path / "project", {name: tmp_path / name for name in "abcd"}
    (here / "data").mkdir(parents=True)
    (here / "cdktf.json").write_text(json.dumps({"app": "python main.py"}))
    (here / "main.py").write_text(PROGRAM)
    (here / WORDS).write_text("kept")
    skyinfra(here, "deploy", "--auto-approve")
    try:
        manifest = Project.find(here).stack("here").fleet("cpu")
        folder = here / ".skyinfra" / "here" / "cpu" / "cpu-0"
        address = (folder / "scheduler").read_text()
        # A folder made anew may get the inode of the one before, so a file tells them apart.
        (folder / "of-the-first-head").touch()
        with open_pool(manifest) as pool:
            pool.sync(here / "data")
            assert pool.submit(sum, [3, 4], detach="over").result(timeout=60) == 7
            for name, gate in gates.items():
                pool.detach(Task(wait_for, (str(gate),)), name)
            until(lambda: sum(map(starts, gates.values())) == 2)
            done = skyinfra(here, "deploy", "--auto-approve", "--replace", 'module.cpu.terraform_data.node["cpu-0"]')
            assert f"here/cpu: 5 of 5 jobs kept in {here}/.skyinfra/.jobs/here" in done.stderr
            # Another head, at the same address: this client has not ended.
            assert not (folder / "of-the-first-head").exists() and (folder / "scheduler").read_text() == address
            assert set(states(pool)) == {"over", *gates}
            assert pool.job("over").result(timeout=60) == 7
            assert {states(pool)[name] for name in gates} == {"queued", "running"}
            for gate in gates.values():
                gate.touch()
            assert {pool.job(name).result(timeout=60) for name in gates} == {(name, "kept") for name in gates}
        # That of the other node went on; that of the head's own has begun again.
        assert sorted(map(starts, gates.values())) == [1, 1, 1, 2]
    finally:
        skyinfra(here, "destroy", "--auto-approve")
    assert not processes(here) and not left(here)


class Fleet:
    """The folders of a fleet of one node, whose runner does nothing but take a port."""

    def __init__(self, folder: Path) -> None:
        self.head, self.state, self._bin = folder / "cpu-0", folder / "head", folder.parent / "runner"
        self._bin.write_text('#!/bin/sh\ncd "$(dirname "$3")"; [ -e scheduler ] || echo 127.0.0.1:$$ >scheduler\n')
        self._bin.chmod(0o755)

    def call(self, verb: str, folder: Path, **variables: str) -> None:
        given = {"RUNNER": str(self._bin), "CONFIGURATION": "{}", "WAIT": "5", "FOLDER": str(folder), **variables}
        subprocess.run(["sh", SCRIPT, verb], env={"PATH": "/usr/bin:/bin", **given}, check=True)

    def up(self) -> None:
        self.call("up", self.head, STATE=str(self.state))

    def replace(self) -> None:
        self.call("down", self.head)
        assert not self.head.exists()
        self.up()

    def job(self, name: str = "1") -> Path:
        return self.head / "jobs" / name / "job.json"


@pytest.fixture
def fleet(tmp_path: Path) -> Fleet:
    (tmp_path / "pool").mkdir()
    return Fleet(tmp_path / "pool")


def test_the_folder_of_the_state_outlives_that_of_the_head(fleet: Fleet) -> None:
    fleet.call("state", fleet.state)
    fleet.up()
    fleet.job().parent.mkdir()
    fleet.job().write_text("mine")
    port = (fleet.head / "scheduler").read_text()
    fleet.replace()
    assert (fleet.job().read_text(), (fleet.head / "scheduler").read_text()) == ("mine", port)
    # Whoever frees another port is not held to the old one.
    (fleet.head / "scheduler").unlink()
    fleet.up()
    assert (fleet.head / "scheduler").read_text() != port
    fleet.call("down", fleet.head)
    fleet.call("down", fleet.state)
    assert not fleet.state.parent.exists()


def test_what_a_head_of_an_earlier_version_has_is_taken_over(fleet: Fleet) -> None:
    fleet.job().parent.mkdir(parents=True)
    fleet.job().write_text("old")
    (fleet.head / "scheduler").write_text("127.0.0.1:1\n")
    stands_for = [sys.executable, "-c", "import time; time.sleep(60)", str(fleet.head / "node.json")]
    with subprocess.Popen(stands_for, start_new_session=True) as runner:
        (fleet.head / "runner.pid").write_text(str(runner.pid))
        fleet.call("state", fleet.state)
        fleet.up()
        # Nothing is moved from under a runner that works with it.
        assert not (fleet.head / "jobs").is_symlink()
        fleet.replace()
        assert runner.poll() is not None
    assert fleet.job().read_text() == "old" and (fleet.head / "jobs").is_symlink()
    assert (fleet.head / "scheduler").read_text() == "127.0.0.1:1\n"


def test_a_head_that_was_killed_gives_its_state_at_its_next_start(fleet: Fleet) -> None:
    fleet.job().parent.mkdir(parents=True)
    fleet.job().write_text("old")
    fleet.up()
    assert fleet.job().read_text() == "old" and (fleet.head / "jobs").resolve() == fleet.state / "jobs"


def test_a_state_that_was_removed_is_made_again(fleet: Fleet) -> None:
    fleet.up()
    fleet.call("down", fleet.state)
    assert not (fleet.head / "jobs").exists()
    fleet.up()
    assert list((fleet.head / "jobs").iterdir()) == []
