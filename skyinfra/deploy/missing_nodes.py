"""Nodes that are gone without Terraform's knowledge: a cloud restarts its machines, here a deploy does.

Those that have ended themselves are gone in the same way, and a deploy makes them anew; so it does with sick ones of
pools that say so.
"""

from __future__ import annotations

import fcntl
import os
import re
import subprocess
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from skyinfra.errors import InvalidManifest, SkyinfraError, counted
from skyinfra.node.folder import NodeDirectory
from skyinfra.offers import usd
from skyinfra.protocol import _schema
from skyinfra.protocol._schema import EngineHost, Name
from skyinfra.protocol.manifest import Manifest
from skyinfra.protocol.readings import FleetHours
from skyinfra.providers import machines_of, read
from skyinfra.terraform.program import Plan, Terraform
from skyinfra.terraform.state import Resource
from skyinfra.terraform.synthesized import SynthesizedStack

# Of one pool, within an hour: what makes more nodes sick is hardly their machines.
MOST_AN_HOUR = 2
_HOUR_S = 3600.0
# What passes by itself, such as a full disk, mostly does so sooner.
_SICK_FOR_S = 600.0
_PATIENCE_S = 3.0
# The resource that starts a node of this machine.
_STARTED = ("terraform_data", "node")


def lost_nodes(stack: SynthesizedStack) -> list[str]:
    """Addresses to replace so that nodes of this machine that died are started again, such as after a reboot.

    Where the folder of a local fleet was removed, its copy of the secret is made again as well.
    """
    lost: list[str] = []
    for name, manifest in stack.fleets().items():
        if manifest.provider == "local":
            lost += _processes(stack, name, manifest)
        elif manifest.provider == "container":
            lost += _containers(stack, name, manifest)
    return lost


@dataclass(frozen=True)
class SickNodes:
    """replaced: why nodes are sick that a deploy makes anew, by the addresses of their resources. kept: a sentence for
    each that stays."""

    replaced: dict[str, str]
    kept: tuple[str, ...]


def sick_nodes(stack: SynthesizedStack, resources: Sequence[Resource]) -> SickNodes:
    """Asks the heads of the pools with ``replace_sick`` for nodes of which half of the slots or more are sick.

    The head is not made anew by itself. No more than `MOST_AN_HOUR` nodes of a pool are within an hour: its ledger of
    machines, which outlives the head, says how many have come in the place of others, and those that are not there may
    be on their way.
    """
    replaced: dict[str, str] = {}
    kept: list[str] = []
    pools = {pool["name"] for pool in stack.pools if pool.get("replace_sick")}
    for pool, manifest in stack.fleets().items() if pools else ():
        if pool not in pools:
            continue
        try:
            sick, left = _sick(manifest)
        except SkyinfraError as error:
            kept.append(
                f"{pool}: its head does not say which nodes are sick, so none is replaced for that: {error.message}"
            )
            continue
        heads = {node.name for node in manifest.nodes if node.head}
        machines = _machines(stack.module_of(pool), resources)
        for node, why in sick.items():
            if node in heads:
                hint = "It is the head, which no deploy makes anew by itself: `skyinfra deploy --replace ADDRESS` does."
                kept.append(f"{node} is sick: {why}. {hint}")
            elif left < 1:
                kept.append(
                    f"{node} is sick: {why}. It stays for now: {MOST_AN_HOUR} nodes of {pool} are replaced an hour."
                )
            elif node in machines:
                replaced[machines[node]] = why
                left -= 1
    return SickNodes(replaced, tuple(kept))


def _machines(module: str, resources: Sequence[Resource]) -> dict[str, str]:
    """Returns the addresses of the machines of *module*, by the names of their nodes: processes and containers
    where nothing is bought."""
    there = [each for each in resources if each.call == module and each.key is not None]
    bought = [each for each in there if machines_of(each.type, each.attributes) is not None]
    started = [each for each in there if (each.type, each.name) == _STARTED]
    return {str(each.key): each.address for each in bought or started}


def _sick(manifest: Manifest) -> tuple[dict[str, str], int]:
    """Returns why nodes of the fleet have been sick for long, by their names, and how many may be replaced now."""
    from skyinfra.client import open_questions

    with open_questions(manifest, timeout=_PATIENCE_S) as pool:
        now, hours = pool.look(), pool.hours(uses=False)
    if (state := now.state) is None or hours is None:
        raise InvalidManifest("it is of an earlier version")
    sick = state.sick_nodes()
    slots = {node.name: state.slots.get(node.name) or manifest.slots_of(node) for node in manifest.nodes}
    found = {
        node: why
        for node, why in sick.items()
        if state.sick_for.get(node, 0.0) >= _SICK_FOR_S
        and 2 * sum(slot.rpartition("/")[0] == node for slot in state.sick) >= len(slots.get(node, ()))
    }
    absent = slots.keys() - sick.keys() - {slot.node for slot in (*now.slots, *now.draining)}
    return found, MOST_AN_HOUR - len(_replaced(hours) | absent)


def _replaced(hours: FleetHours) -> set[str]:
    """Returns the nodes that got another machine within the last hour."""
    began: dict[str, dict[str, float]] = {}
    for run in hours.runs:
        known = began.setdefault(run.node, {})
        known[run.machine] = min(run.began, known.get(run.machine, run.began))
    return {node for node, known in began.items() if len(known) > 1 and max(known.values()) > hours.at - _HOUR_S}


def ended_nodes(stack: SynthesizedStack, plan: Plan) -> list[str]:
    """Returns a sentence for each pool that declares an end of its nodes, and whose nodes *plan* finds gone."""
    limits = ("stop_after_idle", "max_lifetime")
    sentences = []
    for pool in stack.pools if not plan.empty else ():
        found = [f"{name}={pool[name]}" for name in limits if pool.get(name)]
        budget = pool.get("budget") or {}
        if stops := budget.get("action") == "stop":
            found.append(f"its budget of {usd(budget['usd'])}")
        declared = " or ".join(found)
        gone = gone_nodes(stack.module_of(pool["name"]), plan) if declared else 0
        if gone and pool.get("head"):
            gone = int(pool.get("min_nodes", pool["nodes"])) + 1  # those of a group are not in the state
        if declared:
            gone += sum(_is_machine(stack.module_of(pool["name"]), each) for each in plan.stopped)
        if gone:
            said = _said(stack, pool) or f"as {declared} has it, probably"
            idle, kept = read(pool["provider"]).idle, "Volumes and the jobs of its head are still there."
            if idle is not None and not idle.keeps_jobs:
                kept = "Their disks are gone with them, and with that of the head its jobs; volumes are still there."
            back = f"a deploy brings {gone} back. {kept}"
            if stops:
                back += " Where its budget is spent, they end again at once: raise it, or destroy the fleet before."
            sentences.append(f"{pool['name']}: {counted(gone, 'node')} ended without a deploy, {said}; {back}")
    return sentences


def stopped_nodes(stack: SynthesizedStack, terraform: Terraform, plan: Plan) -> frozenset[str]:
    """Returns the addresses of the machines of *stack* that have stopped, where a deploy starts such ones again."""
    idles = {stack.module_of(pool["name"]): read(pool["provider"]).idle for pool in stack.pools}
    stops = {module: idle.stops for module, idle in idles.items() if idle is not None and idle.stops}
    mine = {each: stops[module] for module in stops for each in plan.drifted if _is_machine(module, each)}
    found = terraform.found(plan) if mine else {}
    return frozenset(each for each, argument in mine.items() if argument in found.get(each, ()))


def gone_nodes(module: str, plan: Plan) -> int:
    """Returns how many nodes of the pool of *module* a refresh has not found, or a deploy starts again."""
    machines = [each for each in plan.gone if _is_machine(module, each)]
    again = [each for each, why in plan.reasons.items() if why == "requested" and each.startswith(f"module.{module}.")]
    return len(machines) or len([each for each in again if re.search(r"terraform_data\.(head|worker\[)", each)])


def _is_machine(module: str, address: str) -> bool:
    type = re.sub(r"^(module\.[^.\[]+(\[[^\]]*\])?\.)+", "", address).partition(".")[0]
    return address.startswith(f"module.{module}.") and machines_of(type, {}) is not None


def _said(stack: SynthesizedStack, pool: dict[str, Any]) -> str | None:
    """Returns why the head of a local *pool* says that it has ended; None for others."""
    root = stack.modules.get(pool["name"], {}).get("root") if pool["provider"] == "local" else None
    if root is None:
        return None
    status = NodeDirectory(stack.folder / root / stack.name / pool["name"] / f"{pool['name']}-0").status()
    return status.stops if status is not None and status.state == "stopped" else None


def _processes(stack: SynthesizedStack, name: str, manifest: Manifest) -> Iterator[str]:
    root = stack.modules.get(name, {}).get("root")
    if root is None:
        return
    folder = stack.folder / root / manifest.stack / manifest.pool
    if not (folder / "secret").exists():
        yield f"module.{stack.module_of(name)}.terraform_data.credential"
    for node in manifest.nodes:
        if not _is_served(folder / node.name):
            yield _address(stack.module_of(name), node.name, head=node.head)


def _is_served(folder: Path) -> bool:
    """Returns whether a runner holds the lock of the node's *folder*."""
    try:
        with (folder / "runner.lock").open() as lock:
            fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except FileNotFoundError:
        return False
    return False


def _containers(stack: SynthesizedStack, name: str, manifest: Manifest) -> Iterator[str]:
    """Those that do not run, of an elastic pool those too that wait for work. Where the engine does not answer, these
    are all, and their start says so."""
    module = stack.modules.get(name)
    if module is None:
        return
    made = {
        found["node"]: found
        for each in stack.resources()
        if (each.module, each.type, each.name) == (name, "terraform_data", "node")
        and isinstance(found := (each.attributes.get("output") or {}).get("value"), dict)
    }
    heads = {node.name for node in manifest.nodes if node.head}
    for node, found in made.items():
        variables = _variables(found)
        script = stack.folder / str(module["source"]) / "node.sh"
        asked = ["sh", str(script), "running"]
        done = subprocess.run(asked, env={**os.environ, **variables}, stdin=subprocess.DEVNULL, capture_output=True)
        if done.returncode != 0:
            yield _address(stack.module_of(name), node, head=node in heads)


@dataclass(frozen=True)
class _Engine:
    """The engine of a container. Any other variable, such as PATH, would decide which program runs here."""

    ENGINE: Literal["docker", "podman"]
    HOST: EngineHost | None


@dataclass(frozen=True)
class _Container:
    """The variables of ``node.sh`` for a container, as the state has them."""

    engine: _Engine
    container: Name


def _variables(made: dict[str, Any]) -> dict[str, str]:
    """Returns the variables of ``node.sh``. Raises `InvalidManifest`."""
    given = {"engine": made.get("engine"), "container": made.get("container")}
    read = _schema.read(_Container, given, path="state", error=InvalidManifest)
    return {"ENGINE": read.engine.ENGINE, "HOST": read.engine.HOST or "", "CONTAINER": read.container}


def _address(module: str, node: str, *, head: bool) -> str:
    resource = "head" if head else f'worker["{node}"]'
    return f"module.{module}.terraform_data.{resource}"
