"""One node, from power-on to a task on every slot, with nothing between cloud-init and the client that is not real."""

from __future__ import annotations

from collections.abc import Callable
from importlib import metadata

import pytest
from booted_nodes.fleet import Bed, Fleet
from booted_nodes.image import EXTRA
from booted_nodes.machine import Machine
from tasks_on_nodes.booted import look, package

# One bed for each group: what its nodes are made of is built once for all of them.
pytestmark = pytest.mark.xdist_group("booted-first")

PROFILES = ["1g.10gb", "1g.10gb", "2g.20gb", "3g.40gb"]


def user_of(node: Machine, service: str) -> str:
    """The number of the user that the process of a service has."""
    return node.execute("stat", "-c", "%u", f"/proc/{node.show(f'skyinfra-{service}', 'MainPID')}").stdout.strip()


def as_user(node: Machine, user: str, command: str, process: str = "1") -> int:
    """The exit code of *command*, as that user, with the files that *process* sees."""
    inside = ("nsenter", f"--target={process}", "--mount", "setpriv", f"--reuid={user}", "--clear-groups")
    return node.execute(*inside, "sh", "-c", command, check=False).returncode


def test_a_node_boots_and_runs_a_task_on_every_slot(bed: Bed, fleet: Callable[..., Fleet]) -> None:
    made = fleet(bed.declare(pip=EXTRA)).boot()
    node = made.head
    status = node.status()
    partitions = {slot["slot"]: slot["uuid"] for slot in status["slots"]}
    assert sorted(partitions) == [f"mig-0/{index}" for index in range(4)]
    assert sorted(slot["profile"] for slot in status["slots"]) == PROFILES
    with made.connect() as pool:
        seen = look() @ pool
        versions = {package(name) >> pool for name in EXTRA}
    nodes, slots, users, devices = zip(*seen, strict=True)
    assert dict(zip(slots, devices, strict=True)) == partitions
    assert len(set(devices)) == 4 and all(device.startswith("MIG-") for device in devices)
    assert set(nodes) == {"mig-0"} and 0 not in users
    assert versions == {metadata.version(name) for name in EXTRA}
    [gpu] = node.gpus()
    assert sorted(instance["profile"] for instance in gpu["instances"]) == PROFILES
    # What root reads is in folders of root's, where nobody else writes but for uv's lock, which holds nothing.
    others = "find /etc/skyinfra /opt/skyinfra ( ! -user root -o -perm -2 ) ! -type l ! -name .lock"
    assert not node.execute(*others.split()).stdout
    names = set(node.execute("ls", "/etc/skyinfra").stdout.split())
    assert names == {"node.json", "secret", "actual-layout.json"}
    assert node.execute("stat", "-c", "%U", "/var/lib/skyinfra").stdout.strip() == "skyinfra"
    # Each service has a user of its own, which tasks can neither signal nor read, and which reads no secret.
    users = {name: user_of(node, name) for name in ("runner", "interrupt", "metrics", "watch")}
    assert len(set(users.values())) == 4 and "0" not in users.values()
    for name in ("interrupt", "metrics", "watch"):
        process = node.show(f"skyinfra-{name}", "MainPID")
        for what in (f"kill -0 {process}", f"cat /proc/{process}/environ"):
            assert as_user(node, users["runner"], what) != 0, (name, what)
        for what in ("cat /etc/skyinfra/secret", "ls /mnt/scratch", "touch /var/lib/skyinfra/x", "touch /tmp/../etc/x"):
            assert as_user(node, users[name], what, process) != 0, (name, what)
        assert as_user(node, users[name], "cat /etc/skyinfra/node.json", process) == 0
    # The metrics know the slots, and what stands on the GPU.
    ask = "import urllib.request as u; print(u.urlopen('http://127.0.0.1:9835/metrics').read().decode())"
    assert node.execute("python3", "-c", ask).stdout.count("skyinfra_slot_memory_bytes{") == 4
    # Everything that asks the metadata service has a token: AWS answers nobody else.
    assert node.metadata.refused == 0
    assert node.boots == 1
    assert not node.execute("systemctl", "list-units", "--failed", "--plain", "--no-legend").stdout
    assert "status: done" in node.execute("cloud-init", "status", "--wait").stdout
