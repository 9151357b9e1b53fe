"""What slots use, as the node measures it: on the fake driver, and as Prometheus reads it."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import Callable
from pathlib import Path

import pytest
from devices import vendor_files
from fake_nvml.fake_machine import FakeMachine
from hypothesis import given
from hypothesis import strategies as st
from local_fleets.running_node import RunningNode, h100

from skyinfra.node.folder import Status
from skyinfra.protocol.instance import InstanceInfo
from skyinfra.protocol.nodeconfig import NodeAccelerator
from skyinfra.protocol.readings import Figures, SlotReading
from skyinfra.readings import prometheus
from skyinfra.runner import metrics
from skyinfra.runner.metrics import cannot_listen

Machine = Callable[..., FakeMachine]
MakeNode = Callable[..., RunningNode]

BIG = (("3g.40gb", 0, 4), ("3g.40gb", 4, 4))
MIB = 2**20

# Reads the figures of the slots that partitions of the machine would be, without a runner.
READ = """
import json, sys
from skyinfra.protocol.instance import InstanceInfo
from skyinfra.readings import nvidia
from skyinfra.gpu.nvml import Nvml
from skyinfra.gpu.hardware import session
with session(Nvml()) as nvml:
    slots = []
    for gpu in nvml.gpus():
        mode = gpu.mig_mode()
        found = gpu.instances() if mode and mode[0] else [None]
        for instance in found:
            kind = "partition" if instance else "gpu"
            uuid = instance.uuid if instance else gpu.uuid
            slots.append(InstanceInfo("n1", len(slots), f"n1/{len(slots)}", kind, "s/p", gpu=gpu.index, uuid=uuid))
    slots.append(InstanceInfo("n1", 99, "n1/99", "partition", "s/p", gpu=0, uuid="MIG-gone"))
    print(json.dumps([reading.to_json() for reading in nvidia.of_slots(nvml, slots)]))
"""


def read(machine: FakeMachine, **settings: str) -> list[SlotReading]:
    done = machine.python("-c", READ, **settings)
    assert done.returncode == 0, done.stderr
    return [SlotReading.read(each) for each in json.loads(done.stdout)]


def figures(reading: SlotReading) -> tuple[object, ...]:
    used = None if reading.memory_used is None else reading.memory_used // MIB
    return reading.utilization, used, reading.temperature, reading.power


def test_whole_gpus_and_partitions(fake_machine: Machine) -> None:
    machine = fake_machine("h100_80gb,h100_80gb,t4")
    layout = ("-m", "skyinfra.runner", "partition", "--layout", "3g.40gb*2", "--gpu", "1")
    assert machine.python(*layout).returncode == 0
    found = read(
        machine,
        READINGS="0.utilization=73,0.used=1000,0.temperature=66,0.power=412500,"
        "1.temperature=55,1.power=300000,1/0.used=20000,1/0.sm=87,1/4.used=7,2.utilization=5",
    )
    assert [figures(reading) for reading in found] == [
        (73.0, 1000, 66, 412.5),
        (87.0, 20000, 55, 300.0),
        (0.0, 7, 55, 300.0),
        (5.0, 0, 31, 70.0),
        # A partition that has just gone has no figures of its own.
        (None, None, 66, 412.5),
    ]
    assert found[1].memory_total is not None
    assert 39_000 * MIB < found[1].memory_total < 41_000 * MIB


@pytest.mark.slow
def test_what_a_gpu_or_its_driver_does_not_tell(fake_machine: Machine) -> None:
    machine = fake_machine("a100_80gb")
    layout = ("-m", "skyinfra.runner", "partition", "--layout", "3g.40gb*2", "--force", "--reboot")
    assert machine.python(*layout).returncode == 0
    # Ampere has no GPM.
    assert [figures(reading)[0] for reading in read(machine)] == [None, None, None]
    # Hopper's is for root only where the machine says so.
    hopper = fake_machine("h100_80gb")
    assert read(hopper)[0].utilization == 0
    assert hopper.python("-m", "skyinfra.runner", "partition", "--layout", "7g.80gb").returncode == 0
    assert read(hopper, FAIL="nvmlGpmMigSampleGet:4")[0].utilization is None


def test_energy_by_share_and_activity_by_instance(fake_machine: Machine) -> None:
    machine = fake_machine("h100_80gb,a30")
    layout = ("-m", "skyinfra.runner", "partition", "--layout")
    assert machine.python(*layout, "3g.40gb+1g.10gb*2", "--gpu", "0").returncode == 0
    assert machine.python(*layout, "2g.12gb*2", "--gpu", "1", "--reboot").returncode == 0
    readings = "0.energy=7000000,1.energy=4000000,0/4.sm=50,0/4.tensor=31,0/4.dram=12"
    parts = [each for each in read(machine, READINGS=readings) if "GPU_I_ID" in each.labels]
    found = {(each.labels["gpu"], each.labels["GPU_I_PROFILE"]): each for each in parts}
    three, one, half = (found[key] for key in (("0", "3g.40gb"), ("0", "1g.10gb"), ("1", "2g.12gb")))
    assert (three.energy, three.share, three.slot_energy) == (7000.0, 3 / 7, pytest.approx(3000.0))
    assert (one.slot_energy, half.slot_energy) == (pytest.approx(1000.0), pytest.approx(2000.0))
    assert three.activity["tensor"] == 31.0
    assert (three.utilization, one.activity["sm"], half.activity) == (50.0, 0.0, {})
    assert three.labels | {"UUID": "", "Hostname": "", "DCGM_FI_DRIVER_VERSION": ""} == {
        "gpu": "0",
        "UUID": "",
        "pci_bus_id": three.labels["pci_bus_id"],
        "device": "nvidia0",
        "modelName": "NVIDIA H100 80GB HBM3",
        "Hostname": "",
        "DCGM_FI_DRIVER_VERSION": "",
        "GPU_I_PROFILE": "3g.40gb",
        "GPU_I_ID": "2",
    }
    assert re.fullmatch(r"00000000:[0-9A-F]{2}:00\.0", three.labels["pci_bus_id"])


def test_an_old_driver(fake_machine: Machine) -> None:
    (reading, _) = read(fake_machine("t4", old=True), READINGS="0.utilization=5")
    assert figures(reading) == (5.0, 0, 31, 70.0)


@pytest.mark.parametrize("simulate", [False, True])
def test_slots_of_another_vendor(make_node: MakeNode, tmp_path: Path, simulate: bool) -> None:
    accelerator = NodeAccelerator("MI300X", "amd", 1, 192.0)
    node = make_node(accelerator=accelerator, simulate=simulate)
    root = tmp_path / "root"
    vendor_files.kfd(root, (0x05, 0))
    vendor_files.amd_gpu(root, 0x05, gpu_busy_percent=37, mem_info_vram_used=MIB, __power1_average=300_000_000)
    served = slot(accelerator="MI300X", gpu=0, visible=("ROCR_VISIBLE_DEVICES", "0"), simulated=simulate)
    with node.directory.held():
        node.directory.write(node.directory.status_file, Status("s/p", "n1", "ready", "", slots=(served,)).dumps())
        [reading] = metrics.read(node.file, root=root)
    # What is simulated has no figures, whatever the machine has.
    told = (None, None, None, None) if simulate else (37.0, 1, None, 300.0)
    assert (reading.slot, figures(reading)) == (served, told)
    lines = prometheus.text([reading]).splitlines()
    value = 'skyinfra_slot_utilization_ratio{fleet="s/p",node="n1",slot="0",gpu="0"} 0.37'
    assert (value in lines) is not simulate


def slot(**fields: object) -> InstanceInfo:
    return InstanceInfo(
        **{"node": "n1", "worker": 0, "slot": "n1/0", "kind": "gpu", "fleet": "s/p", "gpu": 3, **fields}
    )  # type: ignore[arg-type]


def test_the_text_that_prometheus_reads() -> None:
    text = prometheus.text(
        [SlotReading(slot(accelerator="H100", uuid="GPU-1"), 50.0, 2, 4, 60, 300.5), SlotReading(slot(worker=1))]
    )
    assert text.splitlines() == [
        "# HELP skyinfra_slot_info A slot that has a worker; always 1.",
        "# TYPE skyinfra_slot_info gauge",
        'skyinfra_slot_info{fleet="s/p",node="n1",slot="0",gpu="3",kind="gpu",accelerator="H100",profile="",'
        'uuid="GPU-1"} 1.0',
        'skyinfra_slot_info{fleet="s/p",node="n1",slot="1",gpu="3",kind="gpu",accelerator="",profile="",uuid=""} 1.0',
        "# HELP skyinfra_slot_utilization_ratio Share of the time, or multiprocessors, in use.",
        "# TYPE skyinfra_slot_utilization_ratio gauge",
        'skyinfra_slot_utilization_ratio{fleet="s/p",node="n1",slot="0",gpu="3"} 0.5',
        "# HELP skyinfra_slot_memory_used_bytes Device memory of the slot in use.",
        "# TYPE skyinfra_slot_memory_used_bytes gauge",
        'skyinfra_slot_memory_used_bytes{fleet="s/p",node="n1",slot="0",gpu="3"} 2.0',
        "# HELP skyinfra_slot_memory_bytes Device memory of the slot.",
        "# TYPE skyinfra_slot_memory_bytes gauge",
        'skyinfra_slot_memory_bytes{fleet="s/p",node="n1",slot="0",gpu="3"} 4.0',
        "# HELP skyinfra_slot_accelerator_celsius Temperature of the slot's whole accelerator.",
        "# TYPE skyinfra_slot_accelerator_celsius gauge",
        'skyinfra_slot_accelerator_celsius{fleet="s/p",node="n1",slot="0",gpu="3"} 60.0',
        "# HELP skyinfra_slot_accelerator_watts Power of the slot's whole accelerator.",
        "# TYPE skyinfra_slot_accelerator_watts gauge",
        'skyinfra_slot_accelerator_watts{fleet="s/p",node="n1",slot="0",gpu="3"} 300.5',
    ]
    assert prometheus.text([]) == ""


def test_figures_that_the_exporter_of_nvidia_has_bear_its_names() -> None:
    labels = {"gpu": "3", "UUID": "GPU-1", "GPU_I_PROFILE": "3g.40gb", "GPU_I_ID": "2", "DCGM_FI_DRIVER_VERSION": "5"}
    part = slot(kind="partition", profile="3g.40gb", uuid="MIG-1")
    reading = SlotReading(
        part,
        memory_used=3 * MIB,
        memory_total=8 * MIB,
        energy=70.5,
        share=0.25,
        activity={"sm": 50.0, "tensor": 12.5},
        labels=labels,
        task="train-0123",
        figures=Figures(3, 4.0, memory_peak=7, energy=1.5),
    )
    found = [line for line in prometheus.text([reading]).splitlines() if not line.startswith("#")]
    named = 'gpu="3",UUID="GPU-1",GPU_I_PROFILE="3g.40gb",GPU_I_ID="2",DCGM_FI_DRIVER_VERSION="5"'
    ours = 'fleet="s/p",node="n1",slot="0",gpu="3"'
    assert [line for line in found if line.startswith("DCGM")] == [
        f"DCGM_FI_DEV_TOTAL_ENERGY_CONSUMPTION{{{named}}} 70500.0",
        f"DCGM_FI_DEV_FB_FREE{{{named}}} 5.0",
        f"DCGM_FI_DEV_FB_USED{{{named}}} 3.0",
        f"DCGM_FI_PROF_SM_ACTIVE{{{named}}} 0.5",
        f"DCGM_FI_PROF_PIPE_TENSOR_ACTIVE{{{named}}} 0.125",
    ]
    assert [line for line in found if not line.startswith(("DCGM", "skyinfra_slot_info", "skyinfra_slot_memory"))] == [
        f"skyinfra_slot_energy_joules_total{{{ours}}} 17.625",
        f'skyinfra_slot_activity_ratio{{{ours},measure="sm"}} 0.5',
        f'skyinfra_slot_activity_ratio{{{ours},measure="tensor"}} 0.125',
        f'skyinfra_task_memory_peak_bytes{{{ours},task="train"}} 7.0',
        f'skyinfra_task_energy_joules{{{ours},task="train"}} 1.5',
    ]
    assert "# TYPE skyinfra_slot_energy_joules_total counter" in prometheus.text([reading])
    # Another vendor's device has labels of its own, and none of these names.
    assert "DCGM" not in prometheus.text([SlotReading(slot(), power=5.0, labels={"gpu_id": "0"})])


@given(st.text())
def test_a_label_holds_anything(name: str) -> None:
    text = prometheus.text([SlotReading(slot(accelerator=name))])
    lines = text.split("\n")
    assert len(lines) == 4
    label = lines[2].partition('accelerator="')[2].partition('",profile=')[0]
    assert re.sub(r"\\(.)", lambda match: {"n": "\n"}.get(match[1], match[1]), label) == name


@pytest.mark.parametrize("listen", ["127.0.0.1:0", "[::1]:0"])
def test_a_node_serves_its_figures(make_node: MakeNode, listen: str) -> None:
    node = make_node(accelerator=h100(BIG))
    assert node.run("metrics", "--once").stdout == "", "no runner, no slots"
    node.boot()
    assert node.run("metrics", "--once").stdout.count("skyinfra_slot_info{") == 2
    command = [
        sys.executable,
        "-m",
        "skyinfra.runner",
        "metrics",
        "--config",
        str(node.file),
        "--listen",
        listen,
    ]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as process:
        try:
            assert process.stderr is not None
            url = process.stderr.readline().split()[1]
            with urllib.request.urlopen(url) as answer:
                assert answer.headers["Content-Type"].startswith("text/plain; version=0.0.4")
                assert b'slot="1"' in answer.read()
            with pytest.raises(urllib.error.HTTPError, match="404") as refused:
                urllib.request.urlopen(url.removesuffix("metrics"))
            refused.value.close()
            node.file.write_text("{")
            with pytest.raises(urllib.error.HTTPError, match="500") as broken:
                urllib.request.urlopen(url)
            broken.value.close()
        finally:
            process.terminate()
    node.configure()
    refused_port = node.run("metrics", "--listen", "nowhere", check=False)
    assert (refused_port.returncode, "expected HOST:PORT" in refused_port.stderr) == (2, True)
    assert "cannot listen" in str(cannot_listen("1.2.3.4:1", OSError(99, "no such address")))
