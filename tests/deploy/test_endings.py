"""Nodes that a plan stops and starts for another machine type, with what ends there; the head is a real one."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from local_fleets.running_node import SECRET, RunningNode, until
from tasks_on_nodes.jobs import starts, wait_for

from skyinfra.deploy.affected_nodes import endings
from skyinfra.protocol.manifest import Endpoint, Manifest, ManifestNode
from skyinfra.terraform.program import Plan
from skyinfra.terraform.synthesized import SynthesizedStack

HEAD, WORKER = "module.mig.aws_instance.head", 'module.mig.aws_instance.worker["n2"]'
GROUP = "module.mig.aws_autoscaling_group.workers[0]"


def stack(folder: Path, *machine_types: str, head: str | None = None) -> SynthesizedStack:
    """A stack whose two instances are g6.xlarge; it declares *machine_types*, and a *head* besides the nodes."""
    made = {"module": "module.mig", "mode": "managed", "provider": "", "type": "aws_instance"}
    attributes = {"instance_type": "g6.xlarge", "arn": "arn:aws:ec2:us-east-1:123456789012:instance/i-1"}
    state = {
        "version": 4,
        "resources": [
            {**made, "name": "head", "instances": [{"attributes": attributes}]},
            {**made, "name": "worker", "instances": [{"attributes": attributes, "index_key": "n2"}]},
        ],
    }
    (folder / "state").write_text(json.dumps(state))
    pool = {"name": "mig", "machine_types": list(machine_types), "head": head}
    return SynthesizedStack("demo", folder, (pool,), {"mig": {}}, backend={"local": {"path": "state"}})


def plan(folder: Path, *addresses: str) -> Plan:
    return Plan(file=folder / "plan", changes=tuple(("update", address) for address in addresses))


def deployed(monkeypatch: pytest.MonkeyPatch, manifest: Manifest) -> None:
    """Terraform's outputs hold *manifest*."""
    monkeypatch.setattr(SynthesizedStack, "fleets", lambda self: {"mig": manifest})


def test_another_machine_type_stops_nodes_with_what_runs_there(
    make_node: Callable[..., RunningNode], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    head = make_node("n1", cpu_slots=1)
    head.boot()
    path = tmp_path / "run"
    with head.pool() as pool:
        nodes = tuple(ManifestNode(name, name, "127.0.0.1", head=name == "n1") for name in ("n1", "n2"))
        deployed(monkeypatch, dataclasses.replace(pool.manifest, nodes=nodes))
        job = pool.submit(wait_for, str(path), detach="training")
        until(lambda: starts(path) and job.state == "running", "it runs")
        said = [str(each) for each in endings(stack(tmp_path, "g6.2xlarge"), plan(tmp_path, HEAD, WORKER))]
        why = "is stopped and started, for another machine type: g6.xlarge becomes g6.2xlarge"
        assert said == [
            f"n1 {why}: ends there: training; the 1 jobs of the fleet go on when it has started",
            f"n2 {why}: no task runs there",
        ]
        Path(f"{path}.open").touch()
        job.result(timeout=60)


@pytest.mark.parametrize(
    ("declared", "addresses"),
    [
        ({"machine_types": ["g6.xlarge"]}, (HEAD, WORKER)),
        # Those of a group are what it launches from then on.
        ({"machine_types": ["g6.2xlarge", "g5.xlarge"], "head": "g6.xlarge"}, (HEAD, GROUP)),
    ],
)
def test_other_updates_stop_nothing(tmp_path: Path, declared: dict[str, Any], addresses: tuple[str, ...]) -> None:
    made = stack(tmp_path, *declared["machine_types"], head=declared.get("head"))
    assert endings(made, plan(tmp_path, *addresses)) == ()


@pytest.mark.parametrize("group", [GROUP, "module.mig.google_compute_region_instance_group_manager.workers[0]"])
def test_a_group_that_is_replaced_ends_the_nodes_of_its_pool(
    group: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    nobody, node = Endpoint("127.0.0.1", 1), ManifestNode("n1", "n1", "127.0.0.1", head=True)
    deployed(monkeypatch, Manifest(1, "demo", "mig", "gcp", nobody, (node,), (), SECRET))
    replaced = Plan(file=tmp_path / "plan", changes=(("replace", group),))
    (ending,) = endings(stack(tmp_path, "a2-highgpu-8g"), replaced)
    assert (ending.pool, ending.node, ending.action) == ("mig", None, "replace")


def test_a_head_besides_the_nodes_has_a_machine_type_of_its_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    nobody, node = Endpoint("127.0.0.1", 1), ManifestNode("n1", "n1", "127.0.0.1", head=True)
    deployed(monkeypatch, Manifest(1, "demo", "mig", "aws", nobody, (node,), (), SECRET))
    made = stack(tmp_path, "g6.xlarge", "g5.xlarge", head="m6i.xlarge")
    (ending,) = endings(made, plan(tmp_path, HEAD, GROUP))
    assert str(ending) == (
        "n1 is stopped and started, for another machine type: g6.xlarge becomes m6i.xlarge: "
        "what runs there could not be asked"
    )
