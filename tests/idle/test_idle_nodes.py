"""Nodes that nobody uses end themselves, by the real runner: with their head and without it, and never with a task."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from local_fleets.running_node import RunningNode, on_slot, until

from skyinfra.drain import request
from skyinfra.idle.meter import FILE, Meter
from skyinfra.submission.snapshot import Target
from skyinfra.tasks import Task

MakeNode = Callable[..., RunningNode]


def wait_for(path: str) -> str:
    """Runs until the file is there."""
    Path(path + ".runs").touch()
    while not Path(path).exists():
        time.sleep(0.02)
    return "done"


def meter(node: RunningNode) -> Meter:
    return Meter.load(node.path / FILE)


def gone(node: RunningNode) -> None:
    until(lambda: node.directory.holder() is None, f"{node.path.name} has ended")


def killed(node: RunningNode) -> None:
    pid = node.status().pid
    assert pid is not None
    os.kill(pid, signal.SIGKILL)
    gone(node)


def use(node: RunningNode, slot: str = "n1/0") -> None:
    with node.client() as client:
        assert on_slot(client, slot, os.getpid) > 0


@pytest.mark.slow
def test_a_node_ends_itself_and_begins_anew(make_node: MakeNode) -> None:
    node = make_node("n1", cpu_slots=2, idle_seconds=2.0)
    node.boot()
    use(node)
    gone(node)
    status = node.status()
    assert (status.state, status.stops) == ("stopped", "not used for 2s (stop_after_idle)")
    assert "ended by itself: not used for 2s" in node.run("status").stdout
    assert meter(node).ended == status.stops
    # The watchdog takes it for one that was stopped; a deploy starts it again, with a life of its own.
    assert node.boot().state == "ready"
    assert request.find(node.directory) is None
    assert meter(node).ended is None


@pytest.mark.slow
def test_a_worker_process_that_was_replaced_keeps_no_node(make_node: MakeNode) -> None:
    """The runner asks each worker whether it is used; nobody answers at the address of the process before."""
    node = make_node("n1", cpu_slots=1, idle_seconds=6.0)
    node.boot()
    use(node)
    time.sleep(2)  # it was asked some times
    with node.client() as client:
        pids = node.pids(client)
        os.kill(pids["n1/0"], signal.SIGKILL)
        until(lambda: node.workers(client) and node.pids(client) != pids, "the slot is back")
    gone(node)
    assert node.status().stops == "not used for 6s (stop_after_idle)"


@pytest.mark.slow
def test_a_node_with_a_task_stays_however_long_that_takes(make_node: MakeNode, tmp_path: Path) -> None:
    node = make_node("n1", cpu_slots=1, idle_seconds=1.0)
    node.boot()
    with node.pool() as pool:
        future = pool.send(Task(wait_for, (str(tmp_path / "go"),)), Target(), windowed=False)
        until((tmp_path / "go.runs").exists, "the task runs")
        lived = meter(node).lived_s
        until(lambda: meter(node).lived_s > lived + 2.5, "more than its idle time has passed")
        assert node.status().state == "ready"
        (tmp_path / "go").touch()
        assert future.result(timeout=20) == "done"
        # The client stays connected, and that does not count.
        gone(node)


@pytest.mark.slow
def test_a_task_that_comes_while_it_ends_takes_the_node_back(make_node: MakeNode, tmp_path: Path) -> None:
    """karpenter#3185: the slots are closed first, and looked at again."""
    node = make_node("n1", cpu_slots=1, idle_seconds=2.0)
    node.boot()
    use(node)
    with node.pool() as pool:
        until(lambda: request.find(node.directory), "its slots are closed")
        future = pool.send(Task(wait_for, (str(tmp_path / "go"),)), Target(), windowed=False)
        until((tmp_path / "go.runs").exists, "the task runs on the node that was about to end")
        (tmp_path / "go").touch()
        assert future.result(timeout=20) == "done"
    gone(node)


@pytest.mark.slow
def test_a_fleet_ends_whose_head_was_killed(make_node: MakeNode, tmp_path: Path) -> None:
    head = make_node("n0", cpu_slots=1)
    head.boot()
    port = head.directory.scheduler_file.read_text().strip()
    worker = make_node("n1", cpu_slots=1, idle_seconds=2.0, head=False, scheduler=port)
    worker.boot()
    with head.pool(worker) as pool:
        pool.send(Task(wait_for, (str(tmp_path / "never"),)), Target(slot="n0/0"), windowed=False)
        until((tmp_path / "never.runs").exists, "the task of the head keeps the fleet")
        until(lambda: meter(worker).begun, "the worker knows of it")
        killed(head)
        # The client waits still, and knows nothing of a head.
        gone(worker)
    assert worker.status().stops == "not used for 2s (stop_after_idle)"


@pytest.mark.slow
def test_no_node_ends_while_another_one_works(make_node: MakeNode, tmp_path: Path) -> None:
    head = make_node("n0", cpu_slots=1, idle_seconds=1.0)
    head.boot()
    worker = make_node(
        "n1", cpu_slots=1, idle_seconds=1.0, head=False, scheduler=head.directory.scheduler_file.read_text().strip()
    )
    worker.boot()
    with head.pool(worker) as pool:
        future = pool.send(Task(wait_for, (str(tmp_path / "go"),)), Target(node="n1"), windowed=False)
        until((tmp_path / "go.runs").exists, "the task runs")
        lived = meter(head).lived_s
        until(lambda: meter(head).lived_s > lived + 2.5, "more than the idle time has passed")
        assert (head.status().state, worker.status().state) == ("ready", "ready")
        (tmp_path / "go").touch()
        assert future.result(timeout=20) == "done"
    gone(head)
    gone(worker)


@pytest.mark.slow
def test_a_runner_that_is_killed_has_forgotten_nothing(make_node: MakeNode) -> None:
    node = make_node("n1", cpu_slots=1, lifetime_seconds=600.0)
    node.boot()
    until(lambda: (node.path / FILE).exists() and meter(node).lived_s > 0, "the meter runs")
    lived = meter(node).lived_s
    killed(node)
    node.boot()
    until(lambda: meter(node).lived_s > lived, "it goes on")
    assert meter(node).lived_s < lived + 60


@pytest.mark.slow
def test_a_lifetime_ends_a_task_that_never_ends(make_node: MakeNode, tmp_path: Path) -> None:
    """skypilot#10628: a stalled process is never idle."""
    node = make_node("n1", cpu_slots=1, lifetime_seconds=6.0)
    node.boot()
    with node.pool() as pool:
        pool.send(Task(wait_for, (str(tmp_path / "never"),)), Target(), windowed=False)
        until((tmp_path / "never.runs").exists, "the task runs")
        gone(node)
    assert node.status().stops == "its max_lifetime of 6s is over"


@pytest.mark.slow
def test_a_fleet_that_is_kept_stays_and_a_head_that_was_killed_knows_it(make_node: MakeNode) -> None:
    node = make_node("n1", cpu_slots=1, idle_seconds=1.0)
    node.boot()
    with node.pool() as pool:
        assert pool.keep(3600.0) == 3600.0
        until(lambda: meter(node).keep_s > 0, "the node has heard it")
    # After that: on a busy machine a node that was used ends before anybody can keep it.
    use(node)
    killed(node)
    node.boot()
    lived = meter(node).lived_s
    until(lambda: meter(node).lived_s > lived + 2.5, "more than the idle time has passed")
    assert node.status().state == "ready"
    with node.pool() as pool:
        assert pool.look().state.ends
    # A process that is started again waits longer for its first use.
    use(node)
    with node.pool() as pool:
        pool.keep(0.0)
    gone(node)


@pytest.mark.slow
def test_a_client_that_only_waits_is_warned(
    make_node: MakeNode, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    node = make_node("n1", cpu_slots=1, lifetime_seconds=20.0)
    node.boot()
    with node.pool() as pool:
        pool.send(Task(wait_for, (str(tmp_path / "never"),)), Target(), windowed=False)
        until(lambda: pool.look().state.stops, "the head knows it")
        assert "its max_lifetime of 20s is over then" in pool.look().state.stops["n1"]
        said = ""

        def warned() -> bool:
            nonlocal said
            said += capfd.readouterr().err
            return "demo/mig: n1 ends in less than a minute: its max_lifetime of 20s" in said

        until(warned, "the client says it")
        gone(node)


@pytest.mark.slow
def test_a_configuration_without_an_end_takes_the_node_back(make_node: MakeNode) -> None:
    node = make_node("n1", cpu_slots=1, idle_seconds=2.0)
    node.boot()
    use(node)
    until(lambda: request.find(node.directory), "its slots are closed")
    node.configure(idle_seconds=0.0)
    node.boot()
    until(lambda: node.status().state == "ready", "it serves")
    use(node)


@pytest.mark.slow
def test_a_fleet_that_nothing_has_used_waits_for_nodes_that_boot(make_node: MakeNode) -> None:
    node = make_node("n1", cpu_slots=1, idle_seconds=1.0)
    node.boot()
    until(lambda: meter(node).idle_s > 3, "more than the idle time has passed")
    assert node.status().state == "ready"
    use(node)
    gone(node)
