"""The processes that the kernel ended as memory ran out, as its own counts tell."""

from __future__ import annotations

import contextlib
from pathlib import Path

_NAME = "oom_kill"


class Kills:
    """Counts them in *group*, the folder of a group of cgroup v2, by default that of this process; or on the machine.

    Not each group counts them: the nearest one above that does is looked at.
    """

    def __init__(self, group: Path | None = None, root: Path = Path("/")) -> None:
        self._counter = _counter(group, root)
        self._before = _count(self._counter)

    def any(self) -> bool:
        """Returns whether there were some since the last call."""
        before, self._before = self._before, _count(self._counter)
        return self._before > before


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


def _count(counter: Path | None) -> int:
    with contextlib.suppress(OSError, ValueError):
        for line in counter.read_text(encoding="ascii").splitlines() if counter is not None else ():
            name, _, number = line.partition(" ")
            if name == _NAME:
                return int(number)
    return 0
