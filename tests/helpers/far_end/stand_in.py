"""The far end of `ssh` in tests without a network: the program `ssh` beside this file says what it does."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent


def far_end(folder: Path, path: str) -> dict[str, str]:
    """The environment in which `ssh` leads to the machines in *folder*. path: the one that is searched otherwise."""
    folder.mkdir(exist_ok=True)
    return {"FAR_END": str(folder), "PATH": f"{HERE}{os.pathsep}{path}"}


def calls(folder: Path) -> list[dict[str, Any]]:
    """Who was called, in order: host, user, known (the name of its host key), command."""
    return [json.loads(line) for line in (folder / "calls").read_text().splitlines()]


def node_file(folder: Path, address: str) -> dict[str, Any]:
    """The configuration of the node at that address."""
    found: dict[str, Any] = json.loads((folder / address / "etc/skyinfra/node.json").read_text())
    return found
