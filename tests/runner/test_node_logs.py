"""Logs of a node in parts, programs that nobody asks for any more, and how a shell on a node is opened."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from local_fleets.running_node import RunningNode, until
from typer.testing import CliRunner

from skyinfra import InvalidField, NodeFailed
from skyinfra.cli.app import app
from skyinfra.node.folder import NodeDirectory
from skyinfra.protocol import questions
from skyinfra.protocol.manifest import Endpoint, Login, Manifest, ManifestNode, Via
from skyinfra.runner import answers, commands
from skyinfra.runner.commands import Commands
from skyinfra.ssh import ways
from skyinfra.worker import output


@given(
    lines=st.lists(st.text(st.characters(exclude_characters="\n\r", codec="utf-8")), min_size=1),
    most=st.integers(40, 90),
)
def test_a_log_is_read_on_without_a_gap(tmp_path_factory: pytest.TempPathFactory, lines: list[str], most: int) -> None:
    directory = NodeDirectory(tmp_path_factory.mktemp("node"))
    text = "".join(f"{line[:8]}\n" for line in lines)
    directory.log_file.write_bytes(text.encode())
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(answers, "_PART_BYTES", most)
        found, offset = "", 0
        while (part := answers.read_log(directory, "runner", offset=offset)) and part["text"]:
            found, offset = found + part["text"], part["offset"]
    assert found == text


def test_the_last_lines_and_what_comes_then(tmp_path: Path) -> None:
    directory = NodeDirectory(tmp_path)
    log = directory.log_file
    log.write_text("a\nb\nc\n")
    first = answers.read_log(directory, "runner", lines=2)
    assert first is not None
    assert first["text"] == "b\nc\n"
    with log.open("a") as stream:
        stream.write("d\nhalf")
    second = answers.read_log(directory, "runner", offset=first["offset"])
    assert second is not None
    assert second["text"] == "d\n"
    # Begun anew, after a rotation for instance.
    log.write_text("e\n")
    third = answers.read_log(directory, "runner", offset=second["offset"])
    assert third is not None
    assert third["text"] == "e\n"


def test_the_last_lines_of_a_long_log_are_all_of_them(tmp_path: Path) -> None:
    directory = NodeDirectory(tmp_path)
    numbered = [f"{number:079}\n" for number in range(20_000)]
    directory.log_file.write_text("".join(numbered))
    asked: list[dict[str, Any]] = []

    def ask(**arguments: Any) -> object:
        asked.append(arguments)
        return answers.read_log(directory, "runner", **arguments)

    part = ask(lines=15_000)
    found = ""
    while isinstance(part, dict) and part["text"]:
        assert len(part["text"]) <= answers._PART_BYTES
        found += part["text"]
        part = ask(offset=part["offset"])
    assert found == "".join(numbered[-15_000:])
    asked.clear()
    first = questions.last_lines(ask, 15_000)
    assert first is not None
    assert (first["text"], first["offset"]) == (found, 20_000 * 80)
    assert "offset" in asked[-1] and len(asked) == 5


@given(
    lines=st.lists(st.tuples(st.text("ab", max_size=8), st.sampled_from(["\n", "\r", "\r\n"])), min_size=1),
    rest=st.sampled_from(["", "rest"]),
    count=st.integers(1, 12),
    most=st.integers(20, 40),
)
def test_the_last_lines_begin_where_a_line_does(
    tmp_path_factory: pytest.TempPathFactory, lines: list[tuple[str, str]], rest: str, count: int, most: int
) -> None:
    directory = NodeDirectory(tmp_path_factory.mktemp("node"))
    text = "".join(map("".join, lines)) + rest
    directory.log_file.write_bytes(text.encode())
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(answers, "_PART_BYTES", most)
        found = questions.last_lines(lambda **asked: answers.read_log(directory, "runner", **asked), count)
    assert found is not None
    assert found["text"] == "".join(text.splitlines(keepends=True)[-count:])


def test_the_log_of_the_boot(tmp_path: Path) -> None:
    directory = NodeDirectory(tmp_path)
    with pytest.raises(NodeFailed, match="it has no log of one"):
        answers.read_log(directory, "boot", root=tmp_path)
    (tmp_path / "var/log/skyinfra").mkdir(parents=True)
    (tmp_path / "var/log/cloud-init-output.log").write_text("cloud-init\n")
    (tmp_path / "var/log/skyinfra/boot.jsonl").write_text("{}\n")
    found = answers.read_log(directory, "boot", root=tmp_path)
    assert found is not None
    assert found["text"] == "{}\n"
    with pytest.raises(InvalidField, match="no such log"):
        answers.read_log(directory, "kernel")


def test_the_journal_where_there_is_no_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    directory = NodeDirectory(tmp_path)
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(NodeFailed, match="no log file, and the system no journal"):
        answers.read_log(directory, "runner")
    program = tmp_path / "journalctl"
    program.write_text('#!/bin/sh\necho "$@"\n')
    program.chmod(0o755)
    found = answers.read_log(directory, "runner", lines=7)
    assert found is not None
    assert found["text"] == "--no-pager -o short-iso -u skyinfra-runner.service -n 7\n"
    program.write_text("#!/bin/sh\necho no permission >&2; exit 1\n")
    with pytest.raises(NodeFailed, match="no permission"):
        answers.read_log(directory, "runner")


def test_output_that_is_kept_has_bounds(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    code = f"""
from pathlib import Path
from skyinfra.worker import output
output._KEPT_FILES, output._PRUNE_EVERY = 3, 1
for number in range(6):
    with output.captured(f"task-{{number}}", Path({str(tmp_path)!r})):
        print(number)
with output.captured("silent", Path({str(tmp_path)!r})):
    pass
with output.captured("nowhere", Path({str(tmp_path)!r}, "no", "such")):
    print("seen")
print("after")
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout == "seen\nafter\n"
    # The oldest go when the next one begins.
    assert sorted(file.name for file in (tmp_path / "tasks").iterdir()) == [f"task-{n}.log" for n in (3, 4, 5)]
    assert output.find(tmp_path, "task-4") == tmp_path / "tasks/task-4.log"
    assert output.find(tmp_path, "task") is not None
    assert output.find(tmp_path, "other") is None
    assert output.find(tmp_path / "no", "task") is None


def test_output_of_what_runs_stays_and_so_does_the_newest(tmp_path: Path) -> None:
    code = f"""
import os
from pathlib import Path
from skyinfra.worker import attempts, output
output._KEPT_BYTES, output._PRUNE_EVERY = 10, 1
folder = Path({str(tmp_path)!r})
(folder / "running").mkdir()
(folder / "running/1").write_text(f"{{os.getpid()}} long\\n")
for key in ("long", "old", "large"):
    with output.captured(key, folder, running=attempts.running):
        print(key * 20)
with output.captured("next", folder, running=attempts.running):
    pass
"""
    subprocess.run([sys.executable, "-c", code], timeout=60, check=True)
    assert sorted(file.name for file in (tmp_path / "tasks").iterdir()) == ["large.log", "long.log"]


def test_output_that_other_slots_remove_meanwhile_costs_none_of_the_task(tmp_path: Path) -> None:
    """Every so many tasks the folder is looked through: a task had no output where a file went in that moment."""
    code = f"""
from pathlib import Path
from skyinfra.worker import output
with output.captured("mine-1", Path({str(tmp_path)!r})):
    print("hello")
"""
    (tmp_path / "tasks").mkdir()
    # Listed, and not there when it is looked at.
    (tmp_path / "tasks/other-1.log").symlink_to("gone")
    subprocess.run([sys.executable, "-c", code], check=True)
    found = output.find(tmp_path, "mine")
    assert found == tmp_path / "tasks/mine-1.log" and found.read_text() == "hello\n"


def test_a_program_that_nobody_asks_for_is_ended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(commands, "_ABANDONED_S", 0.3)
    found = Commands(tmp_path)
    script = "sleep 300 & echo $! > child; echo $$ > self; while :; do echo much; done"
    identity = found.start(["sh", "-c", script])
    until(lambda: (tmp_path / "self").exists() and (tmp_path / "self").read_text().strip(), "it runs")
    pids = [int((tmp_path / name).read_text()) for name in ("self", "child")]
    until(lambda: not any(_runs(pid) for pid in pids), "it has ended, with what it started", seconds=30)
    with pytest.raises(NodeFailed, match="does not run that command"):
        until(lambda: found.output(identity, 0)["code"] is not None and None, "it is forgotten", seconds=30)


def test_a_program_without_output_is_waited_for(tmp_path: Path) -> None:
    """It has closed its own, or writes it into a file: each answer comes in time, and the last one has its code."""
    found = Commands(tmp_path)
    identity = found.start(["sh", "-c", "exec >/dev/null 2>&1; until [ -e go ]; do sleep 0.05; done; exit 3"])
    until(lambda: not found._running[identity]._open, "its output has ended")
    assert found.output(identity, 0.1) == {"parts": [], "code": None}
    (tmp_path / "go").touch()
    assert found.output(identity, 30.0) == {"parts": [], "code": 3}


def test_no_more_programs_than_are_allowed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(commands, "_AT_ONCE", 1)
    found = Commands(tmp_path)
    identity = found.start(["sleep", "300"])
    with pytest.raises(NodeFailed, match="1 commands run on this node already"):
        found.start(["true"])
    found.end(identity)
    assert found.output(identity, 10)["code"] == -15
    until(lambda: threading.active_count() and not found._running, "it is forgotten")
    with pytest.raises(InvalidField, match="no command"):
        found.start([])


def _runs(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


# Shells -------------------------------------------------------------------------------------------------------------


def manifest(provider: str = "aws", **fields: str) -> Manifest:
    head = ManifestNode("p-0", "i-0", "10.0.0.1", fields.get("public"), "us-east-1a", head=True)
    other = ManifestNode("p-1", "i-1", "10.0.0.2", None, "us-east-1a")
    return Manifest(1, "s", "p", provider, Endpoint("10.0.0.1", 8786), (head, other), (), "x" * 32)


# Of a region; https://docs.aws.amazon.com/local-zones/latest/ug/available-local-zones.html;
# https://docs.aws.amazon.com/wavelength/latest/developerguide/available-wavelength-zones.html (2026-11-27).
ZONES = {
    "us-gov-west-1b": "us-gov-west-1",
    "us-west-2-lax-1a": "us-west-2",
    "us-east-1-wl1-bos-wlz-1": "us-east-1",
}


def test_how_a_shell_is_opened(monkeypatch: pytest.MonkeyPatch) -> None:
    fleet = manifest(public="203.0.113.1")
    head, other = fleet.nodes
    reached = {"203.0.113.1"}
    monkeypatch.setattr(ways, "_answers", lambda address: address in reached)
    assert ways.ssh_line(fleet, head, (), user="ubuntu") == ["ssh", "--", "ubuntu@203.0.113.1"]
    # A command of the person's own configuration is none of a line that has one: ssh refuses two.
    alone = ("-o", "RemoteCommand=none")
    asked: list[str] = []

    def configured(host: str) -> bool:
        asked.append(host)
        return True

    monkeypatch.setattr(ways, "_has_command", configured)
    assert ways.ssh_line(fleet, other, ("ls", "a b"), user="me") == [
        *("ssh", *alone, "-J", "me@203.0.113.1", "--", "me@10.0.0.2", "ls 'a b'")
    ]
    assert asked == ["me@10.0.0.2"]
    reached.clear()
    assert ways.ssh_line(fleet, other, (), user="ubuntu") is None
    host = replace(head, ssh=Login())
    assert ways.ssh_line(fleet, host, (), user=None) == ["ssh", "--", "203.0.113.1"]
    host = replace(head, ssh=Login("me", 2222, "~/.ssh/lab", "you@bastion:2200"))
    options = ["-p", "2222", "-i", "~/.ssh/lab", "-J", "you@bastion:2200"]
    assert ways.ssh_line(fleet, host, (), user=None) == ["ssh", *options, "--", "me@203.0.113.1"]
    assert ways.ssh_line(fleet, host, ("ls",), user="root") == [
        *("ssh", *alone, *options, "--", "root@203.0.113.1", "ls")
    ]
    start = ["aws", "ssm", "start-session", "--target=i-1", "--region=us-east-1"]
    assert ways.session_line(fleet, other, ()) == start
    assert ways.session_line(fleet, other, ("ls", "a b")) == [
        *(*start, "--document-name", "AWS-StartInteractiveCommand", "--parameters", "command=ls 'a b'")
    ]
    for zone, region in ZONES.items():
        line = ways.session_line(fleet, replace(other, zone=zone), ())
        assert line is not None and line[4:] == [f"--region={region}"], zone
    assert ways.session_line(manifest("vastai"), other, ()) is None
    # Where nothing answers, by what leads to the head.
    closed = replace(manifest("gcp"), via=Via("iap", "p-0-1a2b3c", zone="z", project="lab"))
    tunnel = "gcloud compute start-iap-tunnel p-1-1a2b3c %p --listen-on-stdin --verbosity=warning"
    proxy = f"ProxyCommand={tunnel} --zone=us-east-1a --project=lab"
    assert ways.ssh_line(closed, other, (), user="me") == ["ssh", "-o", proxy, "--", "me@p-1-1a2b3c"]
    plain = ways.ssh_line(replace(closed, via=Via("iap", "elsewhere")), other, (), user="me")
    assert plain is not None and plain[-1] == "me@p-1"
    behind = replace(manifest("vastai"), via=Via("ssh", "you@gate", port=2200))
    assert ways.ssh_line(behind, other, (), user=None) == ["ssh", "-J", "you@gate:2200", "--", "10.0.0.2"]
    monkeypatch.setattr(ways, "_has_command", lambda _: False)
    assert ways.ssh_line(fleet, host, ("ls",), user=None) == ["ssh", *options, "--", "me@203.0.113.1", "ls"]


@pytest.mark.parametrize(("said", "has"), [("remotecommand tmux attach", True), ("user me", False)])
def test_a_command_of_the_configuration_is_asked_of_ssh(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, said: str, has: bool
) -> None:
    (tmp_path / "ssh").write_text(f'#!/bin/sh\n[ "$*" = "-G -- me@gpu1" ] && echo "{said}"\n')
    (tmp_path / "ssh").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    assert ways._has_command("me@gpu1") is has


def test_a_shell_by_its_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "fleet.json"
    fleet = manifest(public="203.0.113.1").to_json()
    file.write_text(json.dumps(fleet))
    became: list[list[str]] = []
    monkeypatch.setattr(ways, "_answers", lambda address: False)
    monkeypatch.setattr(os, "execvp", lambda program, line: became.append(line))
    monkeypatch.setenv("PATH", str(tmp_path))

    def ssh(*arguments: str) -> Any:
        return CliRunner().invoke(app, ["ssh", str(file), *arguments])

    assert "aws is not installed" in str(ssh("p-1").exception)
    (tmp_path / "aws").touch(mode=0o755)
    assert ssh("p-1", "--", "nvidia-smi", "-L").exit_code == 0
    assert became[0][3:] == [
        *("--target=i-1", "--region=us-east-1", "--document-name", "AWS-StartInteractiveCommand"),
        *("--parameters", "command=nvidia-smi -L"),
    ]
    assert "Did you mean p-1 or p-0?" in str(ssh("p-2").exception)
    file.write_text(json.dumps({**fleet, "provider": "vastai"}))
    assert "nothing answers at port 22 of 203.0.113.1" in str(ssh().exception)
    assert len(became) == 1


@pytest.mark.slow
def test_a_runner_whose_output_goes_to_a_journal_keeps_its_log(make_node: Callable[..., RunningNode]) -> None:
    node = make_node(cpu_slots=1)
    with node.foreground("serve"):
        node.until("ready")
        found = answers.read_log(node.directory, "runner")
    assert found is not None
    assert "slot n1/0: ready, process" in found["text"]
