"""Watches the worker process of a slot from the runner's process, for what ended it."""

from __future__ import annotations

import contextlib
import signal
from functools import partial
from pathlib import Path

from skyinfra.protocol.deaths import Death
from skyinfra.worker import attempts, cancellation, deaths, secrets

# For which output that was not masked yet is kept in memory.
_KEPT_S = 60.0
# The kernel's count of the processes that it killed as memory ran out.
_KILLS = "oom_kill"


class Watch:
    """Notes the deaths of the worker processes of the slot with *index* on the node in *directory*.

    *group*: the folder of the slot's group of processes, where it has one.
    """

    def __init__(self, directory: Path, index: int, group: Path | None = None, root: Path = Path("/")) -> None:
        self._directory = directory
        self._index = index
        self._counter = _counter(group, root)
        self._kills = _kills(self._counter)

    def ended(self, code: int) -> None:
        """Notes that the worker process of the slot ended with *code*, where it ran a task that was not stopped."""
        before, self._kills = self._kills, _kills(self._counter)
        found = attempts.left_behind(self._directory, self._index)
        if found is None or not attempts.begun(found[0], self._directory):
            return
        key, shown = found
        # The task starts again at once, or on another node.
        cancellation.later(_KEPT_S, partial(secrets.discard, key))
        with contextlib.suppress(OSError):  # a full disk: the cause is not known then
            deaths.note(self._directory, key, Death(code, code == -signal.SIGKILL and self._kills > before, shown))


def _counter(group: Path | None, root: Path) -> Path | None:
    """The file that counts what the kernel killed in the slot's group, or in the nearest one above that counts it."""
    try:
        place = group or _own_group(root)
    except OSError:
        place = None
    while place is not None and place.is_relative_to(root / "sys/fs/cgroup"):
        if (file := place / "memory.events").exists():
            return file
        place = place.parent
    file = root / "proc/vmstat"
    return file if file.exists() else None


def _own_group(root: Path) -> Path:
    lines = (root / "proc/self/cgroup").read_text(encoding="utf-8").splitlines()
    path = next((line.removeprefix("0::/") for line in lines if line.startswith("0::/")), "")
    return root / "sys/fs/cgroup" / path


def _kills(counter: Path | None) -> int:
    with contextlib.suppress(OSError, ValueError):
        for line in counter.read_text(encoding="ascii").splitlines() if counter is not None else ():
            name, _, number = line.partition(" ")
            if name == _KILLS:
                return int(number)
    return 0
