"""Copies modules/core.tf into the folder of every module whose nodes are machines: ``python -m tools.core``."""

from __future__ import annotations

from pathlib import Path

MODULES = Path(__file__).resolve().parents[1] / "modules"
# Its nodes are processes, whose configuration is complete only once the head listens.
APART = ("local",)


def folders() -> list[Path]:
    """The folders that hold a copy."""
    return sorted(path for path in MODULES.iterdir() if path.is_dir() and path.name not in APART)


if __name__ == "__main__":
    for folder in folders():
        (folder / "core.tf").write_bytes((MODULES / "core.tf").read_bytes())
