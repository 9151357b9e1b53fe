"""Booted nodes that nobody uses shut their machines down: with a head, and where that was cut off."""

from __future__ import annotations

import gzip
import json
import re
from collections.abc import Callable
from dataclasses import asdict
from typing import Any

import pytest
from booted_nodes.fleet import Bed, Fleet
from booted_nodes.machine import Machine
from tasks_on_nodes.booted import look, work
from terraform_projects.commands import until

from skyinfra.deploy.spending import pool_spent, priced_hours
from skyinfra.offers import Price
from skyinfra.protocol import questions
from skyinfra.protocol.readings import FleetHours

pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("booted-more")]

MakeFleet = Callable[..., Fleet]
IDLE = 12.0


def ending(bed: Bed, fleet: MakeFleet, nodes: int) -> Fleet:
    """A fleet, off, whose idle time is shorter than what may be declared."""
    made = fleet(bed.declare(nodes).model_copy(update={"stop_after_idle": "5m"}))
    for machine in made.nodes:
        text = gzip.decompress(machine.metadata.user_data).decode()
        shorter, count = re.subn(r"(idle_seconds\W+)300\.0", rf"\g<1>{IDLE}", text)
        assert count == 1
        machine.metadata.user_data = gzip.compress(shorter.encode())
    return made


def meter(machine: Machine) -> dict[str, Any]:
    return dict(json.loads(machine.read("/var/lib/skyinfra/idle.json") or "{}"))


def test_a_worker_whose_head_was_cut_off_shuts_its_machine_down(bed: Bed, fleet: MakeFleet) -> None:
    made = ending(bed, fleet, 2).boot()
    head, worker = made.nodes
    assert worker.show("skyinfra-end.path", "ActiveState") == "active"
    # At first nothing listens: a machine that refuses to end.
    worker.execute("systemctl", "stop", "skyinfra-end.path")
    with made.connect() as pool:
        assert {node for node, *_ in look() @ pool} == {head.name, worker.name}
        pool.select(node=head.name).submit(work(1, 3600.0))
        until(lambda: meter(worker).get("begun"), seconds=60)
        head.kill()
    # Nobody is there who could tell it to end.
    try:
        until(lambda: "is still there" in str(worker.status().get("error")), seconds=180)
    except AssertionError:
        raise AssertionError(worker.report()) from None
    assert (worker.status()["state"], worker.status()["slots"]) == ("drained", [])
    assert worker.show("skyinfra-runner", "NRestarts") == "0"
    assert meter(worker)["idle_s"] >= IDLE
    worker.execute("systemctl", "start", "skyinfra-end.path")
    until(lambda: worker.off, seconds=180)
    assert worker.boots == 1


@pytest.mark.parametrize("folder", ["/var/lib/skyinfra", "/run/skyinfra-runner"])
def test_a_task_cannot_shut_a_machine_down_that_declares_no_end(three: Fleet, folder: str) -> None:
    """The second folder is for a disk that has become read-only."""
    machine = three.nodes[1]

    def refusals() -> int:
        said = machine.execute("journalctl", "-u", "skyinfra-end", "--no-pager").stdout
        return said.count("declares no end of this machine")

    before = refusals()
    machine.execute("runuser", "-u", "skyinfra", "--", "touch", f"{folder}/end.request")
    # What refuses has said so before it has ended.
    until(lambda: refusals() > before and machine.show("skyinfra-end.service", "Result") == "exit-code", seconds=60)
    assert not machine.off
    machine.execute("rm", f"{folder}/end.request")


def test_hours_and_use_of_nodes_that_declare_no_end(three: Fleet) -> None:
    """What `skyinfra cost` and `skyinfra destroy --when-idle` ask for."""
    names = {machine.name for machine in three.nodes}
    price = Price(36.0, "us-east-1", "2026-11-20")
    pool_of = {"provider": "aws", "machine_types": ["p5.4xlarge"], "prices": {"p5.4xlarge": asdict(price)}}
    with three.connect() as pool:
        hours = until(lambda: measured(pool, names), seconds=600)
        up = {each.name: float(each.execute("ps", "-o", "etimes=", "-p", "1").stdout) for each in three.nodes}
        used = until(lambda: use(pool, names))
        manifest = pool.manifest
    spent = pool_spent(manifest.fleet, (priced_hours(hours, pool_of, manifest),), pool=pool_of, manifest=manifest)
    assert {each["node"] for each in spent["nodes"]} == names and spent["unknown"] == []
    for each in spent["nodes"]:
        # No longer than the machine is up; a container of this bed hides its begin from the runner.
        assert 0 < each["hours"] * 3600 <= up[each["node"]] + 5
        assert each["machine_type"] == three._node(three.head)["machine_type"]
    assert spent["usd"] == pytest.approx(36.0 * sum(each["hours"] for each in spent["nodes"]), abs=0.01)
    assert all(0 <= each["idle_s"] <= up[node] + 60 and each["keep_s"] == 0 for node, each in used.items())


def use(pool: Any, names: set[str]) -> dict[str, Any] | None:
    """What the nodes say of their use, once each says something."""
    found: dict[str, Any] = pool.ask_all(sorted(names), questions.USE)
    return found if all(isinstance(each, dict) for each in found.values()) else None


def measured(pool: Any, names: set[str]) -> FleetHours | None:
    """The hours, once each node has run for some."""
    found: FleetHours = pool.hours()
    return found if {run.node for run in found.runs if run.seconds > 1} == names else None
