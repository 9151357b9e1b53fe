"""Copies what modules share into their folders, so that each works by itself: ``python -m tools.core``."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path

from skyinfra.providers import kinds, read

MODULES = Path(__file__).resolve().parents[1] / "modules"
# Its nodes are processes, whose configuration is complete only once the head listens.
APART = ("local",)


def folders() -> list[Path]:
    """The folders that hold a copy of the core."""
    return sorted(path for path in MODULES.iterdir() if path.is_dir() and path.name not in APART)


def copies() -> Iterator[tuple[Path, Path]]:
    """Each shared file, and where a copy of it stands; which ones a module has, the data of its provider say."""
    for folder in folders():
        names = ["core.tf"]
        if folder.name in kinds():
            data = read(folder.name)
            if data.boot.delivery == "ssh":
                names += ["hosts.tf", "host.sh", "node.sh"]
                names += ["machines.tf"] if data.terraform else []
            names += data.terraform.get("shared", [])
            names += ["keys.tf"] if data.traits.host_keys == "given" else []
        yield from ((MODULES / name, folder / name) for name in names)


if __name__ == "__main__":
    for source, copy in copies():
        shutil.copyfile(source, copy)
