"""AMD partition modes on a node: through the programs amd-smi and modprobe, which a fake stands in for."""

from __future__ import annotations

import dataclasses
import json
import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from devices import fake_amd_smi
from devices.fake_amd_smi import State
from local_fleets.root_part import root
from local_fleets.running_node import RunningNode, on_slot, until
from support import first_fast
from tasks_on_nodes.jobs import wait_for

from skyinfra import AcceleratorMissing, PartitionFailed
from skyinfra.accelerators import Accelerator, partitions
from skyinfra.gpu import inventory
from skyinfra.gpu.amd.partitioner import AmdGpus
from skyinfra.gpu.amd.simulated import SimulatedAmd
from skyinfra.gpu.amd.smi import AmdSmi
from skyinfra.gpu.hardware import Hardware
from skyinfra.node.folder import NodeDirectory
from skyinfra.protocol.nodeconfig import NodeAccelerator, NodeConfig
from skyinfra.runner import cli, slots
from skyinfra.submission.snapshot import Target
from skyinfra.tasks import Task
from skyinfra.worker import process

WHOLE = {"compute": "SPX", "memory": "NPS1", "requested": "NPS1"}


def declared(text: str) -> NodeAccelerator:
    """What the compiler makes of an accelerator string."""
    found = Accelerator.parse(text)
    count = found.count or 1
    return NodeAccelerator(found.name, "amd", count, found.memory_gb, None, found.layouts(), found.memory_mode)


class Machine:
    """The machine that the fake programs act on; they are on PATH."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.file = folder / "fake-amd.json"
        programs = folder / "bin"
        programs.mkdir()
        for name in ("amd-smi", "modprobe"):
            (programs / name).write_text(f'#!/bin/sh\nexec {sys.executable} -ISs {fake_amd_smi.__file__} {name} "$@"\n')
            (programs / name).chmod(0o755)
        monkeypatch.setenv("PATH", f"{programs}{os.pathsep}{os.environ['PATH']}")
        monkeypatch.setenv("FAKE_AMD", str(self.file))

    def has(self, gpus: int = 1, **fields: Any) -> None:
        State([dict(WHOLE) for _ in range(gpus)], **fields).store()

    def change(self, **fields: Any) -> None:
        dataclasses.replace(State.load(), **fields).store()

    def changes(self) -> list[str]:
        """The calls that change something, since the last time."""
        made = [" ".join(call) for call in State.load().calls if call[0] == "modprobe" or call[1] == "set"]
        self.change(calls=[])
        return made

    @property
    def modes(self) -> list[str]:
        return [f"{gpu['compute']}+{gpu['memory']}" for gpu in State.load().gpus]


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Machine:
    return Machine(tmp_path, monkeypatch)


def drivers(machine: Machine, wanted: NodeAccelerator, tmp_path: Path) -> dict[str, AmdSmi]:
    modes = {mode: list(memory) for mode, memory in partitions.part(wanted.name).modes.items()}
    xcds = partitions.part(wanted.name).xcds
    machine.has(wanted.count, xcds=xcds, name=f"AMD Instinct {wanted.name}", modes=modes)
    return {"amd-smi": AmdSmi(), "simulated": SimulatedAmd(wanted, path=tmp_path, seed="s/p/n1")}


@pytest.mark.parametrize("kind", ["amd-smi", "simulated"])
@pytest.mark.parametrize(
    "text", first_fast(["MI300X:2/CPX+NPS4", "MI300X:2/DPX+NPS2", "MI300A:2/TPX", "MI355X:1/QPX+NPS2"])
)
def test_both_drivers_keep_the_same_rules(machine: Machine, tmp_path: Path, kind: str, text: str) -> None:
    wanted = declared(text)
    driver = drivers(machine, wanted, tmp_path)[kind]
    assert [step.gpu for step in AmdGpus(driver, wanted).plan()] == list(range(wanted.count))
    with pytest.raises(PartitionFailed, match="do not stand as declared"):
        AmdGpus(driver, wanted).actual()
    made = AmdGpus(driver, wanted).partition()
    assert [(p.gpu, p.profile, p.start, p.size) for p in made] == [
        (gpu, p.profile, p.start, p.size) for gpu, layout in enumerate(wanted.layouts) for p in layout
    ]
    assert len({p.uuid for p in made}) == len({vars(p)["visible"] for p in made}) == len(made)
    assert AmdGpus(driver, wanted).plan() == []
    assert AmdGpus(driver, wanted).actual() == AmdGpus(driver, wanted).partition() == made
    whole = dataclasses.replace(wanted, layouts=(), memory_mode=None)
    assert AmdGpus(driver, whole).partition() == ()
    assert AmdGpus(driver, whole).plan() == []
    assert [(gpu.compute, gpu.memory, len(gpu.devices)) for gpu in driver.gpus()] == [("SPX", "NPS1", 1)] * wanted.count


def test_the_memory_mode_goes_first_and_sets_the_compute_mode(machine: Machine) -> None:
    machine.has(2)
    events: list[dict[str, Any]] = []
    AmdGpus(AmdSmi(), declared("MI300X:2/QPX+NPS4")).partition(events.append)
    assert machine.changes() == [
        "amd-smi set --gpu 0 --memory-partition NPS4",
        "amd-smi set --gpu 1 --memory-partition NPS4",
        "modprobe -r amdgpu",
        "modprobe amdgpu",
        # The driver has come up in CPX, where the second GPU begins at 8.
        "amd-smi set --gpu 8 --compute-partition QPX",
        "amd-smi set --gpu 0 --compute-partition QPX",
    ]
    assert machine.modes == ["QPX+NPS4"] * 2
    assert [(e["phase"], e.get("gpu"), e.get("profile")) for e in events] == [
        ("reload", None, None),
        ("memory", None, "NPS4"),
        ("mode", 0, "QPX+NPS4"),
        ("mode", 1, "QPX+NPS4"),
    ]


def test_a_compute_mode_that_comes_with_the_memory_mode_is_not_set_again(machine: Machine) -> None:
    machine.has(1)
    AmdGpus(AmdSmi(), declared("MI300X/CPX+NPS4")).partition()
    assert not [call for call in machine.changes() if "compute" in call]


def test_only_what_differs_is_set(machine: Machine) -> None:
    machine.has(3)
    AmdGpus(AmdSmi(), declared("MI300X:3/CPX")).partition()
    machine.changes()
    state = State.load()
    state.gpus[1]["compute"] = "SPX"
    state.store()
    assert [step.gpu for step in AmdGpus(AmdSmi(), declared("MI300X:3/CPX")).plan()] == [1]
    AmdGpus(AmdSmi(), declared("MI300X:3/CPX")).partition()
    assert machine.changes() == ["amd-smi set --gpu 8 --compute-partition CPX"]
    AmdGpus(AmdSmi(), declared("MI300X:3/CPX")).partition()
    assert machine.changes() == []


def test_a_memory_mode_touches_every_gpu(machine: Machine) -> None:
    machine.has(3)
    AmdGpus(AmdSmi(), declared("MI300X:3/CPX+NPS4")).partition()
    state = State.load()
    state.gpus[1] |= WHOLE
    state.store()
    steps = AmdGpus(AmdSmi(), declared("MI300X:3/CPX+NPS4")).plan()
    assert [str(step) for step in steps] == [f"GPU {i}: set CPX+NPS4" for i in range(3)]
    assert steps[0].to_json() == {"gpu": 0, "action": "mode", "profile": "CPX+NPS4"}


def test_before_rocm_7_amd_smi_loads_the_driver_itself(machine: Machine) -> None:
    machine.has(2, rocm=6)
    made = AmdGpus(AmdSmi(), declared("MI300X:2/CPX+NPS4")).partition()
    assert machine.changes() == ["amd-smi set --gpu 0 --memory-partition NPS4"]
    assert len({p.uuid for p in made}) == 16, "one UUID a GPU there, so the partition stands behind it"
    assert made[9].uuid.endswith("/1")


def test_devices_are_numbered_as_rocm_does(machine: Machine) -> None:
    machine.has(2)
    wanted = declared("MI300X:2/DPX")
    made = AmdGpus(AmdSmi(), wanted).partition()
    assert State.load().order == [1, 0], "a GPU that is divided goes to the end of the topology"
    assert [(p.gpu, p.start, vars(p)["visible"]) for p in made] == [(0, 0, "2"), (0, 4, "3"), (1, 0, "0"), (1, 4, "1")]
    config = NodeConfig(1, "demo", "p", "n1", "local", True, "127.0.0.1:0", wanted)
    planned = slots.plan(config, AmdGpus(AmdSmi(), wanted).devices(), made)
    assert [slots.environment(s, "amd") for s in planned][1] == {
        "ROCR_VISIBLE_DEVICES": "3",
        "HIP_VISIBLE_DEVICES": "0",
    }
    assert [(s.profile, s.memory_gb, s.start, s.size, s.units) for s in planned[:2]] == [
        ("DPX", 96.0, 0, 4, 8),
        ("DPX", 96.0, 4, 4, 8),
    ]
    assert process.resources(planned[0])["profile:DPX"] == 1.0


@pytest.mark.parametrize(
    ("state", "wanted", "message", "hint"),
    [
        ({"root": False}, "MI300X/CPX", "refuses the compute mode CPX: .*requires elevation", "needs root"),
        ({"root": False}, "MI300X/CPX+NPS4", "refuses the memory mode NPS4", "needs root"),
        ({"busy": 99}, "MI300X/CPX", "AMDSMI_STATUS_BUSY", r"stop it(.|\n)*python3 \(4242\)"),
        ({"in_use": 99}, "MI300X/CPX+NPS4", "cannot be loaded again.*Module amdgpu is in use", r"python3 \(4242\)"),
        ({"guest": True}, "MI300X/CPX", r"MI300X VF at 0000:05:00\): .*NOT_SUPPORTED", "SR-IOV"),
        ({"guest": True}, "MI300X/CPX+NPS4", "refuses the memory mode", "SR-IOV"),
        ({"modes": {"SPX": ["NPS1"]}}, "MI300X/CPX", "SETTING_UNAVAILABLE", "driver may be too old"),
        ({"silent": True}, "MI300X/CPX", "refuses the compute mode CPX: amd-smi says nothing", "amd-smi static"),
        ({"silent": True}, "MI300X/CPX+NPS4", "does not take the memory mode NPS4 over", "amd-smi static"),
        ({"xcds": 6}, "MI300X/CPX", "CPX shows 6 partitions where 8 were declared", "modprobe -r ast"),
    ],
)
def test_refusals_say_what_was_wanted_found_and_said(
    machine: Machine, state: dict[str, Any], wanted: str, message: str, hint: str
) -> None:
    machine.has(1, **state)
    with pytest.raises(PartitionFailed, match=message) as caught:
        AmdGpus(AmdSmi(), declared(wanted), patience_s=0).partition()
    assert caught.value.hint is not None
    assert caught.match(hint)
    if "cannot be loaded" not in str(caught.value):
        assert "GPU 0 (AMD Instinct MI300X" in str(caught.value)
        assert "Found: " in str(caught.value) and "Wanted: " in str(caught.value)


def test_a_gpu_that_is_busy_for_a_moment_is_waited_for(machine: Machine) -> None:
    machine.has(1, busy=1, in_use=1)
    assert len(AmdGpus(AmdSmi(), declared("MI300X/QPX+NPS4")).partition()) == 4


def test_what_fails_after_it_has_taken_effect_is_done(machine: Machine) -> None:
    machine.has(2, late=True)
    assert len(AmdGpus(AmdSmi(), declared("MI300X:2/QPX")).partition()) == 8
    machine.has(2, late=True, rocm=6)
    assert len(AmdGpus(AmdSmi(), declared("MI300X:2/QPX+NPS4")).partition()) == 8


def test_warnings_before_the_document_are_passed_over(machine: Machine) -> None:
    machine.has(2, warned=True)
    assert [gpu.compute for gpu in AmdSmi().gpus()] == ["SPX", "SPX"]


def test_what_cannot_be_read_is_named(machine: Machine, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    machine.has(1, loaded=False)
    with pytest.raises(AcceleratorMissing, match=r"`amd-smi list` says nothing .*Unable to detect any GPU") as caught:
        AmdSmi().gpus()
    assert "modprobe amdgpu" in (caught.value.hint or "")
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(inventory, "_TOOLS", (str(tmp_path),))
    with pytest.raises(AcceleratorMissing, match="amd-smi not found") as caught:
        AmdSmi().gpus()
    assert "amd-smi-lib" in (caught.value.hint or "")


@pytest.mark.parametrize(
    ("gpus", "name", "message"),
    [
        (2, "AMD Instinct MI300X", "declared 1 x MI300X, found 2: AMD Instinct MI300X at 0000:05:00, "),
        (1, "AMD Instinct MI325X", "declared 1 x MI300X, found AMD Instinct MI325X"),
    ],
)
def test_another_machine_than_declared(machine: Machine, gpus: int, name: str, message: str) -> None:
    machine.has(gpus, name=name)
    with pytest.raises(AcceleratorMissing, match=message):
        AmdGpus(AmdSmi(), declared("MI300X/CPX")).devices()


def test_whole_gpus_are_looked_for_as_files_unless_they_stand_divided(machine: Machine, tmp_path: Path) -> None:
    def hardware(root: Path) -> Hardware:
        config = NodeConfig(1, "demo", "p", "n1", "local", True, "127.0.0.1:0", declared("MI300X:2"))
        return Hardware(config, NodeDirectory(tmp_path), root=root)

    machine.has(2)
    for file in ("dev/kfd", "dev/dri/renderD128", "dev/dri/renderD129"):
        (tmp_path / file).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / file).touch()
    assert [d.visible for d in hardware(tmp_path).devices()] == ["0", "1"]
    assert hardware(tmp_path).plan() == []
    assert State.load().calls == [], "amd-smi is slow"
    AmdGpus(AmdSmi(), declared("MI300X:2/CPX+NPS4")).partition()
    (tmp_path / "dev/dri/renderD130").touch()
    divided = hardware(tmp_path)
    assert [d.visible for d in divided.devices()] == ["0", "1"]
    assert [str(step) for step in divided.plan()] == ["GPU 0: set SPX+NPS1", "GPU 1: set SPX+NPS1"]
    assert divided.partition(lambda event: None) == ()
    assert machine.modes == ["SPX+NPS1"] * 2


def visible_devices() -> str | None:
    return os.environ.get("ROCR_VISIBLE_DEVICES")


MakeNode = Callable[..., RunningNode]


def test_the_program(machine: Machine, make_node: MakeNode) -> None:
    machine.has(2)
    node = make_node(simulate=False, accelerator=declared("MI300X:2/CPX+NPS4"))
    assert node.run("partition", "--check", check=False).returncode == 1
    done = node.run("partition")
    existing = [json.loads(line) for line in done.stdout.splitlines() if '"standing"' in line]
    assert [(p["gpu"], p["profile"], p["start"]) for p in existing] == [(i // 8, "CPX", i % 8) for i in range(16)]
    assert node.run("partition", "--check").returncode == 0
    machine.changes()
    node.run("partition")
    assert machine.changes() == []
    machine.change(guest=True, gpus=[dict(WHOLE)] * 2)
    refused = node.run("partition", check=False)
    assert refused.returncode == 1
    assert "PartitionFailed" in refused.stderr and "SR-IOV" in refused.stderr and "Traceback" not in refused.stderr


def killed_at(machine: Machine, node: RunningNode, call: int) -> bool:
    """Kills the runner at a call of the programs; the next run must get there. False where it made fewer calls."""
    machine.has(1, die_at=call)
    died = node.run("partition", check=False).returncode != 0
    machine.change(die_at=0)
    if not State.load().loaded:
        machine.change(loaded=True)  # which the next boot does
    node.run("partition")
    assert machine.modes == ["QPX+NPS4"]
    return died


@pytest.mark.slow
def test_the_next_run_gets_there_wherever_the_last_one_was_killed(machine: Machine, make_node: MakeNode) -> None:
    node = make_node(simulate=False, accelerator=declared("MI300X/QPX+NPS4"))
    # At the set of the memory mode, both modprobes, and the set of the compute mode.
    machine.has(1)
    node.run("partition")
    calls = [i for i, call in enumerate(State.load().calls, 1) if call[0] == "modprobe" or call[1] == "set"]
    assert len(calls) == 4
    for call in calls:
        assert killed_at(machine, node, call)


@pytest.mark.slow
def test_the_next_run_gets_there_wherever_it_was_killed(machine: Machine, make_node: MakeNode) -> None:
    node = make_node(simulate=False, accelerator=declared("MI300X/QPX+NPS4"))
    call = 1
    while killed_at(machine, node, call):
        call += 4  # the test above has those that change something
    assert call > 10


@pytest.mark.slow
def test_a_simulated_node_has_a_slot_for_each_partition(make_node: MakeNode) -> None:
    node = make_node(accelerator=declared("MI300X:2/QPX+NPS4"))
    status = node.boot()
    assert [(s.slot, s.kind, s.profile, s.gpu, s.memory_gb) for s in status.slots] == [
        (f"n1/{i}", "partition", "QPX", i // 4, 48.0) for i in range(8)
    ]
    with node.client() as client:
        pids = node.pids(client)
        seen = {slot: on_slot(client, slot, visible_devices) for slot in pids}
        assert seen == {f"n1/{i}": str(i) for i in range(8)}
    node.configure(accelerator=declared("MI300X:2/DPX"))
    assert [(s.profile, s.gpu) for s in node.boot().slots] == [("DPX", 0), ("DPX", 0), ("DPX", 1), ("DPX", 1)]
    node.configure(accelerator=declared("MI300X:2"))
    assert [(s.kind, s.profile, s.gpu) for s in node.boot().slots] == [("gpu", None, 0), ("gpu", None, 1)]


@pytest.mark.slow
@pytest.mark.parametrize(("slot", "after", "count"), [("n1/8", "MI300X:2", 2), ("n1/0", "MI300X:2/DPX", 4)])
def test_modes_change_once_the_last_task_has_ended(
    make_node: Callable[..., RunningNode], tmp_path: Path, slot: str, after: str, count: int
) -> None:
    """The GPUs of a node have one mode: none of them gets another one before all may."""
    node = make_node(accelerator=declared("MI300X:2/CPX"))
    node.boot()
    path = tmp_path / "task"
    with node.pool() as pool:
        future = pool.send(Task(wait_for, (str(path), slot)), Target(slot), windowed=False)
        until(path.exists, "it runs")
        node.configure(accelerator=declared(after))
        with node.booting():
            assert node.until("draining").waits_for == (f"slot {slot}: task wait_for",)
            Path(f"{path}.open").touch()
            assert future.result(timeout=60) == slot
    assert len(node.until("ready").slots) == count
    assert len(path.read_text().split()) == 1, "it was started once"


@pytest.mark.slow
@pytest.mark.parametrize(("after", "count"), [("MI300X:2/CPX", 16), ("MI300X:2/DPX+NPS2", 4), ("MI300X:2", 2)])
def test_root_sets_other_modes_for_the_runner(make_node: Callable[..., RunningNode], after: str, count: int) -> None:
    node = make_node(accelerator=declared("MI300X:2/DPX"))
    assert cli.main(["partition", "--config", str(node.file)]) == 0
    with root(node) as codes, node.foreground("serve") as serving:
        assert len(node.until("ready").slots) == 4 and codes == []
        node.configure(accelerator=declared(after))
        serving.send_signal(signal.SIGHUP)
        until(lambda: (s := node.status()).state == "ready" and len(s.slots) == count and s, "the new modes serve")
        until(lambda: codes == [0], "root was asked once")
