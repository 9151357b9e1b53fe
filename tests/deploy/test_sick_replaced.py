"""Nodes that are sick are replaced by a deploy where their pool says so: which, how many, and why not."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import skyinfra as sky
from skyinfra.compiler import compile_pool
from skyinfra.deploy import missing_nodes
from skyinfra.deploy.missing_nodes import sick_nodes
from skyinfra.errors import FleetUnreachable, InvalidField, NotSupported
from skyinfra.protocol.manifest import Endpoint, Manifest, ManifestNode, ManifestSlot
from skyinfra.protocol.readings import HOURS_VERSION, FleetHours, MachineRun
from skyinfra.terraform.state import Resource
from skyinfra.terraform.synthesized import SynthesizedStack

AWS = 'provider["registry.terraform.io/hashicorp/aws"]'
NODES = tuple(ManifestNode(f"p-{index}", "", "", head=index == 0) for index in range(4))
MANIFEST = Manifest(1, "s", "p", "aws", Endpoint("192.0.2.1", 8786), NODES, (ManifestSlot(0, "cpu"),), "x" * 43)
MACHINES = (
    Resource("p", "aws_instance", "head", AWS, {"instance_type": "m7i.large"}),
    *(Resource("p", "aws_instance", "worker", AWS, {"instance_type": "m7i.large"}, key=f"p-{i}") for i in (1, 2, 3)),
    # Beside each machine, where its setup goes over SSH.
    *(Resource("p", "terraform_data", "node", "", {}, key=f"p-{i}", inside="module.hosts") for i in (1, 2, 3)),
)


@pytest.fixture
def stack(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> SynthesizedStack:
    monkeypatch.setattr(SynthesizedStack, "fleets", lambda self: {"p": MANIFEST})
    return SynthesizedStack("s", tmp_path, ({"name": "p", "replace_sick": True},), {"p": {}}, backend={})


def said(monkeypatch: pytest.MonkeyPatch, sick: dict[str, str], left: int) -> None:
    monkeypatch.setattr(missing_nodes, "_sick", lambda manifest: (sick, left))


def test_the_machine_of_the_node_is_replaced(stack: SynthesizedStack, monkeypatch: pytest.MonkeyPatch) -> None:
    said(monkeypatch, {"p-2": "1 slot: no driver"}, 2)
    found = sick_nodes(stack, MACHINES)
    assert found.replaced == {'module.p.aws_instance.worker["p-2"]': "1 slot: no driver"}
    assert found.kept == ()
    # Nothing is bought here.
    local = [Resource("p", "terraform_data", name, "", {}, key=f"p-{i}") for name in ("node", "worker") for i in (1, 2)]
    assert list(sick_nodes(stack, local).replaced) == ['module.p.terraform_data.node["p-2"]']


def test_no_more_than_are_allowed_and_never_the_head(stack: SynthesizedStack, monkeypatch: pytest.MonkeyPatch) -> None:
    said(monkeypatch, {f"p-{index}": "why" for index in range(4)}, 2)
    found = sick_nodes(stack, MACHINES)
    assert list(found.replaced) == [f'module.p.aws_instance.worker["p-{index}"]' for index in (1, 2)]
    assert [text.partition(" is sick: why. ")[::2] for text in found.kept] == [
        ("p-0", "It is the head, which no deploy makes anew by itself: `skyinfra deploy --replace ADDRESS` does."),
        ("p-3", "It stays for now: 2 nodes of p are replaced an hour."),
    ]


def test_a_head_that_does_not_answer_stops_no_deploy(stack: SynthesizedStack, monkeypatch: pytest.MonkeyPatch) -> None:
    def unreachable(manifest: Manifest) -> Any:
        raise FleetUnreachable("it does not answer")

    monkeypatch.setattr(missing_nodes, "_sick", unreachable)
    found = sick_nodes(stack, MACHINES)
    assert found.replaced == {} and "p: its head does not say which nodes are sick" in found.kept[0]


def test_a_pool_that_does_not_say_so_is_not_asked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(SynthesizedStack, "fleets", lambda self: pytest.fail("it was asked"))
    assert sick_nodes(SynthesizedStack("s", tmp_path, ({"name": "p"},), {"p": {}}, backend={}), ()).replaced == {}


def test_nodes_with_another_machine_count_for_an_hour() -> None:
    now = 1_790_000_000.0
    runs = (
        MachineRun("p-1", "old", now - 90_000, 80_000),
        MachineRun("p-1", "new", now - 1800, 1800),
        # A reboot, which is the same machine; a replacement of yesterday; one that was always there.
        MachineRun("p-2", "one", now - 90_000, 80_000),
        MachineRun("p-2", "one", now - 1800, 1800),
        MachineRun("p-3", "old", now - 90_000, 80_000),
        MachineRun("p-3", "new", now - 7200, 7200),
        MachineRun("p-4", "one", now - 600, 600),
    )
    assert missing_nodes._replaced(FleetHours(HOURS_VERSION, "ledger", now, runs, ())) == {"p-1"}


@pytest.mark.parametrize(
    ("fields", "why"),
    [
        ({"provider": sky.AWS(group=True), "nodes": 4}, "machine group"),
        ({"provider": sky.AWS()}, "the only node is the head"),
        ({"provider": sky.GCP(), "accelerator": "TPUv5e:16", "nodes": 1}, "hosts of a slice"),
    ],
    ids=["group", "one", "slice"],
)
def test_where_no_node_can_be_replaced_it_is_refused(fields: dict[str, Any], why: str) -> None:
    with pytest.raises(InvalidField, match=why) as caught:
        compile_pool(sky.ComputePool(name="p", replace_sick=True, **fields), "s")
    assert caught.value.field == "replace_sick"


def test_machines_that_stand_already_are_not_replaced() -> None:
    pool = sky.ComputePool(name="p", nodes=2, replace_sick=True, provider=sky.SSH(hosts=["192.0.2.1", "192.0.2.2"]))
    with pytest.raises(NotSupported, match="no other machine"):
        compile_pool(pool, "s")
