"""Installing the runner that the fleet's bucket names now on a node that serves; going back where that one does not.

The runner's user asks for it with two words in a file: ``prepare`` installs the other runner beside the one that runs,
``switch`` goes over to it, and the second names the request. Root takes nothing else from that user: what is installed
is what the bucket holds, which only who deploys the fleet may write. The environment is a link to one of its own for
each runner; until the new one has served, the old one stays.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import re
import shutil
import stat
import time
from pathlib import Path
from typing import Any

from . import engine
from .programs import Failed, command, output, read, read_json, replace

# Beside steps.json. Everybody may read it: the name of the ``request``, the ``state``, and the ``error`` of a failure.
FILE = "upgrade.json"
_RUNNER = "skyinfra-runner.service"
_SERVES = ("ready", "drained")
_PATIENCE_S = 180.0
_STARTS = 5
_LARGEST = 2**20


def run(path: str, request: str) -> int:
    """Does what the file *request* asks for, on the node with the steps in the file *path*. 0: upgrade.json says how
    that went. 1: the request says nothing that is known."""
    with engine.opened(path) as boot:
        asked = re.match(r"(prepare|switch) ([0-9a-f]{1,64})$", _foreign(request).strip())
        if asked is None:
            print(f"{request} asks neither to prepare nor to switch", flush=True)
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
    """The node with the steps *boot*, which stand in the file *path*. request: names what is asked for."""

    def __init__(self, boot: dict[str, Any], path: str, request: str = "") -> None:
        self._boot = boot
        self._request = request
        self._file = str(Path(path).with_name(FILE))
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
        text = json.dumps({"request": self._request, **record})
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
        for left in Path(venv).parent.glob(f"{Path(self._venv).name}-*"):
            if str(left) not in (venv, os.path.realpath(self._venv)):
                shutil.rmtree(str(left), ignore_errors=True)
        for operation in ("python", "runner"):
            self._do(self._steps[operation], venv=venv, versions=fetched)
        return {"state": "prepared", "venv": venv}

    def _do(self, step: dict[str, Any], **changed: str) -> None:
        told = engine.step(self._boot, {**step, "arguments": {**step["arguments"], **changed}})
        if told is not None:
            raise Failed(f"{told['step']}: {told['error']}")

    def switch(self) -> dict[str, Any]:
        """Goes over to the prepared runner; back, where that one does not serve."""
        record = self.record()
        if record.get("state") != "prepared":
            return {"state": "failed", "error": "no other runner was prepared"}
        before = os.path.realpath(self._venv)
        if not Path(self._venv).is_symlink():
            before = f"{self._venv}-first"
        record = {"state": "switching", "venv": record["venv"], "before": before}
        self.note(record)
        units = [unit for unit in self._steps["units"]["arguments"]["units"] if unit.endswith(".service")]
        try:
            command("systemctl", "stop", *units)
            self._go(record)
            command("systemctl", "start", "--no-block", *units)
            problem = self._problem()
        except (Failed, OSError) as error:
            problem = str(error)
        if problem is None:
            # From here on nothing leads back.
            self.note({"state": "done"})
            self._remove(record["before"])
            return {"state": "done"}
        output("systemctl", "stop", *units)
        self.back(record)
        output("systemctl", "start", "--no-block", *units)
        return {"state": "back", "error": problem}

    def _go(self, record: dict[str, Any]) -> None:
        replace(f"{self._versions}.before", read(self._versions))
        if not Path(self._venv).is_symlink():
            Path(self._venv).rename(record["before"])
        self._link(record["venv"])
        replace(self._versions, read(f"{self._versions}.new"))

    def back(self, record: dict[str, Any]) -> None:
        """Undoes `_go`, also where it was done in part."""
        kept = Path(f"{self._versions}.before")
        if kept.exists():
            replace(self._versions, read(str(kept)))
        if Path(record["before"]).is_dir():
            self._link(record["before"])
        if os.path.realpath(self._venv) != os.path.realpath(record["venv"]):
            self._remove(record["venv"])

    def _link(self, target: str) -> None:
        link = Path(f"{self._venv}.link")
        with contextlib.suppress(FileNotFoundError):
            link.unlink()
        link.symlink_to(target)
        link.replace(self._venv)
        os.sync()

    def _remove(self, venv: str) -> None:
        shutil.rmtree(venv, ignore_errors=True)
        for end in (".before", ".new"):
            with contextlib.suppress(FileNotFoundError):
                Path(self._versions + end).unlink()

    def _problem(self) -> str | None:
        """Waits until the runner serves. None where it does; otherwise what is wrong."""
        until = time.monotonic() + _PATIENCE_S
        told = "it does not serve"
        while time.monotonic() < until:
            found = dict(
                line.partition("=")[::2]
                for line in output("systemctl", "show", "-p", "MainPID,NRestarts", _RUNNER).splitlines()
            )
            with contextlib.suppress(OSError, ValueError, AttributeError):
                status = json.loads(_foreign(self._boot["status"]))
                if str(status.get("pid")) == found.get("MainPID"):
                    if status.get("state") in _SERVES:
                        return None
                    error = status.get("error") or {}
                    told = str(error.get("message") or f"it is {status.get('state')}")
            if int(found.get("NRestarts") or 0) >= _STARTS:
                break
            time.sleep(1)
        lines = output("journalctl", "-q", "-o", "cat", "-n", "3", "-u", _RUNNER)
        return f"the new runner did not come up: {told}: {lines}"[:1000]


def _foreign(path: str) -> str:
    """The text of a file in a folder of another user: no link is followed, and no pipe waited for. Raises OSError."""
    handle = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
    with os.fdopen(handle, "rb") as stream:
        if not stat.S_ISREG(os.fstat(handle).st_mode):
            raise OSError(f"{path} is no file")
        return stream.read(_LARGEST).decode(errors="replace")
