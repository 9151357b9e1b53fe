"""A deployed fleet that nobody uses ends itself; the next plan says so, and a deploy brings it back with its jobs."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml
from support import ROOT
from terraform_projects.commands import environment, left, processes, skyinfra, until

from skyinfra.node.folder import NodeDirectory

STAYS = 'sky.ComputePool(name="cpu", nodes=2, provider=sky.Local())'
ENDS = STAYS.replace("sky.Local()", 'sky.Local(), stop_after_idle="5s"')
SCRIPT = "print('ran')\n"
LONG = "import time\ntime.sleep(3600)\n"


def declare(folder: Path, pool: str) -> None:
    main = folder / "main.py"
    main.write_text(re.sub(r"sky\.ComputePool\(.*\)(?=,?\n    \])", pool, main.read_text(), flags=re.DOTALL))
    assert pool in main.read_text()


@pytest.fixture
def project(tmp_path: Path) -> Iterator[Path]:
    folder = tmp_path / "project"
    skyinfra(tmp_path, "init", str(folder), "--stack", "demo")
    declare(folder, ENDS)
    (folder / "script.py").write_text(SCRIPT)
    yield folder
    skyinfra(folder, "destroy", "--auto-approve")
    until(lambda: not processes(folder))
    assert not left(folder)


@pytest.mark.slow
def test_a_fleet_ends_and_comes_back_with_its_jobs(project: Path) -> None:
    skyinfra(project, "deploy", "--auto-approve")
    assert "demo/cpu is not idle for 2h." in skyinfra(project, "keep", "demo/cpu", "2h").stdout
    assert "no changes" in skyinfra(project, "plan").stdout
    skyinfra(project, "run", "--detach", "--name", "first", "demo/cpu", "script.py")
    assert "kept no longer" in skyinfra(project, "keep", "demo/cpu", "0").stdout
    # No client, no server: the nodes end for themselves, the runner, its watchdog and its workers.
    until(lambda: not processes(project), seconds=120)
    said = " ".join(skyinfra(project, "plan").stderr.split())
    assert "cpu: 2 nodes ended without a deploy, not used for 5s (stop_after_idle); a deploy brings 2 back." in said
    skyinfra(project, "deploy", "--auto-approve")
    skyinfra(project, "keep", "demo/cpu")
    listed = skyinfra(project, "jobs", "list", "demo/cpu").stdout
    assert "first" in listed and "done" in listed
    assert skyinfra(project, "run", "demo/cpu", "script.py").stdout == "ran\n"
    assert "no changes" in skyinfra(project, "plan").stdout
    assert skyinfra(project, "keep", "demo/cpu", "2 h", check=False).returncode == 2


def unused(project: Path, *options: str, limit: str = "2s") -> tuple[int, str]:
    """The exit code and the output of a destroy, where nobody uses the fleet."""
    done = skyinfra(project, "destroy", "--auto-approve", "--when-idle", limit, *options, check=False)
    return done.returncode, " ".join((done.stderr + done.stdout).split())


@pytest.mark.slow
def test_a_fleet_is_destroyed_once_nobody_uses_it(project: Path) -> None:
    declare(project, STAYS)
    (project / "long.py").write_text(LONG)
    skyinfra(project, "deploy", "--auto-approve")
    # It was never used, and has just booted.
    code, said = unused(project, limit="10m")
    assert code == 0 and said.endswith("demo: not destroyed") and "demo/cpu: was used" in said, said
    skyinfra(project, "run", "--detach", "--name", "first", "demo/cpu", "long.py")
    code, said = unused(project)
    assert code == 0 and "demo/cpu: in use:" in said and "job first" in said, said
    skyinfra(project, "keep", "demo/cpu", "2h")
    skyinfra(project, "jobs", "cancel", "demo/cpu", "first")
    until(lambda: "kept from being idle" in unused(project)[1], seconds=180)
    skyinfra(project, "keep", "demo/cpu", "0")
    # A head that does not answer is not idle.
    head = NodeDirectory(project / ".skyinfra" / "demo" / "cpu" / "cpu-0").status()
    assert head is not None and head.pid is not None
    os.kill(head.pid, signal.SIGSTOP)
    try:
        code, said = unused(project)
    finally:
        os.kill(head.pid, signal.SIGCONT)
    assert code == 1 and "nobody knows whether it is used" in said and said.endswith("not destroyed"), said
    until(lambda: "cpu-1" in skyinfra(project, "exec", "demo/cpu", "cpu-1", "--", "echo", "cpu-1", check=False).stdout)
    code, said = unused(project, "--wait", limit="5s")
    assert code == 0 and said.endswith("demo: destroyed") and "demo/cpu: was used" in said, said


@pytest.mark.slow
def test_a_fleet_that_has_ended_itself_is_destroyed(project: Path) -> None:
    skyinfra(project, "deploy", "--auto-approve")
    skyinfra(project, "run", "demo/cpu", "script.py")
    until(lambda: not processes(project), seconds=180)
    # As the scheduled workflow of the examples does it.
    workflow = yaml.safe_load((ROOT / "examples" / "destroy-when-idle.yml").read_text())["jobs"]["destroy"]
    steps = [step["run"] for step in workflow["steps"] if step.get("run", "").startswith("skyinfra ")]
    given = environment(**{**workflow["env"], "STACK": "demo"})
    done = subprocess.run(["sh", "-ec", *steps], cwd=project, env=given, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0 and done.stdout.endswith("demo: destroyed\n"), done.stdout + done.stderr


@pytest.mark.slow
def test_a_block_whose_program_was_killed_ends(tmp_path: Path) -> None:
    body = """
        import time
        import skyinfra as sky

        @sky.compute
        def double(x: int) -> int:
            return 2 * x

        with sky.ComputePool(provider=sky.Local(), stop_after_idle="5s") as pool:
            assert double(2) >> pool == 4
            open("inside", "w").close()
            time.sleep(600)
    """
    (tmp_path / "program.py").write_text(textwrap.dedent(body))
    program = subprocess.Popen([sys.executable, "program.py"], cwd=tmp_path, env=environment())
    until((tmp_path / "inside").exists)
    program.send_signal(signal.SIGKILL)
    program.wait()
    until(lambda: not processes(tmp_path), seconds=120)
    skyinfra(tmp_path, "destroy", "session", "--auto-approve")
    assert not left(tmp_path)
