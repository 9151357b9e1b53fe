"""Fixtures for nodes that run."""

from __future__ import annotations

import contextlib
import json
import socket
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from local_fleets.running_node import SECRET, RunningNode
from skyinfra.protocol.nodeconfig import NodeConfig


@pytest.fixture
def ipv6() -> None:
    """Skips where this machine has no IPv6."""
    with contextlib.suppress(OSError), socket.create_server(("::1", 0), family=socket.AF_INET6):
        return
    pytest.skip("this machine has no IPv6")


@pytest.fixture
def make_node(tmp_path: Path) -> Iterator[Callable[..., RunningNode]]:
    """``make_node(name="n1", **fields)`` writes a node's directory; nothing runs yet."""
    nodes: list[RunningNode] = []

    def make(name: str = "n1", secret: str = SECRET, **fields: Any) -> RunningNode:
        base: dict[str, Any] = {
            "version": 1,
            "stack": "demo",
            "pool": "mig",
            "node": name,
            "provider": "local",
            "head": True,
            "scheduler": "127.0.0.1:0",
            "simulate": True,
        }
        config = NodeConfig.read(json.loads(NodeConfig(**(base | fields)).dumps()))
        nodes.append(RunningNode(tmp_path / name, config, secret))
        return nodes[-1]

    yield make
    for node in nodes:
        node.stop()
