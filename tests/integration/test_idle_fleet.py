"""A deployed fleet that nobody uses ends itself; the next plan says so, and a deploy brings it back with its jobs."""

from __future__ import annotations

import re
import signal
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path

import pytest
from terraform_projects.commands import environment, left, processes, skyinfra, until

POOL = 'sky.ComputePool(name="cpu", nodes=2, provider=sky.Local(), stop_after_idle="5s")'
SCRIPT = "print('ran')\n"


@pytest.fixture
def project(tmp_path: Path) -> Iterator[Path]:
    folder = tmp_path / "project"
    skyinfra(tmp_path, "init", str(folder), "--stack", "demo")
    main = folder / "main.py"
    main.write_text(re.sub(r"sky\.ComputePool\(.*?\n        \)", POOL, main.read_text(), flags=re.DOTALL))
    assert POOL in main.read_text()
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
