"""Local fleets brought to another version of skyinfra: made by an earlier one, and with a new one that is broken."""

from __future__ import annotations

import json
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
from support import ROOT, missing, unpack
from terraform_projects.commands import copy_quickstart, processes, skyinfra, status, until

from skyinfra.node import code

pytestmark = pytest.mark.slow

# The last commit before this version's changes of nodes: its runner knows no upgrade.
BEFORE = "6efb3dcd4e6e"
JOB = "import pathlib, sys, time\ntime.sleep(float(sys.argv[1]))\nprint('ended')\n"


def jobs(project: Path) -> dict[str, dict[str, Any]]:
    found = json.loads(skyinfra(project, "jobs", "quickstart/mig", "--json").stdout)["jobs"]
    return {job["name"]: job for job in found}


def runner_pids(project: Path) -> set[int]:
    return {int(file.read_text()) for file in (project / ".skyinfra" / "quickstart" / "mig").glob("*/runner.pid")}


def ready(project: Path) -> bool:
    (pool,) = status(project)["pools"]
    return [node["state"] for node in pool["nodes"]] == ["ready", "ready"]


def installed(folder: Path, **changed: str) -> dict[str, str]:
    """The environment of another installation of this skyinfra, with other content of some files."""
    for name in ("skyinfra", "modules", "templates"):
        shutil.copytree(ROOT / name, folder / name, ignore=shutil.ignore_patterns("__pycache__"))
    for file, text in changed.items():
        (folder / "skyinfra" / file.replace("__", "/")).with_suffix(".py").write_text(text)
    return {"PYTHONPATH": str(folder)}


def test_a_fleet_of_an_earlier_version_is_used_and_upgraded_with_its_jobs(tmp_path: Path) -> None:
    archive = subprocess.run(
        ["git", "archive", BEFORE, "skyinfra", "modules", "templates"], cwd=ROOT, capture_output=True, check=False
    )
    if archive.returncode != 0:
        missing(f"the commit {BEFORE}, in the history of the repository,")
    unpack(archive.stdout, tmp_path / "before")
    project = copy_quickstart(tmp_path)
    skyinfra(project, "deploy", "--auto-approve", PYTHONPATH=str(tmp_path / "before"))
    before = runner_pids(project)
    (project / "job.py").write_text(JOB)
    # What it knows goes on working.
    assert ready(project)
    assert skyinfra(project, "run", "quickstart/mig", "job.py", "0").stdout.endswith("ended\n")
    for number in range(6):
        skyinfra(project, "run", "quickstart/mig", "--detach", "--name", f"job-{number}", "job.py", "6")
    refused = skyinfra(project, "upgrade", "quickstart/mig", check=False)
    assert refused.returncode == 2
    assert "older" in refused.stdout

    done = skyinfra(project, "upgrade", "quickstart/mig", "--auto-approve")
    assert f"every node has the runner of this skyinfra, {code.version()}" in done.stdout
    assert "mig-1 moves to the new runner" in done.stderr
    assert len(runner_pids(project)) == 2
    assert not runner_pids(project) & before
    until(lambda: ready(project))
    until(lambda: {job["state"] for job in jobs(project).values()} == {"done"}, seconds=120)
    # None was ended and begun again.
    assert {name: job["attempts"] for name, job in jobs(project).items()} == {f"job-{n}": 1 for n in range(6)}
    # A folder for the head's state is new; what the head has kept moves there.
    changes = json.loads(skyinfra(project, "plan", "--json").stdout)["changes"]
    assert [change["action"] for change in changes] == ["create"]
    skyinfra(project, "deploy", "--auto-approve")
    assert {job["state"] for job in jobs(project).values()} == {"done"}
    again = skyinfra(project, "upgrade", "quickstart/mig", "--auto-approve")
    assert all(line.startswith("synth: ") for line in again.stderr.splitlines())
    skyinfra(project, "destroy", "--auto-approve")
    until(lambda: not processes(project))


def test_a_runner_that_does_not_come_up_leaves_the_fleet_with_the_one_before(tmp_path: Path) -> None:
    project = copy_quickstart(tmp_path)
    skyinfra(project, "deploy", "--auto-approve")
    before = runner_pids(project)
    text = "from skyinfra.errors import NodeFailed\n\nraise NodeFailed('not built')\n"
    broken = installed(tmp_path / "broken", runner__serve=text)
    done = skyinfra(project, "upgrade", "quickstart/mig", "--auto-approve", check=False, **broken)
    assert done.returncode == 1
    assert "mig-0 was not upgraded" in done.stderr and "not built" in done.stderr
    assert "The runner before serves again" in done.stderr
    until(lambda: ready(project))
    # Only the head was tried.
    assert len(runner_pids(project) & before) == 1
    (project / "job.py").write_text(JOB)
    assert skyinfra(project, "run", "quickstart/mig", "job.py", "0").stdout.endswith("ended\n")
    skyinfra(project, "destroy", "--auto-approve")
    until(lambda: not processes(project))


def test_a_task_that_does_not_end_in_time_is_ended_and_a_job_begins_again(tmp_path: Path) -> None:
    project = copy_quickstart(tmp_path)
    other = installed(tmp_path / "other", runner__added='"""Another version."""\n')
    skyinfra(project, "deploy", "--auto-approve", **other)
    (project / "job.py").write_text(
        "import pathlib, sys, time\n"
        "file = pathlib.Path(sys.argv[1])\n"
        "again = file.exists()\n"
        "file.write_text('began')\n"
        "time.sleep(0 if again else 600)\n"
    )
    file = tmp_path / "began"
    skyinfra(project, "run", "quickstart/mig", "--detach", "--name", "long", "job.py", str(file))
    until(file.exists)
    skyinfra(project, "upgrade", "quickstart/mig", "--auto-approve", "--drain", "1")
    until(lambda: jobs(project)["long"]["state"] == "done")
    assert ready(project)
    skyinfra(project, "destroy", "--auto-approve")
    until(lambda: not processes(project))
