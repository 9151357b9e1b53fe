"""A runner that is not root: root partitions, writes down what it did, and is asked again for another layout."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable

import pytest
from local_fleets.root_part import root
from local_fleets.running_node import PATIENCE_S, RunningNode, h100, on_slot, until

from skyinfra import PartitionBusy
from skyinfra.desired import file as desired_file
from skyinfra.gpu import record
from skyinfra.gpu.record import RecordedHardware
from skyinfra.mig.steps import Partition
from skyinfra.node.folder import NodeDirectory, stamp
from skyinfra.node.node import directory_of
from skyinfra.protocol.nodeconfig import NodeAccelerator
from skyinfra.runner import cli, reconcile
from skyinfra.runner.membership import Membership
from skyinfra.runner.reconcile import Reconciler
from skyinfra.runner.workers import Workers

MakeNode = Callable[..., RunningNode]
BEFORE = h100((("3g.40gb", 0, 4),), (("3g.40gb", 0, 4), ("3g.40gb", 4, 4)))
AFTER = h100((("3g.40gb", 0, 4),), (("7g.80gb", 0, 8),))


@pytest.mark.slow
@pytest.mark.parametrize("apart", [False, True], ids=["beside", "apart"])
def test_the_runner_asks_root_for_another_layout(make_node: MakeNode, apart: bool) -> None:
    node = make_node(accelerator=BEFORE)
    if apart:
        # As on a cloud node: the configuration, and what root makes, are in a folder of root's.
        (node.path / "runner").mkdir()
        node.configure(folder=str(node.path / "runner"))
        node.directory = directory_of(node.file)
    assert cli.main(["partition", "--config", str(node.file)]) == 0
    with root(node) as codes, node.foreground("serve") as process:
        node.until("ready")
        with node.client() as client:
            pid = on_slot(client, "n1/0", os.getpid)
            assert codes == [], "what stands already is not asked for"
            node.configure(accelerator=AFTER)
            process.send_signal(1)
            until(lambda: len(node.status().slots) == 2 and node.status().state == "ready", "the new layout serves")
            assert codes == [0]
            assert [slot.profile for slot in node.status().slots] == ["3g.40gb", "7g.80gb"]
            assert on_slot(client, "n1/0", os.getpid) == pid, "the other GPU never noticed"
    if apart:
        assert {each.name for each in node.path.iterdir()} == {"node.json", "secret", "actual-layout.json", "runner"}


def test_what_root_could_not_do_is_the_nodes_status_until_it_can(make_node: MakeNode) -> None:
    node = make_node(accelerator=BEFORE)
    assert cli.main(["partition", "--config", str(node.file)]) == 0
    node.configure(accelerator=AFTER)
    record.write(node.directory, node.config, PartitionBusy("GPU 1: 3g.40gb at 0:4 is used by 4242"))
    with node.foreground("serve"):
        request = until(lambda: desired_file.read(node.directory).request, "a failure of before is tried again")
        busy = PartitionBusy("GPU 1: 3g.40gb at 0:4 is used by 4343")
        record.write(node.directory, node.config, busy, request=request)
        status = until(lambda: (s := node.directory.status()) and s.state == "failed" and s, "the node failed")
        assert status.error is not None
        assert "is used by 4343" in status.error[1]
        assert [slot.gpu for slot in status.slots] == [0], "the GPU that has its layout serves"


async def made_after_a_reminder(node: RunningNode) -> tuple[Partition, ...] | None:
    """What root has made once it is asked a second time: systemd notices no request while root's part runs."""
    workers, superseded = Workers(node.directory), asyncio.Event()
    membership = Membership(node.directory, superseded, lambda *_: {})
    reconciler = Reconciler(node.directory, workers, membership, superseded, partitions=False)
    waiting = asyncio.create_task(reconciler._made_by_root(RecordedHardware(node.config, node.directory)))
    while not (request := desired_file.read(node.directory).request):
        await asyncio.sleep(0.01)
    written = stamp(node.directory.desired_file)
    while stamp(node.directory.desired_file) == written:
        await asyncio.sleep(0.01)
    assert desired_file.read(node.directory).request == request
    assert await asyncio.to_thread(cli.main, ["partition", "--config", str(node.file)]) == 0
    return await waiting


def test_a_request_that_was_not_noticed_is_made_again(make_node: MakeNode, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reconcile, "_REMIND_S", 0.1)
    node = make_node(accelerator=BEFORE)
    assert cli.main(["partition", "--config", str(node.file)]) == 0
    node.configure(accelerator=AFTER)
    made = asyncio.run(asyncio.wait_for(made_after_a_reminder(node), PATIENCE_S))
    assert made is not None
    assert [partition.profile for partition in made] == ["3g.40gb", "7g.80gb"]


@pytest.mark.parametrize(
    ("wanted", "steps"),
    [
        (BEFORE, []),
        (AFTER, ["destroy 3g.40gb at 0:4", "destroy 3g.40gb at 4:4", "create 7g.80gb at 0:8"]),
        (h100((("3g.40gb", 0, 4),), ()), ["destroy 3g.40gb at 0:4", "destroy 3g.40gb at 4:4", "turn MIG off"]),
    ],
)
def test_the_plan_is_made_from_the_record(make_node: MakeNode, wanted: NodeAccelerator, steps: list[str]) -> None:
    node = make_node(accelerator=BEFORE)
    assert cli.main(["partition", "--config", str(node.file)]) == 0
    node.configure(accelerator=wanted)
    found = [str(step) for step in RecordedHardware(node.config, node.directory).plan()]
    assert found == [f"GPU 1: {step}" for step in steps]


def test_a_record_is_read_as_it_was_written(make_node: MakeNode) -> None:
    node = make_node(accelerator=BEFORE)
    directory = NodeDirectory(node.path)
    assert not RecordedHardware.applies(node.config, directory)
    made = (Partition(0, "3g.40gb", 0, 4, "MIG-1"),)
    record.write(directory, node.config, made)
    assert RecordedHardware.applies(node.config, directory)
    found = record.read(directory)
    assert found is not None
    assert (found.partitions, found.error) == (made, None)
    record.write(directory, node.config, PartitionBusy("busy"))
    assert (again := record.read(directory)) is not None
    assert (again.partitions, again.error) == (made, ("PartitionBusy", "busy"))
    directory.actual_file.write_text("{")
    assert record.read(directory) is None
