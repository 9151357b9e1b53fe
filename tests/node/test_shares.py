"""A share of threads for each slot: what systemd has handed over, and a bomb in one slot on a real tree of groups."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest
from support import missing

from skyinfra.doctor import system
from skyinfra.node import shares
from skyinfra.node.folder import NodeDirectory

# Enters a group, and says how many threads it could start there, waiting for a line before it ends.
BOMB = """
import json, sys, threading
from pathlib import Path
from skyinfra.node import shares
shares.enter(Path(sys.argv[1]))
ends, started = threading.Event(), 0
for _ in range(int(sys.argv[2])):
    try:
        threading.Thread(target=ends.wait, daemon=True).start()
    except RuntimeError:
        break
    started += 1
print(json.dumps(started), flush=True)
sys.stdin.readline()
"""


@pytest.fixture
def tree() -> Iterator[Path]:
    """A real group of processes that may have 1,200 threads, of either version of cgroups."""
    for top in (Path("/sys/fs/cgroup"), Path("/sys/fs/cgroup/pids")):
        group = top / f"skyinfra-test-{uuid.uuid4().hex[:8]}"
        try:
            group.mkdir()
        except OSError:
            continue
        if (group / "pids.max").exists():
            (group / "pids.max").write_text("1200")
            if (group / "cgroup.subtree_control").exists():
                (group / "cgroup.subtree_control").write_text("+pids")
            break
        group.rmdir()
    else:
        missing("a tree of cgroups with pids that this process may write")
    try:
        yield group
    finally:
        for each in (*group.glob("*/"), group):
            each.rmdir()


def bomb(group: Path, threads: int) -> subprocess.Popen[str]:
    command = [sys.executable, "-c", BOMB, str(group), str(threads)]
    return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)


def started(process: subprocess.Popen[str]) -> int:
    assert process.stdout is not None
    return int(json.loads(process.stdout.readline()))


def test_a_slot_that_starts_threads_without_end_leaves_the_others_theirs(tree: Path) -> None:
    made = shares.Shares(tree)
    made.divide([0])
    made.divide([0, 1, 2])
    # The runner has a share too.
    assert [int((tree / f"slot-{slot}/pids.max").read_text()) for slot in range(3)] == [300] * 3
    groups = [made.of(slot) for slot in range(2)]
    assert groups[0] is not None and groups[1] is not None
    with bomb(groups[0], 10_000) as first, bomb(groups[1], 200) as second:
        assert 250 < started(first) < 300
        assert started(second) == 200
        made.divide([1])
        # What has not ended keeps its group.
        assert (tree / "slot-0").exists() and not (tree / "slot-2").exists()
        assert (tree / "slot-1/pids.max").read_text().strip() == "600"
        for process in (first, second):
            process.communicate("\n", timeout=30)
    made.divide([1])
    assert not (tree / "slot-0").exists()


def machine(root: Path, *, group: str = "/system.slice/skyinfra-runner.service", **files: str) -> Path:
    """The files of a machine whose process is in *group*; the folder of that group."""
    (root / "proc/self").mkdir(parents=True)
    (root / "proc/self/cgroup").write_text(f"0::{group}\n")
    folder = root / "sys/fs/cgroup" / group.lstrip("/")
    (folder / "runner").mkdir(parents=True)
    (root / "sys/fs/cgroup/cgroup.controllers").write_text("cpu memory pids\n")
    contents = {"cgroup.controllers": "memory pids\n", "pids.max": "4000\n", "cgroup.subtree_control": "", **files}
    for name, text in contents.items():
        (folder / name).write_text(text)
    (folder / "runner/cgroup.procs").write_text("")
    return folder


def test_what_systemd_has_handed_over_is_taken(tmp_path: Path) -> None:
    folder = machine(tmp_path)
    made = shares.claim(tmp_path)
    # The runner is out of the group before that has others below it.
    assert (folder / "runner/cgroup.procs").read_text() == str(os.getpid())
    assert (folder / "cgroup.subtree_control").read_text() == "+pids"
    assert made.of(3) == folder / "slot-3"


@pytest.mark.parametrize(
    ("changed", "why"),
    [
        ({"group": "/user.slice/session-1.scope"}, "only skyinfra-runner.service divides them"),
        ({"group": "/"}, "only skyinfra-runner.service divides them"),
        ({"cgroup.controllers": "memory\n"}, "systemd hands no threads over"),
        ({"pids.max": "max\n"}, "has no limit"),
    ],
)
def test_what_is_not_handed_over_is_left_alone(tmp_path: Path, changed: dict[str, str], why: str) -> None:
    folder = machine(tmp_path, **changed)
    with pytest.raises(OSError, match=why):
        shares.claim(tmp_path)
    assert (folder / "runner/cgroup.procs").read_text() == ""
    assert (folder / "cgroup.subtree_control").read_text() == ""


def test_a_machine_with_older_groups_beside_them_divides_nothing(tmp_path: Path) -> None:
    machine(tmp_path)
    (tmp_path / "sys/fs/cgroup/cgroup.controllers").unlink()
    with pytest.raises(OSError, match="no cgroup v2"):
        shares.claim(tmp_path)
    # Without a share nothing is divided, and no worker is moved.
    shares.Shares().divide([0, 1])
    assert shares.Shares().of(0) is None


def test_doctor_says_whether_they_are_divided(tmp_path: Path) -> None:
    (tmp_path / "node").mkdir()
    directory = NodeDirectory(tmp_path / "node")
    assert list(system._threads(directory, tmp_path)) == []
    with directory.held():
        folder = machine(tmp_path, group="/system.slice/skyinfra-runner.service")
        process = tmp_path / "proc" / str(os.getpid())
        process.mkdir()
        (process / "cgroup").write_text("0::/user.slice\n")
        [found] = system._threads(directory, tmp_path)
        assert found.found.startswith("not divided among the slots: only skyinfra-runner.service")
        (process / "cgroup").write_text("0::/system.slice/skyinfra-runner.service/runner\n")
        for slot in range(2):
            (folder / f"slot-{slot}").mkdir()
            (folder / f"slot-{slot}/pids.max").write_text("1333\n")
        [found] = system._threads(directory, tmp_path)
        assert (found.result, found.found) == ("ok", "2 slots, at most 1333 each")
