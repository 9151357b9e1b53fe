"""Booted nodes whose first boot fails: who hears of it, and that they go on by themselves once they can."""

from __future__ import annotations

import gzip
import json
import re
from collections.abc import Callable
from typing import Any

import pytest
from booted_nodes.fleet import Bed, Fleet
from booted_nodes.machine import Machine
from terraform_projects.commands import until

import skyinfra as sky
from skyinfra.bootstrap import user_data
from skyinfra.bootstrap.files import written
from skyinfra.compiler import compile_pool

# The fixture that all share is made once: the tests run in one process.
pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("booted-first")]

MakeFleet = Callable[..., Fleet]
# What stands on a node; Python's own caches may grow.
LOOK = (
    "find /opt/skyinfra /etc/skyinfra /etc/systemd -not -path '*/__pycache__*' -printf '%p %T@ %m %u\\n' | sort; "
    "systemctl show -p MainPID skyinfra-runner"
)


def without_runner(fleet: Fleet, machine: Machine) -> None:
    """Lets *machine* look for its runner where there is none."""
    text = gzip.decompress(machine.metadata.user_data).decode()
    argument = f'\\"bucket\\":\\"{fleet.bucket.url}'
    assert argument in text
    machine.metadata.user_data = gzip.compress(text.replace(argument, f"{argument}.missing").encode())


def give_runner(machine: Machine) -> None:
    """Lets it look in the right place from now on."""
    machine.execute("sed", "-i", "s/[.]missing//", "/opt/skyinfra/steps.json")


def log(machine: Machine) -> list[dict[str, Any]]:
    text = machine.execute("cat", "/var/log/skyinfra/boot.jsonl").stdout
    return [json.loads(line) for line in text.splitlines()]


def test_a_client_is_told_which_step_of_the_head_failed(bed: Bed, fleet: MakeFleet) -> None:
    made = fleet()
    without_runner(made, made.head)
    made.boot(ready=False)
    status = made.wait(made.head, "failed")
    assert status["error"]["class"] == "BootFailed"
    assert "step runner: " in status["error"]["message"] and "HTTP status 404" in status["error"]["message"]

    def refusal() -> sky.BootFailed | None:
        with pytest.raises(sky.FleetUnreachable) as caught:
            made.connect()
        return caught.value if isinstance(caught.value, sky.BootFailed) else None

    error = until(refusal, seconds=120)
    assert "mig-0 of bed/mig was not set up: step runner: " in str(error) and "HTTP status 404" in str(error)
    give_runner(made.head)
    made.wait(made.head)
    with made.connect() as pool:
        assert len(pool.slots()) == 4


def test_a_machine_of_an_elastic_pool_that_cannot_be_set_up_ends(bed: Bed, fleet: MakeFleet) -> None:
    made = fleet(bed.declare(2))
    head, worker = made.nodes
    without_runner(made, worker)
    # Bounds need a group, which the bed has not: this is the unit of such a worker, in which no time has to pass: it
    # ends after the first failure.
    elastic = written(user_data(compile_pool(bed.declare(1).model_copy(update={"nodes": sky.Range(0, 2)}), "s")).worker)
    [line] = re.findall("ExecStopPost=.*", elastic["/etc/systemd/system/skyinfra-boot.service"])
    text = gzip.decompress(worker.metadata.user_data).decode()
    line = line.replace("-lt 1800", "-lt 1")
    text, count = re.subn(r"(?<=\\n)(?=TimeoutStartSec=infinity)", lambda _: json.dumps(f"{line}\n")[1:-1], text)
    assert count == 1
    worker.metadata.user_data = gzip.compress(text.encode())
    made.boot(ready=False)
    made.wait(head)
    with made.connect() as pool:
        until(lambda: worker.off, seconds=300)
        assert {slot.node for slot in pool.slots()} == {head.name}


def test_a_power_cut_while_files_are_written_is_made_good(fleet: MakeFleet) -> None:
    """cloud-init holds its files for written, and none of them reached the disk; neither did the mark that they did."""
    made = fleet().boot()
    node = made.head
    node.execute("sync")
    node.kill()
    [mark] = (node.root / "var/lib/cloud/instances").glob("*/skyinfra-written")
    mark.unlink()
    assert (mark.parent / "sem/config_write_files").exists()
    units = [each for each in (node.root / "etc/systemd/system").glob("skyinfra-*") if each.is_file()]
    for file in (node.root / "etc/skyinfra/node.json", node.root / "etc/skyinfra/secret", *units):
        file.write_bytes(b"")
    for file in (node.root / "opt/skyinfra/first_boot").glob("*.py"):
        file.unlink()
    (node.root / "opt/skyinfra/steps.json").unlink()
    node.start()
    made.wait(node)
    assert mark.exists()
    with made.connect() as pool:
        assert len(pool.slots()) == 4


def test_the_head_is_told_of_other_nodes_and_a_second_run_changes_nothing(bed: Bed, fleet: MakeFleet) -> None:
    made = fleet(bed.declare(2))
    head, worker = made.nodes
    without_runner(made, worker)
    made.boot(ready=False)
    made.wait(head)
    made.wait(worker, "failed")
    with made.connect() as pool:
        state = until(lambda: (s := pool.look().state) and s.failed and s, seconds=120)
        assert state is not None and state.failed["mig-1"].step == "runner"
        give_runner(worker)
        made.wait(worker)
        assert len(pool.slots()) == 8
        state = pool.look().state
        assert state is not None and state.failed == {}

    before, lines = head.execute("sh", "-c", LOOK).stdout, len(log(head))
    head.execute("systemctl", "restart", "skyinfra-boot")
    assert head.execute("sh", "-c", LOOK).stdout == before
    again = [line["state"] for line in log(head)[lines:]]
    assert set(again) == {"started", "skipped"} and again.count("started") == again.count("skipped")
