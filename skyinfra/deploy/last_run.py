"""The last deploy or destroy of a stack from this checkout, until it has ended well."""

from __future__ import annotations

import fcntl
import json
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from io import FileIO
from pathlib import Path
from typing import IO, Any

from skyinfra.errors import SkyinfraError
from skyinfra.terraform.synthesized import SynthesizedStack


@dataclass(frozen=True)
class LastRun:
    """A deploy or destroy (*verb*) that goes on, or has not ended well.

    began: in ISO 8601, UTC. message: of its error; None where it was killed. running: whether it goes on.
    """

    verb: str
    began: str
    message: str | None = None
    running: bool = False


def last_run(stack: SynthesizedStack) -> LastRun | None:
    """Returns the last run; None where it ended well, or none was made from this checkout."""
    try:
        with _file(stack).open(encoding="utf-8") as file:
            return LastRun(**json.load(file), running=not _locked(file, fcntl.LOCK_SH))
    except (OSError, ValueError, TypeError):
        return None


@contextmanager
def recorded(stack: SynthesizedStack, verb: str) -> Iterator[None]:
    """Keeps the failure of the run in the block, also where it is killed; forgets it where the block ends well."""
    began = datetime.now(UTC).isoformat(timespec="seconds")
    # A cloud's words may name what is nobody else's business. Unbuffered, so that closing it has nothing left to write.
    with open(_file(stack), "ab", buffering=0, opener=lambda path, flags: os.open(path, flags, 0o600)) as file:
        if not _locked(file, fcntl.LOCK_EX):
            yield  # beside another run, which Terraform lets only one of them do
            return
        _write(file, LastRun(verb, began))
        try:
            yield
        except SkyinfraError as error:
            with suppress(OSError):  # the error says where the state is, also on a full disk
                _write(file, LastRun(verb, began, str(error)))
            raise
        _file(stack).unlink(missing_ok=True)


def _file(stack: SynthesizedStack) -> Path:
    return stack.folder / "last-run.json"


def _locked(file: IO[Any], how: int) -> bool:
    """Locks *file*; returns False where a run holds it."""
    try:
        fcntl.flock(file, how | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _write(file: FileIO, run: LastRun) -> None:
    text = json.dumps({key: value for key, value in asdict(run).items() if key != "running"})
    file.truncate(0)
    file.write(text.encode())
