"""The logs of this node, for who asks from elsewhere: of its first boot, of the runner, and what a task prints."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path
from typing import Any

from skyinfra.errors import InvalidField, NodeFailed
from skyinfra.node.folder import NodeDirectory
from skyinfra.worker import output

# The first one that is there: the steps' own log, then that of the script, then all that cloud-init ran.
_BOOT = ("var/log/skyinfra/boot.jsonl", "var/log/skyinfra-setup.log", "var/log/cloud-init-output.log")
_UNIT = "skyinfra-runner.service"
_MOST = 256 * 1024
_JOURNAL_S = 20.0


def read(
    directory: NodeDirectory,
    source: str,
    *,
    task: str = "",
    offset: int | None = None,
    lines: int = 100,
    root: Path = Path("/"),
) -> dict[str, Any] | None:
    """A part of a log: its ``text``, the ``path`` that it is from, and the ``offset`` at which it goes on.

    source: ``boot``, ``runner`` or ``task``. task: the task's key, or how it begins. offset: of the last part; None for
    the last *lines* lines. None where this node knows nothing of the task. Raises `NodeFailed` where it cannot be read,
    `InvalidField` for another source.
    """
    if source == "task":
        if not task or "/" in task:
            raise InvalidField("not the key of a task", field="--task", given=task)
        file = output.find(directory.path, task)
    elif source == "boot":
        file = _boot(root)
    elif source == "runner":
        file = directory.log_file
        if not file.exists():
            return _journal(lines) if offset is None else {"text": "", "path": _UNIT, "offset": offset}
    else:
        raise InvalidField("no such log", field="source", given=source, hint="Logs: boot, runner, task.")
    if file is None:
        return None
    try:
        return _part(file, offset, lines)
    except OSError as error:
        raise NodeFailed(f"cannot be read: {error.strerror or error}", field=str(file)) from None


def _boot(root: Path) -> Path:
    found = [root / name for name in _BOOT if (root / name).exists()]
    if not found:
        raise NodeFailed(
            "this node was not set up by a boot: it has no log of one", hint="`--runner` has its runner's."
        )
    return found[0]


def _part(file: Path, offset: int | None, lines: int) -> dict[str, Any]:
    with file.open("rb") as stream:
        size = os.fstat(stream.fileno()).st_size
        if offset is not None and offset > size:
            offset = 0  # it was begun anew
        start = max(0, size - _MOST) if offset is None else offset
        stream.seek(start)
        data = stream.read(_MOST)
    # Whole lines only, so that no character is cut; the rest comes with the next part, unless nothing else is there.
    end = data.rfind(b"\n") + 1
    if end and (offset is not None or start + len(data) < size):
        data = data[:end]
    text = data.decode(errors="replace")
    if offset is None:
        text = "".join(text.splitlines(keepends=True)[-lines:])
    return {"text": text, "path": str(file), "offset": start + len(data)}


def _journal(lines: int) -> dict[str, Any]:
    """The end of the unit's journal, where there is no file."""
    program = shutil.which("journalctl")
    if program is None:
        raise NodeFailed("the runner of this node has no log file, and the system no journal")
    command = [program, "--no-pager", "-o", "short-iso", "-u", _UNIT, "-n", str(lines)]
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, errors="replace", timeout=_JOURNAL_S, check=False
        )
    except subprocess.TimeoutExpired:
        raise NodeFailed(f"journalctl did not answer within {_JOURNAL_S:g} s", field=_UNIT) from None
    if done.returncode != 0:
        raise NodeFailed(f"journalctl: {done.stderr.strip() or done.returncode}", field=_UNIT)
    return {"text": done.stdout, "path": f"journal of {_UNIT}", "offset": 0}
