"""The answers of a node to clients, see `skyinfra.protocol.questions`, among them its logs."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, BinaryIO

from distributed.security import Security

from skyinfra.engine.forwarding import Ends
from skyinfra.errors import InvalidField, NodeFailed, NotSupported
from skyinfra.head import start
from skyinfra.node.folder import NodeDirectory
from skyinfra.node.node import Node, directory_of
from skyinfra.protocol import questions
from skyinfra.runner import head_connection
from skyinfra.runner.commands import Commands
from skyinfra.runner.files import Files
from skyinfra.runner.upgrade import Upgrades
from skyinfra.worker import output

# The first existing file counts: the log of the steps, that of the script, all output of cloud-init.
_BOOT_LOGS = ("var/log/skyinfra/boot.jsonl", "var/log/skyinfra-setup.log", "var/log/cloud-init-output.log")
_UNIT = "skyinfra-runner.service"
_PART_BYTES = 256 * 1024
_JOURNAL_S = 20.0
# Carriage returns end lines too, as in progress bars.
_LINE_END = re.compile(rb"\n|\r(?!\n)")


class Answers:
    """Answers for the node with the configuration file *config*. *kill_task*: see `Workers.kill_task`; *figures_of*,
    *measured*: `TaskFigures.of` and `TaskFigures.all`; *use*: `IdleWatch.use`."""

    def __init__(
        self,
        config: Path,
        kill_task: Callable[[str, str], bool],
        figures_of: Callable[[str], dict[str, Any] | None],
        measured: Callable[[], dict[str, Any]],
        use: Callable[[], dict[str, Any]],
    ) -> None:
        self._config = config
        self._directory = directory_of(config)
        self.commands = commands = Commands(self._directory.path)
        self.files = files = Files(config, self._directory)
        self._known: dict[str, Callable[..., object]] = {
            questions.DOCTOR: self._doctor,
            questions.METRICS: self._metrics,
            questions.FIGURES: figures_of,
            questions.MEASURED: measured,
            questions.LOG: partial(read_log, self._directory),
            questions.START: commands.start,
            questions.OUTPUT: commands.output,
            questions.END: commands.end,
            questions.STOP: kill_task,
            questions.PUT: files.put,
            questions.GET: files.get,
            questions.UPGRADE: Upgrades(self._directory).answer,
            questions.FORWARD: Ends(self._head).open,
            questions.USE: use,
        }

    def __call__(self, question: str, arguments: dict[str, Any]) -> object:
        """Returns the answer; blocks until it is there. Raises what the answering function raises."""
        if question not in self._known:
            hint = "It is older than the client. All that it knows still works."
            raise NotSupported("the runner of this node does not know this question", given=question, hint=hint)
        return self._known[question](**arguments)

    def _head(self) -> tuple[str, Security]:
        node = Node.load(self._config)
        # The port of the head's own scheduler may be any.
        own = self._directory.scheduler_file.read_text(encoding="utf-8") if node.config.head else None
        return str(start.parse(own or node.config.scheduler)), head_connection.worker_security(node)

    def _doctor(self) -> object:
        from skyinfra.doctor.examine import examine

        return [finding.to_json() for finding in examine(self._config)]

    def _metrics(self) -> object:
        from skyinfra.runner import metrics

        return [reading.to_json() for reading in metrics.read(self._config)]


def read_log(
    directory: NodeDirectory,
    source: str,
    *,
    task: str = "",
    offset: int | None = None,
    lines: int = 100,
    root: Path = Path("/"),
) -> dict[str, Any] | None:
    """Returns a part of a log: its ``text``, the ``path`` of the log, and the ``offset`` of the next part.

    source: ``boot``, ``runner`` or ``task``. task: the task's key, or its beginning. offset: of the last part, or
    None for the first part of the last *lines* lines. Returns None for an unknown task. Raises `NodeFailed` where the
    log cannot be read, `InvalidField` for another source.
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
    for file in (root / name for name in _BOOT_LOGS):
        if file.exists():
            return file
    raise NodeFailed("this node was not set up by a boot: it has no log of one", hint="`--runner` has its runner's.")


def _part(file: Path, offset: int | None, lines: int) -> dict[str, Any]:
    with file.open("rb") as stream:
        size = os.fstat(stream.fileno()).st_size
        if offset is not None and offset > size:
            offset = 0  # the log was rotated
        start = _begin_of_last(stream, size, lines) if offset is None else offset
        stream.seek(start)
        data = stream.read(_PART_BYTES)
    # Whole lines only, so that no character is cut; a last line without an end is given where it is all there is.
    end = data.rfind(b"\n") + 1
    if end and (offset is not None or start + len(data) < size):
        data = data[:end]
    return {"text": data.decode(errors="replace"), "path": str(file), "offset": start + len(data)}


def _begin_of_last(stream: BinaryIO, size: int, lines: int) -> int:
    """Returns where the last *lines* lines of a file begin."""
    end = size
    while end:
        start = max(0, end - _PART_BYTES)
        stream.seek(start)
        # With one byte more, which may be the second half of a line's end.
        data = stream.read(min(end + 1, size) - start)
        begins = [start + each.end() for each in _LINE_END.finditer(data) if start + each.end() <= end]
        if end == size and begins and begins[-1] == size:
            begins.pop()
        if lines <= len(begins):
            return begins[-lines]
        lines, end = lines - len(begins), start
    return 0


def _journal(lines: int) -> dict[str, Any]:
    """Returns the end of the unit's journal, where there is no log file."""
    program = shutil.which("journalctl")
    if program is None:
        raise NodeFailed("the runner of this node has no log file, and the system no journal")
    command = [program, "--no-pager", "-o", "short-iso", "-u", _UNIT, "-n", str(lines)]
    try:
        done = subprocess.run(command, capture_output=True, text=True, errors="replace", timeout=_JOURNAL_S)
    except subprocess.TimeoutExpired:
        raise NodeFailed(f"journalctl did not answer within {_JOURNAL_S:g} s", field=_UNIT) from None
    if done.returncode != 0:
        raise NodeFailed(f"journalctl: {done.stderr.strip() or done.returncode}", field=_UNIT)
    return {"text": done.stdout, "path": f"journal of {_UNIT}", "offset": 0}
