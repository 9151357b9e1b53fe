"""Root's part of a node writes into a folder that belongs to the runner's user, whose tasks may put links there."""

from __future__ import annotations

import fcntl
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from local_fleets.running_node import RunningNode, h100

from skyinfra import InvalidNodeConfig, NodeRebooting, StateDirectoryError, desired
from skyinfra.gpu.machine import RebootGuard, SimulatedMachine
from skyinfra.gpu.simulated.model import StateFile
from skyinfra.mig import Placement
from skyinfra.node import detach
from skyinfra.node import folder as folder_module
from skyinfra.node import watchdog as watchdog_module
from skyinfra.node.folder import NodeDirectory
from skyinfra.node.node import directory_of
from skyinfra.protocol.fleet import FleetLayout
from skyinfra.protocol.nodeconfig import NodeAccelerator, NodeConfig
from skyinfra.runner import cli

MakeNode = Callable[..., RunningNode]
BIG = (("3g.40gb", 0, 4),)


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
    selected = subprocess.Popen(["sleep", "600"])
    try:
        with directory.lock_file.open("a") as lock, directory.watchdog_file.open("a") as watchdog:
            for stream in (lock, watchdog):
                fcntl.flock(stream, fcntl.LOCK_EX)
            for file in (directory.pid_file, directory.watchdog_file):
                file.write_text(f"{selected.pid}\n")
            os.chown(folder, 65534, 65534)
            with pytest.raises(StateDirectoryError, match=r"\(.+, user root\), which is not of the folder's owner"):
                if command == "stop":
                    detach.stop(directory, timeout_s=0.1)
                elif command == "boot":
                    directory.holder()
                else:
                    watchdog_module.end(directory)
        assert selected.poll() is None
    finally:
        selected.kill()
        selected.wait()


@pytest.fixture
def of_tasks(tmp_path: Path, folder: Path) -> NodeDirectory:
    """The directory of a cloud node: *folder* is of the runner's user, the configuration in a folder of root's."""
    if os.geteuid() != 0:
        pytest.skip("root alone gives files away")
    root = tmp_path / "root"
    root.mkdir()
    config = NodeConfig(1, "demo", "mig", "n1", "aws", False, "h:1", h100(BIG), simulate=True, folder=str(folder))
    (root / "node.json").write_text(config.dumps())
    folder.chmod(0o755)
    os.chown(folder, 65534, 65534)
    return directory_of(root / "node.json")


HOLDER = """
import os, sys
from pathlib import Path
from skyinfra.node.folder import NodeDirectory
os.setgroups([])
os.setresgid(65533, 65533, 65533)
os.setresuid(65533, 65533, 65533)
print(NodeDirectory(Path(sys.argv[1])).holder())
"""


def test_a_service_with_a_user_of_its_own_sees_whether_a_runner_serves(of_tasks: NodeDirectory) -> None:
    """The lock of the runner is for its own user."""
    # pytest's folders are for one user.
    for parent in list(of_tasks.path.parents)[:-2]:
        parent.chmod(parent.stat().st_mode | 0o011)

    def seen() -> str:
        command = [sys.executable, "-c", HOLDER, str(of_tasks.path)]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()

    runner = subprocess.Popen(["sleep", "600"], user=65534, group=65534)
    try:
        of_tasks.lock_file.touch(mode=0o600)
        assert seen() == "None"
        of_tasks.pid_file.write_text(f"{runner.pid}\n")
        assert seen() == str(runner.pid)
        # Of an earlier boot: another account has that number now.
        of_tasks.pid_file.write_text(f"{os.getpid()}\n")
        assert seen() == "None"
    finally:
        runner.kill()
        runner.wait()
    of_tasks.pid_file.write_text(f"{runner.pid}\n")
    assert seen() == "None"


def test_messages_of_services_are_in_folders_of_theirs(
    of_tasks: NodeDirectory, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(folder_module, "_RUN", tmp_path / "run")
    # Services that were set up by an earlier skyinfra have none.
    assert of_tasks.notice_file == of_tasks.path / "notice.json"
    own = tmp_path / "run/skyinfra-interrupt"
    own.mkdir(parents=True)
    assert of_tasks.notice_file == own / "notice.json"
    assert of_tasks.declared_file == of_tasks.path / "declared-layout"
    # What tasks write in its place is not read.
    (of_tasks.path / "unwarned").write_text("by a task")
    assert of_tasks.unwarned() is None
    (own / "unwarned").write_text("by the service")
    assert of_tasks.unwarned() == "by the service"
    # A node of this machine has no services.
    assert NodeDirectory(of_tasks.path).notice_file == of_tasks.path / "notice.json"


OPENED = """
import os, sys
from pathlib import Path
from skyinfra.runner import cli
folder, *arguments = sys.argv[1:]
opened = []

def hook(event, given):
    if event == "open" and str(given[0]).startswith(folder) and not given[2] & (os.O_NOFOLLOW | os.O_EXCL):
        opened.append(Path(given[0]).name)

sys.addaudithook(hook)
code = cli.main(arguments)
print(*sorted(set(opened)), file=sys.stderr)
sys.exit(code)
"""


def test_root_reads_its_configuration_and_what_it_remembers_in_its_own_folder(
    of_tasks: NodeDirectory, victim: Path
) -> None:
    root, folder = of_tasks.reboot_file.parent, of_tasks.path
    planted = ("node.json", "node.json.new", "actual-layout.json", "partitions.json", "reboot.json", "runner.lock")
    planted += ("desired-layout.json", "desired.json", "told.json", "followed.json", "placed.json")
    for name in planted:
        (folder / name).symlink_to(victim)
    arguments = [str(folder), "partition", "--config", str(root / "node.json")]
    done = subprocess.run([sys.executable, "-c", OPENED, *arguments], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    # Of the simulated GPUs, which stand in for a driver.
    assert {name for name in done.stderr.split() if not name.startswith(("simulated", ".simulated"))} == set()
    assert is_untouched(victim) and all((folder / name).is_symlink() for name in planted)
    record = json.loads((root / "actual-layout.json").read_text())
    assert [partition["profile"] for partition in record["partitions"]] == ["3g.40gb"]


def _link(file: Path, victim: Path) -> None:
    file.symlink_to(victim)


def _second_name(file: Path, victim: Path) -> None:
    os.link(victim, file)


def _of_another(file: Path, victim: Path) -> None:
    os.chown(file, 65533, 65533)


def _pipe(file: Path, victim: Path) -> None:
    os.mkfifo(file)
    os.chown(file, 65534, 65534)


def _large(file: Path, victim: Path) -> None:
    file.write_text(file.read_text() + " " * 2**20)


def _deep(file: Path, victim: Path) -> None:
    file.write_text("[" * 2**19)


@pytest.mark.parametrize(
    ("planted", "why"),
    [
        (_link, "it is a link"),
        (_second_name, "one with several names"),
        (_pipe, "it is no file"),
        (_of_another, "belongs neither to the owner of its folder nor to root"),
        (_large, "more than 1048576 bytes"),
        (_deep, "is not JSON"),
    ],
)
def test_what_the_runner_asks_of_root_is_a_file_of_its_own(
    of_tasks: NodeDirectory, victim: Path, planted: Callable[[Path, Path], None], why: str
) -> None:
    layout = FleetLayout(1, "h100_80gb", ((Placement("7g.80gb", 0, 8),),))
    config = replace(NodeConfig.load(of_tasks.reboot_file.with_name("node.json")), head=True)
    file = of_tasks.desired_file
    file.write_text(json.dumps({"version": 1, "declared": layout.to_json()}))
    victim.write_text(file.read_text())
    os.chown(file, 65534, 65534)
    found = desired.find(config, "a", of_tasks)
    assert (found.source, found.layout) == ("metadata", layout), "an honest message"
    if planted in (_link, _second_name, _pipe):
        file.unlink()
    planted(file, victim)
    found = desired.find(config, "a", of_tasks)
    assert (found.source, found.config) == ("node.json", config)
    assert why in str(found.refused)


@pytest.mark.parametrize(
    "layout",
    [
        FleetLayout(1, None, ((Placement("--gpu-reset", 0, 1),),)),
        FleetLayout(1, None, ((),)),
        FleetLayout(1, None, ((Placement("CPX", 0, 1), Placement("DPX", 1, 1)),)),
        FleetLayout(1, None, ((Placement("CPX", 0, 1),),), "--help"),
    ],
)
def test_no_words_but_modes_reach_the_program_that_sets_them(folder: Path, layout: FleetLayout) -> None:
    amd = NodeAccelerator("MI300X", "amd", 1, 192.0)
    config = NodeConfig(1, "demo", "mig", "n1", "aws", False, "h:1", amd)
    found = desired.find(config, "a", NodeDirectory(folder), layout)
    assert (found.config, found.source) == (config, "node.json")
    assert isinstance(found.refused, InvalidNodeConfig)


def test_who_may_not_look_into_it_may_still_name_its_files(tmp_path: Path) -> None:
    folder = tmp_path / "closed"
    folder.mkdir(mode=0o700)
    try:
        if os.geteuid() == 0:
            os.seteuid(65534)
        else:
            folder.chmod(0)
        assert NodeDirectory(folder).watchdog_file.name == "watchdog.pid"
    finally:
        os.seteuid(os.getuid())
        folder.chmod(0o700)
