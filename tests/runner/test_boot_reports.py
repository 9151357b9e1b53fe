"""A node that could not be set up: what its head, a client and systemd hear of it."""

from __future__ import annotations

import contextlib
import json
import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from local_fleets.running_node import OTHER_SECRET, SECRET, RunningNode, until

import skyinfra as sky
from skyinfra.client import open_pool
from skyinfra.client.lookup import wait_until_ready
from skyinfra.deploy.fleet_status import fleet_status
from skyinfra.first_boot import report, report_client
from skyinfra.head import start
from skyinfra.node.node import Node
from skyinfra.protocol.fleet import FleetState, NodeFailure
from skyinfra.protocol.manifest import Endpoint, Manifest, ManifestNode, ManifestSlot
from skyinfra.protocol.packages import PackageSource
from skyinfra.runner.notify import Notifier

# Each has runners of its own.
pytestmark = pytest.mark.slow

MakeNode = Callable[..., RunningNode]
FAILURE = {"version": 1, "fleet": "demo/mig", "node": "n2", "step": "driver", "error": "missing", "lines": ["a", "b"]}


def free_ports() -> int:
    """The first of two free ports, one after the other."""
    while True:
        with socket.socket() as one, socket.socket() as two:
            one.bind(("127.0.0.1", 0))
            port = int(one.getsockname()[1])
            with contextlib.suppress(OSError, OverflowError):
                two.bind(("127.0.0.1", port + 1))
                return port


def manifest(port: int, *nodes: str) -> Manifest:
    made = tuple(ManifestNode(name, name, "127.0.0.1", head=name == "n1") for name in nodes)
    return Manifest(1, "demo", "mig", "aws", Endpoint("127.0.0.1", port), made, (ManifestSlot(0, "cpu"),), SECRET)


def told(fleet: Manifest) -> FleetState:
    with open_pool(fleet, timeout=10) as pool:
        state = pool.look().state
    assert state is not None
    return state


def test_the_head_hears_of_other_nodes_until_they_are_set_up(make_node: MakeNode) -> None:
    port = free_ports()
    make_node("n1", cpu_slots=1, provider="aws", scheduler=f"127.0.0.1:{port}").boot()
    fleet = manifest(port, "n1", "n2")
    assert told(fleet).failed == {}
    assert not report.send("127.0.0.1", port + 1, OTHER_SECRET, FAILURE)
    with socket.create_connection(("127.0.0.1", port + 1), timeout=10) as connection:
        connection.sendall(b"\x16\x03\x01" * 30_000)
    assert told(fleet).failed == {}
    assert report.send("127.0.0.1", port + 1, SECRET, FAILURE)
    assert told(fleet).failed == {"n2": NodeFailure("driver", "missing", ("a", "b"))}

    status = fleet_status(fleet, None)
    assert [(node["name"], node["state"]) for node in status["nodes"]] == [("n1", "ready"), ("n2", "failed")]
    assert status["nodes"][1]["failed"]["step"] == "driver"
    with open_pool(fleet, timeout=10, patience=2) as pool, pytest.raises(sky.SlotLost, match="n2 was not set up"):
        pool.select(node="n2").submit(os.getpid).result(timeout=60)

    make_node("n2", cpu_slots=1, head=False, provider="aws", scheduler=f"127.0.0.1:{port}").boot()
    assert told(fleet).failed == {}


def test_a_port_that_is_taken_costs_the_reports_alone(make_node: MakeNode) -> None:
    port = free_ports()
    with socket.create_server(("127.0.0.1", port + 1)):
        node = make_node("n1", cpu_slots=1, provider="aws", scheduler=f"127.0.0.1:{port}")
        assert node.boot().state == "ready"
        assert f"port {port + 1} is taken" in node.directory.log_file.read_text()


class Systemd:
    """The socket that a service tells systemd of itself through."""

    def __init__(self, path: Path) -> None:
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self._socket.bind(str(path))
        self._socket.settimeout(60)
        self.path = path

    def heard(self) -> list[str]:
        """The next message."""
        return self._socket.recv(4096).decode().splitlines()

    def until(self, word: str) -> list[str]:
        """What is heard until *word* is."""
        lines: list[str] = []
        deadline = time.monotonic() + 60
        while not any(line.startswith(word) for line in lines):
            assert time.monotonic() < deadline, lines
            lines += self.heard()
        return lines

    def drop(self) -> None:
        """Reads and forgets what has come."""
        self._socket.setblocking(False)
        with contextlib.suppress(BlockingIOError):
            while True:
                self._socket.recv(4096)
        self._socket.settimeout(60)

    def close(self) -> None:
        self._socket.close()


@contextlib.contextmanager
def service(node: RunningNode, systemd: Systemd) -> Iterator[subprocess.Popen[str]]:
    environment = {**os.environ, "NOTIFY_SOCKET": str(systemd.path), "WATCHDOG_USEC": "2000000"}
    command = [sys.executable, "-m", "skyinfra.runner", "serve", "--config", str(node.file)]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env=environment) as process:
        try:
            yield process
        finally:
            process.terminate()
            try:
                process.communicate(timeout=60)
            finally:
                process.kill()


@pytest.fixture
def systemd(tmp_path: Path) -> Iterator[Systemd]:
    made = Systemd(tmp_path / "notify")
    yield made
    made.close()


def seen_by_task() -> list[str]:
    return [name for name in ("NOTIFY_SOCKET", "WATCHDOG_USEC") if name in os.environ]


def test_systemd_hears_how_the_service_is(make_node: MakeNode, systemd: Systemd) -> None:
    node = make_node("n1", cpu_slots=1)
    with service(node, systemd) as process:
        lines = systemd.until("STATUS=ready")
        assert lines[0] == "READY=1"
        assert "WATCHDOG=1" in systemd.until("WATCHDOG=1")
        with node.pool() as pool:
            assert pool.submit(seen_by_task).result(timeout=60) == []
        process.terminate()
        systemd.until("STOPPING=1")
        assert process.wait(60) == 0


def test_a_systemd_that_reads_nothing_holds_nobody_up(systemd: Systemd, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NOTIFY_SOCKET", str(systemd.path))
    notifier = Notifier()

    def notify() -> None:
        for number in range(2000):  # more than its socket takes
            notifier.alive(f"status {number}")

    thread = threading.Thread(target=notify, daemon=True)
    thread.start()
    thread.join(60)
    assert not thread.is_alive()
    systemd.drop()
    notifier.alive("status 1999")
    assert systemd.until("STATUS")[-1] == "STATUS=status 1999"


def test_a_runner_that_cannot_start_tells_why(make_node: MakeNode, systemd: Systemd) -> None:
    port = free_ports()
    node = make_node("n1", cpu_slots=1, provider="aws", scheduler=f"127.0.0.1:{port}", run=("echo no such; exit 3",))
    with service(node, systemd) as process:
        failure = until(lambda: report_client.ask("127.0.0.1", port, SECRET, timeout=2), "the head tells")
        assert failure["step"] == "runner"
        assert failure["error"] == "NodeFailed: a command of the image ended with exit code 3: echo no such; exit 3"
        assert failure["lines"] == ["no such"]
        with pytest.raises(sky.BootFailed, match="n1 of demo/mig was not set up: step runner") as caught:
            open_pool(manifest(port, "n1"), timeout=10)
        assert "no such" in str(caught.value)
        status = fleet_status(manifest(port, "n1"), None)
        assert "was not set up: step runner" in status["problem"]
        # Another secret: nothing but that no fleet answers.
        other = Manifest.read({**manifest(port, "n1").to_json(), "secret": OTHER_SECRET})
        with pytest.raises(sky.FleetUnreachable, match="does not speak TLS") as refused:
            open_pool(other, timeout=10)
        assert not isinstance(refused.value, sky.BootFailed) and "no such" not in str(refused.value)
        assert process.poll() is None
    assert node.status().state == "failed"


@pytest.mark.skipif(os.geteuid() != 0, reason="root alone mounts a disk that is full")
def test_a_runner_on_a_full_disk_tells_that(make_node: MakeNode, systemd: Systemd, tmp_path: Path) -> None:
    port, folder = free_ports(), tmp_path / "small"
    folder.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=1m", "skyinfra-small", str(folder)], check=True)
    try:
        with contextlib.suppress(OSError), (folder / "full").open("wb", buffering=0) as file:
            while file.write(b"x" * 4096):
                pass
        address = f"127.0.0.1:{port}"
        node = make_node("n1", cpu_slots=1, provider="aws", scheduler=address, folder=str(folder))
        with service(node, systemd):
            failure = until(lambda: report_client.ask("127.0.0.1", port, SECRET, timeout=2), "the head tells")
            assert failure["error"].startswith(f"StateDirectoryError: {folder}/runner.pid: cannot be written: No space")
            assert failure["error"].endswith(f"0 of 1 MB are free on {folder}")
            assert "disk_gb" in failure["lines"][0]
            assert "No space left on device" in fleet_status(manifest(port, "n1"), None)["problem"]
    finally:
        subprocess.run(["umount", "--lazy", str(folder)], check=True)


def test_the_secret_that_a_unit_hands_over(
    make_node: MakeNode, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    node = make_node("n1", cpu_slots=1)
    handed = tmp_path / "credentials"
    handed.mkdir()
    (handed / "secret").write_text(OTHER_SECRET + "\n")
    assert Node.load(node.file).secret == SECRET
    monkeypatch.setenv("CREDENTIALS_DIRECTORY", str(handed))
    (node.path / "secret").unlink()
    assert Node.load(node.file).secret == OTHER_SECRET


def test_packages_come_from_where_it_is_declared(make_node: MakeNode, tmp_path: Path) -> None:
    wheels = tmp_path / "wheels"
    wheels.mkdir()
    show = 'for n in PIP_FIND_LINKS UV_FIND_LINKS PIP_NO_INDEX https_proxy PIP_CERT; do printenv $n; done >"$PWD/seen"'
    source = PackageSource(wheelhouse=str(wheels), proxy="http://127.0.0.1:1", ca_certificate="THE CERTIFICATE\n")
    node = make_node("n1", cpu_slots=1, packages=source, run=(show,))
    node.boot()
    bundle = node.path / "ca.pem"
    seen = (node.path / "seen").read_text().splitlines()
    assert seen == [str(wheels), str(wheels), "1", "http://127.0.0.1:1", str(bundle)]
    assert bundle.read_text().endswith("THE CERTIFICATE\n")
    assert json.loads(node.file.read_text())["packages"]["wheelhouse"] == str(wheels)
    assert start.parse(node.directory.scheduler_file.read_text()).port


def arrived(fleet: Manifest, patience: float) -> list[str]:
    said: list[str] = []
    wait_until_ready(fleet, patience=patience, on_change=said.append)
    return said


def test_a_deploy_waits_until_every_node_is_there(make_node: MakeNode) -> None:
    port = free_ports()
    fleet = manifest(port, "n1", "n2")
    head_node = make_node("n1", cpu_slots=2, provider="aws", scheduler=f"127.0.0.1:{port}")
    other = make_node("n2", cpu_slots=1, provider="aws", head=False, scheduler=f"127.0.0.1:{port}")
    with ThreadPoolExecutor() as threads:
        waiting = threads.submit(arrived, fleet, 120)
        head_node.boot()
        other.boot()
        said = waiting.result(timeout=120)
    assert said[0] == "boots"
    assert said[-1] == "3 of 3 slots are ready"


def test_a_deploy_says_which_step_of_which_node_failed(make_node: MakeNode) -> None:
    port = free_ports()
    fleet = manifest(port, "n1", "n2")
    make_node("n1", cpu_slots=1, provider="aws", scheduler=f"127.0.0.1:{port}").boot()
    assert report.send("127.0.0.1", port + 1, SECRET, FAILURE)
    with pytest.raises(sky.BootFailed, match=r"n2 of demo/mig was not set up: step driver: missing\na\nb"):
        arrived(fleet, 120)


def test_a_deploy_does_not_wait_for_ever(make_node: MakeNode) -> None:
    port = free_ports()
    fleet = manifest(port, "n1", "n2")
    with pytest.raises(sky.FleetUnreachable, match=r"is not ready 0 s after .*does not answer.*\n.*--no-wait"):
        arrived(fleet, 0)
    make_node("n1", cpu_slots=1, provider="aws", scheduler=f"127.0.0.1:{port}").boot()
    with pytest.raises(sky.FleetUnreachable, match="1 of 2 slots are ready"):
        arrived(fleet, 0)
