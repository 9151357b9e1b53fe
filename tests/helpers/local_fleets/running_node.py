"""Nodes in a temporary directory, with simulated accelerators, run by the real program."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import cloudpickle
from distributed import Client

from skyinfra.client import Pool, open_pool
from skyinfra.engine import dask_client
from skyinfra.engine.credentials import Credentials
from skyinfra.head import start
from skyinfra.mig import Placement
from skyinfra.node import detach, watchdog
from skyinfra.node.folder import NodeDirectory, Status
from skyinfra.protocol.calls import Header
from skyinfra.protocol.manifest import Manifest, ManifestNode, ManifestSlot
from skyinfra.protocol.nodeconfig import NodeAccelerator, NodeConfig
from skyinfra.tasks import outcomes

SECRET = "0123456789abcdef" * 4
OTHER_SECRET = "fedcba9876543210" * 4
PATIENCE_S = 60.0
# The layout of one GPU: two slots.
BIG = (("3g.40gb", 0, 4), ("3g.40gb", 4, 4))


def until(condition: Callable[[], Any], what: str, *, seconds: float = PATIENCE_S) -> Any:
    """Polls until *condition* is true, and gives its value."""
    deadline = time.monotonic() + seconds
    while not (value := condition()):
        assert time.monotonic() < deadline, f"not within {seconds} s: {what}"
        time.sleep(0.05)
    return value


def h100(*layouts: tuple[tuple[str, int, int], ...]) -> NodeAccelerator:
    """As many simulated H100 as there are *layouts*, each of (profile, start, size)."""
    placed = tuple(tuple(Placement(*place) for place in layout) for layout in layouts)
    return NodeAccelerator("H100", "nvidia", len(layouts), 80.0, "h100_80gb", placed)


class RunningNode:
    """A node in *path*. Its runner is ended by the fixture."""

    def __init__(self, path: Path, config: NodeConfig, secret: str = SECRET) -> None:
        path.mkdir(parents=True)
        self.path = path
        self.file = path / "node.json"
        self.directory = NodeDirectory(path)
        (path / "secret").write_text(secret)
        self.configure(config)

    def configure(self, config: NodeConfig | None = None, **changes: Any) -> None:
        self.config = dataclasses.replace(config or self.config, **changes)
        self.file.write_text(self.config.dumps())

    def run(self, *arguments: str, check: bool = True) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-m", "skyinfra.runner", arguments[0], "--config", str(self.file), *arguments[1:]]
        done = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE_S, check=False)
        assert not check or done.returncode == 0, done.stdout + done.stderr
        return done

    def stop(self) -> None:
        """Ends its runner, if one serves it, as the command does; a process for that takes as long as the rest."""
        watchdog.end(self.directory)
        with contextlib.suppress(ProcessLookupError):
            detach.stop(self.directory, timeout_s=10)

    def boot(self) -> Status:
        self.run("boot", "--detach", "--wait", str(PATIENCE_S - 5))
        return self.status()

    @contextlib.contextmanager
    def foreground(self, command: str) -> Iterator[subprocess.Popen[bytes]]:
        """The runner as a child process, which ends with the block."""
        arguments = [sys.executable, "-m", "skyinfra.runner", command, "--config", str(self.file)]
        process = subprocess.Popen(arguments, stderr=subprocess.DEVNULL)
        try:
            yield process
        finally:
            process.terminate()
            try:
                process.wait(timeout=30)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()

    def status(self) -> Status:
        status = self.directory.status()
        assert status is not None
        return status

    def until(self, state: str) -> Status:
        return until(lambda: (s := self.directory.status()) and s.state == state and s, f"{self.path.name} is {state}")

    def client(self, secret: str = SECRET) -> Client:
        address = self.directory.scheduler_file.read_text().strip()
        security = Credentials.derive(secret, role="client", name="test").security()
        return Client(f"tls://{address}", security=security, timeout=10)

    def pool(self, *others: RunningNode) -> Pool:
        """A client of the fleet of this head and *others*. Its manifest promises one slot on each node."""
        endpoint = start.parse(self.directory.scheduler_file.read_text())
        nodes = tuple(ManifestNode(n.config.node, n.config.node, "127.0.0.1") for n in (self, *others))
        slots = (ManifestSlot(0, "partition", "H100", "3g.40gb", 0),)
        return open_pool(Manifest(1, "demo", "mig", "local", endpoint, nodes, slots, SECRET, simulated=True))

    @contextlib.contextmanager
    def booting(self, *, refused: str = "") -> Iterator[subprocess.Popen[str]]:
        """``boot --detach`` in the background, for a change that takes long. It has to succeed, or to say *refused*."""
        command = [sys.executable, "-m", "skyinfra.runner", "boot", "--config", str(self.file), "--detach", "--wait"]
        process = subprocess.Popen([*command, "30"], stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
        try:
            yield process
            errors = process.communicate(timeout=PATIENCE_S)[1]
            assert process.returncode == (1 if refused else 0), errors
            assert refused in errors
        finally:
            process.kill()
            process.communicate()

    def quiet_log(self) -> str:
        """The log of a runner that had nothing to complain about."""
        text = self.directory.log_file.read_text()
        for word in ("Traceback", "WARNING", "ERROR"):
            assert word not in text, text
        return text

    def workers(self, client: Client) -> dict[str, dict[str, Any]]:
        """What the scheduler knows of each slot, by slot."""
        workers = client.scheduler_info(n_workers=-1)["workers"].values()
        return {worker["skyinfra"]["slot"]: worker for worker in workers}

    def pids(self, client: Client) -> dict[str, int]:
        """The process of each slot's worker."""
        return {slot: on_slot(client, slot, os.getpid) for slot in self.workers(client)}


def by_value(function: Callable[..., Any], *arguments: Any) -> bytes:
    """A pickled call. The node has no test modules: the function travels by value."""
    module = sys.modules[function.__module__]
    if getattr(module, "__file__", None) and Path(module.__file__).is_relative_to(Path(__file__).parents[2]):
        cloudpickle.register_pickle_by_value(module)
    return cloudpickle.dumps((function, arguments, {}))


def on_slot(client: Client, slot: str, function: Callable[..., Any], *arguments: Any) -> Any:
    """The result of a task that runs on *slot*."""
    call = by_value(function, *arguments)
    outcome = send(client, call, {f"slot:{slot}": 1}).result(timeout=PATIENCE_S)
    return outcomes.result(outcome, function.__name__)


def send(client: Client, call: bytes, resources: dict[str, int]) -> Any:
    """The future of a task, sent as our client sends it: the head takes no other."""
    key = f"task-{uuid.uuid4().hex}"
    return dask_client.send_task(client, key, Header(key, "task", topic="").dumps(), call, resources)
