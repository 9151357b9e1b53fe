"""The folders templates/, modules/ and examples/: at the top of a checkout, below the package in an installed wheel."""

from __future__ import annotations

from pathlib import Path

_PACKAGE = Path(__file__).resolve().parents[1]


def folder(kind: str, name: str = ".") -> Path:
    """The folder *name* of ``templates``, ``modules`` or ``examples`` (*kind*). Raises FileNotFoundError without it."""
    for base in (_PACKAGE / "_bundled", _PACKAGE.parent):
        path = base / kind / name
        if path.is_dir():
            return path
    raise FileNotFoundError(f"{kind}/{name} is neither in this installation of skyinfra nor in its checkout")
