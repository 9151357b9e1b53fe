"""Worker processes that died while they ran a task: the runner notes why, and the next start of the task says it.

A file for each task of the node, with a line for each death (`Death`), which goes when the task ends.
"""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Sequence
from pathlib import Path

from skyinfra.errors import SkyinfraError, TaskAttemptsExceeded
from skyinfra.protocol import deaths
from skyinfra.protocol.deaths import Death
from skyinfra.protocol.instance import instance_info
from skyinfra.worker import output

_FOLDER = "deaths"
# The runner notes a death within milliseconds; the task may start again elsewhere on the node before that.
_NOTED_S = 1.0
_POLL_S = 0.02
# Of the output of a task, in its error.
_LAST_LINES = 5
_LAST_BYTES = 2000


def note(directory: Path, key: str, death: Death) -> None:
    """Notes a death under the task *key* of the node in *directory*. Raises OSError."""
    folder = directory / _FOLDER
    folder.mkdir(exist_ok=True)
    with (folder / key).open("a", encoding="utf-8") as file:
        file.write(json.dumps(death.to_json()) + "\n")


def earlier(directory: Path, key: str, number: int) -> list[Death]:
    """The last *number* deaths of worker processes under the task *key*, as far as they are noted within a second."""
    deadline = time.monotonic() + _NOTED_S
    while len(found := _read(directory / _FOLDER / key)) < number and time.monotonic() < deadline:
        time.sleep(_POLL_S)
    return found[-number:]


def _read(file: Path) -> list[Death]:
    with contextlib.suppress(OSError, ValueError, SkyinfraError):
        return [Death.read(json.loads(line)) for line in file.read_text(encoding="utf-8").splitlines()]
    return []


def forget(directory: Path, key: str) -> None:
    """Forgets the deaths under the task *key*."""
    with contextlib.suppress(OSError):
        (directory / _FOLDER / key).unlink()


def exceeded(directory: Path, key: str, name: str, times: int, found: Sequence[Death]) -> TaskAttemptsExceeded:
    """The error of a task that ended its worker process so many *times*: why, its last lines, and where all are."""
    cause = deaths.causes(found)
    last = output.last_lines(directory, key, _LAST_LINES, _LAST_BYTES)
    fleet = "STACK/POOL"
    with contextlib.suppress(SkyinfraError):
        fleet = instance_info().fleet or fleet
    hint = [f"Its last output:\n{_indented(last)}\n`skyinfra logs {fleet} --task {key}` has all of it."] if last else []
    if (usual := deaths.remedy([death.code for death in found])) and not any(each.out_of_memory for each in found):
        hint.append(usual)
    return TaskAttemptsExceeded(
        f"{name} ended its worker process {times} times{f': {cause}' if cause else ''}",
        hint="\n".join(hint) or None,
    )


def _indented(lines: Sequence[str]) -> str:
    return "\n".join(f"  {line}" for line in lines)
