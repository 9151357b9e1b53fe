"""A deploy replaces sick nodes of a local fleet, two an hour, and says why, and of the others why not."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from tasks_on_nodes.jobs import add, say_sick
from terraform_projects.commands import copy_quickstart, environment, skyinfra, status, until
from typer.testing import CliRunner, Result

import skyinfra as sky
from skyinfra.cli.app import app
from skyinfra.deploy import missing_nodes
from skyinfra.tasks import Task

PROGRAM = """\
import skyinfra as sky
from cdktf import App

app = App()
sky.FleetStack(app, "quickstart", pools=[sky.ComputePool(provider=sky.Local(), nodes=4, replace_sick=True)])
app.synth()
"""
LONG_S = 120


@pytest.mark.slow
def test_sick_nodes_are_replaced_two_an_hour(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    project = copy_quickstart(tmp_path)
    (project / "main.py").write_text(PROGRAM)
    skyinfra(project, "deploy", "--auto-approve")
    try:
        # In this process, where ten minutes of sickness are none.
        monkeypatch.chdir(project)
        for name, value in environment().items():
            monkeypatch.setenv(name, value)
        monkeypatch.setattr(missing_nodes, "_PATIENCE_S", 60.0)
        with sky.connect("quickstart") as pool:
            until(lambda: len(pool.slots()) == 4, seconds=LONG_S)
            for slot in pool.slots()[1:]:
                pool.select(node=slot.node).submit(Task(say_sick, ("no driver",))).result(timeout=LONG_S)
            until(lambda: len(pool.look().state.sick) == 3, seconds=LONG_S)
            assert "no changes" in skyinfra(project, "plan").stdout
            monkeypatch.setattr(missing_nodes, "_SICK_FOR_S", 0.0)
            assert list(pool.map(add, range(8), range(8))) == [2 * number for number in range(8)]
        before = machines(project)
        planned = command("plan")
        for node in ("pool-1", "pool-2"):
            assert f"{node} is replaced, for it is sick: 1 slot: no driver" in planned.output
        assert "pool-3 is sick: 1 slot: no driver. It stays for now" in planned.output
        command("deploy", "--auto-approve")
        changed = {name for name, machine in machines(project).items() if machine != before[name]}
        assert changed == {"pool-1", "pool-2"}
        states = {node["name"]: node["state"] for node in status(project)["pools"][0]["nodes"]}
        assert states == {"pool-0": "ready", "pool-1": "ready", "pool-2": "ready", "pool-3": "sick"}
        again = command("deploy", "--auto-approve")
        assert "no changes" in again.output and "pool-3 is sick: 1 slot: no driver. It stays for now" in again.output
        assert "A deploy replaces it when half of its slots" in " ".join(skyinfra(project, "status").stdout.split())
    finally:
        skyinfra(project, "destroy", "--auto-approve")


def command(*arguments: str) -> Result:
    done = CliRunner().invoke(app, list(arguments))
    assert done.exit_code == 0, done.output
    return done


def machines(project: Path) -> dict[str, str]:
    """The id of each node's machine, by the name of the node."""
    found = (project / ".skyinfra" / "quickstart" / "pool").glob("pool-?/hours.json")
    return {each.parent.name: json.loads(each.read_text())["machine"] for each in found}
