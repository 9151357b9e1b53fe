"""Bringing this node to another version of the runner.

A node of this machine is a process of whichever installation of skyinfra started it: `restart` ends that runner and
starts one of its own installation.

On a cloud node root does it: it installs the runner that the fleet's bucket names now, and goes back where that one
does not serve. The runner's user asks for it with two words in a file: ``prepare`` installs the other runner beside the
one that runs, ``switch`` goes over to it, and the second names the request. Root takes nothing else from that user:
what is installed is what the bucket holds, which only who deploys the fleet may write. The environment is a link to one
of its own for each runner; until the new one has served, the old one stays. The units are those of the runner that
serves.

``python -m skyinfra.runner.upgrade upgrade FILE REQUEST`` is root's part: FILE lists the steps of the first boot,
REQUEST is what is asked for. ``settle FILE`` ends at a boot what was cut off.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from skyinfra.drain import request
from skyinfra.drain.request import Drain
from skyinfra.errors import InvalidField, NodeFailed, NotSupported, SkyinfraError
from skyinfra.first_boot import engine
from skyinfra.first_boot.programs import Failed, changed_units, command, link, output, read, read_json, replace
from skyinfra.node import code, detach, watchdog
from skyinfra.node.folder import NodeDirectory, message

_REQUEST = "upgrade.request"
_UNIT = Path("/etc/systemd/system/skyinfra-upgrade.path")
# Beside steps.json. Everybody may read it: the name of the ``request``, the ``state``, and the ``error`` of a failure.
_FILE = "upgrade.json"
_OPT = Path("/opt/skyinfra")
_WHY = "the runner is upgraded"
_STOP_S = 30.0
_RUNNER = "skyinfra-runner.service"
_SERVES = ("ready", "drained")
_PATIENCE_S = 180.0
_STARTS = 5


class Upgrades:
    """Answers questions about upgrades for the node in *directory*. unit: of root's part; opt: root's folder."""

    def __init__(self, directory: NodeDirectory, *, unit: Path = _UNIT, opt: Path = _OPT) -> None:
        self._directory = directory
        self._unit = unit
        self._opt = opt
        # Of the code as it is when the runner starts: the files may be others later.
        self._version = code.version()

    def answer(self, step: str, request_id: str = "", seconds: float = 0.0) -> dict[str, object]:
        """Takes the *step* ``look``, ``prepare``, ``drain``, ``switch`` or ``cancel``, and returns how far the node is.

        That is the ``version`` of its runner, its ``state`` (`Status.state`), and in ``record`` what root wrote of the
        upgrade: the ``request``, its ``state``, and ``error``. request_id: with ``prepare`` and ``switch``, the name of
        the request in hexadecimal digits. seconds: with ``drain``, for how long tasks may go on. Raises
        `NotSupported` where nothing of root's is there to do it, `InvalidField`, `StateDirectoryError`.
        """
        if step in ("prepare", "switch"):
            if not self._unit.exists():
                raise NotSupported(
                    "nothing on this node can replace its runner",
                    hint="It was made by an earlier skyinfra, or is a container: replace the node.",
                )
            self._directory.write(self._directory.path / _REQUEST, f"{step} {request_id}\n")
        elif step == "drain":
            drain(self._directory, seconds)
        elif step == "cancel":
            request.end_of(self._directory, request.UPGRADE)
        elif step != "look":
            raise InvalidField("no step of an upgrade", field="step", given=step)
        status = self._directory.status()
        return {"version": self._version, "state": status.state if status else None, "record": self._record()}

    def _record(self) -> dict[str, str]:
        try:
            found = json.loads((self._opt / _FILE).read_text(encoding="utf-8"))
            return {str(key): str(value) for key, value in found.items()}
        except (OSError, ValueError, AttributeError):
            return {}


def drain(directory: NodeDirectory, seconds: float) -> None:
    """Takes the node out of service for an upgrade, unless it is already; its tasks may go on for *seconds*."""
    found, status = request.find(directory), directory.status()
    # A recommendation is not followed where no other node has slots.
    if found is None or (found.if_others and (status is None or status.drain_reason != found.why)):
        request.write(directory, Drain(request.VERSION, request.UPGRADE, _WHY, time.time() + seconds))


def restart(config: Path, directory: NodeDirectory, *, wait_s: float) -> None:
    """Ends the runner in the background that serves *directory*, and starts one of this installation.

    Raises `NodeFailed` where the new one is not ready within *wait_s* seconds; the one before serves again then, if it
    can still be started.
    """
    pid = directory.holder()
    before, environment = _started_by(pid)
    watchdog.end(directory)
    detach.stop(directory, timeout_s=_STOP_S)
    try:
        detach.boot(config, wait_s=wait_s)
    except SkyinfraError as error:
        if not before:
            raise
        options = ["boot", "--config", str(config), "--detach", "--restart", "--wait", str(wait_s)]
        done = subprocess.run(
            [*before, *options], env=environment, capture_output=True, text=True, errors="replace", check=False
        )
        back = "The runner before serves again" if done.returncode == 0 else "The runner before does not come up either"
        said = f": {done.stderr.strip()}" if done.returncode else ""
        raise NodeFailed(f"the new runner did not come up: {error.message}. {back}{said}", hint=error.hint) from None
    watchdog.ensure(config, wait_s=wait_s)


def _started_by(pid: int | None) -> tuple[list[str], dict[str, str]]:
    """The program of the runner *pid* without its command, empty where it cannot be told, and its environment."""
    try:
        words, variables = (Path(f"/proc/{pid}/{file}").read_bytes().split(b"\0") for file in ("cmdline", "environ"))
        program = [os.fsdecode(word) for word in words[: words.index(b"boot")]]
    except (OSError, ValueError):
        return [], {}
    # Without it any file in the present folder could shadow a module.
    safe = [] if "-P" in program else ["-P"]
    environment = dict(os.fsdecode(each).partition("=")[::2] for each in variables if each)
    return [program[0], *safe, *program[1:]], environment


# Root's part ---------------------------------------------------------------------------------------------------------


def run(path: str, request_file: str) -> int:
    """Does what the file *request_file* asks for, on the node with the steps in the file *path*.

    0: upgrade.json says how that went. 1: the request says nothing that is known.
    """
    with engine.opened(path) as boot:
        asked = re.match(r"(prepare|switch) ([0-9a-f]{1,64})$", message(Path(request_file)).strip())
        if asked is None:
            print(f"{request_file} asks neither to prepare nor to switch", flush=True)
            return 1
        node = _Node(boot, path, asked.group(2))
        try:
            found = node.prepare() if asked.group(1) == "prepare" else node.switch()
        except (Failed, OSError, ValueError, KeyError) as error:
            found = {"state": "failed", "error": str(error) or type(error).__name__}
        node.note(found)
    return 0


def settle(path: str) -> None:
    """Goes back to the runner that has served before, where the power failed while the node went over to another."""
    with engine.opened(path) as boot:
        node = _Node(boot, path)
        record = node.record()
        if record.get("state") == "switching":
            node.back(record)
            node.note({**record, "state": "back", "error": "the machine restarted meanwhile"})


class _Node:
    """The node with the steps *boot*, which stand in the file *path*. request_id: names what is asked for."""

    def __init__(self, boot: dict[str, Any], path: str, request_id: str = "") -> None:
        self._boot = boot
        self._request_id = request_id
        self._file = str(Path(path).with_name(_FILE))
        self._steps = {step["operation"]: step for step in boot["steps"]}

    @property
    def _versions(self) -> str:
        return str(self._steps["runner"]["arguments"]["versions"])

    @property
    def _venv(self) -> str:
        return str(self._steps["runner"]["arguments"]["venv"])

    def record(self) -> dict[str, Any]:
        try:
            found = read_json(self._file)
        except (OSError, ValueError):
            return {}
        return found if isinstance(found, dict) else {}

    def note(self, record: dict[str, Any]) -> None:
        text = json.dumps({"request": self._request_id, **record})
        replace(self._file, text + "\n")
        print(text, flush=True)

    def prepare(self) -> dict[str, Any]:
        """Installs the runner of the bucket beside the one that runs."""
        fetched = f"{self._versions}.new"
        fetches = [step for step in self._boot["steps"] if step["arguments"].get("path") == self._versions]
        if not fetches:
            raise Failed("this node has its versions from no bucket")
        with contextlib.suppress(FileNotFoundError):
            Path(fetched).unlink()
        self._do(fetches[0], path=fetched)
        if read_json(fetched) == read_json(self._versions):
            return {"state": "current"}
        venv = f"{self._venv}-{hashlib.sha256(read(fetched).encode()).hexdigest()[:12]}"
        self.note({"state": "preparing"})
        for left in Path(venv).parent.glob(f"{Path(self._venv).name}*.d"):
            if str(left) != os.path.realpath(self._venv):
                shutil.rmtree(left, ignore_errors=True)
        self._do(self._steps["python"], venv=venv, versions=fetched)
        # Its programs name their Python: by the folder, which stays, not by the link to it.
        Path(venv).unlink()
        self._do(self._steps["runner"], venv=f"{venv}.d", versions=fetched)
        return {"state": "prepared", "venv": f"{venv}.d"}

    def _do(self, step: dict[str, Any], **changed: str) -> None:
        failed = engine.step(self._boot, {**step, "arguments": {**step["arguments"], **changed}})
        if failed is not None:
            raise Failed(f"{failed['step']}: {failed['error']}")

    def switch(self) -> dict[str, Any]:
        """Goes over to the prepared runner; back, where that one does not serve."""
        record = self.record()
        if record.get("state") == "current":
            return {"state": "current"}
        if record.get("state") != "prepared":
            return {"state": "failed", "error": "no other runner was prepared"}
        before = os.path.realpath(self._venv)
        record = {"state": "switching", "venv": record["venv"], "before": before}
        self.note(record)
        services = [unit for unit in self._steps["units"]["arguments"]["units"] if unit.endswith(".service")]
        try:
            command("systemctl", "stop", *services)
            self._go(record)
            command("systemctl", "start", "--no-block", *services)
            problem = self._problem()
        except (Failed, OSError) as error:
            problem = str(error)
        if problem is None:
            # From here on nothing leads back.
            self.note({"state": "done"})
            self._remove(record["before"])
            return {"state": "done"}
        output("systemctl", "stop", *services)
        self.back(record)
        output("systemctl", "start", "--no-block", *services)
        return {"state": "back", "error": problem}

    def _go(self, record: dict[str, Any]) -> None:
        replace(f"{self._versions}.before", read(self._versions))
        link(record["venv"], self._venv)
        replace(self._versions, read(f"{self._versions}.new"))
        self._take_units()

    def _take_units(self) -> None:
        """Gives systemd the units of the runner that the link names. Raises `Failed`."""
        changed = changed_units(self._venv, self._steps["units"]["arguments"].get("folder", str(_UNIT.parent)))
        for path, text in changed.items():
            replace(path, text)
        if changed:
            command("systemctl", "daemon-reload")
        # Services are stopped meanwhile; what waits for requests is not.
        paths = [Path(path).name for path in changed if path.endswith(".path")]
        if paths:
            command("systemctl", "restart", *paths)

    def back(self, record: dict[str, Any]) -> None:
        """Undoes `_go`, also where it was done in part."""
        kept = Path(f"{self._versions}.before")
        if kept.exists():
            replace(self._versions, read(str(kept)))
        link(record["before"], self._venv)
        # One that brings none has left those that there were.
        with contextlib.suppress(Failed):
            self._take_units()
        self._remove(record["venv"])

    def _remove(self, venv: str) -> None:
        shutil.rmtree(venv, ignore_errors=True)
        for end in (".before", ".new"):
            with contextlib.suppress(FileNotFoundError):
                Path(self._versions + end).unlink()

    def _problem(self) -> str | None:
        """Waits until the runner serves. None where it does; otherwise what is wrong."""
        until = time.monotonic() + _PATIENCE_S
        failed = "it does not serve"
        while time.monotonic() < until:
            found = dict(
                line.partition("=")[::2]
                for line in output("systemctl", "show", "-p", "MainPID,NRestarts", _RUNNER).splitlines()
            )
            with contextlib.suppress(OSError, ValueError, AttributeError):
                status = json.loads(message(Path(self._boot["status"])))
                if str(status.get("pid")) == found.get("MainPID"):
                    if status.get("state") in _SERVES:
                        return None
                    error = status.get("error") or {}
                    failed = str(error.get("message") or f"it is {status.get('state')}")
            if int(found.get("NRestarts") or 0) >= _STARTS:
                break
            time.sleep(1)
        lines = output("journalctl", "-q", "-o", "cat", "-n", "3", "-u", _RUNNER)
        return f"the new runner did not come up: {failed}: {lines}"[:1000]


if __name__ == "__main__":
    if sys.argv[1] == "settle":
        settle(sys.argv[2])
    else:
        sys.exit(run(*sys.argv[2:]))
