"""Jobs outlive their head, however it ends, and run no code in it."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from local_fleets import inside
from local_fleets.running_node import BIG, RunningNode, h100, until
from support import first_fast
from tasks_on_nodes.jobs import add, manifest_of, run_out, starts, wait_for

import skyinfra as sky
from skyinfra.client import open_pool, open_questions

MakeNode = Callable[..., RunningNode]


def test_jobs_outlive_a_head_that_is_killed(make_node: MakeNode, tmp_path: Path) -> None:
    head = make_node("n1", accelerator=h100(BIG[:1]))
    head.boot()
    path = tmp_path / "run"
    with head.pool() as pool:
        assert pool.submit(add, 1, 2, detach="before").result(timeout=60) == 3
        running = pool.submit(wait_for, str(path), "a value", detach="running")
        waits = pool.submit(add, 2, 2, detach="waits")
        until(lambda: starts(path), "it runs")
        until(lambda: running.state == "running", "the head knows that it runs")
        pid = head.status().pid
        assert pid is not None
        os.kill(pid, signal.SIGKILL)
        head.boot()
        # The same client, which has noticed nothing but a delay.
        until(lambda: len(starts(path)) == 2, "it runs again")
        Path(f"{path}.open").touch()
        assert running.result(timeout=60) == "a value"
        assert waits.result(timeout=60) == 4
    with open_pool(manifest_of(head)) as pool:
        assert [(job.name, job.state, job.attempts) for job in pool.jobs()] == [
            ("before", "done", 1),
            ("running", "done", 2),
            ("waits", "done", 1),
        ]
        assert pool.job("before").result() == 3


@pytest.mark.slow
def test_a_job_that_ran_out_of_memory_says_what_would_carry_it(make_node: MakeNode) -> None:
    head = make_node("n1", accelerator=h100(BIG))
    head.boot()
    with head.pool() as pool:
        pool.submit(run_out, detach="short").exception(timeout=60)
    # Also to a client that only asks.
    with open_questions(manifest_of(head)) as asked:
        error = asked.job("short").exception(timeout=60)
        assert error is not None
        had, advice = error.__notes__
        assert had.startswith("Slot n1/") and "(3g.40gb of H100) has 40 GB; the task asked for 53.7 GB more" in had
        assert "No slot of this fleet has 54 GB. A larger profile of its GPU: 7g.80gb" in advice


@pytest.mark.slow
def test_an_orderly_stop_of_the_head_loses_no_job(make_node: MakeNode, tmp_path: Path) -> None:
    head = make_node("n1", accelerator=h100(BIG[:1]))
    head.boot()
    path = tmp_path / "run"
    with head.pool() as pool:
        pool.submit(wait_for, str(path), detach="running")
        until(lambda: starts(path), "it runs")
    head.run("stop", "--timeout", "10")
    head.boot()
    until(lambda: len(starts(path)) == 2, "it runs again")
    Path(f"{path}.open").touch()
    with head.pool() as pool:
        pool.job("running").result(timeout=60)
    assert "Traceback" not in head.directory.log_file.read_text()


class NotesWhere(Exception):
    """Whoever unpickles it writes its process id into the file *path*."""

    def __reduce__(self) -> Any:
        return exec, (f"import os; open({self.args[0]!r}, 'a').write(f'{{os.getpid()}}\\n')",)


def poison(path: str, *, raises: bool) -> None:
    """From now on, tasks of this slot end with a pickle that runs code where it is read."""
    from skyinfra.worker import execute

    def run(header: bytes, call: bytes) -> object:
        if raises:
            raise NotesWhere(path)
        return NotesWhere(path)

    execute.run = run  # type: ignore[assignment]


@pytest.mark.parametrize("raises", first_fast([True, False]))
def test_the_end_of_a_job_runs_no_code_in_the_head(make_node: MakeNode, tmp_path: Path, raises: bool) -> None:
    head = make_node("n1", cpu_slots=1)
    pid = head.boot().pid
    path = tmp_path / "where"
    with head.pool() as pool:
        pool.submit(poison, str(path), raises=raises, detach="poison").result(timeout=60)
        job = pool.submit(add, 1, 2, detach="poisoned")
        # The process of the slot reads its exception itself.
        until(lambda: job.done() or str(pid) in starts(path), "it has ended")
        assert str(pid) not in starts(path)
        if raises:  # the code that runs tasks raises nothing: another process took the place of that one
            assert job.result(timeout=60) == 3
        else:
            assert job.state == "failed"
            assert isinstance(job.exception(timeout=60), sky.SkyinfraError)
    # Where a process was replaced, the status says "serving" until the runner next looks at its slots.
    until(lambda: (status := head.directory.status()) is not None and status.state == "ready", "the node is ready")


# A socket that is refused right before its handshake is left to the garbage collection by wrap_socket of Python 3.11.
@pytest.mark.filterwarnings("ignore:Exception ignored in. <ssl.SSLSocket:pytest.PytestUnraisableExceptionWarning")
@pytest.mark.slow
def test_a_scheduler_that_ends_takes_no_job_with_it(
    make_node: MakeNode, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    script = tmp_path / "script.py"
    for name, value in inside.environment(script).items():
        monkeypatch.setenv(name, value)
    head = make_node("n1", cpu_slots=1)
    pid = head.boot().pid
    assert pid is not None
    path = tmp_path / "run"
    with head.pool() as pool:
        job = pool.submit(wait_for, str(path), detach="running")
        until(lambda: starts(path), "it runs")
        until(lambda: job.state == "running", "the head knows that it runs")
        before = head.directory.log_file.read_text()
        inside.run(pid, script, inside.ENDS)
        until(lambda: "starting it again" in head.directory.log_file.read_text()[len(before) :], "it has ended")
        until(lambda: job.state == "running", "the next scheduler has taken it over")
        Path(f"{path}.open").touch()
        job.result(timeout=60)
        info = job.info()
        assert (len(starts(path)), info.attempts, info.repeated) == (1, 1, None)
