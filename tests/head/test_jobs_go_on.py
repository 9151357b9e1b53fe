"""Jobs on healthy nodes go on when their head ends: the next head takes them over, and says what it repeats."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Callable
from pathlib import Path

import pytest
from local_fleets.running_node import BIG, RunningNode, h100, until
from tasks_on_nodes.jobs import manifest_of, starts, wait_for
from typer.testing import CliRunner

from skyinfra.cli.app import app
from skyinfra.client import Pool, open_pool
from skyinfra.client.jobs import Job
from skyinfra.errors import JobCancelled, ScriptFailed
from skyinfra.worker import output

MakeNode = Callable[..., RunningNode]


class Pair:
    """A head without a slot, and a node."""

    def __init__(self, make_node: MakeNode, slots: int = 1) -> None:
        self.head = make_node("n1", scheduler_only=True, cpu_slots=1)
        self.head.boot()
        scheduler = self.head.directory.scheduler_file.read_text().strip()
        self.node = make_node("n2", accelerator=h100(BIG[:slots]), head=False, scheduler=scheduler)
        self.node.boot()

    def pool(self) -> Pool:
        return open_pool(manifest_of(self.head))

    def kill(self) -> None:
        pid = self.head.status().pid
        assert pid is not None
        os.kill(pid, signal.SIGKILL)


def knows(pair: Pair, job: Job[object], slot: str = "n2/0") -> None:
    """Waits until the next head will know where *job* runs."""
    sent = pair.head.directory.jobs / job.id / "sent"
    until(lambda: sent.exists() and sent.read_text().endswith(f" {slot}\n"), "the head knows where")


def running(pair: Pair, pool: Pool, path: Path) -> Job[object]:
    """A job that runs, and the head knows where."""
    job: Job[object] = pool.submit(wait_for, str(path), "a value", detach="away")
    until(lambda: starts(path), "it runs")
    knows(pair, job)
    return job


@pytest.fixture
def pair(make_node: MakeNode) -> Pair:
    return Pair(make_node)


def test_a_job_goes_on_when_its_head_is_killed_twice(pair: Pair, tmp_path: Path) -> None:
    path = tmp_path / "run"
    with pair.head.pool(pair.node) as pool:
        job = running(pair, pool, path)
        for _ in range(2):
            pair.kill()
            pair.head.boot()
            until(lambda: job.state == "running", "the head has taken it over")
        Path(f"{path}.open").touch()
        assert job.result(timeout=60) == "a value"
        info = job.info()
        assert (len(starts(path)), info.attempts, info.slot, info.repeated) == (1, 1, "n2/0", None)
        assert job.logs().splitlines() == ["started", "let through"]
        # The slot takes others again.
        assert pool.submit(os.getpid).result(timeout=60) == int(starts(path)[0])


@pytest.mark.slow
def test_the_result_of_a_job_that_ended_without_a_head_is_taken(pair: Pair, tmp_path: Path) -> None:
    path = tmp_path / "run"
    with pair.head.pool(pair.node) as pool:
        job = running(pair, pool, path)
        log = Path(output.file_of(f"{job.name}-{job.id}.1", pair.node.directory.path))
        pair.kill()
        Path(f"{path}.open").touch()
        until(lambda: "let through" in log.read_text(), "it has ended")
        pair.head.boot()
        assert job.result(timeout=60) == "a value"
        assert (len(starts(path)), job.info().attempts, job.info().repeated) == (1, 1, None)


@pytest.mark.slow
def test_a_job_whose_node_died_with_the_head_is_repeated_and_that_is_said(pair: Pair, tmp_path: Path) -> None:
    path = tmp_path / "run"
    with pair.head.pool(pair.node) as pool:
        job = running(pair, pool, path)
        pair.kill()
        node = pair.node.status().pid
        assert node is not None
        os.kill(node, signal.SIGKILL)
        pair.head.boot()
        pair.node.boot()
        until(lambda: len(starts(path)) == 2, "it began again")
        Path(f"{path}.open").touch()
        assert job.result(timeout=60) == "a value"
        info = job.info()
        assert info.attempts == 2
        assert info.repeated == "attempt 1 on n2/0 was lost while the head was away: it began again"


@pytest.mark.slow
def test_a_job_that_is_cancelled_before_its_node_is_back_ends_there(pair: Pair, tmp_path: Path) -> None:
    path = tmp_path / "run"
    with pair.head.pool(pair.node) as pool:
        job = running(pair, pool, path)
        node = pair.node.status().pid
        pair.kill()
        assert node is not None
        below = int(starts(path)[0])
        os.kill(below, signal.SIGSTOP)  # it does not come back yet
        try:
            pair.head.boot()
            assert job.cancel()
        finally:
            os.kill(below, signal.SIGCONT)
        with pytest.raises(JobCancelled):
            job.result(timeout=60)
        assert pool.submit(os.getpid).result(timeout=60) == below
        assert len(starts(path)) == 1


SCRIPT = """
import os, sys, time
open(sys.argv[1], "a").write(f"{os.getpid()}\\n")
while not os.path.exists(sys.argv[1] + ".open"): time.sleep(0.01)
open("loss.csv", "w").write("0.1")
print("done with", os.environ["TOKEN"][:2])
sys.exit(3)
"""


@pytest.mark.slow
def test_a_job_with_a_secret_and_a_script_with_files_go_on(
    pair: Pair, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TOKEN", "a secret of a job")
    script, manifest, program = tmp_path / "script", tmp_path / "fleet.json", tmp_path / "write.py"
    program.write_text(SCRIPT)
    with pair.head.pool(pair.node) as pool:
        manifest.write_text(json.dumps(pool.manifest.to_json()))
        options = ["--detach", "--name", "script", "--fetch", "*.csv", "--secret", "TOKEN"]
        arguments = ["run", str(manifest), *options, str(program), "--", str(script)]
        assert CliRunner().invoke(app, arguments).exit_code == 0
        until(lambda: starts(script), "it runs")
        knows(pair, pool.job("script"))
        pair.kill()
        Path(f"{script}.open").touch()
        pair.head.boot()
        error = pool.job("script").exception(timeout=60)
        assert isinstance(error, ScriptFailed)
        assert error.code == 3
        info = pool.job("script").info()
        assert (len(starts(script)), info.attempts, info.lacks, info.repeated) == (1, 1, (), None)
        until(lambda: pool.job("script").info().written, "its files are kept")
        assert [each.name for each in pool.job("script").fetch(tmp_path / "got")] == ["loss.csv"]
