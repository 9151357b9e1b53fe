"""NVIDIA's Xid errors in the kernel's log since the machine started."""

from __future__ import annotations

import json
import os
import re
from collections import Counter
from dataclasses import dataclass
from functools import cache
from pathlib import Path

_XID = re.compile(r"NVRM: Xid \((?:PCI:)?([^)]+)\): (\d+)")
_RECORD = 8192
_TO_DO = {
    "task": "",
    "reset": "Drain the node (`skyinfra-runner drain`) and reset the GPU, or reboot; replace the machine where it "
    "returns.",
    "replace": "Drain the node and replace the machine.",
}
# Another number is a fault that the driver has noticed.
_OTHER = {"meaning": "an error of the driver or the GPU", "action": "reset"}


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
    known = _known() if found else {}
    rows = (
        (number, device, count, known.get(str(number), _OTHER)) for (device, number), count in sorted(found.items())
    )
    return [Xid(number, device, count, row["meaning"], _TO_DO[row["action"]]) for number, device, count, row in rows]


@cache
def _known() -> dict[str, dict[str, str]]:
    """Returns meaning and action of the errors, by their numbers, from NVIDIA's catalog."""
    return dict(json.loads(Path(__file__).with_name("xids.json").read_text(encoding="utf-8"))["xids"])


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
