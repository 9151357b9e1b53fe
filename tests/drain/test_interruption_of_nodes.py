"""A node is taken back, or drained by hand, while tasks run: they know of it, nothing is lost, nothing runs twice."""

from __future__ import annotations

import asyncio
import os
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from local_fleets.running_node import RunningNode, h100, until
from servers.metadata_service import MetadataService, serving

import skyinfra as sky
from skyinfra import SlotLost
from skyinfra.client import Future, Pool
from skyinfra.drain import request
from skyinfra.drain.notices import ENDPOINT
from skyinfra.drain.request import Drain
from skyinfra.node.node import Node
from skyinfra.runner.membership import Membership
from skyinfra.runner.reconcile import Reconciler
from skyinfra.runner.workers import Wanted, Workers
from skyinfra.submission.snapshot import Target
from skyinfra.tasks import Task

MakeNode = Callable[..., RunningNode]

BIG = (("3g.40gb", 0, 4), ("3g.40gb", 4, 4))


@pytest.fixture
def metadata(monkeypatch: pytest.MonkeyPatch) -> Iterator[MetadataService]:
    with serving() as service:
        monkeypatch.setenv(ENDPOINT, service.url)
        yield service


def fleet(make_node: MakeNode, **fields: object) -> tuple[RunningNode, RunningNode]:
    """A head with one slot and another node with two."""
    head = make_node("n1", accelerator=h100(BIG[:1]), **fields)
    head.boot()
    return head, member(make_node, head, **fields)


def member(make_node: MakeNode, head: RunningNode, name: str = "n2", **fields: object) -> RunningNode:
    scheduler = head.directory.scheduler_file.read_text().strip()
    node = make_node(name, head=False, scheduler=scheduler, accelerator=h100(BIG), **fields)
    head.configure(accelerator=h100(BIG))
    head.boot()
    node.boot()
    return node


def patiently(path: str) -> tuple[str, bool, str]:
    """Runs until it is let through or interrupted; a second start goes through."""
    slot = sky.instance_info().slot
    called: list[str] = []
    sky.on_interrupt(lambda: called.append((sky.interruption() or sky.Interruption("none")).why))
    with open(path, "a") as file:  # noqa: PTH123
        file.write(f"{slot}\n")
    while not os.path.exists(f"{path}.open") and not sky.interrupted():  # noqa: PTH110
        time.sleep(0.01)
    deadline = time.monotonic() + 20
    while sky.interrupted() and not called and time.monotonic() < deadline:
        time.sleep(0.01)
    return slot, sky.interrupted(), "".join(called)


def stubborn(path: str) -> str:
    """Ends only where it is started for the second time."""
    slot = sky.instance_info().slot
    with open(path, "a") as file:  # noqa: PTH123
        file.write(f"{slot}\n")
    with open(path) as file:  # noqa: PTH123
        started = len(file.readlines())
    while started == 1:
        time.sleep(0.01)
    return slot


def where() -> str:
    return sky.instance_info().slot


def starts(path: Path) -> list[str]:
    return path.read_text().splitlines() if path.exists() else []


def begin(pool: Pool, function: Callable[[str], object], path: Path, node: str) -> Future[object]:
    future = pool.send(Task(function, (str(path),)), Target(node=node), windowed=False)
    until(lambda: starts(path), f"{path.name} runs")
    return future


def test_a_spot_notice_drains_the_node_and_nothing_is_lost(
    make_node: MakeNode, metadata: MetadataService, tmp_path: Path
) -> None:
    head, node = fleet(make_node, provider="aws")
    run = tmp_path / "run"
    with head.pool(node) as pool, node.foreground("interrupt"):
        running = begin(pool, patiently, run, "n2")
        loose = [tmp_path / f"loose{number}" for number in range(8)]
        futures = [pool.send(Task(patiently, (str(path),)), Target(), windowed=False) for path in loose]
        until(lambda: sum(map(len, map(starts, loose))) == 3, "every other slot has one of them, and five wait")
        metadata.spot("terminate", time.time() + 120)
        slot, told, why = running.result(timeout=60)
        assert slot in ("n2/0", "n2/1")
        assert told
        assert why.startswith("AWS takes the spot instance back (terminate at ")
        status = node.until("drained")
        assert (status.slots, status.drain_reason, status.error) == ((), why, None)
        assert f"out of service: {why}" in node.run("status").stdout
        assert {slot.node for slot in pool.slots()} == {"n1"}
        state = pool.look().state
        assert state is not None
        assert (state.out_of_service, state.slots["n2"]) == ({"n2": why}, ())
        for path in loose:
            Path(f"{path}.open").touch()
        assert {future.result(timeout=60)[0] for future in futures} <= {"n1/0", "n1/1", "n2/0", "n2/1"}
        # What had begun on the node ended there; the rest began on the other one; nothing began twice.
        assert [len(starts(path)) for path in (run, *loose)] == [1] * 9
        assert sorted(Task(where) @ pool) == ["n1/0", "n1/1"]
        # The instance was hibernated, say, and comes back.
        metadata.values.clear()
        node.until("ready")
        assert sorted(Task(where) @ pool) == ["n1/0", "n1/1", "n2/0", "n2/1"]
        assert Task(sky.interrupted) @ pool.select(node="n2") == [False, False]
    node.quiet_log()
    head.quiet_log()


@pytest.mark.slow
def test_what_does_not_end_in_time_starts_again_on_another_node(make_node: MakeNode, tmp_path: Path) -> None:
    head, node = fleet(make_node)
    path = tmp_path / "stubborn"
    with head.pool(node) as pool:
        task = pool.send(Task(stubborn, (str(path),)), Target(), windowed=False)
        until(lambda: starts(path), "it runs")
        (at,) = starts(path)
        drained = node if at.startswith("n2") else head
        done = drained.run("drain", "--timeout", "0.5", "--reason", "a new kernel")
        assert "is drained; `skyinfra-runner undrain` takes it back" in done.stdout
        assert task.result(timeout=60).partition("/")[0] != at.partition("/")[0]
        assert len(starts(path)) == 2
        with pytest.raises(SlotLost, match=rf"slot {at}, which where waits for, left demo/mig: a new kernel"):
            pool.send(Task(where), Target(slot=at), windowed=False).result(timeout=60)
        # It holds through a restart of the runner, until it is taken back.
        drained.run("stop")
        assert "out of service: a new kernel" in drained.run("boot", "--detach").stdout
        assert drained.status().state == "drained"
        assert "2 slots" in drained.run("undrain").stdout
        assert "in service, as it was" in drained.run("undrain").stdout
    assert not list((drained.path / "attempts").iterdir()), "the node's own doing does not count against the task"
    assert "Traceback" not in drained.directory.log_file.read_text()


@pytest.mark.slow
def test_tasks_wait_for_the_replacement_of_the_last_node(make_node: MakeNode, tmp_path: Path) -> None:
    head = make_node("n1", accelerator=h100(BIG), scheduler_only=True)
    head.boot()
    node = member(make_node, head)
    path = tmp_path / "waits"
    with head.pool(node) as pool:
        moving = pool.send(Task(stubborn, (str(path),)), Target(), windowed=False)
        until(lambda: starts(path), "it runs")
        node.run("drain", "--timeout", "0")
        assert pool.slots() == []
        until(lambda: pool.look().prospect(Target()) == "coming", "its slots, which were draining, have left")
        replacement = member(make_node, head, "n3")
        assert moving.result(timeout=60).startswith("n3/")
        assert replacement.status().state == "ready"


@pytest.mark.slow
def test_a_recommendation_is_followed_where_another_node_stays(make_node: MakeNode, metadata: MetadataService) -> None:
    head, node = fleet(make_node, provider="aws")
    metadata.rebalance()
    with head.pool(node) as pool:
        for each in (node, head):
            each.run("interrupt", "--once")
        until(lambda: len(pool.slots()) == 2, "one of them has left")
        left, stays = (node, head) if pool.slots()[0].node == "n1" else (head, node)
        left.until("drained")
        log = stays.directory.log_file
        until(lambda: "no other node has slots, so this one stays" in log.read_text(), "the other one has asked")
        assert stays.status().state == "ready"
        assert not any(Task(sky.interrupted) @ pool)
        # The other one is back, so this one may go: it asks again.
        left.run("undrain")
        stays.until("drained")
        assert {slot.node for slot in pool.slots()} == {left.config.node}


@pytest.mark.slow
def test_a_script_is_told_too(make_node: MakeNode, tmp_path: Path) -> None:
    from skyinfra.client import run_script

    head, node = fleet(make_node)
    script = tmp_path / "train.py"
    script.write_text(
        "import time, skyinfra as sky\n"
        "print('begun', flush=True)\n"
        "while not sky.interrupted(): time.sleep(0.01)\n"
        "print(sky.interruption().why)\n"
    )
    lines: list[str] = []
    drains: list[subprocess.CompletedProcess[str]] = []

    def on_line(_: str, line: str) -> None:
        lines.append(line)
        if line == "begun":
            drains.append(node.run("drain", "--no-wait", "--reason", "maintenance"))

    with head.pool(node) as pool:
        assert run_script(pool, script, node="n2", on_line=on_line) == 0
    assert lines == ["begun", "maintenance"]
    node.until("drained")


@pytest.mark.slow
def test_draining_what_nobody_serves(make_node: MakeNode) -> None:
    node = make_node(cpu_slots=1)
    assert "it will not serve before `skyinfra-runner undrain`" in node.run("drain").stdout
    assert node.boot().state == "drained"
    assert "1 slot." in node.run("undrain").stdout
    refused = node.run("drain", "--timeout", "-1", check=False)
    assert (refused.returncode, "must be at least 0" in refused.stderr) == (2, True)


@pytest.mark.slow
def test_a_drain_that_cannot_be_read_changes_nothing(make_node: MakeNode) -> None:
    node = make_node(cpu_slots=1)
    node.boot()
    node.directory.drain_file.write_text("{")
    log = node.directory.log_file
    until(lambda: "drain.json: is not JSON" in log.read_text(), "it was looked at")
    assert node.until("ready").drain_reason is None


@pytest.mark.parametrize("jump", [-3600.0, 3600.0])
def test_a_clock_that_jumps_leaves_tasks_of_a_drained_node_their_time(
    jump: float, make_node: MakeNode, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The end is wall time for the first look alone: each later one, after a change of the node, has the same."""
    rounds: list[float] = []

    class Draining(Workers):
        async def drain(
            self, keys: object, patience_s: float, *, since: float | None = None, why: str = ""
        ) -> set[Wanted]:
            rounds.append((since or 0.0) + patience_s)
            return set()

    async def joined(*_: object) -> None:
        return None

    node, superseded = make_node(accelerator=h100(BIG)), asyncio.Event()
    membership = Membership(node.directory, superseded, lambda *_: {})
    monkeypatch.setattr(membership, "join", joined)
    reconciler = Reconciler(node.directory, Draining(node.directory), membership, superseded, partitions=False)
    drain = Drain(request.VERSION, request.OPERATOR, "by hand", time.time() + 60)
    now = time.time
    expected = time.monotonic() + 60
    asyncio.run(reconciler.drain(Node.load(node.file), drain))
    monkeypatch.setattr(time, "time", lambda: now() + jump)
    asyncio.run(reconciler.drain(Node.load(node.file), drain))
    assert rounds == pytest.approx([expected] * 2, abs=5) and rounds[0] == pytest.approx(rounds[1])
