"""Compute instances that share a GPU instance, on GPUs: partitions of their own with one memory."""

from __future__ import annotations

import itertools
import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pynvml
import pytest
from devices.capability_files import list_capabilities
from devices.gres import gres, lines
from devices.partitioning import events, phases, program, run
from fake_nvml.fake_machine import FakeMachine

import skyinfra as sky
from skyinfra import NotSupported, PartitionBusy, mig
from skyinfra.compiler import compile_pools
from skyinfra.gpu import exports, partitioner, targets
from skyinfra.gpu.hardware import Hardware, session
from skyinfra.gpu.nvml import Nvml
from skyinfra.gpu.partitioner import ApplyOptions
from skyinfra.gpu.simulated.driver import SimulatedDriver
from skyinfra.mig.grid import compute_refusal
from skyinfra.node.folder import NodeDirectory
from skyinfra.protocol.nodeconfig import NodeAccelerator, NodeConfig
from skyinfra.runner import slots
from skyinfra.worker import process

Machine = Callable[..., FakeMachine]
H100 = mig.geometry("h100_80gb")


def shared(machine: FakeMachine) -> list[tuple[str, int, list[tuple[int, int]]]]:
    """The GPU instances of the first GPU by start, and start and size of what shares them."""
    found = machine.show()[0]["instances"]
    rows = [(i["profile"], i["start"], sorted((c["start"], c["slices"]) for c in i["compute"])) for i in found]
    return sorted(rows, key=lambda row: row[1])


def refusal(machine: FakeMachine, layout: str) -> str:
    """The message about a layout that processes are in the way of, without waiting for them."""
    with machine.loaded(), session(Nvml()) as nvml, pytest.raises(PartitionBusy) as caught:
        partitioner.apply(nvml, targets.given(nvml, layout, "0"), options=ApplyOptions(patience_s=0))
    return str(caught.value)


def test_a_pool_of_compute_instances(fake_machine: Machine, tmp_path: Path) -> None:
    """Two slots with their own UUIDs; the memory is one."""
    pool = sky.ComputePool(
        name="mig", provider=sky.Local(), accelerator=sky.accelerators.H100(count=1, mig="1c.3g.40gb*2")
    )
    (deployment,) = compile_pools([pool], "demo")
    assert [(slot.kind, slot.profile) for slot in deployment.slots] == [("partition", "1c.3g.40gb")] * 2
    config = NodeConfig.read(json.loads(deployment.head.dumps().replace("@SKYINFRA_NODE@", "mig-0")))
    machine = fake_machine("h100_80gb")
    hardware = Hardware(_real(config), NodeDirectory(tmp_path))
    with machine.loaded():
        made = hardware.partition(lambda event: None)
        assert hardware.plan() == []
        planned = slots.plan(config, hardware.devices(), made)
        with session(Nvml()) as nvml:
            devices = [nvml.mig_device(slot.uuid or "") for slot in planned]
            memory = [device.memory().total for device in devices if device is not None]
            names = [device.profile for device in devices if device is not None]
    assert len({slot.uuid for slot in planned}) == 2 and names == ["1c.3g.40gb"] * 2
    assert {each["id"] for each in machine.show()[0]["instances"]} and len(machine.show()[0]["instances"]) == 1
    assert memory[0] == memory[1] > 35 * 2**30
    for slot in planned:
        assert slots.environment(slot, "nvidia") == {"CUDA_VISIBLE_DEVICES": slot.uuid}
        assert (slot.memory_gb, slot.shared_by) == (40.0, 2)
        # A task that asks for memory gets no more than the slot can count on.
        assert process.resources(slot)["gpu_memory_mb"] == pytest.approx(40_000 / 3)
        assert type(slot).read(json.loads(json.dumps(slot.to_json()))) == slot
    assert slots.count(config) == 2


def _real(config: NodeConfig) -> NodeConfig:
    return NodeConfig.read({**config.to_json(), "simulate": False})


def test_what_is_declared_without_them_is_written_as_before() -> None:
    pool = sky.ComputePool(name="mig", provider=sky.Local(), accelerator=sky.accelerators.H100(count=1, mig="3g.40gb"))
    (deployment,) = compile_pools([pool], "demo")
    assert "compute" not in deployment.head.dumps()


def test_a_layout_for_one_machine(fake_machine: Machine) -> None:
    machine = fake_machine("h100_80gb")
    done = run(machine, "--layout", "1c.3g.40gb*2")
    assert done.returncode == 0, done.stderr
    existing = [event for event in events(done) if event["event"] == "standing"]
    assert [(each["profile"], each["start"], each["compute"]) for each in existing] == [
        ("1c.3g.40gb", 4, {"start": 0, "size": 1}),
        ("1c.3g.40gb", 4, {"start": 1, "size": 1}),
    ]
    assert run(machine, "--layout", "1c.3g.40gb*2", "--check").returncode == 0
    assert phases(run(machine, "--layout", "1c.3g.40gb*2")) == []
    more = run(machine, "--layout", "1c.3g.40gb*3+3g.40gb")
    assert phases(more) == ["create", "create"]
    assert shared(machine) == [("3g.40gb", 0, [(0, 3)]), ("3g.40gb", 4, [(0, 1), (1, 1), (2, 1)])]
    assert phases(run(machine, "--layout", "3g.40gb*2")) == ["destroy"] * 3 + ["create"]
    assert shared(machine) == [("3g.40gb", 0, [(0, 3)]), ("3g.40gb", 4, [(0, 3)])]
    assert phases(run(machine, "--layout", "off")) == ["destroy", "destroy", "mode"]


def test_what_has_a_process_stays(fake_machine: Machine) -> None:
    machine = fake_machine("h100_80gb")
    assert run(machine, "--layout", "1c.3g.40gb*3").returncode == 0
    machine.control("hold", 0, "--pid", 77, "--start", 4, "--compute", 2)
    done = run(machine, "--layout", "2c.3g.40gb+1c.3g.40gb")
    assert (done.returncode, phases(done)) == (0, ["destroy", "destroy", "create"]), done.stderr
    assert shared(machine) == [("3g.40gb", 4, [(0, 2), (2, 1)])]
    assert "1c.3g.40gb at 4:4 (2:1) is used by 77" in refusal(machine, "2c.3g.40gb*1")


def test_a_process_on_what_has_to_go_is_named(fake_machine: Machine) -> None:
    machine = fake_machine("h100_80gb")
    assert run(machine, "--layout", "1c.3g.40gb*3").returncode == 0
    machine.control("hold", 0, "--pid", 77, "--start", 4, "--compute", 1)
    before = shared(machine)
    said = refusal(machine, "3g.40gb@4")
    assert shared(machine) == before
    assert "1c.3g.40gb at 4:4 (1:1) is used by 77" in said
    assert "3g.40gb at 4:4 (0:1)" not in said.partition("Wanted")[0]


def test_a_node_of_three_two_and_two(fake_machine: Machine) -> None:
    """The driver alone, in any order of size, puts the one of three where it has no room for the other two."""
    machine = fake_machine("h100_80gb")
    done = run(machine, "--layout", "3c.7g.80gb+2c.7g.80gb*2")
    assert done.returncode == 0, done.stderr
    assert shared(machine) == [("7g.80gb", 0, [(0, 2), (2, 2), (4, 3)])]


def test_layouts_of_others_come_back(fake_machine: Machine, tmp_path: Path) -> None:
    machine = fake_machine("h100_80gb")
    run(machine, "--layout", "1c.3g.40gb@4*2+2g.20gb@0")
    before, file = shared(machine), str(tmp_path / "found.json")
    assert run(machine, "--save", file).returncode == 0
    assert run(machine, "--layout", "1g.10gb*7").returncode == 0
    done = run(machine, "--restore", file)
    assert (done.returncode, shared(machine)) == (0, before), done.stderr


def test_exports_of_what_stands(fake_machine: Machine, tmp_path: Path) -> None:
    machine = fake_machine("h100_80gb")
    run(machine, "--layout", "1c.3g.40gb*2+3g.40gb")
    assert '"1c.3g.40gb": 2' in run(machine, "--export").stdout
    declared = run(machine, "--export", "--format", "declaration").stdout
    assert declared == '"3g.40gb@0+1c.3g.40gb@4*2"\n'
    list_capabilities(machine, tmp_path)
    text, warnings = gres(machine, tmp_path)
    assert warnings == ()
    devices = [line.split()[1:3] for line in lines(text)[1:]]
    assert [kind for kind, _ in devices].count("Type=1c.3g.40gb") == 2
    assert len({files for _, files in devices}) == 3, "each has a file of its own"
    with machine.loaded(), session(Nvml()) as nvml, pytest.raises(NotSupported):
        exports.device_plugin(nvml)
    assert "no compute instances" in run(machine, "--export", "--format", "device-plugin").stderr


def test_the_real_program(fake_machine: Machine) -> None:
    machine = fake_machine("a30")
    done = program(machine, "--layout", "1c.2g.12gb")
    assert done.returncode == 0, done.stderr
    assert [(name, len(found)) for name, _, found in shared(machine)] == [("2g.12gb", 2), ("2g.12gb", 2)]


# Adoption.


def every_division(profile: mig.Profile) -> list[tuple[mig.Compute, ...]]:
    """The divisions of a GPU instance that somebody may have made: whole and empty ones left out."""
    found: list[tuple[mig.Compute, ...]] = []
    options = [mig.Compute(start, size) for size in profile.compute_sizes for start in profile.compute_starts(size)]
    for count in range(1, profile.compute_slices + 1):
        for some in itertools.combinations(options, count):
            compute = tuple(sorted(some, key=lambda each: each.start))
            if not compute_refusal(profile, compute):
                found.append(compute)
    return found


@pytest.mark.parametrize(
    ("name", "step"), [("3g.40gb", 1), ("7g.80gb", 20), pytest.param("7g.80gb", 1, marks=pytest.mark.slow)]
)
def test_what_others_made_is_adopted(tmp_path: Path, name: str, step: int) -> None:
    """The declaration that is printed for it, read by us, changes nothing; and so does its set in other words."""
    accelerator = NodeAccelerator("H100", "nvidia", 1, 80.0, "h100_80gb")
    driver = SimulatedDriver(accelerator, path=tmp_path / "state", seed="others")
    divisions = every_division(H100.profile(name))
    assert len(divisions) >= {"3g.40gb": 8, "7g.80gb": 100}[name]
    with session(Nvml(driver)) as nvml:
        for compute in divisions[::step]:
            start, size = (H100.profile(name).starts or ())[-1], H100.profile(name).size or 0
            _make(nvml, name, start, size, compute)
            (text, warnings) = exports.declaration(nvml)
            desired = targets.given(nvml, json.loads(text), "0")
            assert warnings == ()
            assert partitioner.plan(nvml, targets.arranged(nvml, desired, {})) == []
            names = [f"{each.size}c.{name}" for each in compute]
            (loose,) = mig.resolve(names, H100, 1)
            assert partitioner.plan(nvml, targets.arranged(nvml, {0: loose}, {})) == []
            partitioner.apply(nvml, {0: ()})


# What a machine may have: of each its name, its memory, its model and the number of its GPUs.
MACHINES = (
    ("H100", 80.0, "h100_80gb", 1),
    ("A30", 24.0, "a30_24gb", 1),
    ("H100", 80.0, "h100_80gb", 2),
    ("A30", 24.0, "a30_24gb", 2),
)


@pytest.mark.parametrize("seed", [range(24), pytest.param(range(24, 240), marks=pytest.mark.slow)], ids=["24", "216"])
def test_any_foreign_layout_is_exported_and_adopted_and_nothing_is_to_be_done(tmp_path: Path, seed: range) -> None:
    """In each format that can be adopted; where a format cannot hold it, that is said.

    A GPU instance without a compute instance is named, and the only one that is made anew: nothing can use it.
    """
    adopted = unused = 0
    for number in seed:
        chance = random.Random(number)
        name, memory, model, count = MACHINES[number % len(MACHINES)]
        geometry = mig.geometry(model)
        every = mig.layouts(geometry, mig.plain_profiles(geometry))
        accelerator = NodeAccelerator(name, "nvidia", count, memory, model)
        driver = SimulatedDriver(accelerator, path=tmp_path / f"state {number}", seed="others")
        with session(Nvml(driver)) as nvml:
            bare: set[tuple[int, int | None]] = set()
            for gpu in range(count):
                if gpu and chance.random() < 0.2:
                    continue  # MIG is off there
                for place in chance.choice(every):
                    profile = geometry.profile(place.profile)
                    whole = (mig.Compute(0, profile.compute_slices),)
                    divided = chance.choice([whole, *every_division(profile)])
                    if chance.random() < 0.1:
                        divided = ()
                        bare.add((gpu, place.start))
                    _make(nvml, place.profile, place.start, place.size, divided, gpu)
            for form in (exports.declaration, exports.export, exports.mig_manager):
                text, warnings = form(nvml)
                assert len([each for each in warnings if "has no compute instance: nothing can" in each]) == len(bare)
                if form is not exports.declaration:
                    file = tmp_path / "config.yaml"
                    file.write_text(text)
                    selected = mig.Selected(str(file), "current" if form is exports.export else "skyinfra")
                    kept = exports.keeps(nvml, selected)
                    said = any("which compute instances share" in each for each in warnings)
                    assert kept or said or bare, (number, form, text)
                    text, _ = exports.configured(nvml, selected)
                    if said:
                        continue
                desired = {gpu: targets.given(nvml, each, str(gpu))[gpu] for gpu, each in enumerate(_declared(text))}
                steps = partitioner.plan(nvml, targets.arranged(nvml, desired, {}))
                gone = {(each.gpu, each.start) for each in steps if each.action == "destroy"}
                made = [(each.gpu, each.start) for each in steps if each.action == "create"]
                assert gone == bare and len(made) == len(bare) == len(steps) // 2, (number, form, text, steps)
                adopted += 1
            unused += bool(bare)
    assert adopted > 2 * len(seed) and unused


def _declared(text: str) -> list[str]:
    """The layout of each GPU in a declaration."""
    found = json.loads(text.replace("sky.mig.per_gpu(", "[").replace(")", "]"))
    return found if isinstance(found, list) else [found]


def _make(nvml: Nvml, name: str, start: int, size: int, compute: tuple[mig.Compute, ...], index: int = 0) -> None:
    """As nvidia-smi does, the last one first."""
    gpu = nvml.gpus()[index]
    gpu.set_mig_mode(True)
    profile = next(each for each in gpu.profiles() if each.name == name)
    handle = gpu.create(profile, start=start, size=size)
    for each in reversed(compute):
        gpu.share(handle, profile, start=each.start, size=each.size)


def test_a_size_that_the_device_has_not_is_refused(tmp_path: Path) -> None:
    driver = SimulatedDriver(
        NodeAccelerator("H100", "nvidia", 1, 80.0, "h100_80gb"), path=tmp_path / "state", seed="others"
    )
    with session(Nvml(driver)) as nvml:
        (gpu,) = nvml.gpus()
        gpu.set_mig_mode(True)
        profile = next(each for each in gpu.profiles() if each.name == "4g.40gb")
        handle: Any = gpu.create(profile, start=0, size=4)
        with pytest.raises(pynvml.NVMLError):
            gpu.share(handle, profile, start=0, size=3)
        with pytest.raises(pynvml.NVMLError):
            gpu.share(handle, profile, start=1, size=2)
