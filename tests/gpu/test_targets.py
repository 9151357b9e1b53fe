"""The places of desired partitions on GPUs that have partitions: what stands is adopted, what runs stays."""

from __future__ import annotations

import json
import os
import threading
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from devices.partitioning import phases, program
from fake_nvml.fake_machine import FakeMachine
from local_fleets.root_part import root
from local_fleets.running_node import RunningNode, h100, on_slot, until

import skyinfra as sky
from skyinfra import PartitionFailed, mig
from skyinfra.compiler import compile_pools
from skyinfra.desired import file as desired_file
from skyinfra.gpu import partitioner, targets
from skyinfra.gpu.hardware import Hardware
from skyinfra.gpu.machine import BareMachine
from skyinfra.gpu.record import RecordedHardware
from skyinfra.mig import Placement
from skyinfra.node import processes
from skyinfra.node.folder import NodeDirectory
from skyinfra.protocol.nodeconfig import NodeAccelerator
from skyinfra.runner import cli, slots

MakeNode = Callable[..., RunningNode]
ONES = h100((("1g.10gb", 0, 1), ("1g.10gb", 1, 1), ("1g.10gb", 2, 1)))
# As some other version would place them on an empty GPU: nothing of ONES would stay.
ONES_AND_THREE = h100((("3g.40gb", 0, 4), ("1g.10gb", 4, 1), ("1g.10gb", 5, 1), ("1g.10gb", 6, 1)))
THREES = h100((("3g.40gb", 0, 4), ("3g.40gb", 4, 4)))
THREE_AND_TWO = h100((("2g.20gb", 0, 2), ("3g.40gb", 4, 4)))


def stand(node: RunningNode, accelerator: NodeAccelerator) -> dict[tuple[str, int], str]:
    """Partitions the GPUs exactly as declared, as somebody else would; the UUIDs."""
    hardware = Hardware(node.config, node.directory)
    with hardware.nvml() as nvml:
        made = partitioner.apply(nvml, dict(enumerate(accelerator.per_gpu)))
    return {(each.profile, each.start): each.uuid for each in made}


def existing(hardware: Hardware) -> dict[tuple[str, int], str]:
    return {(each.profile, each.start): each.uuid for each in hardware.existing()}


def test_partitions_in_other_places_are_adopted(make_node: MakeNode) -> None:
    node = make_node(accelerator=ONES_AND_THREE)
    hardware = Hardware(node.config, node.directory)
    before = stand(node, h100((("1g.10gb", 0, 1), ("1g.10gb", 2, 1), ("1g.10gb", 3, 1), ("3g.40gb", 4, 4))))
    events: list[dict[str, object]] = []
    assert hardware.plan() == []
    made = hardware.partition(events.append)
    assert {(each.profile, each.start): each.uuid for each in made} == before
    assert events == []
    assert hardware.actual() == made


def test_nothing_that_may_stay_is_destroyed(make_node: MakeNode) -> None:
    node = make_node(accelerator=ONES_AND_THREE)
    before = stand(node, ONES)
    hardware = Hardware(node.config, node.directory)
    assert [str(step) for step in hardware.plan()] == ["GPU 0: create 3g.40gb at 4:4"]
    hardware.partition(lambda event: None)
    assert before.items() < existing(hardware).items()


@pytest.mark.parametrize("busy", [0, 4])
def test_the_partition_whose_slot_has_a_task_stays(make_node: MakeNode, busy: int) -> None:
    node = make_node(accelerator=THREE_AND_TWO)
    before = stand(node, THREES)
    hardware = Hardware(node.config, node.directory)
    hardware.choose({0: {busy}})
    hardware.partition(lambda event: None)
    after = existing(hardware)
    assert after["3g.40gb", busy] == before["3g.40gb", busy]
    assert sorted(profile for profile, _ in after) == ["2g.20gb", "3g.40gb"]
    # What was chosen is remembered when all instances are gone, as after a reboot.
    with hardware.nvml() as nvml:
        partitioner.apply(nvml, {0: ()})
    assert hardware.existing() == ()
    hardware.partition(lambda event: None)
    assert existing(hardware) == after


@pytest.mark.parametrize(
    "layout",
    [
        [{"profile": "3g.40gb", "start": 4, "size": 4}],
        [{"profile": "3g.40gb", "start": 2, "size": 4}, {"profile": "2g.20gb", "start": 0, "size": 2}],
        [{"profile": "3g.40gb", "start": 0, "size": 4}, {"profile": "2g.20gb", "start": 2, "size": 2}],
        "all",
        None,
    ],
    ids=["other profiles", "no such place", "overlap", "no layout", "no file"],
)
def test_a_choice_that_cannot_be_is_none(make_node: MakeNode, layout: object) -> None:
    """Tasks may write the file, where the runner is not root."""
    node = make_node(accelerator=THREE_AND_TWO)
    if layout is not None:
        node.directory.desired_file.write_text(json.dumps({"version": 1, "places": [layout]}))
    assert targets.read(THREE_AND_TWO, node.directory) == {}
    Hardware(node.config, node.directory).partition(lambda event: None)
    assert set(existing(Hardware(node.config, node.directory))) == {("2g.20gb", 0), ("3g.40gb", 4)}


def test_a_choice_behind_a_link_is_none(make_node: MakeNode, tmp_path: Path) -> None:
    node = make_node(accelerator=THREE_AND_TWO)
    other = h100((("3g.40gb", 0, 4), ("2g.20gb", 4, 2)))
    desired_file.update(node.directory, places=other.layouts)
    assert targets.read(THREE_AND_TWO, node.directory) == {0: other.layouts[0]}
    node.directory.desired_file.rename(tmp_path / "elsewhere")
    node.directory.desired_file.symlink_to(tmp_path / "elsewhere")
    assert targets.read(THREE_AND_TWO, node.directory) == {}


def test_a_fixed_place_counts_more_than_what_stands(make_node: MakeNode) -> None:
    insisted = NodeAccelerator(
        "H100", "nvidia", 1, 80.0, "h100_80gb", mig.resolve("3g.40gb@0", mig.geometry("h100_80gb"), 1)
    )
    node = make_node(accelerator=insisted)
    assert '"fixed":true' in node.file.read_text()
    assert node.config.accelerator is not None
    assert node.config.accelerator.layouts[0] == (Placement("3g.40gb", 0, 4),)
    stand(node, h100((("3g.40gb", 4, 4),)))
    hardware = Hardware(node.config, node.directory)
    hardware.choose({0: {4}})
    hardware.partition(lambda event: None)
    assert set(existing(hardware)) == {("3g.40gb", 0)}


@pytest.mark.parametrize("recorded", [False, True], ids=["the runner partitions", "root partitions"])
def test_tasks_go_on_on_partitions_that_need_not_go(make_node: MakeNode, recorded: bool) -> None:
    node = make_node(accelerator=ONES)
    if recorded:
        assert cli.main(["partition", "--config", str(node.file)]) == 0
    with root(node) as codes, node.foreground("serve" if recorded else "boot") as process:
        node.until("ready")
        with node.client() as client:
            pids = {f"n1/{index}": on_slot(client, f"n1/{index}", os.getpid) for index in range(3)}
            node.configure(accelerator=ONES_AND_THREE)
            process.send_signal(1)
            until(lambda: len(node.status().slots) == 4 and node.status().state == "ready", "the new layout serves")
            assert {slot: on_slot(client, slot, os.getpid) for slot in pids} == pids
            assert sorted(slot.profile or "" for slot in node.status().slots) == ["1g.10gb"] * 3 + ["3g.40gb"]
            assert codes == ([0] if recorded else [])


@pytest.mark.slow
def test_tasks_go_on_beside_compute_instances_that_come_and_go(make_node: MakeNode, tmp_path: Path) -> None:
    def of(declared: str) -> NodeAccelerator:
        return replace(THREES, layouts=mig.resolve(declared, mig.geometry("h100_80gb"), 1))

    node, end = make_node(accelerator=of("1c.3g.40gb*2")), tmp_path / "end"
    with node.foreground("boot") as process:
        node.until("ready")
        with node.client() as client:
            before = {slot.slot: (slot.uuid, on_slot(client, slot.slot, os.getpid)) for slot in node.status().slots}
            assert len({uuid for uuid, _ in before.values()}) == len({pid for _, pid in before.values()}) == 2
            node.configure(accelerator=of("1c.3g.40gb*3+1g.10gb"))
            process.send_signal(1)
            until(lambda: len(node.status().slots) == 4 and node.status().state == "ready", "the new layout serves")
            now = {slot.slot: slot.uuid for slot in node.status().slots}
            assert {slot: (now[slot], on_slot(client, slot, os.getpid)) for slot in before} == before
            # The one with a task stays, wherever it stands.
            busy = next(slot.slot for slot in node.status().slots if slot.compute and slot.compute.start == 2)
            args = (client, busy, until_there, str(end), str(tmp_path / "on"))
            running = threading.Thread(target=on_slot, args=args)
            running.start()
            until((tmp_path / "on").exists, "the task runs")
            node.configure(accelerator=of("1c.3g.40gb*1"))
            process.send_signal(1)
            until(lambda: len(node.status().slots) == 1 and node.status().state == "ready", "the others have gone")
            assert [(slot.slot, slot.uuid) for slot in node.status().slots] == [(busy, now[busy])]
            assert running.is_alive(), "its task was not waited for"
            end.touch()
            running.join()


def test_the_slot_with_a_task_is_not_drained(make_node: MakeNode, tmp_path: Path) -> None:
    """Either of two partitions may go: the one without a task goes, at once."""
    node = make_node(accelerator=THREES)
    assert cli.main(["partition", "--config", str(node.file)]) == 0
    end = tmp_path / "end"
    with root(node) as codes, node.foreground("serve") as process:
        node.until("ready")
        busy = next(slot for slot in node.status().slots if slot.start == 4)
        with node.client() as client:
            running = threading.Thread(
                target=on_slot, args=(client, busy.slot, until_there, str(end), str(tmp_path / "on"))
            )
            running.start()
            until((tmp_path / "on").exists, "the task runs")
            # Where nothing runs the partition at 4 would go.
            node.configure(accelerator=h100((("3g.40gb", 0, 4), ("1g.20gb", 4, 2))))
            process.send_signal(1)
            until(lambda: "1g.20gb" in {slot.profile for slot in node.status().slots}, "the new layout serves")
            node.until("ready")
            assert codes == [0]
            found = {(slot.profile, slot.start): slot.uuid for slot in node.status().slots}
            assert found["3g.40gb", 4] == busy.uuid
            assert sorted(profile or "" for profile, _ in found) == ["1g.20gb", "3g.40gb"]
            assert running.is_alive(), "its task was not waited for"
            end.touch()
            running.join()
        assert [str(step) for step in RecordedHardware(node.config, node.directory).plan()] == []


def until_there(file: str, on: str) -> None:
    Path(on).touch()
    while not Path(file).exists():
        time.sleep(0.05)


def test_a_layout_for_one_machine_adopts_what_stands(fake_machine: Callable[..., FakeMachine]) -> None:
    machine = fake_machine("h100_80gb")
    first = program(machine, "--layout", "1g.10gb@0+1g.10gb@2+3g.40gb@4")
    assert first.returncode == 0, first.stderr
    same = program(machine, "--layout", "3g.40gb+1g.10gb*2")
    assert (same.returncode, phases(same)) == (0, [])
    assert program(machine, "--layout", "3g.40gb+1g.10gb*2", "--check").returncode == 0
    more = program(machine, "--layout", "3g.40gb+1g.10gb*3")
    assert (more.returncode, phases(more)) == (0, ["create"])
    insists = program(machine, "--layout", "3g.40gb@0+1g.10gb*3", "--check")
    assert insists.returncode == 1


def test_a_pool_of_whole_and_partitioned_gpus(fake_machine: Callable[..., FakeMachine], tmp_path: Path) -> None:
    """From the declaration to the slots, on the fake driver: seven partitions beside a whole GPU."""
    pool = sky.ComputePool(name="mig", provider=sky.Local(), accelerator="H100:2/off|1g.10gb*7")
    (compiled,) = compile_pools([pool], "demo")
    assert Counter(slot.kind for slot in compiled.slots) == {"gpu": 1, "partition": 7}
    config = replace(compiled.head, node="n1", scheduler="127.0.0.1:0")
    machine, node = fake_machine("h100_80gb,h100_80gb"), NodeDirectory(tmp_path)
    with machine.loaded():
        hardware = Hardware(config, node)
        found = slots.plan(config, hardware.devices(), hardware.partition(lambda event: None))
        assert [(slot.kind, slot.gpu, slot.profile) for slot in found][:2] == [
            ("gpu", 0, None),
            ("partition", 1, "1g.10gb"),
        ]
        assert len({slot.visible for slot in found}) == len(found) == slots.count(config) == 8
        assert hardware.plan() == []
        assert config.accelerator is not None
        other = replace(config.accelerator, layouts=(config.accelerator.layouts[1][:1], config.accelerator.layouts[1]))
        steps = Hardware(replace(config, accelerator=other), node).plan()
        assert [str(step) for step in steps] == ["GPU 0: turn MIG on", "GPU 0: create 1g.10gb at 0:1"]


def test_what_others_made_is_declared_as_it_stands(fake_machine: Callable[..., FakeMachine]) -> None:
    machine = fake_machine("h100_80gb,h100_80gb,t4")
    assert program(machine, "--export", "--format", "declaration").stdout == "None\n"
    assert program(machine, "--layout", "1g.10gb@2+3g.40gb@4", "--gpu", "1").returncode == 0
    told = program(machine, "--export", "--format", "declaration").stdout
    assert told == 'sky.mig.per_gpu("off", "1g.10gb@2+3g.40gb@4", "off")\n'
    assert program(machine, "--layout", "1g.10gb@2+3g.40gb@4", "--gpu", "1", "--check").returncode == 0


def test_a_dry_run_says_what_stays(fake_machine: Callable[..., FakeMachine]) -> None:
    machine = fake_machine("h100_80gb,h100_80gb")
    assert program(machine, "--layout", "3g.40gb*2").returncode == 0
    asked = ("--layout", "3g.40gb+1g.10gb", "--gpu", "0")
    told = [json.loads(line) for line in program(machine, *asked, "--dry-run").stdout.splitlines()]
    assert [(each["event"], each.get("action"), each["gpu"]) for each in told] == [
        ("differs", "destroy", 0),
        ("differs", "create", 0),
        ("stays", None, 0),
    ]
    assert told[2]["start"] == 4 - told[0]["start"]
    checked = [json.loads(line) for line in program(machine, *asked, "--check").stdout.splitlines()]
    assert checked == told[:2]


class Operated(BareMachine):
    """A machine on which the GPU operator's mig-manager runs."""

    def mig_manager(self) -> int | None:
        return os.getpid()


def test_a_layout_is_not_changed_beside_the_operators_mig_manager(make_node: MakeNode) -> None:
    node = make_node(accelerator=THREES)
    hardware = Hardware(node.config, node.directory)
    options = partitioner.ApplyOptions(machine=Operated())
    with hardware.nvml() as nvml:
        with pytest.raises(PartitionFailed, match="mig-manager partitions the GPUs of this machine") as caught:
            partitioner.apply(nvml, {0: THREES.per_gpu[0]}, options=options)
        assert "nvidia.com/gpu.deploy.mig-manager=false" in str(caught.value)
        assert hardware.existing() == ()
        partitioner.apply(nvml, {0: THREES.per_gpu[0]})
        partitioner.apply(nvml, {0: THREES.per_gpu[0]}, options=options)  # nothing is to be changed


def test_programs_are_found_by_name_also_in_containers(tmp_path: Path) -> None:
    for pid, line in ((7, b"/usr/bin/nvidia-mig-manager\0--node"), (8, b"sh\0nvidia-mig-manager"), (9, b"")):
        (tmp_path / str(pid)).mkdir()
        (tmp_path / str(pid) / "cmdline").write_bytes(line)
    (tmp_path / "10").mkdir()
    assert processes.named("nvidia-mig-manager", proc=tmp_path) == [7]


@pytest.mark.parametrize("recorded", [False, True], ids=["the runner partitions", "root partitions"])
def test_a_place_that_no_gpu_has_is_refused_whatever_stands(make_node: MakeNode, recorded: bool) -> None:
    node = make_node(accelerator=h100((("3g.40gb", 2, 4),)))
    stand(node, h100((("3g.40gb", 4, 4),)))
    hardware = (RecordedHardware if recorded else Hardware)(node.config, node.directory)
    hardware.choose({})
    if recorded:
        assert hardware.plan() != []
        return
    with pytest.raises(PartitionFailed, match=r"does not allow 3g\.40gb at 2:4"):
        hardware.partition(lambda event: None)


def test_what_is_chosen_counts_beside_a_gpu_whose_place_is_impossible(make_node: MakeNode) -> None:
    node = make_node(accelerator=h100((("2g.20gb", 0, 2), ("3g.40gb", 4, 4)), (("3g.40gb", 2, 4),)))
    stand(node, h100((("3g.40gb", 0, 4), ("3g.40gb", 4, 4))))
    Hardware(node.config, node.directory).choose({0: {0}})
    assert node.config.accelerator is not None
    selected = targets.read(node.config.accelerator, node.directory)
    assert {index: {(each.profile, each.start) for each in layout} for index, layout in selected.items()} == {
        0: {("3g.40gb", 0), ("2g.20gb", 4)}
    }
