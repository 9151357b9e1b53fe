"""The recipe of CONTRIBUTING for a new provider, each step as it is written, in a copy of the repository."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from support import ROOT
from terraform_projects.cdk import app_environment

STEPS = re.compile(r"`(python (?:-m [\w.]+|tools/\w+\.py)[^`]*)`")


def run(folder: Path, *command: str) -> str:
    environment = {**app_environment(), "PYTHONPATH": str(folder), "UPDATE_GOLDEN": ""}
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=1200)
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-3000:]
    return done.stdout


@pytest.fixture
def copy(tmp_path: Path) -> Path:
    """Copies the files that are tracked here into a repository of their own."""
    folder = tmp_path / "skyinfra"
    for name in run(ROOT, "git", "ls-files", "-co", "--exclude-standard").splitlines():
        if (ROOT / name).is_file():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, folder / name)
    run(folder, "git", "init", "-q")
    run(folder, "git", "add", "-A")
    run(folder, "git", "-c", "user.name=x", "-c", "user.email=x@example.com", "commit", "-qm", "x")
    return folder


@pytest.mark.slow
def test_every_step_of_the_recipe_runs_as_it_is_written(copy: Path) -> None:
    recipe = (ROOT / "CONTRIBUTING.md").read_text().split("## Adding a provider\n")[1].split("\n## ")[0]
    commands = [found for found in STEPS.findall(recipe) if "build_offers" not in found]
    assert [command.split()[-1] for command in commands[:3]] == ["Zeta", "tools/build_stubs.py", "tools.providers_page"]
    assert len(commands) == 4 and " pytest -k zeta " in commands[3]
    for command in commands:
        said = run(
            copy, sys.executable, *command.split()[1:], *(["-m", "slow or not slow"] if "pytest" in command else [])
        )
    # The life of a fleet, what makes a machine anew, whether it is whole, and what its class takes.
    passed = re.search(r"(\d+) passed", said)
    assert passed and int(passed[1]) >= 8 and "skipped" not in said, said
    changed = run(copy, "git", "status", "--porcelain", "-uall").splitlines()
    assert len(changed) <= 9, changed
    assert {line[3:] for line in changed if line.startswith(" M")} == {"docs/providers.md", "skyinfra/__init__.pyi"}
    # It is formatted, typed and in its room, and what is left to do is found.
    made = [line[3:] for line in changed if line.startswith("??")]
    run(copy, sys.executable, "-m", "ruff", "check", *(name for name in made if name.endswith(".py")))
    run(copy, sys.executable, "-m", "ruff", "format", "--check", *(name for name in made if name.endswith(".py")))
    assert all("FILL" in (copy / name).read_text() for name in made if not name.endswith("variables.tf"))
    again = subprocess.run(
        [sys.executable, "-m", "tools.new_provider", "zeta", "Zeta"], cwd=copy, capture_output=True, text=True
    )
    assert again.returncode == 1 and "is there already" in again.stderr
