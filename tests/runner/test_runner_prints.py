"""Root runs `skyinfra-runner`: its terminal obeys nothing of what the tasks' user writes, or calls a process."""

from __future__ import annotations

import getpass
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from fake_nvml.fake_machine import FakeMachine
from local_fleets.running_node import RunningNode

from skyinfra.gpu import exports
from skyinfra.gpu.machine import SystemMachine
from skyinfra.node import processes
from skyinfra.node.folder import Status
from skyinfra.readings import prometheus
from skyinfra.runner import cli, metrics

MakeNode = Callable[..., RunningNode]
HOSTILE = "a\x1b]0;title\x07\x1b[2J\x9b2J\x00\u202egpj.exe\u2066\u200b"
NAMED = "a\\x1b]0;title\\x07\\x1b[2J\\x9b2J\\x00\\u202egpj.exe\\u2066\\u200b"
# The kernel keeps 15 bytes.
NAME = "a\x1b[2J\u202eb"


def test_metrics_are_as_they_are_where_a_program_reads_them(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    monkeypatch.setattr(metrics, "read", lambda config: ())
    monkeypatch.setattr(prometheus, "text", lambda found: HOSTILE)
    arguments = ["metrics", "--once", "--config", str(tmp_path / "node.json")]
    assert (cli.main(arguments), capsys.readouterr().out) == (0, HOSTILE)
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True, raising=False)
    assert (cli.main(arguments), capsys.readouterr().out) == (0, NAMED)


@pytest.fixture
def node(make_node: MakeNode, monkeypatch: pytest.MonkeyPatch) -> Iterator[RunningNode]:
    """One whose status the tasks' user has written, and which ends its drain then."""
    node = make_node(cpu_slots=1)
    status = Status(
        "demo/mig", "n1", "draining", "", error=(HOSTILE, HOSTILE), waits_for=(HOSTILE,), drain_reason=HOSTILE
    )
    status = replace(status, unwatched=HOSTILE, unwarned=HOSTILE, stops=HOSTILE)
    node.directory.write(node.directory.status_file, status.dumps())
    drained = replace(status, state="drained", node=HOSTILE).dumps()
    monkeypatch.setattr(time, "sleep", lambda seconds: node.directory.write(node.directory.status_file, drained))
    with node.directory.held():
        yield node


@pytest.mark.parametrize("command", ["drain", "status", "doctor"])
def test_a_status_of_the_tasks_user(node: RunningNode, capsys: pytest.CaptureFixture[str], command: str) -> None:
    cli.main([command, "--config", str(node.file)])
    shown = "".join(capsys.readouterr())
    assert NAMED in shown
    assert not (set(HOSTILE) - set(NAMED)) & set(shown)
    if command == "drain":
        assert f"waiting: {NAMED}\n" in shown and f"Node {NAMED} is drained" in shown


RENAMED = f"""
import ctypes, sys
ctypes.CDLL(None).prctl(15, {NAME.encode()!r}, 0, 0, 0)
print(flush=True)
sys.stdin.read()
"""


@pytest.mark.parametrize("arguments", [["adopt"], ["partition", "--export"]], ids=["adopt", "export"])
def test_a_process_with_such_a_name(
    fake_machine: Callable[..., FakeMachine],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    arguments: list[str],
) -> None:
    pipe = subprocess.PIPE
    with subprocess.Popen([sys.executable, "-c", RENAMED], stdin=pipe, stdout=pipe) as process:
        assert process.stdin and process.stdout
        process.stdout.readline()
        warning = processes.describe(process.pid)
        monkeypatch.setattr(SystemMachine, "others_that_partition", lambda self: [warning])
        monkeypatch.setattr(exports, "export", lambda nvml: ("", [warning]))
        with fake_machine("h100_80gb").loaded():
            assert cli.main(arguments) == 0
        process.stdin.close()
    assert capsys.readouterr().err == f"warning: {process.pid} (a\\x1b[2J\\u202eb, user {getpass.getuser()})\n"
