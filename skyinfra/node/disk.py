"""What is to survive a loss of power."""

from __future__ import annotations

import os
from pathlib import Path


def sync_folder(path: Path) -> None:
    """Puts the names in the folder *path* on the disk. Raises OSError."""
    folder = os.open(path, os.O_RDONLY)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)
