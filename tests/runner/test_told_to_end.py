"""A runner with a grace is told to end, as by a batch system: its tasks end by themselves, and nothing is left."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest
from local_fleets.running_node import RunningNode, until
from terraform_projects.commands import kill

import skyinfra as sky
from skyinfra import InvalidNodeConfig
from skyinfra.drain import request
from skyinfra.protocol.nodeconfig import NodeConfig
from skyinfra.submission.snapshot import Target
from skyinfra.tasks import Task

MakeNode = Callable[..., RunningNode]


def interrupted(path: str) -> str:
    """Runs until it is informed, and half a second longer."""
    Path(path).touch()
    while not sky.interrupted():
        time.sleep(0.02)
    time.sleep(0.5)
    told = sky.interruption()
    return told.why if told is not None else ""


def for_ever(path: str) -> None:
    Path(path).touch()
    while True:
        time.sleep(0.1)


def terminate_fork() -> int:
    """Returns the exit code of a fork that was sent SIGTERM."""
    ours, theirs = os.pipe()
    if (pid := os.fork()) == 0:
        os.write(theirs, b"x")
        time.sleep(20)
        os._exit(0)
    os.read(ours, 1)
    os.kill(pid, signal.SIGTERM)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def family(pid: int) -> list[psutil.Process]:
    return [psutil.Process(pid), *psutil.Process(pid).children(recursive=True)]


@pytest.mark.slow
def test_every_process_gets_the_signal_and_the_task_ends_by_itself(make_node: MakeNode, tmp_path: Path) -> None:
    node = make_node("n1", cpu_slots=2, grace_seconds=30.0)
    status = node.boot()
    assert status.pid is not None
    with node.pool() as pool:
        future = pool.send(Task(interrupted, (str(tmp_path / "runs"),)), Target(), windowed=False)
        until((tmp_path / "runs").exists, "the task runs")
        processes = family(status.pid)
        began = time.monotonic()
        # As Slurm does, which knows nothing of who started whom; a second time, as it does as well.
        for _ in range(2):
            for process in processes:
                os.kill(process.pid, signal.SIGTERM)
        assert future.result(timeout=20) == "the node is asked to end"
    until(lambda: node.directory.holder() is None, "the runner has ended")
    assert 0.5 < time.monotonic() - began < 20
    until(lambda: not [each for each in processes if each.is_running()], "all processes have ended")
    assert node.status().state == "stopped"
    # A container that starts again serves again.
    assert node.boot().state == "ready"
    assert request.find(node.directory) is None


@pytest.mark.slow
def test_a_task_that_does_not_end_has_the_grace_and_no_longer(make_node: MakeNode, tmp_path: Path) -> None:
    node = make_node("n1", cpu_slots=1, grace_seconds=2.0)
    status = node.boot()
    assert status.pid is not None
    with node.pool() as pool:
        pool.send(Task(for_ever, (str(tmp_path / "runs"),)), Target(), windowed=False)
        until((tmp_path / "runs").exists, "the task runs")
        began = time.monotonic()
        os.kill(status.pid, signal.SIGTERM)
        until(lambda: node.directory.holder() is None, "the runner has ended")
        assert 2.0 <= time.monotonic() - began < 12


@pytest.mark.slow
def test_a_task_ends_its_forks_by_the_signal(make_node: MakeNode) -> None:
    node = make_node("n1", cpu_slots=1, grace_seconds=2.0)
    node.boot()
    with node.pool() as pool:
        future = pool.send(Task(terminate_fork), Target(), windowed=False)
        assert future.result(timeout=60) == -signal.SIGTERM


@pytest.mark.slow
def test_a_node_whose_head_is_gone_does_not_wait_for_it(make_node: MakeNode) -> None:
    head = make_node("n1", cpu_slots=1)
    ends = head.boot()
    worker = make_node("n2", cpu_slots=1, head=False, scheduler=ends.scheduler, grace_seconds=600.0)
    status = worker.boot()
    assert ends.pid is not None and status.pid is not None
    kill(family(ends.pid))
    os.kill(status.pid, signal.SIGTERM)
    until(lambda: worker.directory.holder() is None, "the runner has ended")
    assert worker.status().state == "stopped"


def test_ready_is_an_exit_code(make_node: MakeNode) -> None:
    node = make_node("n1", cpu_slots=1)
    assert node.run("status", "--ready", check=False).returncode == 1
    node.boot()
    assert node.run("status", "--ready").returncode == 0
    node.run("stop")
    assert node.run("status", "--ready", check=False).returncode == 1


def test_a_grace_below_zero_is_refused() -> None:
    document = NodeConfig(1, "s", "p", "n", "local", True, "127.0.0.1:0", cpu_slots=1).to_json()
    with pytest.raises(InvalidNodeConfig, match=r"node\.json\.grace_seconds: must be at least 0"):
        NodeConfig.read({**document, "grace_seconds": -1.0})
