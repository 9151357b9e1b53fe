"""The quickstart, changed: another layout while tasks run, a lost folder, a new secret, more and fewer nodes."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
from terraform_projects.commands import copy_quickstart, environment, left, processes, skyinfra, slots_of, status, until

import skyinfra as sky
from skyinfra.client import open_pool
from skyinfra.submission.snapshot import Target
from skyinfra.tasks import Task
from skyinfra.terraform.project import Project


def until_open(path: str) -> tuple[str, str | None]:
    """A task that runs until somebody makes a file; notes every start."""
    with open(f"{path}.starts", "a") as file:  # noqa: PTH123
        file.write(".")
    while not os.path.exists(path):  # noqa: PTH110
        time.sleep(0.05)
    info = sky.instance_info()
    return info.slot, info.profile


@pytest.mark.slow
def test_a_layout_changes_in_place_while_tasks_run(tmp_path: Path) -> None:
    project = copy_quickstart(tmp_path)
    main = project / "main.py"
    declared = "H100(count=2, mig=sky.mig.per_gpu({}, {}))"
    main.write_text(main.read_text().replace('H100(mig="3g.40gb")', declared.format('"3g.40gb*1"', '"3g.40gb"')))
    skyinfra(project, "deploy", "--auto-approve")
    try:
        runners = {path.read_text() for path in project.glob(".skyinfra/*/*/*/runner.pid")}
        with open_pool(Project.find(project).stack("quickstart").fleet("mig")) as pool:
            before = pool.slots()
            assert [s.profile for s in before] == ["3g.40gb"] * 6
            goes, stays = before[0], before[1]
            gates = [str(tmp_path / name) for name in ("goes", "stays")]
            futures = [
                pool.send(Task(until_open, (gate,)), Target(slot.slot, profile=slot.profile), windowed=False)
                for slot, gate in zip((goes, stays), gates, strict=True)
            ]
            until(lambda: all(Path(f"{gate}.starts").exists() for gate in gates))
            main.write_text(main.read_text().replace('"3g.40gb*1"', '"2g.20gb"'))
            plan = json.loads(skyinfra(project, "mig", "plan", "quickstart/mig", "--json", "--svg", "plan.svg").stdout)
            assert [(each["node"], each["gpu"]) for each in plan["gpus"]] == [("mig-0", 0), ("mig-1", 0)]
            assert plan["gpus"][0]["ends"] == {goes.slot: ["until_open"]}
            assert [[place["profile"] for place in each["created"]] for each in plan["gpus"]] == [["2g.20gb"] * 3] * 2
            assert plan["unchanged"] == 2
            assert "mig-0 GPU 0; mig-1 GPU 0: after" in (project / "plan.svg").read_text()
            whole = skyinfra(project, "mig", "plan", "quickstart/mig", "off|3g.40gb").stdout
            assert "2 slots destroyed, 2 created, 0 kept; 2 GPUs stay as they are; 1 task has 10m to end" in whole, (
                whole
            )
            advice = skyinfra(project, "mig", "advise", "quickstart/mig", check=False)
            assert (advice.returncode, "0 tasks measured, too few" in advice.stderr) == (1, True), advice.stderr
            with subprocess.Popen(
                [sys.executable, "-m", "skyinfra.cli", "deploy", "--auto-approve"],
                cwd=project,
                env=environment(),
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
            ) as deploy:
                # The other node learns the new layout from the head, while the deployment still waits for the head.
                until(lambda: len([s for s in pool.slots() if s.node == "mig-1"]) == 5)
                found = status(project)["pools"][0]["nodes"]
                assert [(n["name"], n["state"]) for n in found] == [("mig-0", "draining"), ("mig-1", "ready")]
                waiting = next(s for s in found[0]["slots"] if s["state"] == "draining")
                assert (waiting["slot"], waiting["waits_for"]) == (goes.slot, ["until_open"])
                assert deploy.poll() is None
                Path(gates[0]).touch()
                assert futures[0].result(timeout=60) == (goes.slot, "3g.40gb")
                out = deploy.communicate(timeout=120)[0]
                assert deploy.returncode == 0, out
                assert "ends      until_open" in out
                assert "2 slots destroyed, 6 created, 0 kept; 2 GPUs stay as they are; 1 task has 10m to end" in out
                assert f"waiting: node mig-0: tasks end on slots that go: slot {goes.slot}: task until_open" in out
            after = pool.slots()
            assert sorted(s.profile or "" for s in after) == ["2g.20gb"] * 6 + ["3g.40gb"] * 4
            assert [s for s in after if s.gpu == 1] == [s for s in before if s.gpu == 1]
            assert not futures[1].done()
            Path(gates[1]).touch()
            assert futures[1].result(timeout=60) == (stays.slot, "3g.40gb")
            assert len(Task(os.getpid) @ pool) == 10, "this client was connected before the change"
            assert [Path(f"{gate}.starts").read_text() for gate in gates] == [".", "."], "nothing ran twice"
        assert {path.read_text() for path in project.glob(".skyinfra/*/*/*/runner.pid")} == runners
        assert all(psutil.pid_exists(int(pid)) for pid in runners), "a node was replaced"
        for log in project.glob(".skyinfra/*/*/*/runner.log"):
            assert not {"Traceback", "WARNING", "ERROR"} & set(log.read_text().split())
    finally:
        skyinfra(project, "destroy", "--auto-approve")
    until(lambda: not processes(project))


@pytest.mark.slow
def test_a_folder_that_was_removed_is_made_again(tmp_path: Path) -> None:
    project = copy_quickstart(tmp_path)
    skyinfra(project, "deploy", "--auto-approve")
    try:
        shutil.rmtree(project / ".skyinfra")
        until(lambda: not processes(project, "skyinfra.runner"))
        skyinfra(project, "deploy", "--auto-approve")
        assert all(s["state"] == "ready" for s in slots_of(status(project)))
        shutil.rmtree(project / ".skyinfra")
    finally:
        skyinfra(project, "destroy", "--auto-approve")
    until(lambda: not processes(project))
    assert not left(project)


@pytest.mark.slow
def test_a_new_secret_reaches_every_node(tmp_path: Path) -> None:
    project = copy_quickstart(tmp_path)
    skyinfra(project, "deploy", "--auto-approve")
    try:
        old = Project.find(project).stack("quickstart").fleet("mig")
        skyinfra(project, "deploy", "--auto-approve", "--replace", "module.mig.terraform_data.secret")
        new = Project.find(project).stack("quickstart").fleet("mig")
        assert old.secret != new.secret
        assert all(s["state"] == "ready" for s in slots_of(status(project)))
        with pytest.raises(sky.FleetError):
            open_pool(old)
    finally:
        skyinfra(project, "destroy", "--auto-approve")


@pytest.mark.slow
def test_more_and_fewer_nodes(tmp_path: Path) -> None:
    project = copy_quickstart(tmp_path)
    main = project / "main.py"
    main.write_text(main.read_text().replace("nodes=2", "nodes=1"))
    skyinfra(project, "deploy", "--auto-approve")
    try:
        head = slots_of(status(project))[0]["uuid"]
        main.write_text(main.read_text().replace("nodes=1", "nodes=2"))
        skyinfra(project, "deploy", "--auto-approve")
        assert len(slots_of(status(project))) == 4
        main.write_text(main.read_text().replace("nodes=2", "nodes=1"))
        skyinfra(project, "deploy", "--auto-approve")
        assert next(s["uuid"] for s in slots_of(status(project))) == head
        assert sorted(p.name for p in (project / ".skyinfra" / "quickstart" / "mig").iterdir()) == [
            "head",
            "mig-0",
            "secret",
        ]
    finally:
        skyinfra(project, "destroy", "--auto-approve")


@pytest.mark.slow
def test_a_pool_that_is_not_declared_any_more_is_ended(tmp_path: Path) -> None:
    project = copy_quickstart(tmp_path)
    main, folder = project / "main.py", project / ".skyinfra" / "quickstart"
    declared = main.read_text().replace("nodes=2", "nodes=1")
    main.write_text(
        declared.replace("    ],\n)", '        sky.ComputePool(name="cpu", provider=sky.Local()),\n    ],\n)')
    )
    skyinfra(project, "deploy", "--auto-approve")
    try:
        assert processes(folder / "cpu")
        main.write_text(declared)
        planned = skyinfra(project, "plan")
        assert "cpu-0 is destroyed, for its pool is not declared any more" in planned.stdout + planned.stderr
        skyinfra(project, "deploy", "--auto-approve")
        assert not processes(folder / "cpu") and [each.name for each in folder.iterdir()] == ["mig"]
        assert all(s["state"] == "ready" for s in slots_of(status(project)))
        assert json.loads(skyinfra(project, "plan", "--json").stdout)["changes"] == []
    finally:
        skyinfra(project, "destroy", "--auto-approve")
    until(lambda: not processes(project))
