"""Fixtures for clients and the fleets that they use."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from support import python_path

import skyinfra
from local_fleets.fleet_processes import FleetProcess
from skyinfra.client import Pool, open_pool
from skyinfra.protocol.manifest import Endpoint, Manifest, ManifestNode, ManifestSlot
from skyinfra.worker import preload

ROOT = Path(skyinfra.__file__).parent.parent
SECRET = "0123456789abcdef" * 4
# Test modules, which slots import, import it; it is imported once for all slots of a fleet.
PRELOAD = json.dumps({"modules": ["pytest"], "packages": "", "env": {}})


class Fleet:
    """The test fleet's process and its manifest."""

    def __init__(self, root: Path, *, nodes: tuple[str, ...] = ("n0", "n1"), slots: int = 2, **config: object) -> None:
        self.root = root
        self.log = (root / "fleet.log").open("ab")
        env = {**os.environ, "PYTHONPATH": python_path(Path(__file__).parents[1]), preload.VARIABLE: PRELOAD}
        self.process = FleetProcess(root, env, self.log)
        config = {"secret": SECRET, "root": str(root), "nodes": nodes, "slots": slots, **config}
        self.process.stdin.write(json.dumps(config).encode() + b"\n")
        self.process.stdin.flush()
        line = self.process.stdout.readline()
        assert line, (root / "fleet.log").read_text()
        self.manifest = Manifest(
            version=1,
            stack="stack",
            pool="pool",
            provider="local",
            head=Endpoint("127.0.0.1", json.loads(line)["port"]),
            nodes=tuple(ManifestNode(name, name, "127.0.0.1", head=name == "n0") for name in nodes),
            slots=tuple(ManifestSlot(i, "partition", "H100", "3g.40gb", 0) for i in range(slots)),
            secret=SECRET,
            simulated=True,
        )

    def kill(self) -> None:
        """The head and all nodes at once."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()

    def close(self) -> None:
        self.process.stdin.close()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(20)
        self.kill()
        self.process.close()
        self.log.close()


def eventually(condition, *, timeout: float = 60.0) -> None:
    """Polls until *condition* holds."""
    deadline = time.monotonic() + timeout
    while not condition():
        assert time.monotonic() < deadline, "did not happen in time"
        time.sleep(0.05)


@pytest.fixture
def wait_until():
    return eventually


@pytest.fixture(scope="session")
def fleet(tmp_path_factory) -> Iterator[Fleet]:
    # Of many tests, some end processes under tasks that end elsewhere: no slot is to be sick for those after them.
    fleet = Fleet(tmp_path_factory.mktemp("fleet"), deaths=10**6)
    yield fleet
    fleet.close()


@pytest.fixture
def fleets(tmp_path) -> Iterator[type]:
    """Makes further fleets that a test may break."""
    made: list[Fleet] = []

    def make(**config: object) -> Fleet:
        root = tmp_path / str(len(made))
        root.mkdir()
        made.append(Fleet(root, **config))
        return made[-1]

    yield make
    for fleet in made:
        fleet.close()


@pytest.fixture
def pool(fleet) -> Iterator[Pool]:
    with open_pool(fleet.manifest) as pool:
        # A slot whose process another test ended may be on its way back.
        eventually(lambda: len(pool.slots()) == 4)
        yield pool
