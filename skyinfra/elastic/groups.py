"""Where the nodes come from that a head starts: processes of this machine, containers, a group of the provider's."""

from __future__ import annotations

import asyncio
import fcntl
import logging
import os
import shutil
import sys
import time
from collections.abc import Callable, Collection
from pathlib import Path
from typing import ClassVar, Protocol

from skyinfra.elastic.clouds import AwsGroup, GoogleMachines
from skyinfra.elastic.containers import ContainerGroup
from skyinfra.errors import NodeFailed, StateDirectoryError
from skyinfra.node.detach import VARIABLE
from skyinfra.node.folder import NodeDirectory, locked, newer, replace_file
from skyinfra.protocol.nodeconfig import HEAD_PLACEHOLDER, NODE_PLACEHOLDER

logger = logging.getLogger("skyinfra.runner")

# Of a local fleet: the configuration of a node, which modules/local writes, and removes before it ends the nodes.
TEMPLATE = "group.json"
_WAIT_S = 300.0
# A runner holds its folder within that long.
_START_S = 60.0
# Output of a node that did not start.
_WORDS = 500


class Group(Protocol):
    """The source of nodes of one fleet.

    boot_s: how long a node takes, as a rule. patience_s: how long it may take. bounds: the least and the most nodes,
    where the place knows better than the configuration. held: how many nodes are there or start; None where that is not
    known, and the place replaces those that are lost. problem: why the place gives no nodes, once. broken: why machines
    became no nodes, as far as the place knows, each once. made_of: changes with what a node is made of. where: in which
    place one reads why nodes do not come; empty where `problem` says it.
    """

    boot_s: ClassVar[float]
    patience_s: ClassVar[float]

    def bounds(self) -> tuple[int, int] | None: ...
    def held(self) -> int | None: ...
    def ask(self, size: int) -> None: ...
    def problem(self) -> str | None: ...
    def broken(self) -> list[str]: ...
    def made_of(self) -> str | None: ...
    def where(self) -> str: ...
    def tend(self) -> None: ...
    async def close(self) -> None: ...


class LocalGroup:
    """Nodes as processes beside the head in the folder *directory*. *scheduler*: where it listens.

    Each node has a folder beside the head's, is started as Terraform starts one, and ends itself; what is left of it is
    removed here. Terraform knows the group and ends it, whatever it has.
    """

    boot_s: ClassVar[float] = 4.0
    patience_s: ClassVar[float] = 120.0

    def __init__(self, directory: NodeDirectory, pool: str, scheduler: Callable[[], str | None]) -> None:
        self._folder = directory.path.parent
        self._prefix = f"{pool}-group-"
        self._scheduler = scheduler
        self._starting: dict[str, asyncio.Task[None]] = {}
        self._broken: list[str] = []

    def bounds(self) -> tuple[int, int] | None:
        """Returns None: the configuration of the head says it."""
        return None

    def problem(self) -> str | None:
        """Returns None: this machine gives as many as it is asked for."""
        return None

    def broken(self) -> list[str]:
        """Returns why nodes did not start, each once."""
        found, self._broken = self._broken, []
        return found

    def made_of(self) -> str | None:
        """Returns the configuration that Terraform leaves here; None while there is none."""
        try:
            return (self._folder / TEMPLATE).read_text(encoding="utf-8")
        except OSError:
            return None

    def where(self) -> str:
        """Returns nothing: each node that does not start says why."""
        return ""

    def held(self) -> int:
        """Returns how many nodes run or start."""
        return len({path.name for path in self._members() if self._serves(path)} | self._starting.keys())

    def ask(self, size: int) -> None:
        """Starts as many nodes as are missing. Raises `StateDirectoryError`."""
        for _ in range(size - self.held()):
            if self._text("any") is not None:
                path = self._make_folder()
                self._start(path)

    def tend(self) -> None:
        """Removes what ended nodes have left, and has the others take over another configuration or secret."""
        for path in self._members():
            if path.name in self._starting:
                continue
            if not self._serves(path):
                logger.info("node %s has ended", path.name)
                shutil.rmtree(path, ignore_errors=True)
            elif (text := self._text(path.name)) is not None and self._is_old(path, text):
                self._start(path)

    async def close(self) -> None:
        """Leaves the nodes alone, those that start as well."""
        for task in self._starting.values():
            task.cancel()
        await asyncio.gather(*self._starting.values(), return_exceptions=True)

    def _members(self) -> list[Path]:
        return sorted(path for path in self._folder.glob(f"{self._prefix}*") if path.is_dir())

    @staticmethod
    def _serves(path: Path) -> bool:
        """Returns whether a runner serves the folder, or its watchdog starts one, or somebody has just begun to."""
        directory = NodeDirectory(path)
        begins = not directory.lock_file.exists() and not _quiet(path)
        return begins or directory.holder() is not None or _is_locked(directory.watchdog_file)

    def _is_old(self, path: Path, text: str) -> bool:
        file = path / "node.json"
        try:
            return file.read_text(encoding="utf-8") != text or newer(self._folder / "secret", file)
        except OSError:
            return False  # a head before this one had just made the folder

    def _make_folder(self) -> Path:
        number = 1
        while True:
            path = self._folder / f"{self._prefix}{number}"
            try:
                # Two heads make no folder twice.
                path.mkdir(mode=0o700)
            except FileExistsError:
                number += 1
            except OSError as error:
                raise StateDirectoryError(f"cannot be made: {error.strerror}", field=str(path)) from None
            else:
                return path

    def _text(self, node: str) -> str | None:
        """Returns the configuration of *node*; None where the group is being destroyed, or the head has no address."""
        scheduler = self._scheduler()
        try:
            text = (self._folder / TEMPLATE).read_text(encoding="utf-8")
        except FileNotFoundError:
            return None
        return None if scheduler is None else text.replace(NODE_PLACEHOLDER, node).replace(HEAD_PLACEHOLDER, scheduler)

    def _start(self, path: Path) -> None:
        task = asyncio.create_task(self._boot(path), name=f"starts {path.name}")
        self._starting[path.name] = task
        task.add_done_callback(lambda _: self._starting.pop(path.name, None))

    async def _boot(self, path: Path) -> None:
        text = self._text(path.name)
        if text is None:
            return
        replace_file(path / "node.json", text)
        command = [sys.executable, "-m", "skyinfra.runner", "boot", "--config", str(path / "node.json")]
        options = ["--detach", "--restart", "--wait", f"{_WAIT_S:g}"]
        process = await asyncio.create_subprocess_exec(
            *command,
            *options,
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.DEVNULL,
            stderr=asyncio.subprocess.PIPE,
            # The end of the head ends what it has started, but for this.
            env={**os.environ, VARIABLE: str(path)},
            start_new_session=True,
        )
        _, said = await process.communicate()
        if process.returncode:
            text = " ".join(said.decode(errors="replace").split())[:_WORDS]
            self._broken.append(f"node {path.name} did not start: {text}")
            logger.error("%s", self._broken[-1])


def _is_locked(file: Path) -> bool:
    """Returns whether a process holds *file* locked."""
    try:
        with file.open("r") as stream:
            return not locked(stream, fcntl.LOCK_SH)
    except OSError:
        return False


def _quiet(path: Path) -> bool:
    """Returns whether nothing starts in the folder of a node: a head before this one may have begun with it."""
    try:
        return time.time() - path.stat().st_mtime > _START_S
    except OSError:
        return True


def group_of(
    provider: str,
    directory: NodeDirectory,
    pool: str,
    scheduler: Callable[[], str | None],
    nodes: Callable[[], Collection[str]],
) -> Group:
    """Returns where the nodes of a *pool* come from. Raises `NodeFailed` for a provider that this runner cannot ask.

    scheduler: where it listens. nodes: the names of those that are there.
    """
    if provider == "local":
        return LocalGroup(directory, pool, scheduler)
    if provider == "aws":
        return AwsGroup(directory)
    if provider == "gcp":
        return GoogleMachines(directory, nodes)
    if provider == "container":
        return ContainerGroup(pool)
    raise NodeFailed(f"this runner starts no nodes of {provider}", field="node.json.max_nodes")
