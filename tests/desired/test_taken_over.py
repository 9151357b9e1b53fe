"""A node of the version before is taken over: its files of the layout are read once, whatever cuts that off.

node_before/ holds the folders of two nodes that a runner of that version has served: a head whose layouts follow the
work, and a worker. The layout of each came from its head or the provider's metadata, and stands in places of its own.
"""

from __future__ import annotations

import json
import os
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from local_fleets.running_node import RunningNode, h100

from skyinfra import desired
from skyinfra.desired import Desired
from skyinfra.desired import file as desired_file
from skyinfra.gpu import record, targets
from skyinfra.gpu.hardware import Hardware
from skyinfra.gpu.record import RecordedHardware
from skyinfra.mig import Follow, placed_text
from skyinfra.node.folder import NodeDirectory
from skyinfra.node.node import file_sha256
from skyinfra.protocol.nodeconfig import NodeConfig
from skyinfra.runner import cli

BEFORE = Path(__file__).with_name("node_before")
# Source and layouts of each node, and the places in which they stand.
NODES = {
    "head": ("work", ["7g.80gb@0", "2g.20gb@0+2g.20gb@2"], ["7g.80gb@0", "2g.20gb@4+2g.20gb@2"]),
    "worker": ("head", ["2g.20gb@0+2g.20gb@2", "3g.40gb@0+3g.40gb@4"], ["2g.20gb@2+2g.20gb@4", "3g.40gb@0+3g.40gb@4"]),
}


def find(directory: NodeDirectory) -> Desired:
    file = directory.path / "node.json"
    return desired.find(NodeConfig.load(file), file_sha256(file), directory)


def layouts(found: Desired) -> list[str]:
    assert found.config.accelerator is not None
    return [placed_text(layout) for layout in found.config.accelerator.layouts]


def uuids(directory: NodeDirectory) -> set[str]:
    return {each.uuid for each in Hardware(find(directory).config, directory).existing()}


@pytest.fixture(params=NODES)
def node(request: pytest.FixtureRequest, tmp_path: Path) -> NodeDirectory:
    shutil.copytree(BEFORE / request.param, tmp_path / request.param)
    return NodeDirectory(tmp_path / request.param)


def check(node: NodeDirectory) -> None:
    """The node has its layout, in the places of before."""
    source, declared, _ = NODES[node.path.name]
    found = find(node)
    assert (found.source, layouts(found), found.refused) == (source, declared, None)
    assert found.layout.by_node == {"n1": ("7g.80gb", ""), "n2": ("", "3g.40gb*2")}
    assert found.config.accelerator is not None
    recorded = RecordedHardware(found.config, node)
    assert RecordedHardware.applies(found.config, node)
    for hardware in (recorded, Hardware(found.config, node)):
        assert hardware.plan() == [], "nothing that stands has to go"
    assert targets.read(found.config.accelerator, node).keys() == {0, 1}


def test_root_reads_the_files_of_before_and_writes_its_own_alone(node: NodeDirectory) -> None:
    before = {file.name for file in node.path.iterdir()}
    check(node)
    assert record.asked(node), "nothing was done since this boot"
    existing = uuids(node)
    assert cli.main(["partition", "--config", str(node.path / "node.json"), "--on-request"]) == 0
    assert {file.name for file in node.path.iterdir()} - before <= {"actual-layout.json", "simulated.lock"}
    assert uuids(node) == existing
    assert not record.asked(node)
    check(node)


def test_the_runner_takes_them_over_once(node: NodeDirectory) -> None:
    desired_file.update(node)
    kept = desired_file.read(node)
    assert (kept.declared is not None) == (node.path.name == "head")
    check(node)
    for file in desired_file._BEFORE:
        (node.path / file).unlink(missing_ok=True)
    assert desired_file.read(node) == kept
    written = node.desired_file.stat().st_mtime_ns
    desired_file.update(node)
    assert node.desired_file.stat().st_mtime_ns == written


def test_a_node_that_went_back_is_taken_over_again(node: NodeDirectory) -> None:
    """Its old runner has written its files since."""
    desired_file.update(node)
    told = json.loads((node.path / "told.json").read_text())
    told["layout"]["layouts"][1] = []
    (node.path / "told.json").write_text(json.dumps(told))
    now = node.desired_file.stat().st_mtime_ns + 1_000_000
    os.utime(node.path / "told.json", ns=(now, now))
    kept = desired_file.read(node)
    assert kept.fleet is not None
    assert kept.fleet.layouts[1] == ()
    desired_file.update(node)
    os.utime(node.path / "told.json", ns=(0, 0))
    assert desired_file.read(node) == kept


def cut(node: NodeDirectory, step: int, program: Callable[[], object]) -> bool:
    """Runs *program* in a process of its own, whose power fails before that *step* in the folder; whether it did."""
    child = os.fork()
    if child == 0:
        left = step

        def hook(event: str, given: tuple[Any, ...]) -> None:
            nonlocal left
            changes = event in ("os.rename", "os.remove", "os.chmod") or (event == "open" and given[2] & os.O_CREAT)
            if changes and str(given[0]).startswith(str(node.path)):
                left -= 1
                if left < 0:
                    os._exit(9)

        sys.addaudithook(hook)
        with open(os.devnull, "w") as nowhere:  # noqa: PTH123
            os.dup2(nowhere.fileno(), 1)
        failed = 1
        try:
            program()
            failed = 0
        finally:
            os._exit(failed)
    code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    assert code in (0, 9)
    return code == 9


@pytest.mark.slow
def test_a_runner_serves_what_stood_before(make_node: Callable[..., RunningNode]) -> None:
    node = make_node("n1", accelerator=h100((), ()), follow=Follow(["3g.40gb*2", "7g.80gb", "2g.20gb*2"]))
    for file in (BEFORE / "head").iterdir():
        if file.name != "node.json":
            shutil.copy(file, node.path)
    existing = uuids(node.directory)
    status = node.boot()
    assert (status.layouts, status.layout_from) == (("7g.80gb", "2g.20gb*2"), "work")
    assert {slot.uuid for slot in status.slots} == existing
    assert desired_file.read(node.directory).declared is not None
    assert node.directory.desired_file.exists()


def test_the_power_may_fail_before_any_step(node: NodeDirectory, tmp_path: Path) -> None:
    def take_over() -> None:
        """Does what root and then the runner do when the node starts with the new version, but for serving."""
        assert cli.main(["partition", "--config", str(node.path / "node.json"), "--on-request"]) == 0
        desired_file.update(node)
        desired.remember(find(node).layout, file_sha256(node.path / "node.json"), node)

    existing = uuids(node)
    steps = 0
    while cut(node, steps, take_over):
        steps += 1
        check(node)
        assert uuids(node) == existing
        take_over()
        check(node)
        assert uuids(node) == existing
        shutil.rmtree(node.path)
        shutil.copytree(BEFORE / node.path.name, node.path)
    assert steps >= 4
    check(node)
