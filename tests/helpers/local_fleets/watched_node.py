"""A node whose watch is looked at look by look, with a clock and a head of the test's."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest

from skyinfra.drain import request
from skyinfra.drain.request import Drain
from skyinfra.idle import ending, meter, watch
from skyinfra.idle.watch import IdleWatch
from skyinfra.node.folder import NodeDirectory
from skyinfra.node.node import Node
from skyinfra.protocol.nodeconfig import NodeConfig

IDLE = 1800.0


@dataclass
class World:
    """A node, and what its watch is given: the clock since the boot, what runs, and what the head knows."""

    folder: Path
    patch: pytest.MonkeyPatch
    now: float = 1000.0
    ready: bool = True
    runs: bool = False
    closed: bool = False
    head: tuple[float, float, bool] | tuple[float, float, bool, float] | None = None
    config: NodeConfig = field(init=False)

    def __post_init__(self) -> None:
        self.directory = NodeDirectory(self.folder)
        self.config = NodeConfig(
            1, "demo", "p", "p-0", "aws", True, "10.0.0.1:1", cpu_slots=1, folder=str(self.folder), idle_seconds=IDLE
        )
        (self.folder / "systemd").mkdir()
        (self.folder / "pts").mkdir()
        self.patch.setattr(ending, "_SYSTEMD", self.folder / "systemd")
        self.patch.setattr(watch, "_TERMINALS", self.folder / "pts")
        for module in (watch, meter):
            self.patch.setattr(module, "since_boot", lambda: self.now)
        self.node = self.start()

    def start(self) -> IdleWatch:
        """Another runner of the node."""

        async def used() -> bool:
            return self.runs

        async def report(*_: object) -> Any:
            return self.head

        return IdleWatch(self.directory, used=used, closed=lambda: self.closed, report=report, ready=lambda: self.ready)

    def look(self, seconds: float = 5.0, **config: object) -> IdleWatch:
        """One look, so many seconds after the last one."""
        self.now += seconds
        self.config = replace(self.config, **config)  # type: ignore[arg-type]
        node = Node(self.config, self.folder / "node.json", self.config.dumps(), "secret")
        self.node.update(node)
        asyncio.run(self.node._look(node))
        return self.node

    def used_once(self) -> None:
        """Makes the node one that was used."""
        self.runs = True
        self.look()
        self.runs = False

    @property
    def drain(self) -> Drain | None:
        return request.find(self.directory)

    @property
    def asked(self) -> bool:
        """Whether root was asked for the end, since the last question."""
        file = self.folder / ending.REQUEST
        there = file.exists()
        file.unlink(missing_ok=True)
        return there
