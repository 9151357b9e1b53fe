"""A fleet on this machine whose nodes have a network namespace each, so that a link between them can fail.

Their runners are the real program, with TLS and simulated accelerators, and are started anew as systemd starts them.
The client is in the namespace of this machine.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
from fake_nvml.fake_machine import FakeMachine
from local_fleets import inside
from support import ROOT
from tasks_on_nodes.faults import where
from terraform_projects.commands import until

from namespaces import network as bed_network
from namespaces.network import Link, Network
from skyinfra.client import Pool, open_pool
from skyinfra.mig import Placement
from skyinfra.node import processes
from skyinfra.node.folder import NodeDirectory
from skyinfra.protocol.manifest import Endpoint, Manifest, ManifestNode, ManifestSlot
from skyinfra.protocol.nodeconfig import NodeAccelerator, NodeConfig

PREFIX = "skf"
PORT = 8786
SECRET = "0123456789abcdef" * 4
OTHER_SECRET = "fedcba9876543210" * 4
# One H100: the profile, start and size of each partition.
LAYOUT = (("3g.40gb", 4, 4), ("2g.20gb", 0, 2), ("1g.10gb", 2, 1), ("1g.10gb", 3, 1))
# As skyinfra-runner.service has it.
RESTART_S = 2.0
READY_S = 90.0
# Longer than any test waits for its tasks, on a busy machine too.
RESULT_S = 300.0


_LETTERS = itertools.cycle("abc")


class Unavailable(Exception):
    """Why there can be no such fleet on this machine."""


def network() -> Network:
    """A network for nodes. Raises `Unavailable`."""
    if os.geteuid() != 0:
        raise Unavailable("network namespaces need root")
    for program in ("ip", "ss"):
        if shutil.which(program) is None:
            raise Unavailable(f"{program} of iproute2 is missing on this machine")
    bed_network.sweep(PREFIX, _alive)
    try:
        # A process may have several.
        return Network(f"{PREFIX}{os.getpid()}{next(_LETTERS)}")
    except OSError as error:
        raise Unavailable(f"this machine allows no bridge: {error}") from None


@contextlib.contextmanager
def links() -> Iterator[Network]:
    """A network for nodes. Where it cannot be: a failure under CI, a skip elsewhere, with the reason."""
    try:
        made = network()
    except Unavailable as error:
        if os.environ.get("CI"):
            pytest.fail(str(error), pytrace=False)
        pytest.skip(str(error))
    with contextlib.closing(made):
        yield made


def _alive(name: str) -> bool:
    pid = name.removeprefix(PREFIX).split("n")[0].rstrip("abc")
    return Path(f"/proc/{pid}").exists()


class Node:
    """One node. Its runner ends with `close`. *installed*: where its skyinfra is. *driver*: that of its GPU, which is
    simulated without one."""

    def __init__(
        self,
        folder: Path,
        name: str,
        link: Link,
        scheduler: str,
        *,
        head: bool,
        installed: Path = ROOT,
        driver: FakeMachine | None = None,
    ) -> None:
        self.name = name
        self.link = link
        self.installed = installed
        self.driver = driver
        self.folder = folder / name
        self.folder.mkdir(exist_ok=True)
        self.directory = NodeDirectory(self.folder)
        self.file = self.folder / "node.json"
        self.script = self.folder / "script.py"  # see `inside`
        (self.folder / "secret").write_text(SECRET)
        placed = tuple(Placement(*place) for place in LAYOUT)
        config = NodeConfig(
            version=1,
            stack="faults",
            pool="mig",
            node=name,
            provider="local",
            head=head,
            scheduler=scheduler,
            accelerator=NodeAccelerator("H100", "nvidia", 1, 80.0, "h100_80gb", (placed,)),
            simulate=driver is None,
        )
        self.file.write_text(config.dumps())
        self._runner: subprocess.Popen[bytes] | None = None

    @property
    def pid(self) -> int:
        """The process of the runner."""
        assert self._runner is not None
        return self._runner.pid

    def start(self) -> None:
        """Starts the runner; `ip netns exec` becomes it, so that its process is the runner's."""
        with (self.folder / "output.log").open("ab") as log:
            self._runner = subprocess.Popen(
                ["ip", "netns", "exec", self.link.namespace, *self._command("boot")],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env=self._variables(),
                start_new_session=True,
            )

    def kill(self) -> None:
        """``kill -9`` of the runner, and of what it leaves, as systemd does (KillMode=mixed)."""
        runner, self._runner = self._runner, None
        if runner is None:
            return
        runner.kill()
        runner.wait()
        until(lambda: not [process.kill() for process in processes.of_session(runner.pid)], seconds=READY_S)

    def restart(self) -> None:
        """``kill -9`` of the runner, which systemd starts again."""
        self.kill()
        time.sleep(RESTART_S)
        self.start()

    def run(self, *arguments: str) -> str:
        """What a command of `skyinfra-runner` prints on the node; it has to succeed."""
        command = [*self._command(arguments[0]), *arguments[1:]]
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=READY_S, env=self._environment(), check=False
        )
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    def wait(self, state: str = "ready") -> None:
        """Until the runner that was started last says *state*."""

        def said() -> bool:
            status = self.directory.status()
            return status is not None and status.state == state and status.pid == self.pid

        try:
            until(said, seconds=READY_S)
        except AssertionError:
            raise AssertionError(f"{self.name} is not {state}\n{self.log()}") from None

    def log(self) -> str:
        """What the runners of this node have said."""
        return (self.folder / "output.log").read_text(errors="replace")

    def memory(self) -> int:
        """Bytes of memory of the runner's process (RSS); on the head, it is the scheduler's too."""
        return int(psutil.Process(self.pid).memory_info().rss)

    def listens(self) -> list[tuple[str, int]]:
        """Address and port of every TCP socket that listens in the namespace."""
        command = ["ip", "netns", "exec", self.link.namespace, "ss", "-Htln"]
        lines = subprocess.run(command, capture_output=True, text=True, check=True).stdout.splitlines()
        found = [line.split()[3].rpartition(":") for line in lines]
        return [(address.strip("[]"), int(port)) for address, _, port in found]

    def close(self) -> None:
        if self._runner is not None:
            self._runner.terminate()
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._runner.wait(15)
        self.kill()

    def _variables(self) -> dict[str, str]:
        found = {**self._environment(), **inside.environment(self.script)}
        return {**found, "PYTHONPATH": f"{self.installed}{os.pathsep}{found['PYTHONPATH']}"}

    def _environment(self) -> dict[str, str]:
        found = dict(os.environ) if self.driver is None else self.driver.environment()
        return {**found, "PYTHONPATH": str(ROOT)}

    def _command(self, name: str) -> list[str]:
        return [sys.executable, "-P", "-m", "skyinfra.runner", name, "--config", str(self.file)]


class Fleet:
    """Running nodes, of which the first is the head. A test leaves them as it found them, see `settled`.

    closed: nothing can be connected to but the port of the head. *installed*: where the skyinfra of ``n1`` is.
    *driver*: of ``n1``, see `Node`.
    """

    def __init__(
        self,
        folder: Path,
        network: Network,
        *,
        nodes: int,
        closed: bool = False,
        installed: Path = ROOT,
        driver: FakeMachine | None = None,
    ) -> None:
        links = [network.link() for _ in range(nodes)]
        for index, link in enumerate(links if closed else ()):
            link.close_ports(*([PORT] if index == 0 else []))
        scheduler = f"{links[0].address}:{PORT}"
        second: dict[str, Any] = {"installed": installed, "driver": driver}
        self.nodes = [
            Node(folder, f"n{i}", link, scheduler, head=i == 0, **(second if i == 1 else {}))
            for i, link in enumerate(links)
        ]
        self.manifest = Manifest(
            version=1,
            stack="faults",
            pool="mig",
            provider="local",
            head=Endpoint(links[0].address, PORT),
            nodes=tuple(ManifestNode(node.name, node.name, node.link.address) for node in self.nodes),
            slots=tuple(ManifestSlot(i, "partition", "H100", profile, 0) for i, (profile, *_) in enumerate(LAYOUT)),
            secret=SECRET,
            simulated=True,
        )
        for node in self.nodes:
            node.start()

    @property
    def head(self) -> Node:
        return self.nodes[0]

    @property
    def size(self) -> int:
        """How many slots there are."""
        return len(self.nodes) * len(LAYOUT)

    def connect(self) -> Pool:
        return open_pool(self.manifest)

    def settled(self) -> dict[str, int]:
        """Waits until every node is ready and has executed a task on each slot; the worker process of each slot."""
        for node in self.nodes:
            node.wait()
        with self.connect() as pool:
            until(lambda: len(pool.slots()) == self.size, seconds=READY_S)
            found = dict(pool.broadcast(where()))
        assert len(found) == self.size
        return found

    def manifest_json(self) -> str:
        return json.dumps(self.manifest.to_json())

    def close(self) -> None:
        for node in reversed(self.nodes):
            node.close()


@contextlib.contextmanager
def cut(node: Node) -> Iterator[None]:
    """While it lasts, *node* reaches nobody and nobody reaches it; nobody is told."""
    node.link.cut()
    try:
        yield
    finally:
        node.link.mend()
