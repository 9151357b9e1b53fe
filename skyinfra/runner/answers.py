"""Answers of a node to the questions of clients, see `skyinfra.protocol.questions`."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from skyinfra.errors import NotSupported
from skyinfra.node.folder import NodeDirectory
from skyinfra.protocol import questions
from skyinfra.runner import logs
from skyinfra.runner.commands import Commands
from skyinfra.runner.files import Files


class Answers:
    """Answers for the node whose configuration is the file *config*. *kill_task*: see `Workers.kill_task`."""

    def __init__(self, config: Path, kill_task: Callable[[str, str], bool]) -> None:
        self._config = config
        self._directory = NodeDirectory(config.absolute().parent)
        self._commands = Commands(self._directory.path)
        self._files = Files(config, self._directory)
        self._known: dict[str, Callable[..., object]] = {
            questions.DOCTOR: self._doctor,
            questions.METRICS: self._metrics,
            questions.LOG: self._log,
            questions.START: lambda command: self._commands.start(command),
            questions.OUTPUT: lambda identity, longest_s: self._commands.output(identity, longest_s),
            questions.END: lambda identity: self._commands.end(identity),
            questions.STOP: lambda slot, key: kill_task(slot, key),
            questions.PUT: lambda tree: self._files.put(tree),
            questions.GET: lambda path: self._files.get(path),
        }

    def __call__(self, question: str, arguments: dict[str, Any]) -> object:
        """The answer; blocks until it is there. Raises the error of the question."""
        known = self._known.get(question)
        if known is None:
            raise NotSupported(
                "the runner of this node does not know this question",
                given=question,
                hint="It is older than the client: deploy the fleet again.",
            )
        return known(**arguments)

    def _doctor(self) -> object:
        from skyinfra.doctor.examine import examine

        return [finding.to_json() for finding in examine(self._config)]

    def _log(self, source: str, task: str = "", offset: int | None = None, lines: int = 100) -> object:
        return logs.read(self._directory, source, task=task, offset=offset, lines=lines)

    def _metrics(self) -> object:
        from skyinfra.runner import metrics

        return [reading.to_json() for reading in metrics.read(self._config)]
