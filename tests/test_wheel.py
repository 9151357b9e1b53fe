"""The wheel: it carries the modules and templates, and works where there is no checkout."""

from __future__ import annotations

import os
import subprocess
import sys
import zipfile
from pathlib import Path

from support import ROOT
from terraform_projects.cdk import app_environment


def test_the_wheel_carries_modules_and_templates(tmp_path: Path) -> None:
    build = [sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", str(tmp_path), str(ROOT)]
    subprocess.run(build, check=True, capture_output=True)
    (wheel,) = tmp_path.glob("*.whl")
    installed = tmp_path / "installed"
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(installed)
    for kind in ("modules", "templates", "examples"):
        found = (path.relative_to(ROOT / kind) for path in (ROOT / kind).rglob("*") if path.is_file())
        wanted = {path for path in found if "__pycache__" not in path.parts}
        there = installed / "skyinfra" / "_bundled" / kind
        assert {path.relative_to(there) for path in there.rglob("*") if path.is_file()} == wanted
    assert not {path.parts[0] for path in (p.relative_to(installed) for p in installed.iterdir())} & {"tests", "stacks"}
    # A runner that is declared by requirement brings its units as the one of the bucket does.
    units = {path.name for path in (ROOT / "skyinfra" / "node" / "units").iterdir()}
    assert {path.name for path in (installed / "skyinfra" / "node" / "units").iterdir()} == units
    project = tmp_path / "project"
    environment = {**os.environ, "PYTHONPATH": str(installed), "PYTHONSAFEPATH": "1"}
    init = [sys.executable, "-m", "skyinfra.cli", "init", str(project)]
    subprocess.run(init, check=True, env=environment, capture_output=True, cwd=tmp_path)
    environment = {**app_environment(), **environment}
    subprocess.run([sys.executable, "main.py"], check=True, env=environment, capture_output=True, cwd=project)
    (module,) = (project / "cdktf.out" / "stacks" / "quickstart" / "assets").glob("*/*/local/main.tf")
    assert module.read_bytes() == (ROOT / "modules" / "local" / "main.tf").read_bytes()
