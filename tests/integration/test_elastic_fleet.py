"""A deployed local fleet whose size follows its work: nodes come for a queue and go after it, and no plan sees it."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any

import pytest
from terraform_projects.commands import environment, left, processes, skyinfra, status, until

pytestmark = pytest.mark.slow

POOL = 'sky.ComputePool(name="cpu", nodes=sky.Range({}, {}), idle_seconds=5, provider=sky.Local())'
# What ran is written down by who ran it: none may be lost, and none be there twice unless its node died.
QUEUE = """
    import sys
    import skyinfra as sky

    @sky.compute
    def work(number: int, folder: str) -> int:
        import os, time
        time.sleep(1)
        while os.path.exists(os.path.join(folder, "hold")):
            time.sleep(0.1)
        with open(os.path.join(folder, "ran"), "a") as file:
            file.write(f"{number} {sky.instance_info().node}\\n")
        return number

    with sky.connect("demo", "cpu") as pool:
        assert list(pool.map(work, range(24), [sys.argv[1]] * 24)) == list(range(24))
"""
GANG = """
    import skyinfra as sky

    @sky.compute
    def rank() -> str:
        return sky.instance_info().node

    with sky.connect("demo", "cpu") as pool:
        try:
            pool.launch(rank(), nodes=5, per_node=1, framework="none")
        except sky.SkyinfraError as error:
            assert "demo/cpu has 4 nodes at most" in str(error), error
        else:
            raise AssertionError("there are never five nodes")
        assert len(set(pool.launch(rank(), nodes=3, per_node=1, framework="none"))) == 3
"""


def declare(project: Path, least: int, most: int) -> None:
    main = project / "main.py"
    pool = r"sky\.ComputePool\(.*?(\n        |Local\(\))\)"
    main.write_text(re.sub(pool, POOL.format(least, most), main.read_text(), flags=re.DOTALL))
    assert POOL.format(least, most) in main.read_text()


@pytest.fixture
def project(tmp_path: Path) -> Iterator[Path]:
    folder = tmp_path / "project"
    skyinfra(tmp_path, "init", str(folder), "--stack", "demo")
    declare(folder, 0, 4)
    (folder / "crowd.py").write_text(textwrap.dedent(QUEUE))
    yield folder
    while _started:  # a test that failed leaves none to the next one
        with _started.pop() as program:
            program.kill()
    skyinfra(folder, "destroy", "--auto-approve")
    until(lambda: not processes(folder))
    assert not left(folder)


def size(project: Path) -> dict[str, Any]:
    found: dict[str, Any] = status(project, "demo")["pools"][0]["size"]
    return found


def nodes(project: Path) -> list[Path]:
    return sorted((project / ".skyinfra/demo/cpu").glob("cpu-group-*"))


def has(project: Path, count: int) -> bool:
    return size(project)["nodes"] == count and len(nodes(project)) == count


_started: list[subprocess.Popen[bytes]] = []


def started(project: Path, *words: str, stderr: IO[str] | None = None) -> subprocess.Popen[bytes]:
    """Starts a Python program, which ends with the test."""
    program = subprocess.Popen([sys.executable, *words], cwd=project, env=environment(), stderr=stderr)
    _started.append(program)
    return program


def unchanged(project: Path) -> bool:
    return "no changes" in skyinfra(project, "plan").stdout


def ran(project: Path) -> list[int]:
    return sorted(int(line.split()[0]) for line in (project / "ran").read_text().splitlines())


def test_it_grows_to_the_most_and_goes_back_to_nothing_and_every_plan_is_empty(project: Path) -> None:
    skyinfra(project, "deploy", "--auto-approve")
    assert has(project, 0) and unchanged(project)
    (project / "hold").touch()
    queue = started(project, "crowd.py", str(project))
    until(lambda: has(project, 4), seconds=300)
    assert size(project)["why"].endswith("wait for a slot") and unchanged(project)
    (project / "hold").unlink()
    assert queue.wait(timeout=300) == 0 and ran(project) == list(range(24))
    until(lambda: has(project, 0), seconds=300)
    assert size(project)["why"].endswith("had no task for a while") and unchanged(project)
    # Another most reaches the head while it runs, and nothing is made anew but its configuration.
    declare(project, 1, 2)
    changes = json.loads(skyinfra(project, "plan", "--json").stdout)["changes"]
    assert [each["address"] for each in changes] == ["module.cpu.terraform_data.head"]
    skyinfra(project, "deploy", "--auto-approve")
    until(lambda: has(project, 1), seconds=300)
    assert size(project)["why"] == "1 is the least" and unchanged(project)
    assert started(project, "crowd.py", str(project)).wait(timeout=300) == 0
    assert 1 <= len(nodes(project)) <= 2


def test_a_client_is_told_why_it_waits_and_a_mended_configuration_is_tried_at_once(project: Path) -> None:
    skyinfra(project, "deploy", "--auto-approve")
    template = project / ".skyinfra/demo/cpu/group.json"
    whole = template.read_text()
    template.write_text(whole.replace('"head":', '"had":', 1))
    said = project / "said"
    with said.open("w") as stderr:
        queue = started(project, "crowd.py", str(project), stderr=stderr)
    until(lambda: "demo/cpu: work waits: no more nodes have come" in said.read_text(), seconds=300)
    assert re.search(r"node cpu-group-\d did not start: .*had.*; the next try is in \d", said.read_text())
    assert "did not start" in size(project)["problem"] and size(project)["wanted"] == 0
    # A deploy that changes what nodes are made of writes it anew; the pause would be longer than this.
    template.write_text(whole)
    assert queue.wait(timeout=300) == 0 and ran(project) == list(range(24))


def test_no_task_is_lost_where_head_and_node_are_killed_while_it_grows(project: Path) -> None:
    skyinfra(project, "deploy", "--auto-approve")
    # Held, so that no node has ended again before it is killed.
    (project / "hold").touch()
    queue = started(project, "crowd.py", str(project))
    until(lambda: size(project)["nodes"] >= 1, seconds=300)
    for folder in (project / ".skyinfra/demo/cpu/cpu-0", nodes(project)[0]):
        os.kill(int((folder / "runner.pid").read_text()), signal.SIGKILL)
    (project / "hold").unlink()
    assert queue.wait(timeout=300) == 0
    # One that ran on the node that was killed may have run twice.
    assert set(ran(project)) == set(range(24))
    until(lambda: has(project, 0), seconds=300)
    assert unchanged(project)


def test_a_gang_gets_as_many_nodes_as_it_needs(project: Path) -> None:
    skyinfra(project, "deploy", "--auto-approve")
    (project / "ranks.py").write_text(textwrap.dedent(GANG))
    ranks = started(project, "ranks.py")
    assert ranks.wait(timeout=300) == 0
    until(lambda: has(project, 0), seconds=300)


def test_a_destroy_while_nodes_start_leaves_nothing(project: Path) -> None:
    skyinfra(project, "deploy", "--auto-approve")
    queue = started(project, "crowd.py", str(project))
    until(lambda: bool(nodes(project)), seconds=300)
    queue.kill()
    queue.wait()
    skyinfra(project, "destroy", "--auto-approve")
    until(lambda: not processes(project))
    assert not left(project)
