"""Looks for a secret wherever it must not be: in files, and in what the kernel tells of processes."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Collection
from pathlib import Path


def files_with(secret: str, *folders: Path) -> list[str]:
    """The files below *folders* that hold *secret*."""
    found = []
    for folder in folders:
        # Folders may go while they are read: rglob() raises then.
        for path in sorted(Path(root, name) for root, _, names in os.walk(folder) for name in names):
            with contextlib.suppress(OSError):
                if path.is_file() and not path.is_symlink() and secret.encode() in path.read_bytes():
                    found.append(str(path.relative_to(folder)))
    return found


def processes_with(secret: str, *, but: Collection[int] = ()) -> dict[int, str]:
    """The command lines of the processes whose command line or first environment holds *secret*."""
    found = {}
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit() or int(entry.name) in {*but, os.getpid()}:
            continue
        with contextlib.suppress(OSError):
            command = (entry / "cmdline").read_bytes()
            if secret.encode() in command + (entry / "environ").read_bytes():
                found[int(entry.name)] = command.replace(b"\0", b" ").decode(errors="replace")
    return found
