"""The pods that `skyinfra render --format kubernetes` writes, as processes of this machine: their shell, the program
of their container, its probe, and the signal of a deletion."""

from __future__ import annotations

import contextlib
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from clusters.pools import SECRET, declared, stateful_set
from local_fleets.running_node import until

import skyinfra as sky


@pytest.fixture(autouse=True)
def _needs_terraform() -> None:
    """Terraform has no part in this."""


class Pods:
    """The pods of *pool* below *folder*, where each has its own in the place of its volumes, and names of its own."""

    def __init__(self, folder: Path, spec: dict[str, Any]) -> None:
        self.folder = folder
        self._pod = spec["template"]["spec"]
        self._name = spec["serviceName"].removesuffix("-nodes")
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self._port = free.getsockname()[1]
        (folder / "secret").write_text(SECRET)
        self.grace_s = self._pod["terminationGracePeriodSeconds"]

    def _here(self, text: str, number: int) -> str:
        changes = {
            "$$": "$",  # kubelet takes $(NAME) for a variable, and this for the sign
            "/var/lib/skyinfra": str(self.folder / str(number)),
            "/etc/skyinfra": str(self.folder),
            f"{self._name}-0.{self._name}-nodes:8786": f"localhost:{self._port}",
            "8786": str(self._port),
        }
        for old, new in changes.items():
            text = text.replace(old, new)
        return text

    def start(self, number: int) -> subprocess.Popen[bytes]:
        """What kubelet does: the init container, then the container."""
        programs = self.folder / str(number) / "venv/bin"
        programs.mkdir(parents=True)
        (programs / "skyinfra-runner").symlink_to(Path(sys.executable).with_name("skyinfra-runner"))
        (first,) = self._pod["initContainers"]
        environment = {"POD": f"{self._name}-{number}", "NAMESPACE": "ml", "PATH": "/usr/bin:/bin"}
        command = [*first["command"], *(self._here(text, number) for text in first["args"])]
        subprocess.run(command, env=environment, check=True)
        return subprocess.Popen([self._here(part, number) for part in self._container["command"]])

    def is_ready(self, number: int) -> bool:
        """The answer of the readiness probe."""
        probe = [self._here(part, number) for part in self._container["readinessProbe"]["exec"]["command"]]
        return subprocess.run(probe, capture_output=True, check=False).returncode == 0

    @property
    def _container(self) -> dict[str, Any]:
        (container,) = self._pod["containers"]
        return container


@contextlib.contextmanager
def ended(*processes: subprocess.Popen[bytes]) -> Iterator[None]:
    """Ends what is left of *processes* after the block."""
    try:
        yield
    finally:
        for process in processes:
            process.kill()
            process.wait()


@sky.compute
def where() -> str:
    return sky.instance_info().slot


@sky.compute
def until_told(mark: str) -> str:
    """Ends by itself a second after it is informed."""
    Path(mark, sky.instance_info().slot.replace("/", "-")).touch()
    while not sky.interrupted():
        time.sleep(0.05)
    time.sleep(1)
    told = sky.interruption()
    return told.why if told is not None else ""


@pytest.mark.slow
def test_pods_start_in_any_order_and_end_in_their_own_time(tmp_path: Path) -> None:
    pool = declared(provider=sky.Local(simulate=True), accelerator="H100/3g.40gb*2")
    pods = Pods(tmp_path, stateful_set(pool)["spec"])
    worker = pods.start(1)
    assert not pods.is_ready(1)
    head = pods.start(0)
    with ended(worker, head):
        until(lambda: pods.is_ready(0) and pods.is_ready(1), "both pods are ready", seconds=120)
        marks = tmp_path / "marks"
        marks.mkdir()
        with sky.connect(tmp_path / "0" / "forwarded.json", output=False) as fleet:
            assert sorted(where() @ fleet) == ["mig-0/0", "mig-0/1", "mig-1/0", "mig-1/1"]
            futures = fleet.spread(until_told(str(marks)))
            until(lambda: len(list(marks.iterdir())) == 4, "a task runs on every slot")
            for process in (worker, head):
                process.send_signal(signal.SIGTERM)
            assert [future.result(timeout=30) for future in futures] == ["the node is asked to end"] * 4
        assert [process.wait(timeout=pods.grace_s) for process in (worker, head)] == [0, 0]
