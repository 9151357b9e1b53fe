"""The runner notes what ended the worker process of a slot, from the exit code and the kernel's own count."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from skyinfra import TaskAttemptsExceeded, TaskTimeout
from skyinfra.engine.deaths import Death, causes, ended
from skyinfra.protocol import instance, interruption
from skyinfra.protocol.instance import InstanceInfo
from skyinfra.worker import attempts
from skyinfra.worker.attempts import Watch


@pytest.fixture
def node(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The folder of a node, of which this process is the worker of slot 0; beside it, a machine with cgroup v2."""
    node = tmp_path / "node"
    node.mkdir()
    slot = InstanceInfo("n1", 0, "n1/0", "partition", "s/p")
    monkeypatch.setenv(instance.VARIABLE, json.dumps(slot.to_json()))
    monkeypatch.setenv(instance.NODE_DIRECTORY, str(node))
    attempts._note_of.cache_clear()
    yield node
    attempts._note_of.cache_clear()


@pytest.fixture
def root(tmp_path: Path) -> Path:
    group = tmp_path / "root/sys/fs/cgroup/unit/slot-0"
    group.mkdir(parents=True)
    count(tmp_path / "root", 0)
    return tmp_path / "root"


def count(root: Path, kills: int) -> None:
    (root / "sys/fs/cgroup/unit/memory.events").write_text(f"low 0\nhigh 0\nmax 9\noom 3\noom_kill {kills}\n")


def begin(node: Path, key: str) -> None:
    """What a process leaves that dies while it runs the task *key*."""
    scope = attempts.counted(key, "f")
    scope.__enter__()
    files = [node / "running" / "0", node / "attempts" / key, node / "deaths" / key]
    left = {file: file.read_bytes() for file in files if file.exists()}
    scope.__exit__(None, None, None)
    for file, content in left.items():
        file.write_bytes(content)


def test_what_the_kernel_killed_as_memory_ran_out_is_told_from_another_kill(node: Path, root: Path) -> None:
    watch = Watch(node, 0, root / "sys/fs/cgroup/unit/slot-0", root)
    for kills in (0, 1, 1):
        begin(node, "f-1")
        count(root, kills)
        watch.ended(-9)
    assert [each.out_of_memory for each in attempts._earlier(node, "f-1", 3)] == [False, True, False]
    told = "f ended its worker process 3 times: .*as the memory of its machine ran out, then killed"
    with pytest.raises(TaskAttemptsExceeded, match=told), attempts.counted("f-1", "f"):
        pass


def test_a_process_without_a_task_or_with_one_that_is_stopped_is_not_noted(node: Path, root: Path) -> None:
    watch = Watch(node, 0, None, root)
    watch.ended(-15)
    begin(node, "f-1")
    attempts.forgive("f-1", node)
    watch.ended(-9)
    assert not (node / "deaths").exists()
    begin(node, "f-2")
    watch.ended(3)
    watch.ended(4)  # the next one dies before it runs a task
    assert attempts._earlier(node, "f-2", 1) == [Death(3)]


def test_causes_are_said_once_where_they_are_the_same() -> None:
    assert causes([Death(3), Death(3)]) == "exit code 3"
    assert causes([Death(3), Death(-11)]) == "exit code 3, then killed by signal 11 (SIGSEGV)"
    assert causes([]) == ""
    assert ended(-99) == "killed by signal 99"


def test_notes_of_tasks_that_went_on_elsewhere_do_not_pile_up(node: Path) -> None:
    for number in range(attempts._MOST_NOTED + 20):
        attempts._note(node, f"task-{number}", Death(1, False, 0))
    left = {each.name for each in (node / "deaths").iterdir()}
    assert len(left) == attempts._MOST_NOTED and f"task-{attempts._MOST_NOTED + 19}" in left


def test_a_clock_that_is_set_makes_no_task_late(node: Path) -> None:
    file = node / "attempts" / "f-1"
    long_ago = b"%015d\n" % 0

    def again() -> None:
        with attempts.counted("f-1", "f", timeout=min(60.0, interruption.uptime())) as starts:
            assert starts == 2

    begin(node, "f-1")
    os.utime(file, (1000.0, 1000.0))  # the clock was put forward since
    again()
    begin(node, "f-1")
    file.write_bytes(long_ago)  # the clock was put back since, or the machine was booted
    again()
    begin(node, "f-1")
    file.write_bytes(long_ago)
    os.utime(file, (1000.0, 1000.0))
    with pytest.raises(TaskTimeout):
        again()


CHUNK = """
import os, pickle
from skyinfra.protocol.calls import ENDED, GIVEN_BACK, Header
from skyinfra.worker import execute

rows = [(Header(f"f-{number}", "f", "topic").dumps(), pickle.dumps((os.abort, (), {}))) for number in range(3)]
told = []
task = Header("chunk-1", "f", "topic", chunk=True)
assert execute._Chunk(task, pickle.dumps(rows), lambda *event: told.append(event), "n1/0").run() == []
assert told == [(ENDED, "chunk-1", [(f"f-{number}", GIVEN_BACK) for number in range(3)])], told
"""


@pytest.mark.parametrize("wrong", ["it began before", "it cannot be counted"])
def test_a_chunk_that_starts_nothing_gives_all_back_before_it_ends(node: Path, wrong: str) -> None:
    """Else the head, which takes it to have been sent nothing, starts all of it anew where this process dies next."""
    if wrong == "it began before":
        begin(node, "chunk-1")
    else:
        (node / "attempts").touch()
    # In a process of its own: whose output it captures.
    subprocess.run([sys.executable, "-c", CHUNK], check=True, timeout=60)
