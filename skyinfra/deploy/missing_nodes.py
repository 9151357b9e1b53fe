"""Nodes that are gone without Terraform's knowledge: a cloud restarts its machines, here a deploy does."""

from __future__ import annotations

import fcntl
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

from skyinfra.protocol.manifest import Manifest
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
        variables = {**made[node.name]["engine"], "CONTAINER": made[node.name]["container"]}
        script = stack.folder / str(module["source"]) / "node.sh"
        asked = ["sh", str(script), "running"]
        done = subprocess.run(asked, env={**os.environ, **variables}, stdin=subprocess.DEVNULL, capture_output=True)
        if done.returncode != 0:
            yield _address(name, node.name, head=node.head)


def _address(pool: str, node: str, *, head: bool) -> str:
    resource = "head" if head else f'worker["{node}"]'
    return f"module.{pool}.terraform_data.{resource}"
