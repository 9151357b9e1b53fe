"""The hours of a fleet as its head knows them, by nodes that run: who had slots, and what outlives a head."""

from __future__ import annotations

import getpass
import json
import os
import signal
import socket
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from front_ends.schemas import valid
from local_fleets.running_node import BIG, RunningNode, h100, until
from tasks_on_nodes.jobs import add, manifest_of, starts, wait_for
from typer.testing import CliRunner

import skyinfra as sky
from skyinfra import page
from skyinfra.cli.app import app
from skyinfra.client import open_questions
from skyinfra.deploy import kept
from skyinfra.deploy.fleet_status import fleet_status
from skyinfra.deploy.spending import fleet_spent
from skyinfra.protocol.readings import FleetHours
from skyinfra.tasks import Task
from skyinfra.terraform.stores import local_store
from skyinfra.terraform.synthesized import SynthesizedStack

MakeNode = Callable[..., RunningNode]
ME = f"{getpass.getuser()}@{socket.gethostname()}"
POOL = {
    "name": "mig",
    "provider": "local",
    "nodes": 2,
    "machine_types": ["this machine"],
    "simulated": True,
    "budget": {"usd": 5.0, "action": "warn"},
}


def asked(head: RunningNode) -> FleetHours:
    with open_questions(manifest_of(head), timeout=10, patience=30) as fleet:
        found = fleet.hours()
    assert found is not None
    return found


def uses(hours: FleetHours) -> dict[tuple[str, str], tuple[str, float, float]]:
    return {(use.kind, use.name): (use.submitter, use.slot_seconds, use.node_seconds) for use in hours.uses}


@pytest.mark.slow
def test_the_hours_and_whose_tasks_they_were_outlive_the_head(make_node: MakeNode, tmp_path: Path) -> None:
    head = make_node(accelerator=h100(BIG))
    head.boot()
    address = head.directory.scheduler_file.read_text().strip()
    other = make_node("n2", accelerator=h100(BIG), head=False, scheduler=address)
    other.boot()
    until(lambda: {run.node for run in asked(head).runs} == {"n1", "n2"}, "both nodes say their hours")
    path = tmp_path / "goes"
    with head.pool(other) as pool:
        assert Task(add, (1, 2), {}) >> pool == 3
        began = time.monotonic()
        job = pool.submit(wait_for, str(path), detach="nightly")
        until(lambda: starts(path), "the job runs")
        until(lambda: ("job", "nightly") in uses(asked(head)), "it is counted while it runs")
        found = asked(head)
        submitter, slots, nodes = uses(found)["job", "nightly"]
        # A half of the only GPU of a node.
        assert submitter == ME and nodes == pytest.approx(slots / 2)
        assert uses(found)["task", "add"][0] == ME
        until(lambda: uses(asked(head))["job", "nightly"][1] > slots + 5, "its seconds go on")
        before = asked(head)
        # Killed: what it had not written is lost, and nodes say their hours again.
        head.run("stop", "--timeout", "10")
        head.boot()
        until(lambda: {run.node for run in asked(head).runs} == {"n1", "n2"}, "both nodes are back")
        after = asked(head)
        assert after.ledger == before.ledger and {r.machine for r in after.runs} == {r.machine for r in before.runs}
        assert sum(run.seconds for run in after.runs) >= sum(run.seconds for run in before.runs)
        until(lambda: uses(asked(head))["job", "nightly"][1] > slots + 6, "it goes on, and is counted again")
        assert uses(asked(head))["job", "nightly"][1] < time.monotonic() - began + 2, "no second twice"
        Path(f"{path}.open").touch()
        job.result(timeout=60)
    file = head.directory.jobs / ".hours.json"
    assert oct(file.parent.stat().st_mode & 0o777) == "0o700"

    # What a fleet has cost stands beside its kept jobs, and the page has a few values.
    manifest, store = manifest_of(head), local_store(tmp_path / "project", "demo")
    stack = SynthesizedStack("demo", tmp_path, (POOL,), {}, backend={"local": {}})
    assert kept.keep(manifest, store, stack=stack).whole
    with open_questions(manifest, timeout=10, patience=30) as fleet:
        shown = page.state(fleet, spent=lambda: fleet_spent(manifest, POOL, after))
        assert shown["spent"]["hours"] == pytest.approx(sum(run.seconds for run in after.runs) / 3600, abs=1e-3)  # type: ignore[index]
        assert page.state(fleet)["spent"] is None
    status = fleet_status(manifest, None, POOL)
    assert status["spent"]["usd"] == 0 and status["spent"]["budget"]["fraction"] == 0
    head.run("stop", "--timeout", "10")


def test_a_head_that_was_killed_finds_its_ledger(make_node: MakeNode) -> None:
    head = make_node(accelerator=h100(BIG))
    head.boot()
    until(lambda: asked(head).runs, "it knows its own hours")
    (before,) = asked(head).runs
    os.kill(head.status().pid or 0, signal.SIGKILL)
    head.boot()
    (after,) = until(lambda: asked(head).runs, "the hours are there again")
    assert after.machine == before.machine and after.seconds >= before.seconds
    assert abs(after.began - before.began) < 2, "the time in between is counted"


def test_cost_of_a_project(make_node: MakeNode, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    head = make_node(accelerator=h100(BIG))
    head.boot()
    project = tmp_path / "project"
    folder = project / "cdktf.out" / "stacks" / "demo"
    folder.mkdir(parents=True)
    (project / "cdktf.json").write_text(json.dumps({"language": "python", "app": "python main.py"}))
    demo = {"name": "demo", "workingDirectory": "stacks/demo", "synthesizedStackPath": "stacks/demo/cdk.tf.json"}
    (project / "cdktf.out" / "manifest.json").write_text(json.dumps({"stacks": {"demo": demo}}))
    priced = {
        **POOL,
        "provider": "aws",
        "region": "us-east-1",
        "machine_types": ["p5.48xlarge"],
        "budget": {"usd": 0.0001, "action": "warn"},
        "prices": {
            "p5.48xlarge": {"usd_per_hour": 3600.0, "region": "us-east-1", "date": "2026-07", "basis": "listed"}
        },
    }
    (folder / "cdk.tf.json").write_text(json.dumps({"//": {"skyinfra": {"pools": [priced]}}}))
    monkeypatch.chdir(project)
    fleets = {"mig": manifest_of(head)}
    monkeypatch.setattr(SynthesizedStack, "fleets", lambda self: fleets)
    monkeypatch.setattr(SynthesizedStack, "resources", lambda self: ())

    def command(*arguments: str, code: int = 0) -> Any:
        result = CliRunner().invoke(app, [*arguments])
        found = result.output, result.exception
        assert result.exit_code == code and isinstance(result.exception, SystemExit | None), found
        return result

    # A runner that comes back counts the time that it was away: the machine was not.
    head.run("stop", "--timeout", "10")
    head.boot()
    until(lambda: sum(run.seconds for run in asked(head).runs), "it knows its own hours")
    # A budget that is spent fails the command, for who runs it by a timetable.
    found = json.loads(command("cost", "--json", code=1).stdout)
    valid("cost", json.dumps(found))
    (pool,) = found["stacks"][0]["pools"]
    seconds = pool["hours"] * 3600
    assert pool["source"] == "head" and pool["usd"] == pytest.approx(seconds, rel=0.2, abs=1)
    out = command("cost", "demo/mig", "--since", "1d", "--wide", code=1).stdout
    assert "demo/mig: ~$" in out and "since " in out and "p5.48xlarge" in out
    assert "Not known, and not in the sum: disks; public addresses; traffic." in out
    with pytest.raises(sky.PoolNotFound):
        CliRunner().invoke(app, ["cost", "demo/other"], catch_exceptions=False)
    with pytest.raises(sky.StackNotFound):
        CliRunner().invoke(app, ["cost", "other"], catch_exceptions=False)
    command("jobs", "keep", "demo/mig")
    head.run("stop", "--timeout", "10")
    down = json.loads(command("cost", "--json", code=1).stdout)["stacks"][0]["pools"][0]
    assert down["source"] == "kept" and down["usd"] >= pool["usd"] and "does not answer" in down["problem"]
    fleets.clear()
    gone = json.loads(command("cost", "demo", "--json").stdout)["stacks"][0]["pools"][0]
    assert (gone["source"], gone["problem"], gone["usd"]) == ("kept", None, down["usd"])
