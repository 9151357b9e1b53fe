"""Tasks of the fault suite. They note each of their starts in a file, which all nodes of this machine share."""

from __future__ import annotations

import ctypes
import os
import signal
import time
from collections import Counter
from pathlib import Path

import skyinfra as sky


@sky.compute
def where() -> tuple[str, int]:
    """The slot and its worker process."""
    return sky.instance_info().slot, os.getpid()


@sky.compute
def count(number: int, journal: str, seconds: float) -> tuple[int, str]:
    """Takes *seconds*. *number*, and the node."""
    _note(journal, number)
    time.sleep(seconds)
    return number, sky.instance_info().node


@sky.compute
def count_on_device(number: int, journal: str, seconds: float) -> tuple[int, str]:
    """As `count`; meets an error of its device, where it has one, as a program with CUDA does."""
    import pynvml

    _note(journal, number)
    time.sleep(seconds)
    slot = sky.instance_info()
    if not slot.simulated:
        try:
            pynvml.nvmlInit()
            pynvml.nvmlDeviceGetMemoryInfo(pynvml.nvmlDeviceGetHandleByUUID(slot.uuid))
        except pynvml.NVMLError:
            raise RuntimeError("CUDA error: unspecified launch failure") from None
    return number, slot.node


@sky.compute
def die(number: int, journal: str) -> None:
    """Ends its worker process, however often it is started."""
    _note(journal, number)
    os.kill(os.getpid(), signal.SIGKILL)


@sky.compute
def hold(number: int, journal: str, seconds: int) -> int:
    """Holds the GIL for that long: no other thread of the worker runs, nothing of it answers."""
    _note(journal, number)
    ctypes.PyDLL(None).sleep(seconds)
    return number


@sky.compute
def spin(number: int, journal: str) -> None:
    """Runs until it is stopped, and notes in a second file that it was."""
    _note(journal, number)
    try:
        while True:
            time.sleep(0.05)
    finally:
        _note(f"{journal}.stopped", number)


@sky.compute
def echo(data: bytes) -> bytes:
    """*data*, as other bytes of the same length."""
    return data[::-1]


def _note(journal: str, number: int) -> None:
    # One write at the end of the file: lines of several processes do not mix.
    with Path(journal).open("ab", buffering=0) as file:
        file.write(f"{number} {sky.instance_info().slot}\n".encode())


def starts(journal: Path) -> list[tuple[int, str]]:
    """Number and slot of each start that was noted, in their order."""
    if not journal.exists():
        return []
    lines = [line.split() for line in journal.read_text().splitlines()]
    return [(int(number), slot) for number, slot in lines]


def started_again(journal: Path) -> set[int]:
    """The numbers of the tasks that were started more than once."""
    return {number for number, times in Counter(number for number, _ in starts(journal)).items() if times > 1}
