"""Booted nodes that cannot be what they are to be, or only after a reboot."""

from __future__ import annotations

import time
from collections.abc import Callable

import pytest
from booted_nodes.fleet import Bed, Fleet
from booted_nodes.machine import Machine
from tasks_on_nodes.booted import look
from terraform_projects.commands import until

import skyinfra as sky

# The fixture that all share is made once: the tests run in one process.
pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("booted-more")]

MakeFleet = Callable[..., Fleet]
A100 = "a100_40gb"
# Longer than a node takes to boot and to ask for a reboot: one more would be seen.
QUIET_S = 20.0


def a100(bed: Bed) -> sky.ComputePool:
    """A machine whose GPUs keep their MIG mode over a reboot, and may need one to change it."""
    return bed.declare(accelerator=sky.accelerators.A100(count=8, memory="40GB", mig="7g.40gb"))


def modes(machine: Machine) -> set[tuple[int, int]]:
    """Current and pending MIG mode of its GPUs."""
    return {(gpu["current"], gpu["pending"]) for gpu in machine.gpus()}


def test_a_mode_that_needs_a_reboot_costs_one(bed: Bed, fleet: MakeFleet) -> None:
    made = fleet(a100(bed), gpus=",".join([A100] * 8), guest=True)
    node = made.head
    assert modes(node) == {(0, 0)}
    made.boot()
    assert node.boots == 2
    assert modes(node) == {(1, 1)}
    with made.connect() as pool:
        assert len(set(look() @ pool)) == 8
    # Nothing is left to reboot for: not at the next start of the service, not at the next boot.
    node.execute("systemctl", "restart", "skyinfra-partition")
    node.execute("systemctl", "reboot", check=False)
    until(lambda: node.boots == 3)
    made.wait(node)
    assert node.boots == 3


def test_a_mode_that_stays_pending_costs_no_second_reboot(bed: Bed, fleet: MakeFleet) -> None:
    made = fleet(a100(bed), gpus=",".join([A100] * 8), guest=True, stuck=True).boot(ready=False)
    node = made.head
    status = made.wait(node, "failed")
    assert "it is not rebooted again" in status["error"]["message"]
    time.sleep(QUIET_S)
    assert node.boots == 2


def test_a_package_that_is_not_there_fails_the_node_by_name(bed: Bed, fleet: MakeFleet) -> None:
    made = fleet(bed.declare(pip=["no-such-package-anywhere==9"])).boot(ready=False)
    status = made.wait(made.head, "failed")
    assert "no-such-package-anywhere" in status["error"]["message"]
    assert status["slots"] == []


def test_a_runner_with_another_hash_is_not_installed_and_the_client_is_told(bed: Bed, fleet: MakeFleet) -> None:
    made = fleet()
    node = made.head
    (made.bucket.folder / made.bucket.wheel["name"]).write_bytes(b"not what was compiled")
    made.boot(ready=False)
    status = made.wait(node, "failed")
    assert status["error"]["class"] == "BootFailed"
    assert "runner" in status["error"]["message"]

    def refusal() -> sky.BootFailed | None:
        # Who reports it is started when the state has been written.
        with pytest.raises(sky.FleetUnreachable) as caught:
            made.connect()
        return caught.value if isinstance(caught.value, sky.BootFailed) else None

    assert "step runner" in str(until(refusal, seconds=120))
    assert node.show("skyinfra-runner", "ActiveState") == "inactive"
