"""Three booted nodes, and what happens to nodes in their life."""

from __future__ import annotations

import hashlib
import os
import stat
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest
from booted_nodes.fleet import BOOT_S, Fleet
from booted_nodes.machine import Machine
from tasks_on_nodes.booted import look, work
from terraform_projects.commands import until

# The fixture that all share is made once: the tests run in one process.
pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("booted-three")]

SLOTS = 4
CUT_S = 60.0
# Those that a node of this place has; their folders below /run are there while they run.
WATCHDOGS = ("skyinfra-interrupt", "skyinfra-watch")


def devices(machine: Machine) -> dict[str, str]:
    """The device of each slot, as the node says."""
    return {slot["slot"]: slot["uuid"] for slot in machine.status()["slots"]}


def check(three: Fleet) -> None:
    """A task runs on every slot of every node, and sees its device."""
    with three.connect() as pool:
        until(lambda: len(pool.slots()) == SLOTS * len(three.nodes), seconds=BOOT_S)
        seen = look() @ pool
    wanted = {slot: uuid for machine in three.nodes for slot, uuid in devices(machine).items()}
    assert len(wanted) == SLOTS * len(three.nodes) == len(set(wanted.values()))
    assert {slot: uuid for _, slot, _, uuid in seen} == wanted
    assert {host for host, _, _, _ in seen} == {machine.name for machine in three.nodes}


def test_every_slot_is_registered_at_the_head(three: Fleet) -> None:
    check(three)


@pytest.mark.parametrize("which", [1, 0], ids=["worker", "head"])
def test_a_reboot_brings_the_same_partitions_back(three: Fleet, which: int) -> None:
    machine = three.nodes[which]
    before, boots = devices(machine), machine.boots
    machine.execute("systemctl", "reboot", check=False)
    until(lambda: machine.boots == boots + 1)
    three.wait(machine)
    assert devices(machine) == before
    assert machine.boots == boots + 1
    for each in three.nodes:
        three.wait(each)
    check(three)


def test_a_runner_that_is_killed_comes_back(three: Fleet) -> None:
    machine = three.nodes[1]
    before, old = devices(machine), machine.show("skyinfra-runner", "MainPID")
    machine.execute("kill", "-9", old)
    until(lambda: machine.show("skyinfra-runner", "MainPID") not in ("0", old))
    until(lambda: str(machine.status().get("pid")) == machine.show("skyinfra-runner", "MainPID"))
    three.wait(machine)
    assert devices(machine) == before
    check(three)


@pytest.mark.parametrize("which", [1, 0], ids=["worker", "head"])
def test_watchdogs_that_are_killed_come_back_and_then_the_runner_does(three: Fleet, which: int) -> None:
    """systemd starts each of them again; while one of them is away, status says so."""
    machine = three.nodes[which]
    before = devices(machine)
    assert machine.status()["unwatched"] is None
    there = [unit for unit in WATCHDOGS if machine.show(unit, "UnitFileState") == "enabled"]
    assert there
    for unit in (*there, "skyinfra-runner"):
        old = until(lambda unit=unit: machine.show(unit, "MainPID").removeprefix("0"))  # type: ignore[misc]
        machine.execute("kill", "-9", old)
        until(lambda unit=unit, old=old: machine.show(unit, "MainPID") not in ("0", old))  # type: ignore[misc]
        assert machine.show(unit, "NRestarts") != "0"
    until(lambda: str(machine.status().get("pid")) == machine.show("skyinfra-runner", "MainPID"))
    three.wait(machine)
    assert devices(machine) == before
    # Not within the moment that systemd takes: the runner has seen all of them again.
    for unit in there:
        until(lambda unit=unit: machine.execute("test", "-d", f"/run/{unit}", check=False).returncode == 0)  # type: ignore[misc]
    assert machine.status()["unwatched"] is None
    for unit in there:
        machine.execute("systemctl", "stop", unit)
        said = f"{unit} does not run: `journalctl -u {unit}` says more"
        try:
            until(lambda said=said: machine.status()["unwatched"] == said)  # type: ignore[misc]
            with three.connect() as pool:
                until(lambda said=said: pool.look().state.unwatched == {machine.name: said})  # type: ignore[misc]
        finally:
            machine.execute("systemctl", "start", unit)
        until(lambda: machine.status()["unwatched"] is None)
    check(three)


def test_a_second_run_of_the_set_up_changes_nothing(three: Fleet) -> None:
    machine = three.nodes[1]
    before, runner = dict(files(machine)), machine.show("skyinfra-runner", "MainPID")
    # What cloud-init made of `runcmd`, as it runs it once for each instance.
    machine.execute("/var/lib/cloud/instance/scripts/runcmd")
    until(lambda: "No jobs" in machine.execute("systemctl", "list-jobs").stdout)
    assert dict(files(machine)) == before
    assert machine.show("skyinfra-runner", "MainPID") == runner
    check(three)


def files(machine: Machine) -> Iterator[tuple[str, tuple[object, ...]]]:
    """Mode, owner and content of what the set-up writes; not what the runner keeps of itself."""
    for top in ("opt/skyinfra", "etc", "var/lib/skyinfra"):
        for folder, _, names in os.walk(machine.root / top):
            for file in (Path(folder) / name for name in names):
                kept = file.parent == machine.root / "var/lib/skyinfra"
                if not kept and "scratch" not in file.parts and "__pycache__" not in file.parts:
                    found = file.lstat()
                    content = hashlib.sha256(file.read_bytes()).hexdigest() if stat.S_ISREG(found.st_mode) else ""
                    yield str(file), (found.st_mode, found.st_uid, found.st_gid, content)


def test_the_tag_of_the_head_changes_the_layout_in_place(three: Fleet) -> None:
    runners = [machine.show("skyinfra-runner", "MainPID") for machine in three.nodes]
    before = [devices(machine) for machine in three.nodes]
    kept = [
        {slot["uuid"] for slot in machine.status()["slots"] if slot["profile"] == "3g.40gb"} for machine in three.nodes
    ]
    try:
        three.head.metadata.tags["skyinfra:layout"] = "3g.40gb:2"
        for machine in three.nodes:
            until(partial(serves, machine, 2), seconds=BOOT_S)
        with three.connect() as pool:
            seen = until(lambda: len(pool.slots()) == 6 and look() @ pool)
        assert {uuid for *_, uuid in seen} == {uuid for each in three.nodes for uuid in devices(each).values()}
        for machine, stayed in zip(three.nodes, kept, strict=True):
            assert stayed < set(devices(machine).values())
    finally:
        three.head.metadata.tags["skyinfra:layout"] = "3g.40gb+2g.20gb+1g.10gb:2"
        for machine in three.nodes:
            until(partial(serves, machine, SLOTS), seconds=BOOT_S)
    assert [devices(machine) for machine in three.nodes] == before
    assert [machine.show("skyinfra-runner", "MainPID") for machine in three.nodes] == runners
    check(three)


def serves(machine: Machine, slots: int) -> bool:
    """Whether the node is ready with so many slots."""
    return machine.status()["state"] == "ready" and len(devices(machine)) == slots


def test_tasks_of_a_node_that_is_cut_off_finish_elsewhere(three: Fleet) -> None:
    machine = three.nodes[2]
    count = SLOTS * len(three.nodes)
    with three.connect() as pool:
        futures = [pool.submit(work(number, 10.0)) for number in range(count)]
        until(lambda: sum(len(started(each)) for each in three.nodes) == count)
        there = started(machine)
        assert len(there) == SLOTS
        cut = time.monotonic()
        machine.link.cut()
        try:
            results = [future.result(timeout=BOOT_S) for future in futures]
            time.sleep(max(0.0, cut + CUT_S - time.monotonic()))
        finally:
            machine.link.mend()
    assert [number for number, _ in results] == list(range(count))
    assert machine.name not in {host for _, host in results}
    assert there <= {name for each in three.nodes if each is not machine for name in started(each)}
    three.wait(machine)
    check(three)


def started(machine: Machine) -> set[str]:
    """The tasks that have started there."""
    return {file.name for file in (machine.root / "var/lib/skyinfra").glob("started-*")}
