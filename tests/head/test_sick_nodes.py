"""A sick node is said: by status, doctor, the fleet page and webhooks; its slots come back when it is well."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
from devices.small_disks import disk
from local_fleets.running_node import BIG, RunningNode, h100, until
from servers.webhooks import webhook_server
from tasks_on_nodes.jobs import add, manifest_of, wait_for
from typer.testing import CliRunner

import skyinfra
from skyinfra import page
from skyinfra.cli.app import app
from skyinfra.cli.status import _print_stack
from skyinfra.client import connect
from skyinfra.deploy.fleet_status import fleet_status
from skyinfra.head.scheduler import FleetScheduler
from skyinfra.protocol.fleet import FleetLayout
from skyinfra.protocol.instance import SICK_KEY, STARTUP_KEY
from skyinfra.protocol.manifest import Manifest
from skyinfra.submission.connection import Snapshot
from skyinfra.tasks import Task

MakeNode = Callable[..., RunningNode]


def look(head: RunningNode) -> Snapshot:
    with head.pool() as pool:
        return pool.look()


def said_of(head: RunningNode, node: str) -> dict[str, Any]:
    """What `skyinfra status` says of *node*."""
    found = fleet_status(manifest_of(head), None)
    return next(each for each in found["nodes"] if each["name"] == node)


def process() -> int:
    return os.getpid()


@pytest.mark.slow
def test_a_full_disk_is_said_everywhere_and_jobs_go_elsewhere(
    make_node: MakeNode, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    head = make_node("n1", accelerator=h100(BIG))
    head.boot()
    other = make_node(
        "n2", head=False, scheduler=head.directory.scheduler_file.read_text().strip(), accelerator=h100(BIG)
    )
    with ExitStack() as stack:
        server = stack.enter_context(webhook_server())
        config = {name: (other.path / name).read_text() for name in ("node.json", "secret")}
        small = stack.enter_context(disk(other.path))
        for name, text in config.items():
            (other.path / name).write_text(text)
        stack.callback(other.run, "stop", "--timeout", "10")
        other.boot()
        manifest = tmp_path / "fleet.json"
        manifest.write_text(json.dumps(manifest_of(head).to_json()))
        with connect(str(manifest)) as pool:
            until(lambda: len(pool.slots()) == 4, "all slots are there")
            waits = pool.detach(Task(wait_for, (str(tmp_path / "waits"),)), "waits", notify=[server.url("hook")])
            until((tmp_path / "waits").exists, "it runs")
            small.fill()
            jobs = [pool.detach(Task(add, (number, 1)), f"add-{number}") for number in range(8)]
            assert [job.result(timeout=60) for job in jobs] == list(range(1, 9))
            # Whatever slot of the node still takes tasks gets one.
            assert [future.result(60) for future in [pool.submit(add, 1, 1) for _ in range(16)]] == [2] * 16
            sick = until(lambda: pool.look().state.sick or None, "the head knows it")
            assert all(slot.startswith("n2/") and "No space left on device" in why for slot, why in sick.items())
            until(lambda: server.received, "the webhook is told")
            assert server.texts()[0].startswith("node n2 on demo/mig: sick: No space left on device")
            found = said_of(head, "n2")
            assert "No space left on device" in found["sick"]
            assert {slot["state"] for slot in found["slots"] if slot["sick"]} == {"sick"}
            _print_stack({"stack": "demo", "pools": [fleet_status(manifest_of(head), None)], "last_run": None})
            assert "n2 is sick, and takes no tasks on" in " ".join(capsys.readouterr().out.split())
            nodes = page.state(pool)["nodes"]
            assert isinstance(nodes, list)
            assert "is sick" in next(each["problem"] for each in nodes if each["name"] == "n2")
            told = CliRunner().invoke(app, ["doctor", str(manifest), "--json"])
            findings = json.loads(told.stdout)
            text = json.dumps(findings)
            assert "checks of slots" in text and "No space left on device" in text
            small.mend()
            until(lambda: len(pool.slots()) == 4, "its slots are back")
            assert said_of(head, "n2")["sick"] is None
            (tmp_path / "waits.open").touch()
            assert waits.result(timeout=60) is None


@pytest.mark.slow
def test_a_node_whose_python_is_broken_is_said_to_be_sick(
    make_node: MakeNode, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    head = make_node("n1", accelerator=h100(BIG))
    head.boot()
    address = head.directory.scheduler_file.read_text().strip()
    other = make_node("n2", head=False, scheduler=address, accelerator=h100(BIG))
    # That node has an installation of its own.
    installed = tmp_path / "installed"
    shutil.copytree(Path(skyinfra.__file__).parent, installed / "skyinfra")
    with monkeypatch.context() as patch:
        patch.chdir(tmp_path)
        patch.setenv("PYTHONPATH", f"{installed}{os.pathsep}{os.environ.get('PYTHONPATH', '')}")
        other.boot()
    with head.pool(other) as pool:
        until(lambda: len(pool.slots()) == 4, "all slots are there")
        there = [slot for slot in pool.slots() if slot.node == "n2"]
        pids = pool.broadcast(Task(process), slots=there)
        code = installed / "skyinfra" / "worker" / "execute.py"
        whole = code.read_text()
        code.write_text("raise ImportError('a broken Python')")
        for pid in pids:
            os.kill(pid, signal.SIGKILL)
        assert list(pool.map(add, range(40), range(40))) == [2 * number for number in range(40)]
        sick = until(lambda: pool.look().state.sick, "the head knows it", seconds=90)
        assert set(sick) <= {"n2/0", "n2/1"}
        code.write_text(whole)
        until(lambda: len(pool.slots()) == 4, "its slots are back")
        assert pool.look().state.sick == {}


@pytest.mark.slow
def test_who_waits_with_notify_hears_of_a_node_that_becomes_sick(make_node: MakeNode, tmp_path: Path) -> None:
    """The attached run tells webhooks and commands, as the head does for its jobs; as does who waits for a job."""
    # One slot more than the job and the script have, for what the other node fails.
    head = make_node("n1", accelerator=h100([("1g.10gb", start, 1) for start in range(3)]))
    head.boot()
    other = make_node(
        "n2", head=False, scheduler=head.directory.scheduler_file.read_text().strip(), accelerator=h100(BIG)
    )
    manifest, script, path, ran, lines = (
        tmp_path / name for name in ("fleet.json", "train.py", "waits", "ran", "lines")
    )
    manifest.write_text(json.dumps(manifest_of(head).to_json()))
    script.write_text(
        "import os, sys, time\nopen(sys.argv[1], 'w').close()\n"
        "while not os.path.exists(sys.argv[1] + '.open'):\n    time.sleep(0.01)\n"
    )
    command = f"command:cat >> {lines}"
    with ExitStack() as stack:
        server = stack.enter_context(webhook_server())
        config = {name: (other.path / name).read_text() for name in ("node.json", "secret")}
        small = stack.enter_context(disk(other.path))
        for name, text in config.items():
            (other.path / name).write_text(text)
        stack.callback(other.run, "stop", "--timeout", "10")
        other.boot()
        with connect(str(manifest)) as pool:
            until(lambda: len(pool.slots()) == 6, "all slots are there")
            job = pool.select(node="n1").detach(Task(wait_for, (str(path),)), "waits")
            clients = [
                client(
                    stack,
                    "run",
                    "--alone",
                    "--node",
                    "n1",
                    "--notify",
                    server.url("run"),
                    *map(str, (manifest, script, ran)),
                ),
                client(stack, "jobs", "result", str(manifest), "waits", "--notify", command),
            ]
            until(ran.exists, "the script runs")
            small.fill()
            try:
                assert list(pool.map(add, range(40), range(40))) == [2 * number for number in range(40)]
                until(lambda: server.received and lines.exists() and lines.read_text(), "both are told")
            finally:
                small.mend()
                Path(f"{path}.open").touch()
                Path(f"{ran}.open").touch()
            assert [each.wait(60) for each in clients] == [0, 0]
            assert job.result(timeout=60) is None
        sick, ended = server.texts()
        assert sick.startswith("node n2 on demo/mig: sick: ") and "No space left on device" in sick
        assert ended.startswith(f"train.py on {manifest}: done")
        sick, ended = lines.read_text().splitlines()
        assert sick.startswith("node n2 on demo/mig: sick: ")
        assert ended.startswith("waits on demo/mig: done")


def client(stack: ExitStack, *arguments: str) -> subprocess.Popen[bytes]:
    """A command of skyinfra that runs until the end of *stack*."""
    started = subprocess.Popen([sys.executable, "-m", "skyinfra.cli", *arguments], stdin=subprocess.DEVNULL)
    stack.callback(started.wait)
    stack.callback(started.kill)
    return started


def test_of_a_node_that_has_left_nothing_is_said_any_more() -> None:
    async def scenario() -> None:
        where = {"host": "127.0.0.1", "port": 0, "dashboard": False, "dashboard_address": "127.0.0.1:0"}
        async with FleetScheduler(layout=FleetLayout(1), **where) as head:
            for node in ("n1", "n2"):
                head.promise(node, [f"{node}/0", f"{node}/1"])
                head.sick.report(node, {f"{node}/0": "its Python is broken"}, "the watchdog")
            # As the runner of a node does that drains: it reports again what it lacks, after it has said that it goes.
            head.promise("n1", ())
            head.leave("n1", "asked to")
            head.sick.report("n1", {"n1/0": "its Python is broken"}, "the watchdog")
            assert problems(head) == {"sick": {"n2/0": "its Python is broken"}, "unwatched": {"n2": "the watchdog"}}
            # A slot that is not to be there any more, after another layout.
            head.promise("n2", ["n2/1"])
            assert problems(head) == {"sick": {}, "unwatched": {"n2": "the watchdog"}}
            # It is back.
            head.promise("n1", ["n1/0"])
            head.sick.report("n1", {"n1/0": "its Python is broken"}, None)
            assert problems(head) == {"sick": {"n1/0": "its Python is broken"}, "unwatched": {"n2": "the watchdog"}}

    asyncio.run(scenario())


def test_a_head_without_slots_of_its_own_says_that_nothing_watches_it() -> None:
    async def scenario() -> None:
        where = {"host": "127.0.0.1", "port": 0, "dashboard": False, "dashboard_address": "127.0.0.1:0"}
        async with FleetScheduler(layout=FleetLayout(1), **where) as head:
            head.promise("n0", ())
            head.sick.report("n0", {}, "the watchdog")
            assert problems(head) == {"sick": {}, "unwatched": {"n0": "the watchdog"}}

    asyncio.run(scenario())


def test_what_a_node_said_that_died_is_forgotten() -> None:
    """Nobody says of it that it leaves: a lookup that waited for its slots waited for ever."""
    there = {"n1", "n2"}

    async def scenario() -> None:
        where = {"host": "127.0.0.1", "port": 0, "dashboard": False, "dashboard_address": "127.0.0.1:0"}
        async with FleetScheduler(layout=FleetLayout(1), **where) as head:
            head.sick.is_gone = lambda node, seconds=0.0: node not in there
            for node in ("n1", "n2"):
                head.promise(node, [f"{node}/0"])
                head.sick.report(node, {f"{node}/0": "its Python is broken"}, "the watchdog")
            there.remove("n2")
            await wait_for_slots(head, ["n1"])
            assert problems(head) == {"sick": {"n1/0": "its Python is broken"}, "unwatched": {"n1": "the watchdog"}}
            # It was cut off for a while.
            there.add("n2")
            head.promise("n2", ["n2/0"])
            await wait_for_slots(head, ["n1", "n2"])

    async def wait_for_slots(head: FleetScheduler, nodes: list[str]) -> None:
        async with asyncio.timeout(60):
            while sorted(head.identity()[STARTUP_KEY]["slots"]) != nodes:
                await asyncio.sleep(0.05)

    asyncio.run(scenario())


def test_a_node_of_the_manifest_that_died_is_said_to_be_gone_and_another_is_forgotten(
    make_node: MakeNode, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("skyinfra.deploy.fleet_status._SILENT_S", 0.5)
    head = make_node("n1", cpu_slots=1)
    head.boot()
    other = make_node("n2", head=False, scheduler=head.directory.scheduler_file.read_text().strip(), cpu_slots=1)
    other.boot()
    with head.pool(other) as pool:
        fleet = pool.manifest

    def stands(found: Manifest) -> dict[str, Any]:
        return {node["name"]: node["state"] for node in fleet_status(found, None)["nodes"]}

    until(lambda: stands(fleet) == {"n1": "ready", "n2": "ready"}, "both are ready")
    pid = other.status().pid
    assert pid is not None
    os.killpg(pid, signal.SIGKILL)
    until(lambda: stands(fleet) == {"n1": "ready", "n2": "gone"}, "it is said to be gone")
    _print_stack({"stack": "demo", "pools": [fleet_status(fleet, None)], "last_run": None})
    printed = " ".join(capsys.readouterr().out.split())
    assert "n2 is gone: its head has not heard of it for" in printed and "`skyinfra plan demo`" in printed
    # A size that became smaller.
    assert stands(manifest_of(head)) == {"n1": "ready"}


def problems(head: FleetScheduler) -> Any:
    found = head.identity()[SICK_KEY]
    return {name: found[name] for name in ("sick", "unwatched")}
