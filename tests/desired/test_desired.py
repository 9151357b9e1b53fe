"""Which layout a node is to have: of the files that may say so."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from local_fleets.running_node import h100

from skyinfra import InvalidNodeConfig, desired, mig
from skyinfra.desired import Desired, declare
from skyinfra.desired import file as desired_file
from skyinfra.mig import Follow, Placement
from skyinfra.node import folder
from skyinfra.node.folder import NodeDirectory
from skyinfra.protocol.fleet import FleetLayout
from skyinfra.protocol.nodeconfig import NodeAccelerator, NodeConfig
from skyinfra.runner import slots

BIG = (Placement("3g.40gb", 0, 4),)
SMALL = (Placement("2g.20gb", 0, 2), Placement("2g.20gb", 2, 2))
LAYOUT = FleetLayout(1, "h100_80gb", (SMALL,))


def config(*, head: bool, accelerator: NodeAccelerator | None = None) -> NodeConfig:
    device = accelerator or h100((("3g.40gb", 0, 4),))
    return NodeConfig(1, "demo", "mig", "n1", "local", head, "127.0.0.1:0", device)


def layouts(found: Desired) -> tuple[tuple[Placement, ...], ...]:
    assert found.config.accelerator is not None
    return found.config.accelerator.layouts


@pytest.fixture
def directory(tmp_path: Path) -> NodeDirectory:
    return NodeDirectory(tmp_path)


def test_on_the_head_the_written_layout_stands_above_the_configured_one(directory: NodeDirectory) -> None:
    head = config(head=True)
    assert desired.find(head, "a", directory) == Desired(head, "node.json")
    assert folder.stamp(directory.desired_file) is None
    declare(directory, FleetLayout(1, None, (SMALL,)))
    found = desired.find(head, "a", directory)
    assert (layouts(found), found.source, found.refused) == ((SMALL,), "metadata", None)
    assert found.layout == LAYOUT
    first = folder.stamp(directory.desired_file)
    declare(directory, FleetLayout(1))
    assert folder.stamp(directory.desired_file) != first
    assert layouts(desired.find(head, "a", directory)) == ()
    desired_file.update(directory, declared=None)
    desired_file.update(directory, declared=None)
    assert desired.find(head, "a", directory).source == "node.json"


def test_other_nodes_take_what_they_are_told_and_keep_it_for_that_configuration(directory: NodeDirectory) -> None:
    node = config(head=False)
    declare(directory, FleetLayout(1, None, ((),)))
    assert desired.find(node, "a", directory) == Desired(node, "node.json")
    found = desired.find(node, "a", directory, LAYOUT)
    assert (layouts(found), found.source) == ((SMALL,), "head")
    desired.remember(found.layout, "a", directory)
    assert desired.find(node, "a", directory) == found
    assert desired.find(node, "b", directory) == Desired(node, "node.json"), "a new configuration"
    written = directory.desired_file.stat().st_mtime_ns
    desired.remember(found.layout, "a", directory)
    assert directory.desired_file.stat().st_mtime_ns == written
    layout_of_2 = '{"version": 1, "config_sha256": "a", "fleet": {"version": 2}}'
    for text in ("", "[]", '{"version": 2, "config_sha256": "a", "fleet": {"version": 1}}', layout_of_2, "{"):
        directory.desired_file.write_text(text)
        assert desired.find(node, "a", directory) == Desired(node, "node.json")


@pytest.mark.parametrize(
    ("layout", "message"),
    [
        (FleetLayout(1, None, (BIG, BIG)), "2 layouts, and this node has 1 accelerator"),
        (FleetLayout(1, "a100_40gb", (BIG,)), "the layout is for a100_40gb, and this node has h100_80gb"),
        (FleetLayout(1, None, ((Placement("3g.40gb", 1, 4),),)), "3g.40gb cannot stand at 1:4 on h100_80gb"),
        (FleetLayout(1, None, ((Placement("3g.40gb", 0, 3),),)), "3g.40gb cannot stand at 0:3 on h100_80gb"),
        (FleetLayout(1, None, ((*BIG, *SMALL),)), "2g.20gb cannot stand at 0:2 on h100_80gb"),
        (FleetLayout(1, None, ((Placement("3g.20gb", 0, 4),),)), "has no profile of that name"),
    ],
)
def test_what_cannot_be_is_refused_and_changes_nothing(
    layout: FleetLayout, message: str, directory: NodeDirectory
) -> None:
    node = config(head=False)
    found = desired.find(node, "a", directory, layout)
    assert (found.config, found.source) == (node, "node.json")
    assert isinstance(found.refused, InvalidNodeConfig)
    assert message in str(found.refused)
    head = config(head=True)
    directory.desired_file.write_text(json.dumps({"version": 1, "declared": layout.to_json()}))
    found = desired.find(head, "a", directory)
    assert (found.config, found.source) == (head, "node.json")
    assert str(directory.desired_file) in str(found.refused)
    desired.remember(LAYOUT, "a", directory)
    found = desired.find(head, "a", directory)
    assert (layouts(found), found.source) == ((SMALL,), "head"), "the last one that was good"
    assert message in str(found.refused)


def test_nodes_that_cannot_be_partitioned(directory: NodeDirectory) -> None:
    cpu = dataclasses.replace(config(head=False), accelerator=None, cpu_slots=2)
    assert desired.find(cpu, "a", directory, FleetLayout(1)) == Desired(cpu, "head")
    assert Desired(cpu, "node.json").layout == FleetLayout(1)
    assert "this node has no accelerators" in str(desired.find(cpu, "a", directory, LAYOUT).refused)
    chips = config(head=False, accelerator=NodeAccelerator("TPU", "google", 1))
    assert desired.find(chips, "a", directory, FleetLayout(1)).refused is None
    refused = desired.find(chips, "a", directory, FleetLayout(1, None, (BIG,))).refused
    assert "TPU cannot be partitioned" in str(refused)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "is not JSON"),
        ('{"version": 2}', "another version than can be read here"),
        ('{"version": 1, "declared": {"version": 2}}', "declared: another version than can be read here"),
        ('{"version": 1, "declared": {"version": 1, "layouts": [], "more": 1}}', "unknown field"),
    ],
)
def test_a_document_that_cannot_be_is_refused(text: str, message: str, directory: NodeDirectory) -> None:
    head = config(head=True)
    directory.desired_file.write_text(text)
    found = desired.find(head, "a", directory)
    assert (found.config, found.source) == (head, "node.json")
    assert message in str(found.refused)


def test_a_file_that_cannot_be_read_is_refused(directory: NodeDirectory) -> None:
    directory.desired_file.mkdir()
    assert "cannot be read: it is no file" in str(desired.find(config(head=True), "a", directory).refused)
    directory.desired_file.rmdir()
    directory.desired_file.symlink_to("nowhere")
    assert "cannot be read: it is a link" in str(desired.find(config(head=True), "a", directory).refused)


def test_layouts_in_words() -> None:
    assert (mig.layout_text(()) or "whole") == "whole"
    assert mig.layout_text((*BIG, *SMALL)) == "3g.40gb+2g.20gb*2"


def test_how_many_slots_there_are_to_be() -> None:
    per_gpu = h100((("3g.40gb", 0, 4), ("3g.40gb", 4, 4)), ())
    assert slots.count(config(head=True, accelerator=per_gpu)) == 3
    assert slots.count(config(head=True, accelerator=NodeAccelerator("TPU", "google", 4))) == 4
    assert slots.count(dataclasses.replace(config(head=True), accelerator=None, cpu_slots=2)) == 2


@given(st.integers(0, 20), st.sets(st.integers(0, 30), max_size=20))
def test_slots_that_stay_keep_their_names_and_the_others_get_the_lowest(total: int, kept: set[int]) -> None:
    names = slots.names("n1", total, kept)
    indexes = [int(name.rpartition("/")[2]) for name in names]
    assert indexes == sorted(set(indexes))
    assert kept <= set(indexes)
    assert len(indexes) == max(total, len(kept))
    new = set(indexes) - kept
    assert all(index in indexes for index in range(max(new, default=0)))


def test_the_memory_mode_travels_with_the_layout(directory: NodeDirectory) -> None:
    modes = tuple((Placement("CPX", 0, 1),) for _ in range(2))
    amd = NodeAccelerator("MI300X", "amd", 2, 192.0, None, modes, "NPS4")
    of_head = Desired(config(head=True, accelerator=amd), "node.json").layout
    assert of_head.memory_mode == "NPS4"
    told = FleetLayout.read(of_head.to_json(), source="head")
    connected = config(head=False, accelerator=dataclasses.replace(amd, layouts=(), memory_mode=None))
    found = desired.find(connected, "a", directory, told)
    assert found.refused is None
    assert found.config.accelerator == amd
    desired.remember(found.layout, "a", directory)
    assert desired.find(connected, "a", directory).config.accelerator == amd
    # The head's own file says it as well; without it the GPUs have one memory domain.
    declare(directory, FleetLayout(1, None, modes, "NPS2"))
    assert desired.find(config(head=True, accelerator=amd), "a", directory).layout.memory_mode == "NPS2"
    declare(directory, FleetLayout(1, None, modes))
    assert desired.find(config(head=True, accelerator=amd), "a", directory).layout.memory_mode is None
    nvidia = desired.find(config(head=False), "a", directory, dataclasses.replace(told, layouts=())).refused
    assert "H100 has no memory modes" in str(nvidia)


def test_what_the_head_has_chosen_counts_above_what_is_declared(directory: NodeDirectory) -> None:
    follows = dataclasses.replace(config(head=True), follow=Follow(["2g.20gb*3", "7g.80gb"]))
    desired.follow(directory, {"n1": ["7g.80gb"], "n2": ["2g.20gb*3"], "n3": ["1g.10gb*7"]})
    found = desired.find(follows, "a", directory)
    assert (layouts(found), found.source) == (((Placement("7g.80gb", 0, 8),),), "work")
    # Nodes get what is declared, with what was chosen for each; what is not declared any more does not count.
    assert found.layout.by_node == {"n1": ("7g.80gb",), "n2": ("2g.20gb*3",)}
    assert found.layout.layouts == layouts(desired.find(config(head=True), "a", directory))
    declare(directory, FleetLayout(1, None, (SMALL,)))
    assert layouts(desired.find(follows, "a", directory))[0][0].profile == "7g.80gb", "a deploy undoes nothing"
    told = desired.find(follows, "a", directory).layout
    for node, profile in (("n2", "2g.20gb"), ("n4", SMALL[0].profile)):
        connected = dataclasses.replace(follows, node=node, head=False)
        of_node = desired.find(connected, "a", directory, told)
        assert {place.profile for place in layouts(of_node)[0]} == {profile}
        assert of_node.layout == told, "what it compares with what the head says next"
        desired.remember(of_node.layout, "a", directory)
        assert layouts(desired.find(connected, "a", directory)) == layouts(of_node)
    assert desired.find(config(head=True), "a", directory).source == "metadata", "layouts follow no more"


@pytest.mark.parametrize("selected", ["{", '{"version": 1, "by_node": {"n1": ["7g.80gb", "7g.80gb"]}}'])
def test_a_choice_that_cannot_be_changes_nothing(directory: NodeDirectory, selected: str) -> None:
    follows = dataclasses.replace(config(head=True), follow=Follow(["2g.20gb*3", "7g.80gb"]))
    directory.desired_file.write_text(selected)
    found = desired.find(follows, "a", directory)
    assert (layouts(found), found.source) == (layouts(Desired(follows, "node.json")), "node.json")
    refused = desired.find(
        dataclasses.replace(follows, head=False),
        "a",
        directory,
        FleetLayout(1, None, (BIG,), by_node={"n1": ("--help",)}),
    )
    assert "by_node.n1" in str(refused.refused)
