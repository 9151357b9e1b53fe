"""The one reboot that a pending MIG mode may cost, and never a second.

A file remembers, across the boot, that it was asked for. It goes when every mode is as wanted, so that a later change
may reboot again.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

from skyinfra._errors import NodeFailed, NodeRebooting, PartitionFailed
from skyinfra.runner.machine import Machine
from skyinfra.runner.state import replace_file, writing


class RebootGuard:
    """Lets a machine reboot once. *file* is what remembers it."""

    def __init__(self, file: Path) -> None:
        self._file = file

    def reboot(self, machine: Machine, gpus: Sequence[int], what: str) -> NodeRebooting:
        """Reboots *machine* to get *what* done on *gpus*; the exception to raise then.

        Raises `PartitionFailed` where a reboot was tried before, `NodeFailed` where the machine refuses.
        """
        numbers = ", ".join(map(str, gpus))
        boot = machine.boot_id()
        before = self._asked_in()
        if before is not None and before != boot:
            raise PartitionFailed(
                f"the node was rebooted to {what} on GPU {numbers}, and it is still pending; it is not rebooted again",
                field=str(self._file),
                given=f"asked for in boot {before}",
                hint="`nvidia-smi -q -d MIG` and the kernel log (NVRM lines) say what the driver sees. "
                "Remove the file to allow one more reboot.",
            )
        if before is None:
            # On the disk before anything else happens: a reboot that is not remembered would come again and again.
            with writing(self._file):
                self._file.parent.mkdir(parents=True, exist_ok=True)
            replace_file(self._file, json.dumps({"boot": boot, "gpus": list(gpus)}) + "\n", durable=True)
        try:
            # Also where it was asked for in this very boot: what asked may have been ended before it could.
            machine.reboot()
        except NodeFailed:
            self.clear()
            raise
        return NodeRebooting(
            f"the node reboots once to {what} on GPU {numbers}",
            hint="The partitions are made when it is up again.",
        )

    def clear(self) -> None:
        """Forgets a reboot that did what it was for."""
        with writing(self._file):
            self._file.unlink(missing_ok=True)

    def _asked_in(self) -> str | None:
        """The boot in which a reboot was asked for; a file that cannot be read counts, because a loop is worse."""
        if not self._file.exists():
            return None
        try:
            return str(json.loads(self._file.read_text(encoding="utf-8"))["boot"])
        except (ValueError, KeyError, TypeError):
            return "unknown"
