"""``skyinfra-runner doctor``: looks at everything that a node needs for its tasks, and says what to do about it.

It changes nothing, and nothing that it cannot look at ends it.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

from skyinfra.doctor import nvidia, packages, system, vendors
from skyinfra.errors import InvalidNodeConfig, SkyinfraError
from skyinfra.gpu import desired
from skyinfra.node.folder import NodeDirectory
from skyinfra.node.node import file_sha256
from skyinfra.protocol.findings import Finding
from skyinfra.protocol.nodeconfig import NodeConfig

logger = logging.getLogger("skyinfra.runner")


def examine(config: Path | None = None, *, root: Path = Path("/")) -> list[Finding]:
    """What is found on this machine, against the node configuration in the file *config* where one is given.

    *root*: where device files and the kernel's are looked for. Raises `InvalidNodeConfig` where *config* cannot be
    read.
    """
    node = _node(config) if config is not None else None
    directory = NodeDirectory(config.absolute().parent) if config is not None else None
    path = packages.search_path(directory.packages if directory is not None else None)
    looks: list[Callable[[], Iterator[Finding]]] = [
        lambda: _runner(directory),
        lambda: nvidia.look(node, directory, path, root),
        lambda: vendors.look(node, directory, path, root),
        lambda: system.look(node, directory, root),
    ]
    findings = [finding for look in looks for finding in _guarded(look)]
    if node is None and not any(finding.what.startswith("accelerators") for finding in findings):
        findings.insert(0, _none_found())
    return findings


def _node(config: Path) -> NodeConfig:
    """The configuration, with the layout that counts."""
    read = NodeConfig.load(config)
    try:
        return desired.find(read, file_sha256(config), NodeDirectory(config.absolute().parent)).config
    except InvalidNodeConfig:
        return read


def _guarded(look: Callable[[], Iterator[Finding]]) -> Iterator[Finding]:
    """What *look* finds; what it raises in the middle is a finding too."""
    try:
        yield from look()
    except SkyinfraError as error:
        yield wrong(error)
    except OSError as error:
        yield Finding("system", "unknown", f"cannot be looked at: {error}", "to be readable")


def wrong(error: SkyinfraError, what: str = "accelerators") -> Finding:
    """The finding that *error* is."""
    where = f"{error.field}: " if error.field else ""
    return Finding(what, "wrong", f"{where}{error.message}", "as declared", error.hint or "")


def _runner(directory: NodeDirectory | None) -> Iterator[Finding]:
    """What the runner itself says."""
    if directory is None:
        return
    status, holder = directory.status(), directory.holder()
    wanted = "ready"
    if status is None:
        yield Finding("runner", "wrong", "has not served this node", wanted, "`systemctl status skyinfra-runner`")
        return
    if holder is None:
        status = replace(status, state="stopped" if status.state != "failed" else "failed")
    reason = ": ".join(status.error) if status.error else status.drain_reason or ""
    found = f"{status.state}{f': {reason}' if reason else ''}"
    fine = status.state in ("ready", "drained")
    yield Finding("runner", "ok" if fine else "wrong", found, wanted, "" if fine else _about_runner(directory))


def _about_runner(directory: NodeDirectory) -> str:
    log = directory.log_file
    return f"{log} says more." if log.exists() else "`journalctl -u skyinfra-runner` says more."


def _none_found() -> Finding:
    return Finding(
        "accelerators",
        "wrong",
        "none: no NVIDIA, AMD, AWS, Google or Intel accelerator is to be seen",
        "at least one",
        "Install the accelerator's driver, or choose a machine type that has one; a node of CPU slots has a "
        "configuration, which `--config` names.",
    )
