"""Examines everything that a node needs for its tasks. Changes nothing; what cannot be examined is a finding."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from pathlib import Path

from skyinfra import desired
from skyinfra.doctor import nvidia, packages, system, vendors
from skyinfra.errors import InvalidNodeConfig, SkyinfraError
from skyinfra.node import probe
from skyinfra.node.folder import NodeDirectory
from skyinfra.node.node import directory_of, file_sha256
from skyinfra.protocol.findings import Finding
from skyinfra.protocol.nodeconfig import NodeConfig


def examine(config: Path | None = None, *, root: Path = Path("/")) -> list[Finding]:
    """Returns the findings on this machine, compared with the node configuration in the file *config*, if given.

    *root*: the folder with ``dev``, ``proc`` and ``sys``. Raises `InvalidNodeConfig` where *config* cannot be read.
    """
    directory = directory_of(config) if config is not None else None
    node = _node(config, directory) if config is not None and directory is not None else None
    path = packages.search_path(directory.packages if directory is not None else None)
    looks = (
        _runner(directory) if directory is not None else (),
        _notices(directory) if directory is not None else (),
        _watchdog(directory) if directory is not None else (),
        _checks(directory) if directory is not None else (),
        nvidia.checks(node, directory, path, root),
        vendors.checks(node, directory, path, root),
        system.checks(node, directory, root),
    )
    findings = [finding for checks in looks for finding in _guarded(checks)]
    if node is None and not any(finding.what.startswith("accelerators") for finding in findings):
        found = "none: no NVIDIA, AMD, AWS, Google or Intel accelerator is to be seen"
        todo = (
            "Install the accelerator's driver, or choose a machine type that has one; a node of CPU slots has a "
            "configuration, which `--config` names."
        )
        findings.insert(0, Finding("accelerators", "wrong", found, "at least one", todo))
    return findings


def _node(config: Path, directory: NodeDirectory) -> NodeConfig:
    """Returns the configuration with the desired layout."""
    read = NodeConfig.load(config)
    try:
        return desired.find(read, file_sha256(config), directory).config
    except InvalidNodeConfig:
        return read


def _guarded(checks: Iterable[Finding]) -> Iterator[Finding]:
    """Yields the findings of *checks*; an error that it raises is a finding too."""
    try:
        yield from checks
    except SkyinfraError as error:
        where = f"{error.field}: " if error.field else ""
        yield Finding("accelerators", "wrong", f"{where}{error.message}", "as declared", error.hint or "")
    except OSError as error:
        yield Finding("system", "unknown", f"cannot be looked at: {error}", "to be readable")


def _notices(directory: NodeDirectory) -> Iterator[Finding]:
    """Preemption notices that cannot be read."""
    why = directory.unwarned()
    if why is not None:
        todo = (
            "This node and its tasks are not warned before it is taken back. Switch the machine's metadata service on "
            "and let skyinfra-interrupt reach it; `journalctl -u skyinfra-interrupt` says more."
        )
        yield Finding("preemption notices", "wrong", why, "to be readable", todo)


def _watchdog(directory: NodeDirectory) -> Iterator[Finding]:
    """Says what is missing of that which starts the runner again."""
    status = directory.status()
    if status is not None and status.unwatched is not None and directory.holder() is not None:
        todo = "Start it again: systemd does so on cloud nodes, the runner on others; its log says why it could not."
        yield Finding("watchdogs", "wrong", status.unwatched, "to run", todo)


def _checks(directory: NodeDirectory) -> Iterator[Finding]:
    """Checks whether the node can do what each task needs, as the user of the tasks."""
    if not directory.path.is_dir() or directory.path.stat().st_uid != os.geteuid():
        return
    wanted, todo = "files, descriptors, a thread and a process for each task", ""
    try:
        probe.check(directory.path)
        found = "passed"
    except Exception as error:  # noqa: BLE001 - whatever it is, a task would meet it
        found = probe.said(error)
        todo = (
            "Its slots take no tasks; they do by themselves once this passes. Free what it lacks, or replace the node."
        )
    yield system.judged("checks of slots", not todo, found, wanted, todo)


def _runner(directory: NodeDirectory) -> Iterator[Finding]:
    """The status of the runner."""
    status, holder = directory.status(), directory.holder()
    if status is None:
        yield Finding("runner", "wrong", "has not served this node", "ready", "`systemctl status skyinfra-runner`")
        return
    state = status.state if holder is not None or status.state == "failed" else "stopped"
    reason = ": ".join(status.error) if status.error else status.drain_reason or ""
    found = f"{state}{f': {reason}' if reason else ''}"
    log = directory.log_file if directory.log_file.exists() else "`journalctl -u skyinfra-runner`"
    yield system.judged("runner", state in ("ready", "drained"), found, "ready", f"{log} says more.")
