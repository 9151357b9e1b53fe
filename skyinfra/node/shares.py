"""A share of the node's threads for each slot, so that one that starts threads without end leaves the others theirs.

systemd hands the unit's group of processes (cgroup v2) over to the runner of a cloud node (``Delegate=pids``). The
runner moves into a group below it, and makes one for each slot. A slot's worker enters it before it runs tasks, and
what tasks start stays there. That holds what goes wrong, not what means harm: the groups belong to the user of the
runner, which tasks have too. Everywhere else the slots have the node's threads between them.
"""

from __future__ import annotations

import contextlib
import errno
import os
from collections.abc import Iterable
from pathlib import Path

_UNIT = "skyinfra-runner.service"
_RUNNER = "runner"
_SLOT = "slot-"
# A worker alone has some twenty.
_LEAST = 256


class Shares:
    """The groups of the slots in the folder *top*, whose ``pids.max`` is divided; none where it is None."""

    def __init__(self, top: Path | None = None) -> None:
        self._top = top

    def divide(self, slots: Iterable[int]) -> None:
        """Gives each of *slots*, by number, the same share; the runner has one as well. Raises OSError."""
        if self._top is None:
            return
        names = {f"{_SLOT}{slot}" for slot in slots}
        for group in self._top.glob(f"{_SLOT}*"):
            # Where a process is left, it keeps its share.
            if group.name not in names:
                with contextlib.suppress(OSError):
                    group.rmdir()
        share = max(_LEAST, _limit(self._top) // (len(names) + 1))
        for name in sorted(names):
            (self._top / name).mkdir(exist_ok=True)
            _write(self._top / name / "pids.max", str(share))

    def of(self, slot: int) -> Path | None:
        """Returns the group for `enter`."""
        return None if self._top is None else self._top / f"{_SLOT}{slot}"


def claim(root: Path = Path("/")) -> Shares:
    """Takes over the group of this process, where systemd has handed it over. Raises OSError, with why it has not.

    *root*: the parent of proc/ and sys/. This process has to have no children.
    """
    top = _group("self", root)
    if top.name != _UNIT:
        raise OSError(errno.ENOTSUP, f"only {_UNIT} divides them")
    if "pids" not in (top / "cgroup.controllers").read_text(encoding="ascii").split():
        raise OSError(errno.ENOTSUP, "systemd hands no threads over (Delegate=pids)")
    _limit(top)
    # Groups with processes have none below them.
    (top / _RUNNER).mkdir(exist_ok=True)
    enter(top / _RUNNER)
    _write(top / "cgroup.subtree_control", "+pids")
    return Shares(top)


def enter(group: Path) -> None:
    """Moves this process into *group*. Raises OSError."""
    _write(group / "cgroup.procs", str(os.getpid()))


def divided(pid: int, root: Path = Path("/")) -> dict[str, int]:
    """Returns the most threads of each slot of the runner *pid*, by the name of its group. Raises OSError, with why
    they are not divided."""
    group = _group(pid, root)
    if group.name != _RUNNER or group.parent.name != _UNIT:
        raise OSError(errno.ENOTSUP, f"only {_UNIT} divides them, on machines with cgroup v2 alone")
    return {each.name: _limit(each) for each in sorted(group.parent.glob(f"{_SLOT}*"))}


def _group(pid: int | str, root: Path) -> Path:
    """Returns the folder of the group of cgroup v2 in which a process is. Raises OSError."""
    lines = (root / "proc" / str(pid) / "cgroup").read_text(encoding="utf-8").splitlines()
    path = next((line.removeprefix("0::/") for line in lines if line.startswith("0::/")), None)
    if path is None or not (root / "sys/fs/cgroup/cgroup.controllers").exists():
        raise OSError(errno.ENOTSUP, "this machine has no cgroup v2, or others beside it")
    return root / "sys/fs/cgroup" / path


def _limit(group: Path) -> int:
    text = (group / "pids.max").read_text(encoding="ascii").strip()
    if not text.isdigit():
        raise OSError(errno.ENOTSUP, f"{group.name} has no limit (TasksMax)")
    return int(text)


def _write(file: Path, text: str) -> None:
    # Not made where it is not there.
    with file.open("r+", encoding="ascii") as stream:
        stream.write(text)
