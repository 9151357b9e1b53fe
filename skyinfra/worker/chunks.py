"""Short tasks that travel together: the node's part.

They are executed one after the other, each as on its own: its own arguments, output and outcome. What turns out not to
suit that is given back, and its client sends it alone: what has not started when the chunk takes longer than it was
thought to, and all of it where the process that had it first was lost, so that whoever ended that is counted alone.

Travels to nodes: standard library only.
"""

from __future__ import annotations

import contextlib
import os
import pickle
import threading
from collections import deque
from collections.abc import Callable, Sequence
from pathlib import Path

from skyinfra.protocol import calls, instance
from skyinfra.protocol.calls import Header, Outcome
from skyinfra.worker import attempts, cancellation, execute, interruption, output, streaming

# The event of a chunk: the keys of tasks with their pickled outcomes, or with this where one is given back.
ENDED = "outcomes"
GIVEN_BACK = b""
# A chunk is made to take less than half of that.
_LONGEST_S = 0.05
# Outcomes are told when they are so many bytes, and in the end.
_MOST_BYTES = 64 * 1024

# Header and pickled call of a task.
Row = tuple[bytes, bytes]
# An event of the client's topic: its kind, the key that it is about, and what it says.
Tell = Callable[[str, str, object], object]


def dumps(rows: Sequence[Row]) -> bytes:
    """The call of a chunk of tasks."""
    return pickle.dumps(list(rows), protocol=pickle.HIGHEST_PROTOCOL)


def run(task: Header, call: bytes, tell: Tell, slot: str) -> list[tuple[str, Outcome]]:
    """Executes the tasks of the chunk *task*. Gives the outcomes that are too large to be told, with their keys."""
    chunk = _Chunk(task, call, tell, slot)
    folder = Path(os.environ[instance.NODE_DIRECTORY])
    # Tasks that are not told of, for whatever reason, are sent alone, and meet it by themselves.
    with (
        contextlib.suppress(Exception, KeyboardInterrupt),
        attempts.counted(task.key, task.name) as starts,
        output.captured(task.key, folder) as file,
        streaming.telling(file, chunk.say if task.echo else None),
        cancellation.stoppable(task.key),
    ):
        if starts == 1:
            chunk.execute(file)
    return chunk.large


class _Chunk:
    """The tasks of a chunk that have not started, and the outcomes that have not been told."""

    def __init__(self, task: Header, call: bytes, tell: Tell, slot: str) -> None:
        self.large: list[tuple[str, Outcome]] = []
        self._key = task.key
        self._tell = tell
        self._slot = slot
        self._lock = threading.Lock()
        self._rows: deque[Row] = deque(pickle.loads(call))  # noqa: S301 - the fleet's own, over mutual TLS
        self._untold: list[tuple[str, bytes]] = []
        self._bytes = 0
        self._now = task

    def say(self, kind: str, content: object) -> None:
        """Tells what the present task says while it runs."""
        self._tell(kind, self._now.key, [self._slot, self._now.name, content])

    def execute(self, file: str | None) -> None:
        """Runs the tasks, whose output goes to *file*."""
        timer = threading.Timer(_LONGEST_S, self._give_back)
        timer.daemon = True
        timer.start()
        try:
            while (row := self._next()) is not None:
                self._now = Header.loads(row[0])
                self._end(_outcome(self._now, row[1]), file)
        finally:
            timer.cancel()
            self._give_back()

    def _next(self) -> Row | None:
        with self._lock:
            return self._rows.popleft() if self._rows else None

    def _end(self, outcome: Outcome, file: str | None) -> None:
        if file is not None and output.written(file):
            with streaming.cutting():
                output.cut(file, self._now.key)
        if outcome.failure is not None:
            # An interrupt ends the chunk, and a client gives up at the first failure.
            self._give_back()
        data = pickle.dumps(outcome)
        with self._lock:
            if len(data) > calls.SMALL_OUTCOME:
                self.large.append((self._now.key, outcome))
                return
            self._untold.append((self._now.key, data))
            self._bytes += len(data)
            if self._bytes > _MOST_BYTES or not self._rows:
                self._flush()

    def _give_back(self) -> None:
        """Starts nothing more, and tells what there is to tell."""
        with self._lock:
            self._untold += [(Header.loads(header).key, GIVEN_BACK) for header, _ in self._rows]
            self._rows.clear()
            self._flush()

    def _flush(self) -> None:
        if self._untold:
            self._tell(ENDED, self._key, self._untold)
            self._untold, self._bytes = [], 0


def _outcome(task: Header, call: bytes) -> Outcome:
    try:
        with interruption.task_scope():
            return execute.perform(task, call)
    except BaseException as error:  # noqa: BLE001 - a task may raise anything, sys.exit and Ctrl-C included
        return execute.failed(error)
