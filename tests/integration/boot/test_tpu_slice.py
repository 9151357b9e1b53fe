"""The hosts of a TPU slice: booted from one text, each a node with a slot, and one gang of JAX on all of them.

The chips are made-up device files, JAX is a program of a few lines that meets as it does: the plugin starts both alike.
The startup script, which the agent of a TPU VM runs at every boot, is run by cloud-init here.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path

import pytest
from booted_nodes.fleet import BOOT_S, Bed, Fleet
from booted_nodes.google import on_google
from terraform_projects.commands import until

import skyinfra as sky

pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("booted-more")]

HOSTS, CHIPS = 2, 4
# Each rank hears the addresses of all from the first one.
JAX = """
import json, socket, time

class distributed:
    def initialize(address, num_processes, process_id):
        host, _, port = address.rpartition(":")
        if process_id == 0:
            with socket.create_server((host, int(port))) as server:
                others = [server.accept() for _ in range(num_processes - 1)]
            found = [host, *(peer[0] for _, peer in others)]
            for connection, _ in others:
                connection.sendall(json.dumps(found).encode())
                connection.close()
        else:
            deadline = time.monotonic() + 30
            while True:
                try:
                    with socket.create_connection((host, int(port)), timeout=1) as connection:
                        found = json.loads(connection.makefile().read())
                    break
                except OSError:
                    assert time.monotonic() < deadline
        distributed.met = process_id, num_processes, found
"""


def train() -> tuple[tuple[int, int, list[str]], dict[str, str], list[str]]:
    """Returns the gang that JAX knows, the variables that libtpu reads, and the device files of the host."""
    import jax

    found = {name: value for name, value in os.environ.items() if name.startswith("TPU_")}
    return jax.distributed.met, found, sorted(path.name for path in Path("/dev").glob("accel*"))


@sky.compute
def host() -> tuple[str, str, str | None]:
    """Returns the slot that a task runs on."""
    found = sky.instance_info()
    return found.slot, found.kind, os.environ.get("TPU_WORKER_ID")


def test_the_hosts_of_a_slice_are_one_gang(bed: Bed, fleet: Callable[..., Fleet]) -> None:
    pool = sky.ComputePool(
        name="train",
        provider=sky.GCP(project="p"),
        accelerator=sky.accelerators.TPUv5p_16(),
        image=sky.Image(wheelhouse=bed.index, env={"PYTHONPATH": "/srv/made-up"}),
        plugins=[sky.plugins.jax()],
    )
    made = fleet(pool)
    head, *hosts = made.nodes
    assert len(hosts) == HOSTS
    addresses = [each.address for each in hosts]
    tpu_env = {"ACCELERATOR_TYPE": "v5p-16", "TOPOLOGY": "2x2x2", "HOST_BOUNDS": "1,1,2"}
    tpu_env |= {"CHIPS_PER_HOST_BOUNDS": "2,2,1", "ALT": "false", "WRAP": "false,false,false"}
    for machine in made.nodes:
        on_google(machine, made)
    for number, machine in enumerate(hosts):
        machine.devices = tuple(f"accel{chip}" for chip in range(CHIPS))
        machine.metadata.attributes |= {
            "agent-worker-number": str(number),
            "worker-network-endpoints": ",".join(f"unknown:unknown:{address}" for address in addresses),
            "tpu-env": "".join(f"{name}: '{value}'\n" for name, value in tpu_env.items()),
        }
        library = machine.root / "srv/made-up/jax.py"
        library.parent.mkdir(parents=True)
        library.write_text(JAX)
    assert len({machine.metadata.attributes["user-data"] for machine in hosts}) == 1
    made.boot()
    assert head.status()["slots"] == []
    with made.connect() as client:
        wanted = [(f"train-0-{number}/0", "host", str(number)) for number in range(HOSTS)]
        assert host() @ client == wanted
        ranks = client.launch(train, framework="jax")
        for number, (met, variables, files) in enumerate(ranks):
            assert met == (number, HOSTS, addresses)
            assert files == list(hosts[number].devices)
            assert variables == {
                "TPU_ACCELERATOR_TYPE": "v5p-16",
                "TPU_CHIPS_PER_HOST_BOUNDS": "2,2,1",
                "TPU_HOST_BOUNDS": "1,1,2",
                "TPU_SKIP_MDS_QUERY": "1",
                "TPU_TOPOLOGY": "2x2x2",
                "TPU_TOPOLOGY_ALT": "false",
                "TPU_TOPOLOGY_WRAP": "false,false,false",
                "TPU_WORKER_HOSTNAMES": ",".join(addresses),
                "TPU_WORKER_ID": str(number),
            }
        with pytest.raises(sky.InvalidField, match="the 2 hosts of a TPU slice run one program"):
            client.launch(train, framework="jax", nodes=1)
        # The startup script runs at every boot, and writes what all hosts have: no host notices.
        last = hosts[-1]
        runner = last.show("skyinfra-runner", "MainPID")
        last.execute("sh", "/var/lib/cloud/instance/user-data.txt")
        assert json.loads(last.read("/etc/skyinfra/node.json"))["node"] == f"train-0-{HOSTS - 1}"
        last.execute("systemctl", "reboot", check=False)
        until(lambda: last.boots == 2 and last.status().get("state") == "ready", seconds=BOOT_S)
        assert last.show("skyinfra-runner", "MainPID") != runner
        until(lambda: len(client.slots()) == HOSTS, seconds=BOOT_S)
        assert [met for met, _, _ in client.launch(train, framework="jax")] == [met for met, _, _ in ranks]
    assert all(machine.metadata.refused == 0 for machine in made.nodes)
