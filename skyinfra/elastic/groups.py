"""Where the nodes come from that a head starts: processes of this machine, or a group of the provider's."""

from __future__ import annotations

import asyncio
import fcntl
import json
import logging
import os
import shutil
import sys
import time
import urllib.error
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar, Protocol

from skyinfra.errors import InvalidNodeConfig, NodeFailed, SkyinfraError, StateDirectoryError
from skyinfra.idle import ending
from skyinfra.node.detach import VARIABLE
from skyinfra.node.folder import NodeDirectory, locked, message, newer, replace_file
from skyinfra.protocol.nodeconfig import HEAD_PLACEHOLDER, NODE_PLACEHOLDER

logger = logging.getLogger("skyinfra.runner")

# Of a local fleet: the configuration of a node, which modules/local writes, and removes before it ends the nodes.
TEMPLATE = "group.json"
# The tag of a head on AWS: the name of its group, the least and the most nodes.
TAG = "tags/instance/skyinfra:group"
# What the head asks of its group, and what became of that.
_REQUEST, _STATE = "group.request", "group.state"
_WAIT_S = 300.0
# A runner holds its folder within that long.
_START_S = 60.0
# A watch that starts does nothing that was asked for before that: the fleet is another one since then.
_OLD_S = 120.0
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


@dataclass(frozen=True)
class Said:
    """The answer of the watch of a head for its group: the bounds, the last size that was asked for, what failed, and
    the name of the group."""

    least: int
    most: int
    asked: int | None = None
    problem: str | None = None
    group: str | None = None


class AwsGroup:
    """The Auto Scaling group of the workers, by way of the watch of the head, which alone has the role's credentials.

    The head leaves a number in a folder of its runner; `GroupWatch` asks for it and says what became of that.
    """

    boot_s: ClassVar[float] = 240.0
    patience_s: ClassVar[float] = 900.0

    def __init__(self, directory: NodeDirectory) -> None:
        self._directory = directory
        self._reported: str | None = None

    def bounds(self) -> tuple[int, int] | None:
        """Returns those of the tag; None where nothing was read yet."""
        said = self._said()
        return None if said is None else (said.least, said.most)

    def held(self) -> int | None:
        """Returns None: the group replaces a machine that is lost."""
        return None

    def problem(self) -> str | None:
        """Returns what the group answered, once; None where it took the size."""
        said = self._said()
        found = said.problem if said is not None else None
        if found == self._reported:
            return None
        self._reported = found
        return found

    def broken(self) -> list[str]:
        """Returns nothing: machines that could not be set up tell the head."""
        return []

    def made_of(self) -> str | None:
        """Returns the name of the group: the module makes another one for nodes that are made of something else."""
        said = self._said()
        return None if said is None else said.group

    def where(self) -> str:
        """Returns the command that prints the cloud's reasons: the role of a machine may not ask for them."""
        name = self.made_of()
        command = f"aws autoscaling describe-scaling-activities --auto-scaling-group-name {name}"
        return "" if name is None else f"why, says `{command}`"

    def ask(self, size: int) -> None:
        """Leaves *size* for the watch. Raises `StateDirectoryError`."""
        self._reported = None
        # The time makes it another request where the size is the one of before.
        replace_file(self._directory.said_by("runner") / _REQUEST, f"{size} {time.time():.0f}\n")

    def tend(self) -> None:
        """Does nothing: the group knows its machines."""

    async def close(self) -> None:
        """Leaves the group alone."""

    def _said(self) -> Said | None:
        try:
            return Said(**json.loads(message(self._directory.said_by("watch") / _STATE)))
        except (OSError, ValueError, TypeError):
            return None


class GroupWatch:
    """Asks the group of a head on AWS for what the runner of the head wants. *directory*: of the node."""

    def __init__(self, directory: NodeDirectory) -> None:
        self._directory = directory
        self._done: str | None = None
        self._written: Said | None = None
        self._problem: str | None = None
        self._asked: int | None = None

    def check(self, tag: str | None) -> None:
        """Does what is asked, once. *tag*: of the head, None for one without a group. Raises `StateDirectoryError`."""
        if tag is None:
            return
        name, least, most = _read_tag(tag)
        try:
            text = message(self._directory.said_by("runner") / _REQUEST).strip()
        except (OSError, ValueError):
            text = ""
        size, _, at = text.partition(" ")
        if self._done is None:
            self._done = text if at.isdigit() and abs(time.time() - int(at[:12])) > _OLD_S else ""
        if size.isdigit() and text != self._done:
            # The least is the head's: while machines become no nodes, none is to be started in their place.
            self._asked = min(int(size[:6]), most)
            self._problem = _set_size(name, self._asked)
            self._done = text
        said = Said(least, most, self._asked, self._problem, name)
        if said != self._written:
            self._directory.write(self._directory.said_by("watch") / _STATE, json.dumps(vars(said)) + "\n")
            self._written = said


def _read_tag(text: str) -> tuple[str, int, int]:
    """Raises `InvalidNodeConfig`."""
    try:
        name, least, most = text.strip().rsplit(" ", 2)
        return name, int(least), int(most)
    except ValueError:
        raise InvalidNodeConfig("expected a group, and its least and most nodes", field=TAG, given=text) from None


def _set_size(group: str, size: int) -> str | None:
    """Asks for *size* nodes; returns why that failed, None where it did not."""
    try:
        ending.ask_group("SetDesiredCapacity", AutoScalingGroupName=group, DesiredCapacity=str(size))
    except urllib.error.HTTPError as error:
        error.close()
        may = " The role of the head needs autoscaling:SetDesiredCapacity on that group." if error.code == 403 else ""
        return f"the group {group} does not take the size {size}: {error}.{may}"
    except (OSError, ValueError, LookupError, SkyinfraError) as error:
        return f"the group {group} cannot be asked for {size} nodes: {error}"
    return None


def group_of(provider: str, directory: NodeDirectory, pool: str, scheduler: Callable[[], str | None]) -> Group:
    """Returns where the nodes of a *pool* come from. Raises `NodeFailed` for a provider that this runner cannot ask."""
    if provider == "local":
        return LocalGroup(directory, pool, scheduler)
    if provider == "aws":
        return AwsGroup(directory)
    raise NodeFailed(f"this runner starts no nodes of {provider}", field="node.json.max_nodes")
