"""Another runner on a node that serves: prepared, switched to, gone back from, and cut off at every step."""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
import threading
import zipfile
from collections.abc import Iterator
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from first_boots.boots import PACKAGE, FirstBoot, program, step
from support import ROOT

from skyinfra.drain import request
from skyinfra.drain.request import Drain
from skyinfra.node.folder import NodeDirectory, Status
from skyinfra.runner import upgrade

# Where a runner brings its units, in its environment.
BROUGHT = "lib/python3.11/site-packages/skyinfra/node/units"
# In place of uv: an environment is a folder whose Python says the version, a runner is the content of its wheel, and so
# are its units.
UV = f"""case $1 in
venv) mkdir -p "$5/bin"; printf '#!/bin/sh\\necho %s.9\\n' "$4" >"$5/bin/python"; chmod +x "$5/bin/python";;
pip) at=$(dirname "$(dirname "$4")"); mkdir -p "$at/{BROUGHT}"; {sys.executable} -S -m zipfile -e "$6" "$at" || exit 1
  cp "$at/says" "$at/bin/skyinfra-runner"
  for unit in runner.service partition.path; do cp "$at/says" "$at/{BROUGHT}/skyinfra-$unit"; done;;
esac"""
# In place of systemctl: a runner serves where its wheel says so.
SYSTEMCTL = """echo "$1" >>"$NODE/calls"
case $1 in
stop) echo '{"state": "stopped", "pid": null}' >"$NODE/var/status.json";;
start) echo $(($(cat "$NODE/pid" 2>/dev/null || echo 0) + 1)) >"$NODE/pid"
  if grep -q serves "$NODE/opt/venv/bin/skyinfra-runner" && grep -q serves "$NODE/system/skyinfra-runner.service"; then
    echo "{\\"state\\": \\"ready\\", \\"pid\\": $(cat "$NODE/pid")}" >"$NODE/var/status.json"
  fi;;
show) echo "MainPID=$(cat "$NODE/pid")"
  grep -q serves "$NODE/opt/venv/bin/skyinfra-runner" && echo NRestarts=0 || echo NRestarts=5;;
is-active | is-enabled) exit 0;;
esac"""
# Runs the request, and ends the process at the change of the disk with that number.
CUT = """import os, sys
from pathlib import Path
from skyinfra.runner import upgrade
left = int(sys.argv[1])
def cutting(function):
    def done(*arguments):
        global left
        if left == 0:
            os._exit(9)
        left -= 1
        return function(*arguments)
    return done
upgrade.replace = cutting(upgrade.replace)
upgrade.command = cutting(upgrade.command)
upgrade.link = cutting(upgrade.link)
for name in ("rename", "replace", "symlink_to"):
    setattr(Path, name, cutting(getattr(Path, name)))
sys.exit(upgrade.run(*sys.argv[2:]))
"""


class Node(FirstBoot):
    """A node with a bucket, whose first boot has installed the runner "old serves"."""

    def __init__(self, path: Path, url: str, bucket: Path) -> None:
        super().__init__(path)
        self.bucket = bucket
        self.opt = path / "opt"
        self.request = path / "var" / "upgrade.request"
        self.record_file = path / "upgrade.json"
        programs = path / "programs"
        program(programs, "uv", UV)
        program(programs, "systemctl", SYSTEMCTL)
        program(programs, "journalctl", "echo the end of its log")
        self.environment = {**os.environ, "PATH": f"{programs}:{os.environ['PATH']}", "NODE": str(path)}
        versions, venv, tools = (str(self.opt / name) for name in ("versions.json", "venv", "tools"))
        self.versions, self.venv = Path(versions), Path(venv)
        self.carry("old serves")
        runner = {"venv": venv, "tools": tools, "requirements": [], "versions": versions, "bucket": url}
        self.write(
            step("file", name="versions", url=f"{url}/versions.json", path=versions),
            step("python", version=None, venv=venv, tools=tools, versions=versions),
            step("runner", **runner),
        )
        self.boot()
        document = json.loads(self.file.read_text())
        names = ["skyinfra-runner.service", "skyinfra-partition.path"]
        self.system = path / "system"
        places = {"marker": f"{path}/run/booted", "venv": venv, "folder": str(self.system)}
        document["steps"].append(step("units", units=names, running=[], **places))
        self.file.write_text(json.dumps(document))
        self.boot()

    def carry(self, runner: str) -> None:
        """Puts a runner into the bucket."""
        name = f"{runner.replace(' ', '-')}.whl"
        with zipfile.ZipFile(self.bucket / name, "w") as archive:  # which compresses nothing
            archive.writestr("says", runner)
        wheel = {"name": name, "sha256": hashlib.sha256((self.bucket / name).read_bytes()).hexdigest()}
        (self.bucket / "versions.json").write_text(json.dumps({"version": 1, "python": "3.11", "wheel": wheel}))

    def boot(self) -> None:
        for command in (self.root_command("settle"), self.command("run")):
            done = subprocess.run(
                command, cwd=PACKAGE, env=self.environment, capture_output=True, text=True, check=False
            )
            assert done.returncode == 0, done.stdout + done.stderr

    def root_command(self, verb: str, *more: str) -> list[str]:
        return [self.python, "-m", "skyinfra.runner.upgrade", verb, str(self.file), *more]

    def ask(self, text: str) -> dict[str, Any]:
        self.request.write_text(text)
        done = subprocess.run(
            self.root_command("upgrade", str(self.request)),
            cwd=PACKAGE, env=self.environment, capture_output=True, text=True, check=False, timeout=60,
        )  # fmt: skip
        assert done.returncode in (0, 1), done.stderr
        return self.record()

    def cut(self, text: str, changes: int) -> bool:
        """Asks, and cuts the power before that change of the disk; False where the request was done before."""
        self.request.write_text(text)
        command = [self.python, "-c", CUT, str(changes), str(self.file), str(self.request)]
        done = subprocess.run(command, cwd=ROOT, env=self.environment, capture_output=True, text=True, check=False)
        assert done.returncode in (0, 9), done.stderr
        return done.returncode == 9

    def record(self) -> dict[str, Any]:
        found: dict[str, Any] = json.loads(self.record_file.read_text()) if self.record_file.exists() else {}
        return found

    @property
    def runner(self) -> str:
        """The runner that the link names; its units stand in the folder of systemd."""
        found = (self.venv / "bin" / "skyinfra-runner").read_text()
        assert {file.read_text() for file in self.system.glob("skyinfra-*")} == {found}
        return found

    def calls(self) -> list[str]:
        """What systemd was asked for."""
        return (self.path / "calls").read_text().split()

    def left(self) -> set[str]:
        """The environments and the files beside the versions."""
        return {each.name for each in self.opt.iterdir() if each.name.startswith(("venv", "versions"))}


class _Files(SimpleHTTPRequestHandler):
    def log_message(self, format: str, *arguments: object) -> None:
        """Nothing is logged."""


@pytest.fixture
def node(tmp_path: Path) -> Iterator[Node]:
    bucket = tmp_path / "bucket"
    bucket.mkdir()
    server = ThreadingHTTPServer(("127.0.0.1", 0), partial(_Files, directory=str(bucket)))
    server.daemon_threads = True
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True)
    thread.start()
    try:
        yield Node(tmp_path / "node", f"http://127.0.0.1:{server.server_address[1]}", bucket)
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


def test_another_runner_is_prepared_beside_the_one_that_runs_and_then_serves(node: Node) -> None:
    node.carry("new serves")
    assert node.ask("prepare aa01")["state"] == "prepared"
    assert node.runner == "old serves"
    assert node.record()["request"] == "aa01"
    assert node.ask("switch aa02") == {"request": "aa02", "state": "done"}
    assert node.runner == "new serves"
    calls = node.calls()
    since = calls[len(calls) - 1 - calls[::-1].index("stop") :]
    assert since[:4] == ["stop", "daemon-reload", "restart", "start"]
    # Nothing of the old one is left, and the next boot finds nothing to do.
    assert len(node.left()) == 3, node.left()
    assert json.loads(node.versions.read_text())["wheel"]["name"] == "new-serves.whl"
    node.boot()
    assert node.runner == "new serves"
    assert [state for state in node.states()[-8:] if state[1] == "skipped"] == [
        (name, "skipped") for name in ("versions", "python", "runner")
    ]


@pytest.mark.slow
def test_a_second_upgrade_follows_the_first(node: Node) -> None:
    for number, runner in enumerate(("new serves", "newer serves")):
        node.carry(runner)
        assert node.ask(f"prepare {number}a")["state"] == "prepared"
        assert node.ask(f"switch {number}b")["state"] == "done"
        assert node.runner == runner
    assert len(node.left()) == 3, node.left()


def test_a_runner_that_does_not_serve_is_left_for_the_one_before(node: Node) -> None:
    node.carry("new ends at once")
    assert node.ask("prepare aa01")["state"] == "prepared"
    found = node.ask("switch aa02")
    assert found["state"] == "back"
    assert found["error"] == "the new runner did not come up: it does not serve: the end of its log"
    assert node.runner == "old serves"
    assert json.loads(node.status.read_text())["state"] == "ready"
    assert json.loads(node.versions.read_text())["wheel"]["name"] == "old-serves.whl"
    assert len(node.left()) == 3, node.left()
    node.carry("newer serves")
    assert node.ask("prepare aa03")["state"] == "prepared"
    assert node.ask("switch aa04")["state"] == "done"
    assert node.runner == "newer serves"


@pytest.mark.slow
def test_the_runner_that_is_there_is_current(node: Node) -> None:
    assert node.ask("switch aa00") == {"request": "aa00", "state": "failed", "error": "no other runner was prepared"}
    assert node.ask("prepare aa01") == {"request": "aa01", "state": "current"}
    # As after an upgrade in which other nodes went back: this one has nothing to go over to, and nothing is wrong.
    assert node.ask("switch aa02") == {"request": "aa02", "state": "current"}
    assert node.runner == "old serves"


@pytest.mark.slow
def test_what_cannot_be_installed_is_said_and_changes_nothing(node: Node) -> None:
    node.carry("new serves")
    (node.bucket / "new-serves.whl").unlink()
    found = node.ask("prepare aa01")
    assert found["state"] == "failed"
    assert found["error"].startswith("runner: http://127.0.0.1")
    assert "404" in found["error"]
    assert node.runner == "old serves"


@pytest.mark.slow
@pytest.mark.parametrize(
    "text", ["", "prepare", "switch; reboot", "prepare ../../x", "restart aa01", "prepare " + "a" * 65]
)
def test_root_does_nothing_else_that_it_is_asked_for(node: Node, text: str) -> None:
    node.carry("new serves")
    assert node.ask(text) == {}
    assert node.runner == "old serves"


@pytest.mark.slow
def test_root_reads_no_link(node: Node, tmp_path: Path) -> None:
    target = tmp_path / "of-root"
    target.write_text("prepare aa01")
    node.request.symlink_to(target)
    done = subprocess.run(
        node.root_command("upgrade", str(node.request)),
        cwd=PACKAGE, env=node.environment, capture_output=True, check=False,
    )  # fmt: skip
    assert done.returncode != 0
    assert node.record() == {}


@pytest.mark.slow
@pytest.mark.parametrize("runner", ["new serves", pytest.param("new ends at once", marks=pytest.mark.slow)])
def test_a_power_cut_at_any_change_leaves_a_runner_that_serves(node: Node, runner: str) -> None:
    for changes in range(40):
        node.carry(runner)
        assert node.ask("prepare aa01")["state"] in ("prepared", "current")
        if node.record()["state"] == "current":
            pytest.fail(f"the runner is {node.runner} after {changes} changes")
        if not node.cut("switch aa02", changes):
            break
        node.boot()
        if node.record()["state"] == "done":
            break
        assert node.record()["state"] in ("prepared", "back"), changes
        assert node.runner == "old serves", changes
    else:
        pytest.fail("it never ended")
    assert changes > 5
    assert node.runner == (runner if "serves" in runner else "old serves")


def test_a_node_that_boots_while_its_fleet_is_upgraded_takes_the_new_runner(node: Node) -> None:
    node.venv.unlink()
    (node.bucket / "old-serves.whl").unlink()
    node.carry("new serves")
    document = json.loads(node.file.read_text())
    document["steps"] = [{**each, "attempts": 2} for each in document["steps"]]
    node.file.write_text(json.dumps(document))
    node.boot()
    assert node.runner == "new serves"


@pytest.mark.parametrize(
    ("reason", "by"), [(None, request.UPGRADE), ("maintenance", request.UPGRADE), ("AWS recommends to leave", "aws")]
)
def test_only_a_recommendation_that_the_node_follows_is_drain_enough(
    tmp_path: Path, reason: str | None, by: str
) -> None:
    directory = NodeDirectory(tmp_path)
    request.write(directory, Drain(request.VERSION, "aws", "AWS recommends to leave", None, if_others=True))
    status = Status("demo", "train-0", "drained" if reason else "ready", "", drain_reason=reason)
    directory.write(directory.status_file, status.dumps())
    upgrade.drain(directory, 600.0)
    found = request.find(directory)
    assert found is not None and found.by == by
