"""The node's directory."""

from __future__ import annotations

import dataclasses
import errno
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from local_fleets.running_node import RunningNode

from skyinfra import NodeFailed, StateDirectoryError
from skyinfra.node.folder import NodeDirectory, Status, writing
from skyinfra.protocol.instance import InstanceInfo

STATUS = Status(
    fleet="demo/mig",
    node="n1",
    state="ready",
    config_sha256="ab" * 32,
    pid=7,
    scheduler="127.0.0.1:8786",
    error=("NodeFailed", "why"),
    slots=(InstanceInfo("n1", 0, "n1/0", "cpu", "demo/mig", visible=("A", "b")),),
)


def test_a_status_is_read_as_it_was_written(tmp_path: Path) -> None:
    directory = NodeDirectory(tmp_path)
    assert directory.status() is None
    directory.write(directory.status_file, STATUS.dumps())
    assert directory.status() == STATUS
    assert [file.name for file in tmp_path.iterdir()] == ["status.json"]


def test_the_status_of_another_version_says_nothing(tmp_path: Path) -> None:
    (tmp_path / "status.json").write_text('{"version": 2}')
    assert NodeDirectory(tmp_path).status() is None


def test_a_directory_below_a_file_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    directory = NodeDirectory(tmp_path / "file")
    with pytest.raises(StateDirectoryError, match=r"file/status\.json: cannot be written: Not a directory") as caught:
        directory.write(directory.status_file, "")
    assert "A part of the path is a file" in str(caught.value)
    assert directory.holder() is None
    with pytest.raises(StateDirectoryError), directory.held():
        pytest.fail("held")


@pytest.mark.parametrize(
    ("code", "hint"),
    [(errno.ENOSPC, "disk_gb"), (errno.EROFS, "read-only"), (errno.EACCES, "owner"), (errno.EIO, "log")],
)
def test_the_reason_says_what_to_do(code: int, hint: str) -> None:
    with pytest.raises(StateDirectoryError) as caught, writing(Path("/x/status.json")):
        raise OSError(code, os.strerror(code))
    assert os.strerror(code) in str(caught.value)
    assert hint in (caught.value.hint or "")


def test_one_runner_holds_a_directory(tmp_path: Path) -> None:
    directory = NodeDirectory(tmp_path)
    assert directory.holder() is None
    with directory.held():
        assert directory.holder() == os.getpid()
        with pytest.raises(NodeFailed, match=f"process {os.getpid()}"), NodeDirectory(tmp_path).held():
            pytest.fail("held twice")
    assert directory.holder() is None
    assert not directory.pid_file.exists()


def test_the_pid_of_a_killed_runner_does_not_count(tmp_path: Path) -> None:
    program = (
        "import sys, pathlib, os, signal\nfrom skyinfra.node.folder import NodeDirectory\n"
        "with NodeDirectory(pathlib.Path(sys.argv[1])).held(): os.kill(os.getpid(), signal.SIGKILL)"
    )
    subprocess.run([sys.executable, "-c", program, str(tmp_path)], check=False)
    directory = NodeDirectory(tmp_path)
    assert directory.pid_file.exists()
    assert directory.holder() is None


def test_status_of_a_runner_that_was_killed(make_node: Callable[..., RunningNode]) -> None:
    node = make_node(cpu_slots=1)
    assert node.run("status", check=False).returncode == 1
    text = dataclasses.replace(STATUS, state="serving", error=None).dumps()
    node.directory.write(node.directory.status_file, text)
    seen = Status.loads(node.run("status", "--json").stdout)
    assert (seen.state, seen.pid) == ("failed", None)
    assert seen.error is not None
    assert "failed" in node.run("status").stdout


def test_status_imports_nothing_heavy(make_node: Callable[..., RunningNode]) -> None:
    node = make_node(cpu_slots=1)
    program = (
        "import sys\nfrom skyinfra.runner.cli import main\n"
        "main(['status', '--config', sys.argv[1]])\n"
        "assert not {'distributed', 'pynvml', 'cryptography'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", program, str(node.file)], check=True, capture_output=True)


def test_nothing_is_written_into_what_was_made_in_the_place_of_a_removed_folder(tmp_path: Path) -> None:
    folder = tmp_path / "node"
    folder.mkdir()
    directory = NodeDirectory(folder)
    with directory.held():
        directory.write(directory.figures_file, "{}")
        shutil.rmtree(folder)
        folder.mkdir()
        with pytest.raises(StateDirectoryError, match="was removed"):
            directory.write(directory.figures_file, "{}")
        assert list(folder.iterdir()) == []
