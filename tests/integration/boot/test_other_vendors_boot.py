"""Nodes with made-up accelerators of AWS, Intel and AMD: device files and vendors' tools; the rest is real."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from booted_nodes.fleet import Bed, Fleet
from booted_nodes.hosts import Hosts
from booted_nodes.machine import Machine
from devices import vendor_files
from tasks_on_nodes.booted import output_of
from terraform_projects.commands import skyinfra

import skyinfra as sky
from skyinfra.client import Pool, open_pool
from skyinfra.terraform.project import Project

pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("booted-hosts")]

RUNNER = "/opt/skyinfra/venv/bin/skyinfra-runner"
ASK = "import urllib.request as u; print(u.urlopen('http://127.0.0.1:9835/metrics').read().decode())"


def visible(pool: Pool, variable: str) -> list[str]:
    """The value of a variable on each slot."""
    return [each.strip() for each in output_of(f"echo ${variable}") @ pool]


def figures(node: Machine, metric: str) -> dict[str, float]:
    """Returns the lines that Prometheus gets, by slot."""
    found = re.findall(rf'^{metric}{{.*slot="(\d+)".*}} (\S+)$', node.execute("python3", "-c", ASK).stdout, re.M)
    return {slot: float(value) for slot, value in found}


def doctor(node: Machine, name: str) -> dict[str, tuple[str, str]]:
    """The findings about accelerators of that name: result and what was found."""
    done = node.execute(RUNNER, "doctor", "--config", "/etc/skyinfra/node.json", "--json", check=False)
    found: Sequence[dict[str, Any]] = json.loads(done.stdout)["findings"]
    ours = {each["what"]: (each["result"], each["found"]) for each in found}
    return {what: each for what, each in ours.items() if what == "accelerators" or what.startswith(name)}


def test_inferentia(bed: Bed, fleet: Callable[..., Fleet]) -> None:
    made = fleet(bed.declare(accelerator=sky.accelerators.Inferentia2(count=6)))
    made.head.devices = [f"neuron{number}" for number in range(6)]
    vendor_files.neuron_monitor(made.head.root / "opt/aws/neuron/bin")
    node = made.boot().head
    with made.connect() as pool:
        assert visible(pool, "NEURON_RT_VISIBLE_CORES") == ["0-1", "2-3", "4-5", "6-7", "8-9", "10-11"]
    assert figures(node, "skyinfra_slot_utilization_ratio") == {"1": 0.425, **dict.fromkeys("02345", 0.0)}
    assert figures(node, "skyinfra_slot_memory_used_bytes")["1"] == vendor_files.NEURON_USED
    found = doctor(node, "Neuron devices")
    assert found["accelerators"] == ("ok", "6 Neuron devices")
    assert found["Neuron devices: files"] == ("ok", "may be opened by skyinfra")
    assert found["Neuron devices: driver"] == ("wrong", "neuron is not loaded")
    assert "Neuron devices: neuron-monitor" not in found


def test_gaudi(bed: Bed, fleet: Callable[..., Fleet]) -> None:
    provider = sky.AWS(region="us-east-1", ami="ami-00000000000000001")
    made = fleet(bed.declare(accelerator=sky.accelerators.Gaudi(count=8), provider=provider))
    made.head.devices = [f"accel/accel{number}" for number in range(8)]
    vendor_files.hl_smi(made.head.root / "usr/bin", *(f"{n}, {10 * n}, 512, 32768, 36, 103" for n in range(8)))
    node = made.boot().head
    with made.connect() as pool:
        assert visible(pool, "HABANA_VISIBLE_MODULES") == [str(number) for number in range(8)]
    assert figures(node, "skyinfra_slot_utilization_ratio") == {str(n): n / 10 for n in range(8)}
    assert set(figures(node, "skyinfra_slot_accelerator_watts").values()) == {103.0}
    found = doctor(node, "Gaudi cards")
    assert (found["accelerators"][1], found["Gaudi cards: hl-smi"]) == ("8 Gaudi cards", ("ok", "answers"))
    assert "hl-1.18.0" in found["Gaudi cards: version of hl-smi"][1]


@pytest.fixture
def hosts(bed: Bed, tmp_path: Path, terraform_program: str) -> Iterator[Hosts]:
    made = Hosts(bed, tmp_path)
    try:
        yield made
    finally:
        made.close()


def test_amd(hosts: Hosts) -> None:
    node = hosts.start("gpu1", devices=("kfd", "dri/renderD128", "dri/renderD129"))
    here = hosts.project(hosts.host(node), accelerator="MI300X:2")
    try:
        skyinfra(here, "deploy", "--auto-approve")
        with open_pool(Project.find(here).stack("lab").fleet("lab")) as pool:
            assert visible(pool, "ROCR_VISIBLE_DEVICES") == ["0", "1"]
            assert visible(pool, "HIP_VISIBLE_DEVICES") == ["0", "0"]
        # The machine has no files of amdgpu in /sys: slots, and no figures.
        assert figures(node, "skyinfra_slot_info") == {"0": 1.0, "1": 1.0}
        assert figures(node, "skyinfra_slot_utilization_ratio") == {}
        found = doctor(node, "AMD GPUs")
        assert (found["accelerators"], found["AMD GPUs: files"][0]) == (("ok", "2 AMD GPUs"), "ok")
    finally:
        skyinfra(here, "destroy", "--auto-approve", check=False)
