"""A runner in the background that is killed comes back; one that was ended otherwise does not."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from local_fleets.running_node import PATIENCE_S, RunningNode, h100, on_slot, until

from skyinfra.cli import status
from skyinfra.deploy.fleet_status import fleet_status
from skyinfra.node import folder, watchdog
from skyinfra.protocol.nodeconfig import NodeConfig

MakeNode = Callable[..., RunningNode]
ONE = h100((("3g.40gb", 0, 4),))


def boot(node: RunningNode) -> int:
    """Boots it with a watchdog and returns the watchdog's process id."""
    node.run("boot", "--detach", "--restart", "--wait", str(PATIENCE_S - 5))
    return int(node.directory.watchdog_file.read_text())


def runs(pid: int) -> bool:
    return Path(f"/proc/{pid}/cmdline").exists() and bool(Path(f"/proc/{pid}/cmdline").read_bytes())


def kill(node: RunningNode) -> int:
    pid = node.status().pid
    assert pid is not None
    os.kill(pid, signal.SIGKILL)
    return pid


def test_a_runner_that_is_killed_comes_back_with_its_slots(make_node: MakeNode) -> None:
    node = make_node(accelerator=ONE)
    boot(node)
    slots, scheduler = node.status().slots, node.directory.scheduler_file.read_text()
    for _ in range(2):
        before = kill(node)
        until(lambda before=before: (s := node.status()).pid not in (None, before) and s.state == "ready", "it is back")
        assert node.status().slots == slots
        assert node.directory.scheduler_file.read_text() == scheduler
    with node.client() as client:
        assert on_slot(client, "n1/0", int) == 0
    assert "the runner was killed" in node.directory.log_file.read_text()


@pytest.mark.slow
def test_it_has_one_watchdog_which_ends_with_it(make_node: MakeNode) -> None:
    node = make_node(accelerator=ONE)
    pid = boot(node)
    assert boot(node) == pid
    command = [sys.executable, "-m", "skyinfra.runner", "keep", "--config", str(node.file)]
    assert subprocess.run(command, timeout=PATIENCE_S, check=False).returncode == 0
    assert node.run("stop").stdout == "stopped\n"
    assert not runs(pid)
    assert node.status().state == "stopped"


@pytest.mark.slow
def test_a_runner_that_ends_by_itself_is_left_alone(make_node: MakeNode) -> None:
    node = make_node(accelerator=ONE)
    pid = boot(node)
    runner = node.status().pid
    assert runner is not None
    os.kill(runner, signal.SIGTERM)
    until(lambda: not runs(pid), "the watchdog has ended")
    assert node.status().state == "stopped"


@pytest.mark.slow
def test_a_runner_that_cannot_come_back_is_left_alone(make_node: MakeNode) -> None:
    node = make_node(accelerator=ONE)
    pid = boot(node)
    node.configure(accelerator=h100((("7g.80gb", 1, 8),)))
    kill(node)
    until(lambda: not runs(pid), "the watchdog has ended")
    assert node.directory.holder() is None
    assert node.directory.log_file.read_text().count("the runner was killed") == 1


@pytest.mark.slow
def test_a_folder_that_is_gone_needs_no_watchdog(make_node: MakeNode) -> None:
    node = make_node(accelerator=ONE)
    pid = boot(node)
    node.path.rename(node.path.with_name("gone"))
    until(lambda: not runs(pid), "the watchdog has ended")


@pytest.mark.slow
def test_what_is_starting_is_taken_back_by_a_stop(make_node: MakeNode) -> None:
    node = make_node(accelerator=ONE)
    boot(node)
    before = kill(node)
    until(lambda: node.directory.holder() not in (None, before), "it is being started")
    watchdog.end(node.directory)
    assert node.directory.holder() is None or node.status().state == "ready"


@pytest.mark.slow
def test_a_watchdog_that_is_killed_is_started_again_and_watches(make_node: MakeNode) -> None:
    node = make_node(accelerator=ONE)
    pid = boot(node)
    for _ in range(2):
        os.kill(pid, signal.SIGKILL)
        until(
            lambda pid=pid: node.directory.watchdog_file.read_text().strip() not in ("", str(pid)), "there is another"
        )
        pid = int(node.directory.watchdog_file.read_text())
        until(lambda pid=pid: runs(pid), "it runs")
        before = kill(node)
        until(lambda before=before: (s := node.status()).pid not in (None, before) and s.state == "ready", "it is back")
    assert node.run("stop").stdout == "stopped\n"
    assert not runs(pid)
    assert node.status().state == "stopped"


@pytest.mark.slow
def test_status_says_that_a_watchdog_is_missing(make_node: MakeNode, capsys: pytest.CaptureFixture[str]) -> None:
    node = make_node(accelerator=ONE)
    pid = boot(node)
    log = node.directory.log_file
    log.rename(log.with_suffix(".before"))
    log.mkdir()
    os.kill(pid, signal.SIGKILL)
    until(lambda: "its watchdog was killed and cannot be started" in (node.status().unwatched or ""), "status says it")
    assert "missing: its watchdog was killed" in node.run("status").stdout
    told = json.loads(node.run("doctor", "--json", check=False).stdout)
    assert "its watchdog was killed" in json.dumps(told)
    with node.pool() as pool:
        assert "its watchdog was killed" in pool.look().state.unwatched["n1"]
        found = fleet_status(pool.manifest, None)
    assert "its watchdog was killed" in found["nodes"][0]["unwatched"]
    status._print_stack({"stack": "demo", "pools": [found], "standing": None})
    assert "n1: its watchdog was killed and cannot be started" in capsys.readouterr().out
    log.rmdir()
    until(lambda: node.status().unwatched is None, "it runs again")
    assert runs(int(node.directory.watchdog_file.read_text()))


class Services:
    """A node of a cloud, with the folders of its systemd below that of the test."""

    def __init__(self, path: Path, monkeypatch: pytest.MonkeyPatch, *, head: bool = True) -> None:
        self.run, self.units, root = path / "run", path / "units", path / "etc"
        for each in (self.run, self.units, root):
            each.mkdir()
        monkeypatch.setattr(folder, "_RUN", self.run)
        monkeypatch.setattr(folder, "_UNITS", self.units)
        for name in ("_LOOK_S", "_MISSING_S", "_BEGIN_S"):
            monkeypatch.setattr(watchdog, name, 0.0)
        config = NodeConfig(1, "lab", "cpu", "n1", "aws", head, "127.0.0.1:8786", cpu_slots=1)
        (root / "node.json").write_text(config.dumps())
        self.watched = watchdog.Watched(root / "node.json", folder.NodeDirectory(path, root))

    def enable(self, service: str) -> None:
        """As `systemctl enable` does it, with the unit that the runner brings."""
        unit = f"skyinfra-{service}.service"
        wants = self.units / "multi-user.target.wants"
        wants.mkdir(exist_ok=True)
        (self.units / unit).write_text((Path(folder.__file__).parent / "units" / unit).read_text())
        (wants / unit).symlink_to(self.units / unit)

    def missing(self) -> str | None:
        self.watched.check()
        return self.watched.missing


def test_a_service_that_ran_and_does_not_is_missing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    node = Services(tmp_path, monkeypatch)
    # No node has both services.
    assert node.missing() is None
    node.enable("watch")
    (node.run / "skyinfra-watch").mkdir()
    assert node.missing() is None
    (node.run / "skyinfra-watch").rmdir()
    assert "skyinfra-watch does not run" in str(node.missing())
    (node.run / "skyinfra-watch").mkdir()
    assert node.missing() is None


def test_a_service_that_never_ran_is_missing_once_it_has_had_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    node = Services(tmp_path, monkeypatch)
    node.enable("interrupt")
    monkeypatch.setattr(watchdog, "_BEGIN_S", 60.0)
    assert node.missing() is None
    monkeypatch.setattr(watchdog, "_BEGIN_S", 0.0)
    assert "skyinfra-interrupt does not run" in str(node.missing()) and "skyinfra-watch" not in str(node.missing())
    # A person has disabled it, and the node of before has one without a folder.
    (node.units / "multi-user.target.wants" / "skyinfra-interrupt.service").unlink()
    assert node.missing() is None
    node.enable("watch")
    unit = node.units / "skyinfra-watch.service"
    unit.write_text(unit.read_text().replace("RuntimeDirectory=", "#"))
    assert node.missing() is None


def test_a_worker_from_an_image_of_a_head_needs_no_service_of_heads(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    node = Services(tmp_path, monkeypatch, head=False)
    for service in ("watch", "interrupt"):
        node.enable(service)
    assert "skyinfra-interrupt" in str(node.missing()) and "skyinfra-watch" not in str(node.missing())
