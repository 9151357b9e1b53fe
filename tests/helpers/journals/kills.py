"""The journal of jobs, in processes that end at each step that changes the disk.

A program: ``kills.py FOLDER``. For each step N it writes FOLDER/N/jobs in a forked process that ends there as
SIGKILL would end it, a write in its middle; FOLDER/N/said holds what had been acknowledged before. It prints how many
steps there are.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

from journals.samples import CALL, IDENTITY, OUTCOME, wanted
from skyinfra.head.journal import Journal, Record, settled
from skyinfra.protocol.calls import Ending

_CHANGES = {"os.mkdir", "os.rename", "os.remove", "os.rmdir"}


class Steps:
    """Counts what changes the disk below *folder*, and ends the process at the step *last*."""

    def __init__(self, folder: Path, last: int) -> None:
        self.folder = str(folder)
        self.left = last
        self.pwrite, self.fsync = os.pwrite, os.fsync
        sys.addaudithook(self.audit)
        os.pwrite, os.fsync = self.half, self.synced

    def step(self) -> None:
        self.left -= 1
        if self.left < 0:
            os._exit(9)

    def audit(self, event: str, arguments: tuple[Any, ...]) -> None:
        creates = event == "open" and arguments[2] & os.O_CREAT
        if (creates or event in _CHANGES) and self.folder in str(arguments[0]):
            self.step()

    def half(self, handle: int, data: memoryview, offset: int) -> int:
        if self.left == 0:
            self.pwrite(handle, data[: len(data) // 2], offset)
        self.step()
        return self.pwrite(handle, data, offset)

    def synced(self, handle: int) -> None:
        self.step()
        self.fsync(handle)


def live(folder: Path, last: int) -> None:
    """Everything that happens to a job, from its submission to its being forgotten."""
    said = os.open(folder / "said", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    Steps(folder / "jobs", last)
    journal = Journal(folder / "jobs")
    for offset in range(0, len(CALL), 700):
        journal.stage(IDENTITY, offset, CALL[offset : offset + 700])
    record = Record.of(wanted(), now=1000.0)
    journal.add(record, len(CALL))
    os.write(said, b"added ")
    journal.save(record)
    ending = Ending.of(OUTCOME)
    journal.end(settled(record, ending, now=2000.0), ending.dumps())
    os.write(said, b"ended ")
    journal.forget(IDENTITY)
    os.write(said, b"forgotten ")


def main(folder: Path) -> None:
    number = 0
    while True:
        place = folder / str(number)
        place.mkdir(parents=True)
        child = os.fork()
        if child == 0:
            live(place, number)
            os._exit(0)
        code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        assert code in (0, 9), code
        number += 1
        if code == 0:
            print(number)
            return


if __name__ == "__main__":
    main(Path(sys.argv[1]))
