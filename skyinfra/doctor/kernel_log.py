"""NVIDIA's Xid errors in the kernel's log since the machine started."""

from __future__ import annotations

import os
import re
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

_XID = re.compile(r"NVRM: Xid \((?:PCI:)?([^)]+)\): (\d+)")
_RECORD = 8192
# Meanings and remedies: NVIDIA, "XID Errors" of the GPU deployment and management documentation.
_RESET = "Drain the node (`skyinfra-runner drain`) and reset the GPU, or reboot; replace the machine where it returns."
_REPLACE = "Drain the node and replace the machine."
_TASK = ""
_KNOWN: dict[int, tuple[str, str]] = {
    8: ("the GPU stopped processing", _TASK),
    13: ("graphics engine exception, mostly an error of a task", _TASK),
    31: ("memory page fault, mostly an error of a task", _TASK),
    32: ("invalid or corrupted push buffer stream", _TASK),
    43: ("the GPU stopped processing for a task", _TASK),
    45: ("work of a task that ended was cleaned up", _TASK),
    48: ("double bit ECC error", _RESET),
    61: ("breakpoint of the internal micro-controller", _RESET),
    62: ("halt of the internal micro-controller", _RESET),
    63: ("a row of memory was remapped, or a page retired", _TASK),
    64: ("a row of memory could not be remapped, or a page not retired", _RESET),
    68: ("video decoder exception", _TASK),
    69: ("graphics engine class error, mostly an error of a task", _TASK),
    74: ("NVLink error", _RESET),
    79: ("the GPU has fallen off the bus", _REPLACE),
    92: ("many single bit ECC errors", _RESET),
    94: ("contained ECC error: only one task was hit", _RESET),
    95: ("uncontained ECC error: any task may have been hit", _RESET),
    109: ("context switch timeout", _RESET),
    119: ("the GPU's system processor does not answer", _RESET),
    120: ("the GPU's system processor failed", _RESET),
    121: ("corrected C2C link error", _TASK),
    140: ("unrecovered ECC error", _RESET),
}
# Another number is a fault that the driver has noticed.
_OTHER = ("an error of the driver or the GPU", _RESET)


@dataclass(frozen=True)
class Xid:
    """The error *number* of the GPU at the PCI address *device*; *to_do* is empty where the GPU works after it."""

    number: int
    device: str
    count: int
    meaning: str
    to_do: str


def xids(root: Path = Path("/")) -> list[Xid]:
    """Returns the errors in the kernel's log, by device and number. Raises OSError where it cannot be read."""
    found = Counter(
        (match[1].strip(), int(match[2])) for line in _lines(root / "dev/kmsg") if (match := _XID.search(line))
    )
    return [
        Xid(number, device, count, *_KNOWN.get(number, _OTHER)) for (device, number), count in sorted(found.items())
    ]


def _lines(file: Path) -> list[str]:
    """Reads the records of the kernel's ring buffer, one with each read. A plain file, as in tests, has lines."""
    lines: list[str] = []
    handle = os.open(file, os.O_RDONLY | os.O_NONBLOCK)
    try:
        while True:
            try:
                data = os.read(handle, _RECORD)
            except BlockingIOError:
                return lines
            except BrokenPipeError:  # the buffer was overwritten meanwhile: the next read goes on behind that
                continue
            if not data:
                return lines
            lines += data.decode(errors="replace").splitlines()
    finally:
        os.close(handle)
