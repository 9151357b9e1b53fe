"""Machines of a cloud that are set up over SSH, for real but for the cloud: its answers are booted machines."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import mock_provider.bed as mock
import pytest
from booted_nodes.fleet import Bed
from booted_nodes.hosts import Hosts
from booted_nodes.machine import Machine
from support import module_source
from tasks_on_nodes.booted import look
from terraform_projects.commands import until

import skyinfra as sky
from skyinfra.bootstrap import runner_wheel
from skyinfra.client import open_pool
from skyinfra.compiler import compile_pool
from skyinfra.protocol.manifest import Manifest
from skyinfra.stack import module_inputs

pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("booted-hosts")]


@pytest.fixture
def hosts(bed: Bed, tmp_path: Path, terraform_program: str) -> Iterator[Hosts]:
    made = Hosts(bed, tmp_path)
    try:
        yield made
    finally:
        made.close()


def declared(hosts: Hosts, index: str, layout: str) -> str:
    """A root with the module as a stack has it, two nodes in that layout."""
    key = hosts.key.with_suffix(".pub").read_text()
    provider = sky.DigitalOcean(ssh_public_key=key, allow_cidrs=["198.51.100.0/24"], key_file=str(hosts.key))
    image = sky.Image(wheelhouse=index)
    pool = sky.ComputePool(name="train", nodes=2, provider=provider, accelerator=f"H100/{layout}", image=image)
    runner = hosts.key.parent / runner_wheel.wheel().name
    runner.write_bytes(runner_wheel.wheel().content)
    inputs = module_inputs(compile_pool(pool, "s"), ".") | {"runner_file": str(runner)}
    # Terraform would read an expression in what it takes as it is.
    texts = {
        name: text.replace("${", "$${").replace("%{", "%%{") for name, text in inputs.items() if isinstance(text, str)
    }
    module = {"source": module_source("digitalocean"), **inputs, **texts}
    fleet = {"fleet": {"value": "${module.train.fleet}", "sensitive": True}}
    return json.dumps({"module": {"train": module}, "output": fleet})


def slots(cloud: mock.Bed) -> dict[str, int]:
    """Tasks that ran on every slot, by node, on a device each."""
    with open_pool(Manifest.read(cloud.output("fleet"))) as pool:
        seen = look() @ pool
    assert len({(node, device) for node, _, _, device in seen}) == len(seen)
    names = [node for node, *_ in seen]
    return {name: names.count(name) for name in sorted(set(names))}


def test_bought_machines_become_nodes(bed: Bed, hosts: Hosts, tmp_path: Path) -> None:
    machines: list[Machine] = [hosts.start(f"droplet{number}") for number in range(2)]
    with mock.served(tmp_path / "cloud", "digitalocean", "tls") as cloud:
        # One key for both: the cloud of the bed cannot tell them apart. A third one comes from somebody in the middle.
        known = hosts.key_of(machines[0])
        hosts.give_key(machines[1], machines[0])
        cloud.world.answer("tls_private_key", {"public_key_openssh": f"{known}\n", "private_key_openssh": "its half\n"})
        for number, machine in enumerate(machines):
            found = {"ipv4_address": machine.address, "ipv4_address_private": machine.address}
            cloud.world.answer("digitalocean_droplet", found, where={"name": f"train-{number}"})
        cloud.write(declared(hosts, bed.index, "3g.40gb"), "main.tf.json")
        cloud.run("init", "-no-color")
        cloud.apply()
        assert cloud.changes() == {}
        assert slots(cloud) == {"train-0": 2, "train-1": 2}
        started = [machine.show("skyinfra-runner", "MainPID") for machine in machines]

        cloud.write(declared(hosts, bed.index, "1g.10gb"), "main.tf.json")
        cloud.apply()
        until(lambda: slots(cloud) == {"train-0": 7, "train-1": 7}, seconds=60)
        assert [machine.show("skyinfra-runner", "MainPID") for machine in machines] == started

        # A machine that has gone for good hinders no destroy.
        machines[1].kill()
        cloud.destroy()
        assert cloud.world.existing() == {}
        secret = machines[0].read("/etc/skyinfra/secret")
        assert secret and not any(secret in printed for printed in cloud.printed)
