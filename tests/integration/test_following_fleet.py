"""Layouts that follow the work in a fleet that Terraform made: deploys undo nothing, and status says why."""

from __future__ import annotations

import time
from pathlib import Path

import pytest
from terraform_projects.commands import copy_quickstart, processes, skyinfra, status, until

import skyinfra as sky
from skyinfra.client import open_pool
from skyinfra.tasks import Task
from skyinfra.terraform.project import Project

pytestmark = pytest.mark.slow

FOLLOW = 'H100(), layout=sky.mig.Follow(among=["2g.20gb*3", "3g.40gb*2", "7g.80gb"], idle_seconds=1)'


def profile_of(folder: str, seconds: float) -> str | None:
    with (Path(folder) / "starts").open("a") as file:
        file.write(".")
    time.sleep(seconds)
    return sky.instance_info().profile


def test_a_fleet_follows_its_work_and_terraform_does_not_fight_it(tmp_path: Path) -> None:
    project = copy_quickstart(tmp_path)
    main = project / "main.py"
    text = main.read_text().replace('H100(mig="3g.40gb")', FOLLOW).replace("nodes=2", "nodes=1")
    main.write_text(text)
    skyinfra(project, "deploy", "--auto-approve")
    try:
        with open_pool(Project.find(project).stack("quickstart").fleet("mig")) as pool:
            task = Task(profile_of, (str(tmp_path), 0.3))
            wanted = ["2g.20gb"] * 5 + ["7g.80gb"] * 2 + ["2g.20gb"] * 5
            found = [pool.submit(task.options(profile=name)).result() for name in wanted]
            assert found == wanted
            assert task.options(gpu_memory_gb=41) >> pool == "7g.80gb"
            (shown,) = status(project)["pools"]
            assert shown["follow"]["among"] == ["2g.20gb*3", "3g.40gb*2", "7g.80gb"]
            changes = [(each["before"], each["layout"]) for each in shown["follow"]["changes"]]
            assert changes == [("2g.20gb*3", "7g.80gb"), ("7g.80gb", "2g.20gb*3"), ("2g.20gb*3", "7g.80gb")]
            table = skyinfra(project, "status").stdout
            assert "Layouts follow the work: 2g.20gb*3, 3g.40gb*2, 7g.80gb, after 1s." in table
            assert "mig-0 GPU 0: 2g.20gb*3 -> 7g.80gb: 1 task for 41 GB waited" in table
            # Nothing is to be done for Terraform, and a changed declaration undoes no choice.
            assert "no changes, everything is as declared" in skyinfra(project, "plan").stdout
            main.write_text(text.replace("H100()", 'H100(mig="3g.40gb")'))
            plan = skyinfra(project, "plan")
            assert "slots go" not in plan.stdout + plan.stderr
            skyinfra(project, "deploy", "--auto-approve")
            assert [slot.profile for slot in pool.slots()] == ["7g.80gb"]
            assert len((tmp_path / "starts").read_text()) == len(wanted) + 1, "no task ran twice"
            # One layout for good.
            main.write_text(text.replace(FOLLOW, 'H100(mig="3g.40gb")'))
            skyinfra(project, "deploy", "--auto-approve")
            until(lambda: [slot.profile for slot in pool.slots()] == ["3g.40gb"] * 2)
            assert status(project)["pools"][0]["follow"] is None
    finally:
        skyinfra(project, "destroy", "--auto-approve")
    until(lambda: not processes(project))
