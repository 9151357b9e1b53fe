"""At most one reboot for a pending MIG mode.

A file remembers the reboot across the boot. A GPU is forgotten when its mode is the desired one, so that a later change
may reboot again.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from skyinfra.errors import NodeFailed, NodeRebooting, PartitionFailed
from skyinfra.gpu.machine import SystemMachine
from skyinfra.node.folder import replace_file, writing


class RebootGuard:
    """Allows one reboot of the machine for each GPU. *file* remembers it: ``{"boot": ID, "gpus": [INDEX, ...]}``."""

    def __init__(self, file: Path) -> None:
        self._file = file

    def reboot(self, machine: SystemMachine, gpus: Sequence[int], what: str) -> NodeRebooting:
        """Reboots *machine* to get *what* done on *gpus*; returns the exception to raise then.

        Raises `PartitionFailed` after a reboot for any of them before, `NodeFailed` where the machine refuses.
        """
        numbers = ", ".join(map(str, gpus))
        boot = machine.boot_id()
        asked = self._asked()
        if asked is not None and asked.boot != boot and (asked.gpus is None or asked.gpus & set(gpus)):
            raise PartitionFailed(
                f"the node was rebooted to {what} on GPU {numbers}, and it is still pending; it is not rebooted again",
                field=str(self._file),
                given=f"asked for in boot {asked.boot}",
                hint="`nvidia-smi -q -d MIG` and the kernel log (NVRM lines) say what the driver sees. "
                "Remove the file to allow one more reboot.",
            )
        # On the disk before anything else happens: a reboot that is not remembered would come again and again.
        self._keep(_Asked(boot, frozenset(gpus) | ((asked and asked.gpus) or frozenset())))
        try:
            # Also where it was asked for in this boot: that process may have been ended before it could reboot.
            machine.reboot()
        except NodeFailed:
            self._keep(asked)
            raise
        return NodeRebooting(
            f"the node reboots once to {what} on GPU {numbers}",
            hint="When it is up, run this again to make the partitions; a node of a fleet does so by itself.",
        )

    def clear(self, gpus: Sequence[int]) -> None:
        """Forgets a reboot for *gpus* that was successful; that of others is not forgotten."""
        asked = self._asked()
        if asked is not None and not (asked.gpus and asked.gpus.isdisjoint(gpus)):
            left = (asked.gpus or frozenset()) - set(gpus)
            self._keep(_Asked(asked.boot, left) if left else None)

    def _keep(self, asked: _Asked | None) -> None:
        with writing(self._file):
            if asked is None:
                self._file.unlink(missing_ok=True)
                return
            self._file.parent.mkdir(parents=True, exist_ok=True)
        text = json.dumps({"boot": asked.boot, "gpus": sorted(asked.gpus or ())}) + "\n"
        replace_file(self._file, text, durable=True)

    def _asked(self) -> _Asked | None:
        """The last reboot. A file that cannot be read counts for every GPU, because a loop is worse."""
        if not self._file.exists():
            return None
        try:
            read = json.loads(self._file.read_text(encoding="utf-8"))
            return _Asked(str(read["boot"]), frozenset(map(int, read["gpus"])))
        except (ValueError, KeyError, TypeError):
            return _Asked("unknown", None)


class _Asked(NamedTuple):
    """The boot in which a reboot was last asked for, and its GPUs; None: they are not known."""

    boot: str
    gpus: frozenset[int] | None
