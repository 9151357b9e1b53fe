"""What `import skyinfra` reads ahead where cdktf runs the program."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from support import ROOT, first_fast, python_path
from terraform_projects.cdk import app_environment

STACK = """
import skyinfra as sky
from cdktf import App
app = App()
sky.FleetStack(app, "s", pools=[sky.ComputePool(provider=sky.AWS(), accelerator="H100/3g.40gb")])
app.synth()
"""
BEFORE = "import sys, skyinfra, skyinfra.prewarm\nbefore = set(sys.modules)\n"
# The packages among the modules that came: another thread may see them half made.
AFTER = """
import json
import os
came = {n: m for n, m in sys.modules.items() if n not in before}
print(json.dumps([n for n, m in came.items() if hasattr(m, "__path__")]))
"""


def run(program: str, folder: Path, *, synthesizes: bool = False) -> str:
    environment = {**app_environment(), **({"CDKTF_CONTEXT_JSON": "{}"} if synthesizes else {})}
    result = subprocess.run(
        [sys.executable, "-c", program],
        cwd=folder,
        env=environment,
        check=True,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert "Traceback" not in result.stderr
    return result.stdout


def test_an_interrupt_of_a_program_that_is_synthesized_shows_no_traceback(tmp_path: Path) -> None:
    environment = {**os.environ, "PYTHONPATH": python_path(), "CDKTF_CONTEXT_JSON": "{}"}
    for raised, shown in (("KeyboardInterrupt", "interrupted\n"), ("ValueError('mine')", "ValueError: mine\n")):
        done = subprocess.run(
            [sys.executable, "-c", f"import skyinfra\nraise {raised}"],
            env=environment,
            cwd=tmp_path,
            capture_output=True,
            text=True,
        )
        assert done.returncode != 0 and done.stderr.endswith(shown)
        assert ("Traceback" in done.stderr) == (raised != "KeyboardInterrupt")


def test_it_is_read_where_a_stack_is_synthesized_only(tmp_path: Path) -> None:
    program = """
import sys, skyinfra
if skyinfra._prewarm is not None:
    skyinfra._prewarm.wait()
print("skyinfra.stack" in sys.modules, "jinja2" in sys.modules, "cdktf" in sys.modules)
"""
    assert run(program, tmp_path).split() == ["False", "False", "False"]
    assert run(program, tmp_path, synthesizes=True).split() == ["True", "True", "False"]


def test_the_stack_is_the_same(tmp_path: Path) -> None:
    texts = []
    for synthesizes in (False, True):
        folder = tmp_path / str(synthesizes)
        folder.mkdir()
        run(STACK, folder, synthesizes=synthesizes)
        texts.append((folder / "cdktf.out" / "stacks" / "s" / "cdk.tf.json").read_bytes())
    assert texts[0] == texts[1]


def test_no_package_is_imported_by_both_threads(tmp_path: Path) -> None:
    ours, theirs = (
        set(json.loads(run(BEFORE + work + AFTER, tmp_path).splitlines()[-1]))
        for work in ("skyinfra.prewarm._read()", "import cdktf")
    )
    assert {"skyinfra.bootstrap", "pydantic", "jinja2"} <= ours
    assert {"cdktf", "jsii"} <= theirs
    assert not ours & theirs


@pytest.mark.parametrize("name", first_fast(["stack", "compiler", "pool", "mig.layouts", "deploy", "providers.aws"]))
def test_a_program_that_imports_a_module_itself_does_not_wait_for_itself(tmp_path: Path, name: str) -> None:
    """`from skyinfra.stack import ...` waited for ever (2026-11-26)."""
    program = f"import importlib; importlib.import_module('skyinfra.{name}')\n{STACK}"
    run(program, tmp_path, synthesizes=True)
    assert (tmp_path / "cdktf.out" / "stacks" / "s" / "cdk.tf.json").exists()


def test_what_fails_is_told_by_who_needs_it(tmp_path: Path) -> None:
    """A stack that has no use for what could not be read is synthesized."""
    broken = tmp_path / "jinja2.py"
    broken.write_text("raise ValueError('broken')\n")
    program = """
import sys
sys.path.insert(0, "")
import skyinfra as sky
sky.ComputePool(provider=sky.Local())
print("made")
"""
    assert run(program, tmp_path, synthesizes=True) == "made\n"


def test_the_template_of_a_project_imports_in_that_order() -> None:
    lines = (ROOT / "templates" / "project" / "main.py.j2").read_text(encoding="utf-8").splitlines()
    assert lines.index("import skyinfra as sky") < lines.index("from {{ library }} import App")
