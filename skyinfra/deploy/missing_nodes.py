"""Nodes that are gone without Terraform's knowledge: a cloud restarts its machines, here a deploy does.

Those that have ended themselves are gone in the same way, and a deploy makes them anew.
"""

from __future__ import annotations

import fcntl
import os
import re
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from skyinfra.errors import InvalidManifest, counted
from skyinfra.node.folder import NodeDirectory
from skyinfra.offers import usd
from skyinfra.protocol import _schema
from skyinfra.protocol._schema import EngineHost, Name
from skyinfra.protocol.manifest import Manifest
from skyinfra.providers import machines_of
from skyinfra.terraform.program import Plan
from skyinfra.terraform.synthesized import SynthesizedStack


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
        gone = _gone(stack.module_of(pool["name"]), plan) if declared else 0
        if gone and pool.get("head"):
            gone = int(pool["nodes"]) + 1  # those of a group are not in the state
        if gone:
            said = _said(stack, pool) or f"as {declared} has it, probably"
            back = f"a deploy brings {gone} back. Volumes and the jobs of its head are still there."
            if stops:
                back += " Where its budget is spent, they end again at once: raise it, or destroy the fleet before."
            sentences.append(f"{pool['name']}: {counted(gone, 'node')} ended without a deploy, {said}; {back}")
    return sentences


def _gone(module: str, plan: Plan) -> int:
    """Returns how many nodes of the pool of *module* a refresh has not found, or a deploy starts again."""
    machines = [each for each in plan.gone if _is_machine(module, each)]
    again = [each for each, why in plan.reasons.items() if why == "requested" and each.startswith(f"module.{module}.")]
    return len(machines) or len([each for each in again if re.search(r"terraform_data\.(head|worker\[)", each)])


def _is_machine(module: str, address: str) -> bool:
    type = address.removeprefix(f"module.{module}.").partition(".")[0]
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
        yield f"module.{name}.terraform_data.credential"
    for node in manifest.nodes:
        if not _is_served(folder / node.name):
            yield _address(name, node.name, head=node.head)


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
    """Those that do not run. Where the engine does not answer, these are all, and their start says so."""
    module = stack.modules.get(name)
    if module is None:
        return
    made = {
        found["node"]: found
        for each in stack.resources()
        if (each.module, each.type, each.name) == (name, "terraform_data", "node")
        and isinstance(found := (each.attributes.get("output") or {}).get("value"), dict)
    }
    for node in manifest.nodes:
        if node.name not in made:
            continue
        variables = _variables(made[node.name])
        script = stack.folder / str(module["source"]) / "node.sh"
        asked = ["sh", str(script), "running"]
        done = subprocess.run(asked, env={**os.environ, **variables}, stdin=subprocess.DEVNULL, capture_output=True)
        if done.returncode != 0:
            yield _address(name, node.name, head=node.head)


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


def _address(pool: str, node: str, *, head: bool) -> str:
    resource = "head" if head else f'worker["{node}"]'
    return f"module.{pool}.terraform_data.{resource}"
