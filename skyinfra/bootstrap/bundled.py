"""The folders templates/, modules/ and examples/: at the top of a checkout, below the package in an installed wheel."""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import Path

_PACKAGE = Path(__file__).resolve().parents[1]


def folder(kind: str, name: str = ".") -> Path:
    """The folder *name* of ``templates``, ``modules`` or ``examples`` (*kind*). Raises FileNotFoundError without it."""
    for base in (_PACKAGE / "_bundled", _PACKAGE.parent):
        path = base / kind / name
        if path.is_dir():
            return path
    raise FileNotFoundError(f"{kind}/{name} is neither in this installation of skyinfra nor in its checkout")


def modules(names: Iterable[str], below: Path | None = None) -> list[Path]:
    """The folders of the Terraform modules *names*, and of those beside them that they call (``source = "../NAME"``).

    below: the folder with all of them; None: that of this skyinfra. Raises FileNotFoundError without it.
    """
    below = below or folder("modules")
    found: dict[Path, None] = {}
    waiting = [below / name for name in names]
    while waiting:
        module = waiting.pop(0)
        if module not in found:
            found[module] = None
            texts = (file.read_text(encoding="utf-8") for file in sorted(module.glob("*.tf")))
            waiting += [below / name for text in texts for name in re.findall(r'source\s*=\s*"\.\./(\w+)"', text)]
    return list(found)
