"""Blocks: the fleets that programs deploy around a ``with`` block, in the folder in which they were started.

All of one lies in ``.skyinfra/.sessions/STACK``: what was synthesized, the state, and the lock that its program holds.
Where the program was killed that stays, so that the command line finds the fleet and ends it.
"""

from __future__ import annotations

import fcntl
import json
import os
import shutil
import stat
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import IO, Any

from skyinfra.errors import ProjectError
from skyinfra.terraform.state import refuse_shared
from skyinfra.terraform.synthesized import SynthesizedStack, read_stack

_FOLDER = Path(".skyinfra") / ".sessions"
_LOCK = "lock"
# Whoever looks whether a program holds the lock holds it for a moment.
_ATTEMPTS = 10
_PAUSE_S = 0.05


@dataclass(frozen=True)
class Opened:
    """The program that opened a block: its command line, its process, and when it began to deploy, in ISO 8601."""

    program: str
    pid: int
    began: str

    @classmethod
    def now(cls) -> Opened:
        """Returns this program."""
        words = [each or "-" for each in sys.argv] or ["python"]
        return cls(" ".join([Path(words[0]).name, *words[1:]])[:200], os.getpid(), _now())

    @property
    def hours(self) -> float:
        """The hours since it began."""
        with suppress(ValueError):
            return max(0.0, (datetime.now(UTC) - datetime.fromisoformat(self.began)).total_seconds() / 3600)
        return 0.0


def _now() -> str:
    return datetime.now(UTC).isoformat(timespec="seconds")


@dataclass(frozen=True)
class Block:
    """A block whose fleet exists, as far as is known. base: the folder in which its program was started.

    opened: None where that cannot be read. running: whether its program still runs.
    """

    stack: SynthesizedStack
    base: Path
    opened: Opened | None
    running: bool

    @property
    def folder(self) -> Path:
        """The folder of all that belongs to it."""
        return folder_of(self.base, self.stack.name)


def folder_of(base: Path, stack: str) -> Path:
    """Returns the folder of the block of that name of the programs that are started in *base*."""
    return base / _FOLDER / stack


def blocks(base: Path) -> tuple[Block, ...]:
    """Returns the blocks of the programs that were started in *base*, by name.

    None of a folder that another account could have made: Terraform runs what lies there.
    """
    above = base / _FOLDER
    if not (is_own(above.parent) and is_own(above)):
        return ()
    try:
        folders = [each for each in sorted(above.iterdir()) if is_own(each)]
    except OSError:  # of root
        return ()
    return tuple(block for folder in folders if (block := _read(base, folder)) is not None)


def _read(base: Path, folder: Path) -> Block | None:
    at = folder / "cdktf.out" / "stacks" / folder.name
    try:
        stack = read_stack(folder.name, at, at / "cdk.tf.json")
    except ProjectError:  # it was killed before there was anything
        return None
    return Block(stack, base, opened(folder), _held(folder / _LOCK))


def opened(folder: Path) -> Opened | None:
    """Returns the program that opened the block in *folder*; None where there is none, or it cannot be read."""
    try:
        return Opened(**json.loads((folder / _LOCK).read_text(encoding="utf-8")))
    except (OSError, ValueError, TypeError):
        return None


def _held(lock: Path) -> bool:
    """Returns whether a program holds *lock*."""
    with suppress(OSError), lock.open("rb") as file:
        return not _locked(file, fcntl.LOCK_SH)
    return False


def _locked(file: IO[Any], how: int) -> bool:
    try:
        fcntl.flock(file, how | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def hold(folder: Path) -> IO[str] | None:
    """Makes the *folder* of a block and returns its lock, to be closed; None where another program holds it.

    Raises `ProjectError` where it cannot be made, or where other accounts could write to it.
    """
    try:
        # The state, which holds the fleet secret, is written there.
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        # Somebody else may have made them where the folder around is one for all, such as /tmp.
        for each in (folder, folder.parent, folder.parent.parent):
            refuse_shared(each)
            if not is_own(each):
                raise ProjectError(
                    "belongs to another account, which could have its code run as you",
                    field=str(each),
                    hint="Run the program in a folder that is yours.",
                )
        lock = (folder / _LOCK).open("a+", encoding="utf-8")
    except OSError as error:
        raise ProjectError(
            f"cannot be written: {error.strerror}",
            field=str(folder),
            hint="Run the program in a folder that is yours, on a disk that has space.",
        ) from None
    for _ in range(_ATTEMPTS):
        if _locked(lock, fcntl.LOCK_EX):
            return lock
        time.sleep(_PAUSE_S)
    lock.close()
    return None


def record(lock: IO[str], program: Opened) -> None:
    """Writes into its *lock* which program has the block."""
    lock.truncate(0)
    json.dump(asdict(program), lock)
    lock.flush()


@contextmanager
def kept_from_programs(block: Block) -> Iterator[Callable[[], None]]:
    """While it lasts, no other program opens the block anew. Gives what removes its folder, once it is destroyed."""
    lock = hold(block.folder)
    try:
        yield lambda: remove(block.folder)
    finally:
        if lock is not None:
            lock.close()


def remove(folder: Path) -> None:
    """Removes the folder of a block whose fleet is destroyed."""
    shutil.rmtree(folder, ignore_errors=True)
    for each in (folder.parent, folder.parent.parent):
        with suppress(OSError):  # other fleets and blocks lie there
            each.rmdir()


def is_own(path: Path) -> bool:
    """Returns whether *path* is of this account or root, and no other account may write to it if it is a folder."""
    owners = (os.geteuid(), 0)
    try:
        if path.lstat().st_uid not in owners:
            return False
        found = path.stat()
        if stat.S_ISDIR(found.st_mode):
            refuse_shared(path)
    except (OSError, ProjectError):
        return False
    return found.st_uid in owners
