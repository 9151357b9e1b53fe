"""Root's part of a node writes into a folder that belongs to the runner's user, whose tasks may put links there."""

from __future__ import annotations

import fcntl
import json
import os
import subprocess
import tempfile
from collections.abc import Callable
from pathlib import Path

import pytest
from running_node import RunningNode, h100

from skyinfra import NodeRebooting, StateDirectoryError
from skyinfra.gpu.machine import RebootGuard, SimulatedMachine
from skyinfra.gpu.simulated.model import StateFile
from skyinfra.node import detach
from skyinfra.node import watchdog as watchdog_module
from skyinfra.node.folder import NodeDirectory
from skyinfra.runner import cli

MakeNode = Callable[..., RunningNode]


class Rebooting(SimulatedMachine):
    """A machine that takes a reboot for granted."""

    def __init__(self) -> None:
        super().__init__(None)
        self.reboots = 0

    def reboot(self) -> None:
        self.reboots += 1


@pytest.fixture
def victim(tmp_path: Path) -> Path:
    """A file outside the folder, for root alone."""
    file = tmp_path / "victim"
    file.write_text("root's")
    file.chmod(0o600)
    return file


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    folder = tmp_path / "node"
    folder.mkdir()
    return folder


def is_untouched(victim: Path) -> bool:
    return victim.read_text() == "root's" and victim.stat().st_mode & 0o777 == 0o600


def test_a_link_in_place_of_the_new_file_changes_no_mode(
    folder: Path, victim: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = tempfile.mkstemp

    def swapped(**arguments: str) -> tuple[int, str]:
        handle, name = made(**arguments)
        Path(name).unlink()
        Path(name).symlink_to(victim)
        return handle, name

    monkeypatch.setattr(tempfile, "mkstemp", swapped)
    directory = NodeDirectory(folder)
    directory.write(directory.status_file, "{}")
    assert is_untouched(victim)


def test_a_link_in_place_of_the_file_is_replaced(folder: Path, victim: Path) -> None:
    (folder / "reboot.json").symlink_to(folder.parent / "made by root")
    (folder / "simulated.new").symlink_to(victim)
    raised = RebootGuard(folder / "reboot.json").reboot(Rebooting(), [0], "turn MIG on")
    assert isinstance(raised, NodeRebooting)
    assert not (folder.parent / "made by root").exists()
    assert json.loads((folder / "reboot.json").read_text())["gpus"] == [0]
    with StateFile(folder / "simulated.json", 1).change():
        pass
    assert is_untouched(victim)


def test_a_link_in_place_of_the_log_is_not_followed(
    make_node: MakeNode, victim: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    node = make_node(accelerator=h100(()))
    node.directory.log_file.symlink_to(victim)
    monkeypatch.setattr("skyinfra.runner.partition_cli.NodeConfig.load", lambda path: 1 / 0)
    assert cli.main(["partition", "--config", str(node.file)]) == 1
    assert is_untouched(victim)


def test_a_reboot_that_was_remembered_but_never_asked_for_is_asked_for(folder: Path) -> None:
    """What asked for it may be killed in between; the same boot cannot end twice."""
    machine = Rebooting()
    guard = RebootGuard(folder / "reboot.json")
    (folder / "reboot.json").write_text(json.dumps({"boot": machine.boot_id(), "gpus": [0]}))
    guard.reboot(machine, [0], "turn MIG on")
    assert machine.reboots == 1


@pytest.mark.skipif(os.geteuid() != 0, reason="root alone ends processes of others")
@pytest.mark.parametrize("command", ["stop", "boot", "watchdog"])
def test_root_signals_no_process_that_another_account_chose(folder: Path, command: str) -> None:
    directory = NodeDirectory(folder)
    chosen = subprocess.Popen(["sleep", "600"])
    try:
        with directory.lock_file.open("a") as lock, directory.watchdog_file.open("a") as watchdog:
            for stream in (lock, watchdog):
                fcntl.flock(stream, fcntl.LOCK_EX)
            for file in (directory.pid_file, directory.watchdog_file):
                file.write_text(f"{chosen.pid}\n")
            os.chown(folder, 65534, 65534)
            with pytest.raises(StateDirectoryError, match=r"\(sleep, user root\), which is not of the folder's owner"):
                if command == "stop":
                    detach.stop(directory, timeout_s=0.1)
                elif command == "boot":
                    directory.holder()
                else:
                    watchdog_module.end(directory)
        assert chosen.poll() is None
    finally:
        chosen.kill()
        chosen.wait()
