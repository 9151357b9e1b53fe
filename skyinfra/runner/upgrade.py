"""Bringing this node to another version of the runner.

On a cloud node root does it, on request, see `skyinfra.first_boot.upgrade`. A node of this machine is a process of
whichever installation of skyinfra started it: another one stops that runner and starts its own.
"""

from __future__ import annotations

import json
import os
import subprocess
import time
from pathlib import Path

from skyinfra.drain import request
from skyinfra.drain.request import Drain
from skyinfra.errors import InvalidField, NodeFailed, NotSupported, SkyinfraError
from skyinfra.first_boot import upgrade
from skyinfra.node import code, detach, watchdog
from skyinfra.node.folder import NodeDirectory

_REQUEST = "upgrade.request"
_UNIT = Path("/etc/systemd/system/skyinfra-upgrade.path")
_OPT = Path("/opt/skyinfra")
_WHY = "the runner is upgraded"
_STOP_S = 30.0


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
            request.end_upgrade(self._directory)
        elif step != "look":
            raise InvalidField("no step of an upgrade", field="step", given=step)
        status = self._directory.status()
        return {"version": self._version, "state": status.state if status else None, "record": self._record()}

    def _record(self) -> dict[str, str]:
        try:
            found = json.loads((self._opt / upgrade.FILE).read_text(encoding="utf-8"))
            return {str(key): str(value) for key, value in found.items()}
        except (OSError, ValueError, AttributeError):
            return {}


def drain(directory: NodeDirectory, seconds: float) -> None:
    """Takes the node out of service for an upgrade, unless it is already; its tasks may go on for *seconds*."""
    if request.find(directory) is None:
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
